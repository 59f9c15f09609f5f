"""Area backward: the numbers, and the arguments of a backward call."""

from __future__ import annotations

from collections.abc import Iterator

from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.paper import Node
from autograd_conformance.program import Backward


def _carrying(case: Case) -> Iterator[PassCase]:
    """Backward calls that carried a gradient somewhere."""
    return (p for p in case.backwards if case.carried(p))


@claim("backward.chain-rule")
def test_chain_rule(case: Case) -> Findings:
    """The gradient of every leaf is the product of Jacobians along each path, summed over paths."""
    for p in _carrying(case):
        yield from (HELD for _ in case.carried(p))


def _inputs_of(node: Node) -> Iterator[int]:
    return (id(edge) for edge in node.edges if edge is not None)


@claim("backward.fan-out-sums")
def test_fan_out_sums(case: Case) -> Findings:
    """A tensor that is used several times gets the sum over its uses."""
    for p in _carrying(case):
        used = [edge for node in p.due.executed for edge in _inputs_of(node)]
        if len(set(used)) < len(used):
            yield HELD


@claim("backward.scalar-implicit-one")
def test_scalar_implicit_one(case: Case) -> Findings:
    """backward() of a tensor with one element is backward(torch.ones_like(it))."""
    for p in _carrying(case):
        if any(seed is None for seed in p.statement.seeds):
            yield HELD


@claim("backward.nonscalar-needs-gradient")
def test_nonscalar_needs_gradient(case: Case) -> Findings:
    """backward() of a tensor with none or several elements needs a gradient."""
    for p in case.passes:
        if p.due.why == "nonscalar":
            yield case.judge_raise(p.at, "the root has not exactly one element and no gradient is given")


@claim("backward.vector-jacobian")
def test_vector_jacobian(case: Case) -> Findings:
    """backward(v) gives the vector-Jacobian product with v."""
    for p in _carrying(case):
        if any(seed is not None and set(seed.values) - {1.0} for seed in p.statement.seeds):
            yield HELD


@claim("backward.no-requires-grad-error")
def test_no_requires_grad_error(case: Case) -> Findings:
    """A pass from a root that does not require grad raises."""
    for p in case.passes:
        if p.due.why == "untracked":
            yield case.judge_raise(p.at, "the root does not require grad")


@claim("backward.inputs-restricts")
def test_inputs_restricts(case: Case) -> Findings:
    """backward(inputs=...) fills the .grad of these tensors and touches no other."""
    for p in case.judged:
        s = p.statement
        if not isinstance(s, Backward) or s.inputs is None:
            continue
        yield from (HELD for name in s.inputs if name in p.due.deltas)
        yield from case.untouched(p, "it is not among the inputs")


@claim("backward.list-of-roots")
def test_list_of_roots(case: Case) -> Findings:
    """autograd.backward of several roots adds up their gradients in one go."""
    for p in _carrying(case):
        if len(p.statement.roots) > 1:
            yield HELD


@claim("backward.broadcast-sums")
def test_broadcast_sums(case: Case) -> Findings:
    """The gradient of an operand that was broadcast is summed down to its shape."""
    for p in _carrying(case):
        if any(node.op.kind == "binary" and _broadcasts(node) for node in p.due.executed):
            yield HELD


def _broadcasts(node: Node) -> bool:
    shape = node.outs[0].shape
    return any(
        e is not None and t.shape != shape and 0 not in t.shape for e, t in zip(node.edges, node.inputs, strict=True)
    )


@claim("backward.unused-output-is-zero")
def test_unused_output_is_zero(case: Case) -> Findings:
    """Outputs of an op that do not lead to the root count as zero."""
    for p in _carrying(case):
        roots = set(p.statement.roots)
        read = {id(t) for node in p.due.executed for t in node.inputs} | {id(case.due.tensors[r]) for r in roots}
        for node in p.due.executed:
            used = [id(out) in read for out in node.outs if 0 not in out.shape]
            if any(used) and not all(used):
                yield HELD


@claim("backward.returns-none")
def test_returns_none(case: Case) -> Findings:
    """backward() returns None and leaves the numbers and the version of its roots alone."""
    for p in case.backwards:
        root = p.statement.roots[0]
        nothing = case.seen.facts.get((p.at, "returns None"))
        yield case.judge(p.at, "returned is None", True, nothing, "gradients go to .grad, nothing is returned")
        same = case.seen.facts.get((p.at, "roots unchanged"))
        yield case.judge(
            p.at, f"{root}.tolist() == held", True, same, "backward only reads", before=f"held = {root}.tolist()"
        )
        for name in case.seen.written.get(p.at, ()):
            held = f"held = {name}._version"
            yield case.judge(p.at, f"{name}._version == held", True, False, "backward only reads", before=held)
