"""Area requires-grad: which tensors are recorded, and what switching the flag does."""

from __future__ import annotations

from collections.abc import Iterator

from autograd_conformance.compare import HELD, Case, Finding, Findings, Made, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.ops import FLOATS, OPS
from autograd_conformance.probes import forward_values
from autograd_conformance.program import (
    Apply,
    Backward,
    Leaf,
    Program,
    Rewrap,
    SetRequiresGrad,
    Statement,
    renamed,
    writes,
)
from autograd_conformance.reports.statements import statement_source
from autograd_conformance.transform import needed


def _flips(case: Case, *, value: bool) -> Iterator[tuple[int, SetRequiresGrad]]:
    """Switches of the flag that had to work and did."""
    for at, s in case.at(SetRequiresGrad):
        if s.value is value and at not in case.due.refused:
            yield at, s


@claim("requires-grad.propagates-any")
def test_propagates_any(case: Case) -> Findings:
    """A recorded op with an operand that requires grad gives an output that requires grad."""
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if s.no_grad or made.paper.dtype not in FLOATS or not OPS[s.op].differentiable:
            continue
        if True in [t.requires_grad for t in operands]:
            yield case.judge(
                made.at, f"{made.name}.requires_grad", True, made.seen.requires_grad, "an operand requires grad"
            )
            yield case.judge(
                made.at, f"{made.name}.grad_fn is not None", True, made.seen.has_grad_fn, "an operand requires grad"
            )


@claim("requires-grad.propagates-none")
def test_propagates_none(case: Case) -> Findings:
    """An op whose operands do not require grad, or that runs under no_grad, records nothing."""
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if made.paper.dtype not in FLOATS:
            continue
        if s.no_grad or True not in [t.requires_grad for t in operands]:
            why = "under no_grad nothing is recorded" if s.no_grad else "no operand requires grad"
            yield case.judge(made.at, f"{made.name}.requires_grad", False, made.seen.requires_grad, why)
            yield case.judge(made.at, f"{made.name}.grad_fn is not None", False, made.seen.has_grad_fn, why)
            yield case.judge(made.at, f"{made.name}.is_leaf", True, made.seen.is_leaf, why)


@claim("requires-grad.integer-outputs-never")
def test_integer_outputs_never(case: Case) -> Findings:
    """An integer or bool output never requires grad, and a cast back to floating point does not revive it."""
    integral = {m.name for m in case.made if m.paper.dtype not in FLOATS}
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if made.name in integral and any(t.requires_grad for t in operands):
            yield case.judge(
                made.at, f"{made.name}.requires_grad", False, made.seen.requires_grad, "its dtype is not floating"
            )
        elif OPS[s.op].kind == "cast" and s.args[0] in integral:
            yield case.judge(
                made.at, f"{made.name}.requires_grad", False, made.seen.requires_grad, "it is cast from integers"
            )


@claim("requires-grad.nonleaf-always-true")
def test_nonleaf_always_true(case: Case) -> Findings:
    """A tensor that has a grad_fn requires grad."""
    for made in case.made:
        if made.seen.has_grad_fn:
            yield case.judge(made.at, f"{made.name}.requires_grad", True, made.seen.requires_grad, "it has a grad_fn")


@claim("requires-grad.multi-output")
def test_multi_output(case: Case) -> Findings:
    """All floating outputs of an op with several require grad alike, and share one node."""
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if OPS[s.op].kind != "several" or s.no_grad or not any(t.requires_grad for t in operands):
            continue
        floating = made.paper.dtype in FLOATS
        yield case.judge(
            made.at, f"{made.name}.requires_grad", floating, made.seen.requires_grad, "one op made all outputs"
        )
        if made.name == s.outs[-1] and floating and len(s.outs) > 1 and (made.at, "one node") in case.seen.facts:
            probe = f"{s.outs[0]}.grad_fn is {made.name}.grad_fn"
            yield case.judge(made.at, probe, True, case.seen.facts[made.at, "one node"], "one op made all outputs")


@claim("requires-grad.value-independent")
def test_value_independent(case: Case) -> Findings:
    """Values are bitwise the same whether leaves require grad or not, and whether recording is on or off."""
    if int(case.program.digest(), 16) % 8:  # each takes three runs of its own
        return
    graph = Program(tuple(s for s in case.program if isinstance(s, Leaf | Apply | Rewrap)))
    plain = Program(tuple(map(_untracked, graph)))
    seen = forward_values(graph, case.device)
    others = (
        (plain, "", forward_values(plain, case.device)),
        (graph, _OFF, forward_values(graph, case.device, record=False)),
    )
    for made in case.made:
        for program, prefix, due in others:
            if made.seen.requires_grad and 0 not in made.paper.shape and made.name in seen and made.name in due:
                same = repr(due[made.name]) == repr(seen[made.name])
                yield HELD if same else _differs(case, made, program, prefix)


_OFF = "with torch.no_grad(): "


