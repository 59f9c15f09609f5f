"""Area leaf: what a leaf is, and how tensors made from tensors become leaves or not."""

from __future__ import annotations

from autograd_conformance.compare import HELD, Case, Findings, Made
from autograd_conformance.judge import claim
from autograd_conformance.ops import FLOATS, OPS
from autograd_conformance.program import Apply, Backward, Rewrap


@claim("leaf.iff-no-grad-fn")
def test_iff_no_grad_fn(case: Case) -> Findings:
    """is_leaf says exactly that there is no grad_fn."""
    for m in case.made:
        yield case.judge(m.at, f"{m.name}.is_leaf", not m.seen.has_grad_fn, m.seen.is_leaf, "is_leaf means: no grad_fn")
    for at, flags in case.seen.changed.items():
        arg = case.program.statements[at].arg  # type: ignore[union-attr]
        yield case.judge(at, f"{arg}.is_leaf", not flags.has_grad_fn, flags.is_leaf, "is_leaf means: no grad_fn")


@claim("leaf.not-requiring-is-leaf")
def test_not_requiring_is_leaf(case: Case) -> Findings:
    """A tensor that does not require grad is a leaf, be it computed or not."""
    for m in case.made:
        if not m.seen.requires_grad:
            yield case.judge(m.at, f"{m.name}.is_leaf", True, m.seen.is_leaf, "it does not require grad")


@claim("leaf.created-by-user")
def test_created_by_user(case: Case) -> Findings:
    """A tensor that requires grad is a leaf if the user made it, and none if a recorded op did."""
    for m in case.made:
        if m.seen.requires_grad and m.paper.dtype in FLOATS:
            by_user = not isinstance(m.statement, Apply)
            why = "the user made it" if by_user else "a recorded op made it"
            yield case.judge(m.at, f"{m.name}.is_leaf", by_user, m.seen.is_leaf, why)


@claim("leaf.cast-makes-nonleaf")
def test_cast_makes_nonleaf(case: Case) -> Findings:
    """A conversion that converts is an op: from a tensor that requires grad it gives a non-leaf."""
    for m, operands in case.applied:
        s = m.statement
        assert isinstance(s, Apply)
        if OPS[s.op].kind == "cast" and operands[0].requires_grad and not s.no_grad:
            yield case.judge(m.at, f"{m.name}.is_leaf", False, m.seen.is_leaf, "the conversion is recorded")
            yield case.judge(
                m.at,
                f"{m.name}.dtype == torch.{m.paper.dtype}",
                True,
                m.seen.dtype == m.paper.dtype,
                "it was converted",
            )
    for at, s in case.at(Rewrap):
        if s.how == "same" and (at, "new object") in case.seen.facts:
            same = not case.seen.facts[at, "new object"]
            yield case.judge(at, f"{s.out} is {s.arg}", True, same, "there is nothing to convert")


@claim("leaf.clone-is-differentiable")
def test_clone_is_differentiable(case: Case) -> Findings:
    """A clone of what requires grad is a non-leaf, and backward through it changes no gradient."""
    clones = {}
    for m, operands in case.applied:
        s = m.statement
        assert isinstance(s, Apply)
        if s.op == "clone" and operands[0].requires_grad and not s.no_grad:
            clones[m.at] = m
            yield case.judge(m.at, f"{m.name}.is_leaf", False, m.seen.is_leaf, "clone is an op like any other")
        if s.op == "clone" and (m.at, "same memory") in case.seen.facts:
            probe = f"{m.name}.untyped_storage().data_ptr() == {s.args[0]}.untyped_storage().data_ptr()"
            yield case.judge(m.at, probe, False, case.seen.facts[m.at, "same memory"], "a clone has memory of its own")
    for p in case.judged:
        if case.carried(p) and any(node.at in clones for node in p.due.executed):
            yield HELD


def _copied(case: Case, m: Made, *, tracked: bool, shares: bool) -> Findings:
    """A copy without history: flag, leafness, numbers, memory."""
    arg = m.statement.arg  # type: ignore[union-attr]
    yield case.judge(m.at, f"{m.name}.requires_grad", tracked, m.seen.requires_grad, f"it has no history to {arg}")
    yield case.judge(m.at, f"{m.name}.is_leaf", True, m.seen.is_leaf, f"it has no history to {arg}")
    numbers = case.seen.values
    if (m.at, m.name) in numbers and 0 not in m.paper.shape:
        yield case.judge(
            m.at, f"{m.name}.tolist()", numbers[m.at, arg], numbers[m.at, m.name], f"it holds the numbers of {arg}"
        )
    if (m.at, "same memory") in case.seen.facts:
        probe = f"{m.name}.data_ptr() == {arg}.data_ptr()"
        why = f"it shares the memory of {arg}" if shares else "it is a copy in memory of its own"
        yield case.judge(m.at, probe, shares, case.seen.facts[m.at, "same memory"], why)


@claim("leaf.torch-tensor-copies")
def test_torch_tensor_copies(case: Case) -> Findings:
    """torch.tensor(t) and t.new_tensor(t) copy the numbers and nothing else."""
    for m in case.rewrapped("tensor", "tensor_tracked", "new_tensor", "copy"):
        assert isinstance(m.statement, Rewrap)
        yield from _copied(case, m, tracked=m.statement.how == "tensor_tracked", shares=False)


@claim("leaf.parameter-of-nonleaf")
def test_parameter_of_nonleaf(case: Case) -> Findings:
    """Parameter(t) is a leaf that requires grad, shares memory with t and has no history to it."""
    for m in case.rewrapped("parameter"):
        yield from _copied(case, m, tracked=True, shares=True)
    made = {m.name for m in case.rewrapped("parameter")}
    for p in case.judged:
        for name in made.intersection(case.carried(p)) if isinstance(p.statement, Backward) else ():
            yield case.judge(
                p.at, f"{name}.grad is not None", True, p.after.get(name) is not None, "it is a leaf that requires grad"
            )
