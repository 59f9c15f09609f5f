"""Which promise a difference breaks, found by experiment.

A wrong gradient alone does not say which promise failed. So the program is changed in one respect at a time, and each
*control* is run on the same device: the same pass without what came before it, with the gradients reset first, with
``backward`` in place of ``autograd.grad``, without ``inputs=``, with every tensor used once ... A claim is blamed if its
control, the program without what the claim is about, is right. If no control is, a plain formula is wrong, and the
claim blamed is the most general one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autograd_conformance.compare import Case, Difference
from autograd_conformance.program import (
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Leaf,
    Pass,
    Program,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
    reads,
)
from autograd_conformance.transform import (
    bypassed,
    cut_off,
    exchanged,
    expanded,
    history,
    inserted,
    needed,
    one_by_one,
    ones_like,
    unshared,
    without,
)

GENERAL = {
    "missing": "grad.leaf-only",
    "unexpected": "grad.unreached-stays-none",
    "accumulated": "agrad.equals-backward",
    "raised": "requires-grad.means-differentiable",
    "wrong": "backward.chain-rule",
}
_REWRAP_CLAIMS = {
    "detach": "detach.cuts",
    "copy": "detach.cuts",
    "data": "detach.data-attribute",
    "reattach": "detach.reattach-as-leaf",
    "parameter": "leaf.parameter-of-nonleaf",
    "tensor": "leaf.torch-tensor-copies",
    "tensor_tracked": "leaf.torch-tensor-copies",
    "new_tensor": "leaf.torch-tensor-copies",
    "same": "leaf.cast-makes-nonleaf",
}
_STATEMENT_CLAIMS: dict[type, str] = {
    Apply: "requires-grad.propagates-any",
    Leaf: "leaf.created-by-user",
    SetRequiresGrad: "requires-grad.inplace-setter-returns-self",
    DetachInPlace: "detach.inplace-variant",
    SetGrad: "grad.reset-none-or-zero",
    Write: "detach.storage-shared",
    SetData: "detach.data-attribute",
}
Control = tuple[str, Program | None]


def stray_claim(statement: Statement) -> str:
    """The claim that is broken when a statement other than a pass raises and nothing is wrong with it."""
    if isinstance(statement, Rewrap):
        return _REWRAP_CLAIMS[statement.how]
    return _STATEMENT_CLAIMS[type(statement)]


def blame(case: Case, difference: Difference) -> tuple[str, ...]:
    """Ids of the claims that a difference breaks; never empty."""
    trial = _Trial(case, difference)
    return trial.verdict()


class _Trial:
    """The controls of one difference."""

    def __init__(self, case: Case, difference: Difference) -> None:
        self.case, self.difference = case, difference
        whole = Program(case.program.statements[: difference.at + 1])
        part = needed(case.program, difference.at)
        self.program = whole if self.clean(part) else part

    def clean(self, program: Program | None) -> bool:
        """Does a control come out as due?"""
        if program is None:
            return False
        case = self.case.again(program)
        return case is not None and not case.seen.skipped and not case.differences and bool(case.judged)

    def verdict(self) -> tuple[str, ...]:
        """First what came before the pass, then what is particular about it."""
        earlier = history(self.program)
        if earlier:
            fresh = without(self.program, earlier)
            if self.clean(fresh):
                return tuple(self._history())
            self.program = fresh
        call = [claim for claim, control in self._call() if self.clean(control)]
        blamed = call or [claim for claim, control in self._features() if self.clean(control)]
        return tuple(dict.fromkeys(blamed)) or (self._general(),)

    def _general(self) -> str:
        """No control is right: the most general claim that speaks of this kind of difference."""
        statement = self.case.program.statements[self.difference.at]
        if self.difference.kind == "missing" and self.difference.name in statement.roots:  # type: ignore[union-attr]
            return "requires-grad.means-differentiable"
        for claim, control in self._call():  # not shown to be right, but not wrong either
            case = None if control is None else self.case.again(control)
            if case is not None and not case.differences:
                return claim
        return GENERAL[self.difference.kind]

    # --- what came before -----------------------------------------------------------------------------------------

    def _history(self) -> list[str]:
        last = len(self.program) - 1
        name = self.difference.name
        leaves = [s for s in self.case.seen.grads.get(self.difference.at, ()) if s in _names(self.program)]
        reset = inserted(self.program, last, [SetGrad(leaf, "none") for leaf in leaves])
        if self.difference.kind in ("wrong", "missing", "unexpected") and self.clean(reset):
            return self._accumulation(name)
        resets = [i for i in history(self.program) if isinstance(self.program.statements[i], SetGrad)]
        if resets and self.clean(without(self.program, resets)):
            return ["grad.reset-none-or-zero"]
        return self._repetition()

    def _accumulation(self, name: str) -> list[str]:
        """The pass alone is right; added to what was there it is not."""
        rows = self.program.statements
        resets = [i for i in history(self.program) if isinstance(rows[i], SetGrad) and reads(rows[i]) == (name,)]
        if resets:
            dropped = without(self.program, resets)
            if self.clean(dropped):
                how = rows[resets[-1]].how  # type: ignore[union-attr]
                return ["grad.user-assigned-is-base" if how == "assign" else "grad.reset-none-or-zero"]
        blamed = ["grad.accumulates-sum"]
        backwards = [i for i, s in enumerate(rows) if isinstance(s, Backward)]
        if len({rows[i].roots for i in backwards}) > 1 and self.clean(self._at_once(backwards)):  # type: ignore[union-attr]
            blamed.append("grad.multi-loss-equals-sum-loss")
        return blamed

    def _at_once(self, backwards: list[int]) -> Program:
        """All backward calls as one call with a list of roots."""
        calls = [s for s in self.program if isinstance(s, Backward)]
        roots = tuple(r for s in calls for r in s.roots)
        seeds = tuple(seed for s in calls for seed in s.seeds)
        rest = without(self.program, backwards[:-1])
        return exchanged(rest, len(rest) - 1, Backward(roots, seeds))

    def _repetition(self) -> list[str]:
        """The pass is right unless others ran before it: which of them, and what do the two share?"""
        case = self.case.again(self.program)
        if case is None or not case.passes:
            return [GENERAL[self.difference.kind]]
        *before, this = case.passes
        culprits = [p for p in before if self.clean(without(self.program, (p.at,)))] or before
        frees = [p for p in culprits if isinstance(p.statement, Grad) and not _retains(p.statement)]
        if frees and self.difference.kind == "raised":
            return ["agrad.frees-executed-part"]
        backwards = [i for i, s in enumerate(self.program) if isinstance(s, Backward)]
        losses = isinstance(this.statement, Backward) and any(
            p.statement.roots != this.statement.roots for p in culprits
        )
        if losses and self.difference.kind == "wrong" and self.clean(self._at_once(backwards)):
            return ["grad.multi-loss-equals-sum-loss"]
        nodes = {node.at for node in this.due.executed}
        if any(nodes & {node.at for node in p.due.executed} for p in culprits):
            return ["free.retain-graph-repeat"]
        ops = [s.op for s in self.program if isinstance(s, Apply)]
        return ["free.forward-backward-pairing" if len(set(ops)) < len(ops) else "free.disjoint-graphs"]

    # --- what is particular ---------------------------------------------------------------------------------------

    def _features(self) -> Iterator[Control]:
        program, last = self.program, len(self.program) - 1
        statement = program.statements[last]
        assert isinstance(statement, Backward | Grad)
        case = self.case.again(program)
        if case is None:
            return
        yield from self._arguments(program, last, statement)
        tensors = case.due.tensors
        yield from self._cuts(program, cut_off(program, tensors))
        yield from self._flags(program)
        if self.difference.kind != "raised":
            yield "backward.fan-out-sums", unshared(program, tensors)
            yield "backward.broadcast-sums", expanded(program, tensors)
            yield "backward.unused-output-is-zero", one_by_one(program, tensors)
            yield "leaf.clone-is-differentiable", bypassed(program, ("clone",))

    def _call(self) -> Iterator[Control]:
        """The same graph and a plainer call: if that is right, the call is at fault and not the graph."""
        program, last = self.program, len(self.program) - 1
        statement = program.statements[last]
        if isinstance(statement, Grad):
            plain = Backward(statement.roots, statement.seeds, statement.retain_graph, statement.create_graph)
            yield self._grad_claim(statement), exchanged(program, last, plain)
            if len(statement.roots) > 1:
                yield "agrad.sum-over-outputs", exchanged(program, last, *_one_at_a_time(statement))
        elif isinstance(statement, Backward) and statement.inputs is not None:
            yield "backward.inputs-restricts", exchanged(program, last, replace(statement, inputs=None))

    def _grad_claim(self, statement: Grad) -> str:
        due = self.case.due.passes[self.difference.at]
        unused = self.difference.name and self.difference.name not in due.deltas
        zeros = statement.materialize_grads and _all_zero(self.difference.due)
        if self.difference.kind != "accumulated" and (unused or zeros):
            return "agrad.unused-input"
        return "agrad.equals-backward"

    def _arguments(self, program: Program, last: int, s: Pass) -> Iterator[Control]:
        if len(s.roots) > 1 and isinstance(s, Backward):
            yield "backward.list-of-roots", exchanged(program, last, *_one_at_a_time(s))
        if s.create_graph and isinstance(s, Backward):
            yield (
                "grad.create-graph-replaces",
                exchanged(program, last, replace(s, create_graph=False, retain_graph=True)),
            )
        if any(seed is None for seed in s.seeds):
            yield "backward.scalar-implicit-one", exchanged(program, last, replace(s, seeds=self._explicit(s)))
        ones = tuple(None if seed is None else ones_like(seed) for seed in s.seeds)
        if ones != s.seeds:
            yield "backward.vector-jacobian", exchanged(program, last, replace(s, seeds=ones))

    def _explicit(self, s: Pass) -> tuple[Constant | None, ...]:
        tensors = self.case.due.tensors
        return tuple(
            Constant(tensors[root].shape, tensors[root].dtype, (1.0,)) if seed is None else seed
            for root, seed in zip(s.roots, s.seeds, strict=True)
        )

    def _cuts(self, program: Program, control: Program | None) -> Iterator[Control]:
        for s in program:
            if isinstance(s, Rewrap):
                yield _REWRAP_CLAIMS[s.how], control
            elif isinstance(s, Apply) and s.no_grad:
                yield "requires-grad.propagates-none", control
        written = [i for i, s in enumerate(program) if isinstance(s, Write)]
        if written:
            yield "detach.version-shared", without(program, written)
        detached = [i for i, s in enumerate(program) if isinstance(s, DetachInPlace)]
        if detached:
            yield "detach.inplace-variant", without(program, detached)

    def _flags(self, program: Program) -> Iterator[Control]:
        flips = [i for i, s in enumerate(program) if isinstance(s, SetRequiresGrad)]
        for i in flips:
            s = program.statements[i]
            assert isinstance(s, SetRequiresGrad)
            used_before = any(s.arg in reads(t) for t in program.statements[:i] if isinstance(t, Apply))
            off = "requires-grad.off-after-forward"
            on = "requires-grad.on-after-forward" if used_before else "requires-grad.start-recording-later"
            yield (on if s.value else off), without(program, flips)


def _one_at_a_time(s: Pass) -> list[Pass]:
    """A pass for each root; a root may not reach every input."""
    parts = [
        replace(s, roots=(root,), seeds=(seed,), retain_graph=True) for root, seed in zip(s.roots, s.seeds, strict=True)
    ]
    return [replace(part, allow_unused=True) if isinstance(part, Grad) else part for part in parts]


def _retains(s: Pass) -> bool:
    return s.create_graph if s.retain_graph is None else s.retain_graph


def _all_zero(literal: str) -> bool:
    return not any(digit in literal for digit in "123456789")


def _names(program: Program) -> set[str]:
    return {name for s in program for name in reads(s)}
