"""Area grad: what rests in ``.grad``, how it is added to, and whose memory it is."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from autograd_conformance.buffers import origins
from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.program import SetData, SetGrad
from autograd_conformance.reports.statements import constant_source
from autograd_conformance.seen import GradSeen
from autograd_conformance.verdicts import Violation


def _filled(case: Case) -> Iterator[tuple[PassCase, str, GradSeen]]:
    """Gradients that a backward call was due to give and gave."""
    for p in case.backwards:
        for name in p.due.deltas:
            after = p.after.get(name)
            if after is not None:
                yield p, name, after


def _added(case: Case) -> Iterator[tuple[PassCase, str, GradSeen, GradSeen]]:
    """Gradients that a backward call added to one that was there, in memory of its own."""
    for p, name, after in _filled(case):
        before = p.before.get(name)
        if before is not None and name not in p.shared:
            yield p, name, before, after


@claim("grad.none-initially")
def test_none_initially(case: Case) -> Findings:
    """A tensor that was just made has no .grad."""
    for m in case.made:
        if m.seen.is_leaf:
            yield case.judge(m.at, f"{m.name}.grad is None", True, m.seen.grad_is_none, "no backward has run for it")


@claim("grad.leaf-only")
def test_leaf_only(case: Case) -> Findings:
    """After backward the leaves that require grad and were reached have a .grad, and no non-leaf has."""
    for p in case.backwards:
        yield from (HELD for name in p.due.deltas if name in p.after)  # a missing one is a difference
    last = max((p.at for p in case.backwards), default=None)
    if last is None:
        return
    for m in case.made:
        if m.seen.has_grad_fn and m.at < last:
            yield case.judge(last, f"{m.name}.grad is None", True, m.name not in case.seen.kept, "it is no leaf")


@claim("grad.unreached-stays-none")
def test_unreached_stays_none(case: Case) -> Findings:
    """A leaf that the roots do not depend on keeps its .grad as it was, the very tensor."""
    for p in case.backwards:
        if p.statement.inputs is None:
            yield from case.untouched(p, "the roots do not depend on it")


@claim("grad.metadata-matches-leaf")
def test_metadata_matches_leaf(case: Case) -> Findings:
    """A .grad has the shape and the dtype of its leaf."""
    for p, name, after in _filled(case):
        tensor = case.due.tensors[name]
        yield case.judge(p.at, f"tuple({name}.grad.shape)", tensor.shape, after.shape, f"{name} has this shape")
        yield case.judge(
            p.at, f"str({name}.grad.dtype)", f"torch.{tensor.dtype}", f"torch.{after.dtype}", f"{name} has this dtype"
        )


@claim("grad.accumulates-sum")
def test_accumulates_sum(case: Case) -> Findings:
    """Backward adds to the .grad that is there: after k calls it is the sum of k gradients."""
    for p, name, before, after in _added(case):
        if name in case.carried(p) and after.values is not None and before.values is not None:
            yield HELD


@claim("grad.own-memory")
def test_own_memory(case: Case) -> Findings:
    """No two gradients, and no gradient and a tensor of the user's, share memory."""
    for p in case.backwards:
        shared = case.seen.overlaps.get(p.at, [])
        fresh = [name for name, after in p.after.items() if after is not None and 0 not in after.shape]
        yield from (HELD for _ in fresh[1:])
        earlier = {pair for at, pairs in case.seen.overlaps.items() if at < p.at for pair in pairs}
        for one, other in shared:
            if (one, other) in earlier:
                continue
            seeds = [name for name in (one, other) if name.startswith("gradient=")]
            if len(seeds) == 2 or (seeds and not seeds[0].endswith(f"@{p.at}")):
                continue
            yield _overlap(case, p, one, other)


def _overlap(case: Case, p: PassCase, one: str, other: str) -> Violation:
    """Two names of the runner's that share memory, as a broken promise."""
    buffers = origins(p.due, [case.due.tensors[root] for root in p.statement.roots])
    reach = [buffers.get(name.removesuffix(".grad"), set()) for name in (one, other) if name.endswith(".grad")]
    seeds = [name for name in (one, other) if name.startswith("gradient=")]
    if not seeds:
        probe = f"{one}.untyped_storage().data_ptr() == {other}.untyped_storage().data_ptr()"
        handed_on = len(reach) == 2 and bool(reach[0] & reach[1])
        why = "each leaf owns its gradient" if len(reach) == 2 else "a gradient is no view of a leaf"
        return Violation("", p.at, probe, "False", "True", because=why, mark=_mark(handed_on))
    i = int(seeds[0].removeprefix("gradient=").split("@")[0])
    seed = p.statement.seeds[i]
    assert seed is not None
    grad = one if other == seeds[0] else other
    probe = f"{grad}.untyped_storage().data_ptr() == seed.untyped_storage().data_ptr()"
    before, why = f"seed = {constant_source(seed, case.device)}", "the tensor passed as gradient= belongs to the user"
    handed_on = ("seed", i) in reach[0]
    return Violation("", p.at, probe, "False", "True", before=before, because=why, mark=_mark(handed_on))


def _mark(handed_on: bool) -> str:
    """The word by which an expectation tells the known way to share a buffer from any other."""
    return "handed on" if handed_on else "shared"


@claim("grad.accumulate-in-place")
def test_accumulate_in_place(case: Case) -> Findings:
    """Backward without create_graph adds into the very tensor that .grad is, where it lies."""
    for p, name, before, after in _added(case):
        if p.statement.create_graph or before.has_grad_fn or 0 in after.shape:
            continue
        g, why = f"{name}.grad", "the gradient is added in place"
        yield case.judge(p.at, f"{g} is held", True, after.same_object, why, before=f"held = {g}")
        yield case.judge(
            p.at, f"{g}.stride() == held", True, after.stride == before.stride, why, before=f"held = {g}.stride()"
        )
        same = after.start == before.start
        yield case.judge(p.at, f"{g}.data_ptr() == held", True, same, why, before=f"held = {g}.data_ptr()")


