"""Area agrad: ``torch.autograd.grad``, which returns gradients instead of adding them to ``.grad``."""

from __future__ import annotations

import numpy as np

from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.program import Grad


@claim("agrad.equals-backward")
def test_equals_backward(case: Case) -> Findings:
    """autograd.grad returns what backward would add to .grad, and adds nothing."""
    for p in case.grads:
        yield from (HELD for _ in case.carried(p))
        yield from _metadata(case, p)
        for name, after in p.after.items():
            before = p.before.get(name)
            if before is not None and after is not None:
                held = f"held = {name}.grad"
                yield case.judge(
                    p.at, f"{name}.grad is held", True, after.same_object, "no .grad is touched", before=held
                )


def _metadata(case: Case, p: PassCase) -> Findings:
    """What is returned has the shape and the dtype of its input."""
    for i, name in enumerate(p.statement.inputs or ()):
        returned, tensor = case.seen.returned[p.at][i], case.due.tensors[name]
        if returned is not None:
            g, why = f"g{p.at}[{i}]", f"{name} is like this"
            yield case.judge(p.at, f"tuple({g}.shape)", tensor.shape, returned.shape, why)
            yield case.judge(p.at, f"str({g}.dtype)", f"torch.{tensor.dtype}", f"torch.{returned.dtype}", why)


@claim("agrad.unused-input")
def test_unused_input(case: Case) -> Findings:
    """An input that the roots do not depend on is an error, None with allow_unused, zeros with materialize_grads."""
    for p in case.passes:
        s = p.statement
        if not isinstance(s, Grad):
            continue
        if p.due.why == "unused":
            if p.must_raise:
                yield case.judge_raise(
                    p.at, "an input is not reached and neither allow_unused nor materialize_grads is set"
                )
            continue
        if not p.judged:
            continue
        for i, name in enumerate(s.inputs):
            returned = case.seen.returned[p.at][i]
            if name not in p.due.deltas:
                yield case.judge(p.at, f"g{p.at}[{i}] is None", True, returned is None, f"{name} is not reached")
            elif s.materialize_grads:
                shape = None if returned is None else returned.shape
                yield case.judge(
                    p.at, f"tuple(g{p.at}[{i}].shape)", case.due.tensors[name].shape, shape, f"{name} is like this"
                )


@claim("agrad.nonrequiring-input")
def test_nonrequiring_input(case: Case) -> Findings:
    """An input that does not require grad is an error, allow_unused or not."""
    for p in case.passes:
        if isinstance(p.statement, Grad) and p.due.why == "input":
            yield case.judge_raise(p.at, "an input does not require grad")


@claim("agrad.result-not-tracked")
def test_result_not_tracked(case: Case) -> Findings:
    """Without create_graph what autograd.grad returns does not require grad."""
    for p in case.grads:
        if p.statement.create_graph:
            continue
        for i, returned in enumerate(case.seen.returned[p.at]):
            if returned is not None:
                materialized = p.statement.materialize_grads and not np.any(p.due.deltas[p.statement.inputs[i]])
                yield case.judge(
                    p.at,
                    f"g{p.at}[{i}].requires_grad",
                    False,
                    returned.requires_grad,
                    "create_graph is not set",
                    mark="materialized" if materialized else "",
                )


@claim("agrad.frees-executed-part")
def test_frees_executed_part(case: Case) -> Findings:
    """autograd.grad frees what it executed, and nothing else."""
    passes = {p.at: p for p in case.passes}
    for p in case.passes:
        freeing = [passes.get(node.freed_by) for node in p.due.again if node.freed_by < p.at]
        if p.must_raise and not p.due.raises and any(q is not None and isinstance(q.statement, Grad) for q in freeing):
            yield case.judge_raise(p.at, "autograd.grad freed tensors that this pass needs")


@claim("agrad.sum-over-outputs")
def test_sum_over_outputs(case: Case) -> Findings:
    """With several roots autograd.grad returns the sum of their gradients."""
    for p in case.grads:
        if len(p.statement.roots) > 1 and case.carried(p):
            yield HELD