def _untracked(s: Statement) -> Statement:
    if isinstance(s, Leaf):
        return Leaf(s.name, s.data, False, s.layout)
    if isinstance(s, Rewrap):
        return Rewrap(
            s.out, s.arg, {"reattach": "detach", "tensor_tracked": "tensor", "parameter": "detach"}.get(s.how, s.how)
        )
    return s


def _differs(case: Case, made: Made, program: Program, prefix: str) -> Finding:
    """The other run of the same ops, under other names, and the comparison of the two."""
    at = next(i for i, s in enumerate(program) if made.name in writes(s))
    part = needed(program, at)
    names = {name: f"{name}_other" for s in part for name in writes(s)}
    lines = [statement_source(renamed(s, names), case.device) for s in part]
    before = "\n".join(line if line.startswith(_OFF) else prefix + line for line in lines)
    why = (
        "the same ops on the same numbers with recording off"
        if prefix
        else "the same ops on the same numbers without requires_grad"
    )
    probe = f"{made.name}.tolist() == {names[made.name]}.tolist()"
    return case.judge(made.at, probe, True, False, why, before=before)


@claim("requires-grad.unset-nonleaf-error")
def test_unset_nonleaf_error(case: Case) -> Findings:
    """Switching the flag of a non-leaf off raises and leaves it on."""
    for at, s in case.at(SetRequiresGrad):
        if case.due.refused.get(at) != "nonleaf":
            continue
        yield case.judge_raise(at, f"{s.arg} has a grad_fn; only leaves can be switched")
        flags = case.seen.changed.get(at)
        if at in case.seen.errors and flags is not None:
            yield case.judge(
                at, f"{s.arg}.requires_grad", True, flags.requires_grad, "the refused change must not happen"
            )


@claim("requires-grad.inplace-setter-returns-self")
def test_setter_returns_self(case: Case) -> Findings:
    """requires_grad_ returns the tensor itself with the flag set; so does the attribute."""
    for at, s in case.at(SetRequiresGrad):
        flags = case.seen.changed.get(at)
        if at in case.due.refused or flags is None:
            continue
        yield case.judge(at, f"{s.arg}.requires_grad", s.value, flags.requires_grad, "the flag was just set")
        if (at, "returns self") in case.seen.facts:
            probe = f"{s.arg}.requires_grad_({s.value}) is {s.arg}"
            yield case.judge(at, probe, True, case.seen.facts[at, "returns self"], "requires_grad_ works in place")


@claim("requires-grad.start-recording-later")
def test_start_recording_later(case: Case) -> Findings:
    """A tensor made without grad and then switched on is a leaf, and passes fill its .grad."""
    computed = {m.name for m in case.made if not isinstance(m.statement, Leaf)}
    for at, s in _flips(case, value=True):
        flags = case.seen.changed.get(at)
        if s.arg not in computed or flags is None:
            continue
        yield case.judge(at, f"{s.arg}.is_leaf", True, flags.is_leaf, "its history starts here")
        for p in case.judged:
            if p.at > at and s.arg in case.carried(p):
                yield HELD


@claim("requires-grad.off-after-forward")
def test_off_after_forward(case: Case) -> Findings:
    """A leaf that is switched off between forward and backward keeps its .grad as it was."""
    for at, s in _flips(case, value=False):
        for p in case.judged:
            reached = isinstance(p.statement, Backward) and s.arg not in p.due.deltas and _leads_to(case, p, s.arg)
            if p.at > at and reached and p.statement.inputs is None:
                before, after = p.before.get(s.arg), p.after.get(s.arg)
                due, seen = (g and g.values for g in (before, after))
                yield case.judge(
                    p.at,
                    f"None if {s.arg}.grad is None else {s.arg}.grad.tolist()",
                    due,
                    seen,
                    "it does not require grad when backward comes",
                )


@claim("requires-grad.on-after-forward")
def test_on_after_forward(case: Case) -> Findings:
    """A leaf that is switched on after the forward is not part of the graph that was recorded before."""
    for at, s in _flips(case, value=True):
        for p in case.judged:
            executed = [n for n in p.due.executed if n.at < at and any(t.name == s.arg for t in n.inputs)]
            if p.at > at and executed and s.arg not in p.due.deltas and isinstance(p.statement, Backward):
                before, after = p.before.get(s.arg), p.after.get(s.arg)
                due, seen = (g and g.values for g in (before, after))
                yield case.judge(
                    p.at,
                    f"None if {s.arg}.grad is None else {s.arg}.grad.tolist()",
                    due,
                    seen,
                    "it did not require grad when the op ran",
                )


def _leads_to(case: Case, p: PassCase, name: str) -> bool:
    return any(edge is case.due.tensors[name] for node in p.due.executed for edge in node.edges)


@claim("requires-grad.means-differentiable")
def test_means_differentiable(case: Case) -> Findings:
    """From every tensor that requires grad one can backpropagate, from a leaf too."""
    for p in case.passes:
        if p.must_raise is False and not p.due.again:
            yield HELD  # an error that is not due is a difference, and its controls find the claim