@claim("grad.create-graph-replaces")
def test_create_graph_replaces(case: Case) -> Findings:
    """Backward with create_graph=True replaces .grad; the old tensor keeps its numbers."""
    for p, name, before, after in _added(case):
        if not p.statement.create_graph or before.values is None or 0 in after.shape:
            continue
        yield case.judge(
            p.at,
            f"{name}.grad is held",
            False,
            after.same_object,
            "create_graph does not write in place",
            before=f"held = {name}.grad",
        )
        old = case.seen.replaced.get(p.at, {})
        if name in old:
            yield case.judge(
                p.at,
                "held.tolist()",
                before.values,
                old[name],
                "the old tensor is left alone",
                before=f"held = {name}.grad",
            )


@claim("grad.reset-none-or-zero")
def test_reset_none_or_zero(case: Case) -> Findings:
    """After .grad = None or .grad.zero_() the next backward leaves its own gradient alone there."""
    yield from _reset(case)
    yield from _after_reset(case, ("none", "zero"))


@claim("grad.user-assigned-is-base")
def test_user_assigned_is_base(case: Case) -> Findings:
    """Backward adds to a .grad that the user assigned."""
    yield from _after_reset(case, ("assign",))


def _reset(case: Case) -> Findings:
    """What a reset itself leaves behind."""
    for at, s in case.at(SetGrad):
        after = case.seen.grads[at].get(s.arg)
        if s.how == "none":
            yield case.judge(at, f"{s.arg}.grad is None", True, after is None, "it was set to None")
        elif s.how == "zero" and after is not None and after.values is not None:
            zeros = np.zeros(after.shape).tolist()
            yield case.judge(at, f"{s.arg}.grad.tolist()", zeros, after.values, "it was set to zero")


def _after_reset(case: Case, hows: tuple[str, ...]) -> Findings:
    reset: dict[str, str] = {}
    filled: set[str] = set()
    steps = {p.at: p for p in case.backwards}
    for at, s in enumerate(case.program):
        if isinstance(s, SetGrad):
            reset[s.arg] = s.how
        elif at in steps:
            for name in case.carried(steps[at]):
                if reset.pop(name, None) in hows and (name in filled or hows == ("assign",)):
                    yield HELD
                filled.add(name)


@claim("grad.not-requiring-grad")
def test_not_requiring_grad(case: Case) -> Findings:
    """Without create_graph a new .grad does not require grad."""
    for p, name, after in _filled(case):
        if not p.statement.create_graph and p.before.get(name) is None:
            yield case.judge(p.at, f"{name}.grad.requires_grad", False, after.requires_grad, "create_graph is not set")
            yield case.judge(
                p.at, f"{name}.grad.grad_fn is None", True, not after.has_grad_fn, "create_graph is not set"
            )


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Non-overlapping and without gaps."""
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape, strict=True) if sz > 1):
        if step != expected:
            return False
        expected *= size
    return True


def _rowmajor(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


def _layouts(case: Case, *, dense: bool) -> Iterator[tuple[PassCase, str, GradSeen, tuple[int, ...]]]:
    moved = {s.arg for s in case.program if isinstance(s, SetData)}
    leaves = {m.name: m.seen.stride for m in case.made if m.seen.is_leaf and m.name not in moved}
    for p, name, after in _filled(case):
        stride = leaves.get(name)
        shape = case.due.tensors[name].shape
        if p.statement.create_graph or stride is None or p.before.get(name) is not None or not prod(shape):
            continue
        if _dense(shape, stride) is dense and len(shape) > 0:
            yield p, name, after, tuple(st for st, size in zip(stride, shape, strict=True) if size > 1)


@claim("grad.layout-dense-follows-param")
def test_layout_dense(case: Case) -> Findings:
    """A new .grad of a dense leaf has the strides of the leaf; where a size is 1 the stride says nothing."""
    for p, name, after, stride in _layouts(case, dense=True):
        sizes = case.due.tensors[name].shape
        seen = tuple(st for st, size in zip(after.stride, sizes, strict=True) if size > 1)
        probe = f"tuple(s for s, n in zip({name}.grad.stride(), {name}.shape) if n > 1)"
        yield case.judge(p.at, probe, stride, seen, f"{name} lies in memory like this")


@claim("grad.layout-nondense-rowmajor")
def test_layout_nondense(case: Case) -> Findings:
    """A new .grad of a leaf with gaps or overlaps in memory is row-major contiguous."""
    for p, name, after, _ in _layouts(case, dense=False):
        sizes = case.due.tensors[name].shape
        due = tuple(st for st, size in zip(_rowmajor(sizes), sizes, strict=True) if size > 1)
        seen = tuple(st for st, size in zip(after.stride, sizes, strict=True) if size > 1)
        probe = f"tuple(s for s, n in zip({name}.grad.stride(), {name}.shape) if n > 1)"
        yield case.judge(p.at, probe, due, seen, f"the memory of {name} is not dense")


@claim("grad.multi-loss-equals-sum-loss")
def test_multi_loss(case: Case) -> Findings:
    """Backward of one loss and then of another adds up to backward of both."""
    filled_by: dict[str, tuple[str, ...]] = {}
    for p in case.backwards:
        roots = p.statement.roots
        for name in case.carried(p):
            if p.before.get(name) is not None and filled_by.get(name, roots) != roots:
                yield HELD
            filled_by[name] = roots
