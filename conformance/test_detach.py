"""Area detach: what is cut, what is shared, and what comes after the cut."""

from __future__ import annotations

from autograd_conformance.compare import HELD, Case, Findings
from autograd_conformance.judge import claim
from autograd_conformance.program import Backward, DetachInPlace, Rewrap, SetData, Write

_CUTS = ("detach", "data", "reattach", "copy")


@claim("detach.never-requires-grad")
def test_never_requires_grad(case: Case) -> Findings:
    """detach() gives a new leaf that does not require grad, and leaves its source as it was."""
    for m in case.rewrapped("detach"):
        arg = m.statement.arg  # type: ignore[union-attr]
        yield case.judge(m.at, f"{m.name}.requires_grad", False, m.seen.requires_grad, "it is detached")
        yield case.judge(m.at, f"{m.name}.is_leaf", True, m.seen.is_leaf, "it is detached")
        yield case.judge(
            m.at, f"{m.name} is not {arg}", True, case.seen.facts[m.at, "new object"], "detach makes a new tensor"
        )
        probe, due = f"({arg}.requires_grad, {arg}.is_leaf)", case.seen.facts[m.at, "source unchanged"]
        yield case.judge(m.at, f"{probe} == held", True, due, f"{arg} itself is not detached", before=f"held = {probe}")


def _memory(case: Case, *hows: str) -> Findings:
    wrapped = list(case.rewrapped(*hows))
    if not wrapped:
        return
    strides = {m.name: m.seen.stride for m in case.made}
    for m in wrapped:
        arg = m.statement.arg  # type: ignore[union-attr]
        why = f"it is {arg} in another wrapping"
        if (m.at, "same memory") in case.seen.facts:
            same = case.seen.facts[m.at, "same memory"]
            yield case.judge(m.at, f"{m.name}.data_ptr() == {arg}.data_ptr()", True, same, why)
        if arg in strides and not any(s.arg == arg for at, s in case.at(SetData) if at < m.at):
            yield case.judge(m.at, f"{m.name}.stride()", strides[arg], m.seen.stride, why)
        numbers = case.seen.values
        if (m.at, arg) in numbers and 0 not in m.paper.shape:
            yield case.judge(m.at, f"{m.name}.tolist()", numbers[m.at, arg], numbers[m.at, m.name], why)
    sources = {m.name: m.statement.arg for m in wrapped}  # type: ignore[union-attr]
    for at, s in case.at(Write):
        source = sources.get(s.arg)
        if source is None or (at, source) not in case.seen.values or 0 in case.due.tensors[source].shape:
            continue
        numbers = case.seen.values
        yield case.judge(
            at,
            f"{source}.tolist() == {s.arg}.tolist()",
            True,
            numbers[at, source] == numbers[at, s.arg],
            "a write on either side is seen on the other",
        )


@claim("detach.storage-shared")
def test_storage_shared(case: Case) -> Findings:
    """detach() shares memory with its source: a write on one side is seen on the other."""
    yield from _memory(case, "detach", "reattach")


@claim("detach.data-attribute")
def test_data_attribute(case: Case) -> Findings:
    """t.data shares memory with t and has neither the flag nor a history."""
    for m in case.rewrapped("data"):
        yield case.judge(m.at, f"{m.name}.requires_grad", False, m.seen.requires_grad, ".data has no history")
        yield case.judge(m.at, f"{m.name}.is_leaf", True, m.seen.is_leaf, ".data has no history")
    yield from _memory(case, "data")
    yield from _assigned(case)


def _assigned(case: Case) -> Findings:
    """What the assignment of .data leaves as it was, and what it refuses."""
    for at, s in case.at(SetData):
        if case.due.refused.get(at) == "dtype":
            yield case.judge_raise(at, f"{s.arg} requires grad and cannot be of an integer dtype")
            continue
        if at in case.seen.errors:
            continue
        facts, flags = case.seen.facts, f"({s.arg}.requires_grad, {s.arg}.is_leaf)"
        why = "only its memory is exchanged"
        yield case.judge(at, f"{flags} == held", True, facts[at, "flags kept"], why, before=f"held = {flags}")
        yield case.judge(at, f"{s.arg}.grad is held", True, facts[at, "grad kept"], why, before=f"held = {s.arg}.grad")


@claim("detach.cuts")
def test_cuts(case: Case) -> Findings:
    """No gradient passes a detach: what comes out is that of the same graph with a constant in its place."""
    cuts = {m.name for m in case.rewrapped(*_CUTS)}
    for p in case.judged:
        used = any(t.name in cuts for node in p.due.executed for t in node.inputs)
        if used and case.carried(p):
            yield HELD


@claim("detach.inplace-variant")
def test_inplace_variant(case: Case) -> Findings:
    """detach_() turns the tensor itself into a leaf that does not require grad, and returns it."""
    for at, s in case.at(DetachInPlace):
        flags = case.seen.changed.get(at)
        if at in case.due.refused or flags is None:
            continue
        yield case.judge(at, f"{s.arg}.requires_grad", False, flags.requires_grad, "it was detached in place")
        yield case.judge(at, f"{s.arg}.grad_fn is None", True, not flags.has_grad_fn, "it was detached in place")
        if (at, "returns self") in case.seen.facts:
            yield case.judge(
                at, f"{s.arg}.detach_() is {s.arg}", True, case.seen.facts[at, "returns self"], "it works in place"
            )


@claim("detach.inplace-view-error")
def test_inplace_view_error(case: Case) -> Findings:
    """detach_() of a view raises and changes nothing."""
    for at, s in case.at(DetachInPlace):
        if case.due.refused.get(at) != "view":
            continue
        yield case.judge_raise(at, f"{s.arg} is a view")
        if at in case.seen.errors and (at, "flags kept") in case.seen.facts:
            flags, same = f"({s.arg}.requires_grad, {s.arg}.is_leaf)", case.seen.facts[at, "flags kept"]
            why = "a refused change must not happen"
            yield case.judge(at, f"{flags} == held", True, same, why, before=f"held = {flags}")


@claim("detach.version-shared")
def test_version_shared(case: Case) -> Findings:
    """A write through detach() of a tensor that was saved for backward is noticed by backward."""
    for p in case.passes:
        writers = {w for found in p.due.written.values() for w in found}
        if (
            not writers
            or p.due.again
            or p.due.raises
            or not any(type(case.program.statements[w]) is Write for w in writers)
        ):
            continue
        if p.must_raise:
            yield case.judge_raise(p.at, "a tensor that backward needs was written through an alias")


@claim("detach.reattach-as-leaf")
def test_reattach_as_leaf(case: Case) -> Findings:
    """t.detach().requires_grad_() is a leaf of its own: it gets a gradient, and the history of t gets none from it."""
    leaves = {m.name for m in case.rewrapped("reattach")}
    for m in case.rewrapped("reattach"):
        assert isinstance(m.statement, Rewrap)
        yield case.judge(m.at, f"{m.name}.requires_grad", True, m.seen.requires_grad, "it was switched on")
        yield case.judge(m.at, f"{m.name}.is_leaf", True, m.seen.is_leaf, "it is detached")
    for p in case.judged:
        if isinstance(p.statement, Backward):
            for name in leaves.intersection(case.carried(p)):
                yield case.judge(
                    p.at,
                    f"{name}.grad is not None",
                    True,
                    p.after.get(name) is not None,
                    "it is a leaf that requires grad",
                )
