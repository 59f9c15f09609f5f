"""A program, what was due and what was seen, side by side; and where the two differ.

Numbers are compared in two steps. Nearly all agree at once, to a tight tolerance. For the few that do not, the oracle
runs the program again with random rounding (:class:`autograd_conformance.oracle.Noise`). A gradient that rounding
moves visibly lies at a kink, a tie or a cancellation, and nobody promises it; elsewhere what rounding cannot explain is
a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from autograd_conformance.oracle import InvalidProgram, predict
from autograd_conformance.paper import Due, Noise, Paper, PassDue
from autograd_conformance.probes import saved
from autograd_conformance.program import (
    Apply,
    Backward,
    DetachInPlace,
    Grad,
    Pass,
    Program,
    Rewrap,
    SetRequiresGrad,
    Statement,
    Write,
    writes,
)
from autograd_conformance.runner import run
from autograd_conformance.seen import Error, GradSeen, Seen, TensorSeen
from autograd_conformance.verdicts import Violation

SAMPLES = 24  # a tie is overlooked if all of them fall on the same side: once in 16 million
FEW = 3  # for controls, where overlooking one costs precision and no false alarm
UNSTABLE = 0.01  # a gradient that rounding moves by this share of its size is unspecified
TIGHT = {"float32": 1e-4, "float64": 1e-9}
LEAST = 1e-3  # gradients smaller than this are compared as if they were of this size


class Held:
    """A comparison that came out as due."""


HELD = Held()
Finding = Held | Violation
Findings = Iterator[Finding]


class Made(NamedTuple):
    """A tensor: the statement that made it, what was due of it and what was seen."""

    at: int
    name: str
    seen: TensorSeen
    paper: Paper
    statement: Statement


class PassCase(NamedTuple):
    """One pass: what was due and what was seen.

    ``must_raise`` is None where nothing is promised. ``judged`` means that it had to succeed and did, so that its
    gradients count.
    """

    at: int
    statement: Pass
    due: PassDue
    must_raise: bool | None
    error: Error | None
    before: dict[str, GradSeen | None]
    after: dict[str, GradSeen | None]
    shared: frozenset[str]
    """Names of leaves whose ``.grad`` shared memory with something before the pass."""

    @property
    def judged(self) -> bool:
        """Had to succeed and did, and its numbers are due."""
        return self.must_raise is False and self.error is None and not self.due.spoiled


DifferenceKind = Literal["missing", "unexpected", "wrong", "accumulated", "raised", "stray"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A gradient, or a pass as a whole, that is not as due."""

    at: int
    name: str
    kind: DifferenceKind
    probe: str
    due: str
    seen: str
    tolerance: float = 0.0

    def violation(self, claim: str, because: str) -> Violation:
        """The difference as a broken promise."""
        if self.kind in ("raised", "stray"):
            return Violation(claim, self.at, "", "None", self.seen, "raises", because=because, mark=self.kind)
        return Violation(
            claim, self.at, self.probe, self.due, self.seen, "close", self.tolerance, because=because, mark=self.kind
        )


class Case:
    """One program on one device, ready to be judged."""

    def __init__(
        self, program: Program, device: str, *, values: bool = True, samples: int = SAMPLES, trusted: bool = False
    ) -> None:
        self.program, self.device, self.values, self.samples = program, device, values, samples
        self.due: Due = predict(program, trusted=trusted)
        self.seen: Seen = run(program, device, values=values)
        self.excluded = 0
        self._carried: dict[int, list[str]] = {}

    def again(self, program: Program) -> Case | None:
        """Another program on the same device, a control; None if it makes no sense."""
        try:
            return Case(program, self.device, values=self.values, samples=FEW)
        except InvalidProgram:
            return None

    def judge(
        self, at: int, probe: str, due: Any, seen: Any, because: str, *, before: str = "", mark: str = ""
    ) -> Finding:
        """Compare what is read off a tensor after statement ``at``; ``probe`` is how a script reads it."""
        if due == seen:
            return HELD
        return Violation("", at, probe, repr(due), repr(seen), before=before, because=because, mark=mark)

    def untouched(self, p: PassCase, why: str) -> Findings:
        """Leaves that require grad and to which a pass gives nothing keep their ``.grad``, the very tensor."""
        for name, after in p.after.items():
            if name in p.due.deltas or not self.due.tensors[name].requires_grad:
                continue
            before = p.before.get(name)
            yield self.judge(p.at, f"{name}.grad is None", before is None, after is None, why)
            if before is not None and after is not None:
                held = f"held = {name}.grad"
                yield self.judge(p.at, f"{name}.grad is held", True, after.same_object, why, before=held)

    def judge_raise(self, at: int, because: str, *, mark: str = "") -> Finding:
        """Statement ``at`` must raise RuntimeError."""
        error = self.seen.errors.get(at)
        if error is not None and _is_runtime_error(error):
            return HELD
        return Violation(
            "", at, "", "RuntimeError", error.kind if error else "None", "raises", because=because, mark=mark
        )

    def at(self, kind: type) -> Iterator[tuple[int, Any]]:
        """Statements of a kind that could run, with their index."""
        skipped = self.seen.skipped
        return ((i, s) for i, s in enumerate(self.program) if type(s) is kind and i not in skipped)

    @cached_property
    def made(self) -> list[Made]:
        """All tensors in the order in which they were made."""
        rows, tensors = [], self.due.tensors
        for at, statement in enumerate(self.program):
            for name in writes(statement):
                seen = self.seen.made.get(name)
                if seen is not None:
                    rows.append(Made(at, name, seen, tensors[name], statement))
        return rows

    def rewrapped(self, *hows: str) -> Iterator[Made]:
        """Tensors made from tensors in one of these ways."""
        return (m for m in self.made if isinstance(m.statement, Rewrap) and m.statement.how in hows)

    @cached_property
    def applied(self) -> list[tuple[Made, list[TensorSeen]]]:
        """Outputs of ops together with the flags that their operands were seen to have at that time."""
        flags: dict[str, TensorSeen] = {}
        rows, made = [], iter(self.made)
        current = next(made, None)
        for at, statement in enumerate(self.program):
            if at in self.seen.changed and isinstance(statement, SetRequiresGrad | DetachInPlace):
                flags[statement.arg] = self.seen.changed[at]
            while current is not None and current.at == at:
                if isinstance(statement, Apply):
                    rows.append((current, [flags[name] for name in statement.args]))
                flags[current.name] = current.seen
                current = next(made, None)
        return rows

    # --- passes ---------------------------------------------------------------------------------------------------

    @cached_property
    def passes(self) -> list[PassCase]:
        """All passes that could run."""
        rows: list[PassCase] = []
        before: dict[str, GradSeen | None] = {}
        shared: frozenset[str] = frozenset()
        for at, statement in enumerate(self.program):
            if at not in self.seen.grads:
                continue
            after = self.seen.grads[at]
            if isinstance(statement, Backward | Grad) and at in self.due.passes and at not in self.seen.skipped:
                due = self.due.passes[at]
                error = self.seen.errors.get(at)
                rows.append(PassCase(at, statement, due, self._must_raise(due), error, before, after, shared))
            before = after
            if not isinstance(statement, Grad):
                pairs = self.seen.overlaps.get(at, ())
                shared = frozenset(name.removesuffix(".grad") for pair in pairs for name in pair)
        return rows

    @cached_property
    def judged(self) -> list[PassCase]:
        """Backward calls and ``autograd.grad`` calls that had to succeed and did."""
        return [p for p in self.passes if p.judged]

    @cached_property
    def backwards(self) -> list[PassCase]:
        """Backward calls that had to succeed and did."""
        return [p for p in self.judged if isinstance(p.statement, Backward)]

    @cached_property
    def grads(self) -> list[PassCase]:
        """``autograd.grad`` calls that had to succeed and did."""
        return [p for p in self.judged if isinstance(p.statement, Grad)]

    def carried(self, p: PassCase) -> list[str]:
        """Names that a pass gives a gradient that is not all zero: where a wrong one would show."""
        known = self._carried.get(p.at)
        if known is None:
            known = [name for name, g in p.due.deltas.items() if name not in p.shared and np.count_nonzero(g)]
            self._carried[p.at] = known
        return known

    @cached_property
    def _saved(self) -> Any:
        dues = self.due.passes.values()
        again = {node.at for due in dues for node in due.again}
        written = {at for due in dues for found, writers in due.written.items() for at in (found, *writers)}
        return saved(self.program, self.device, again | written)

    def _must_raise(self, due: PassDue) -> bool | None:
        if due.raises:
            return None if due.depends or due.unsure else True
        if due.unsure:
            return None
        if not due.depends:
            return False
        return self._packed_decides(due)

    def _packed_decides(self, due: PassDue) -> bool | None:
        """Must raise if a node that runs again packed a tensor, or one whose tensor was written since did."""
        packed, storage = self._saved.packed, self._saved.storage
        if any(node.at in packed and node.op.reads_saved for node in due.again):
            return True
        statements = self.program.statements
        unsure = bool(due.again)
        for at, writers in due.written.items():
            for writer in writers:
                if storage.get(writer) not in packed.get(at, ()):
                    continue
                if isinstance(statements[writer], Write):
                    return True
                unsure = True
        return None if unsure else False

    # --- differences ----------------------------------------------------------------------------------------------

    @cached_property
    def differences(self) -> list[Difference]:
        """Everything about gradients that is not as due, the earliest first."""
        found: list[Difference] = list(self._stray_errors())
        for p in self.passes:
            if p.must_raise is False and p.error is not None:
                found.append(Difference(p.at, "", "raised", "", "None", p.error.kind))
            elif p.judged:
                found.extend(self._differences(p))
        return found

    def _stray_errors(self) -> Iterator[Difference]:
        """Errors of statements that are no passes and with which nothing is wrong."""
        for at, error in self.seen.errors.items():
            doubtful = at in self.due.refused or at in self.due.doubtful
            if not doubtful and not isinstance(self.program.statements[at], Backward | Grad):
                yield Difference(at, "", "stray", "", "None", error.kind)

    def _differences(self, p: PassCase) -> Iterator[Difference]:
        is_backward = isinstance(p.statement, Backward)
        for name, after in p.after.items():
            before = p.before.get(name)
            if name in p.shared:
                self.excluded += 1
                continue
            delta = p.due.deltas.get(name) if is_backward else None
            difference = self._grad_difference(p.at, name, before, after, delta, f"{name}.grad")
            if difference is not None:
                yield difference if is_backward else replace(difference, kind="accumulated")
        if is_backward:
            return
        for i, name in enumerate(p.statement.inputs or ()):
            after = self.seen.returned[p.at][i]
            difference = self._grad_difference(p.at, name, None, after, p.due.deltas.get(name), f"g{p.at}[{i}]")
            if difference is not None:
                yield difference

    def _grad_difference(
        self, at: int, name: str, before: GradSeen | None, after: GradSeen | None, delta: Any, probe: str
    ) -> Difference | None:
        if after is None:
            due = _total(before, delta)
            return None if due is None else Difference(at, name, "missing", probe, _literal(due), "None", 1e-6)
        if before is None and delta is None:
            return Difference(at, name, "unexpected", probe, "None", _literal(after.values))
        if not self.values or after.shape != self.due.tensors[name].shape:
            return None
        if delta is None and before is not None and before.values == after.values:
            return None
        due = _total(before, delta)
        if due.tolist() == after.values:
            return None
        return self._number_difference(at, name, due, after, probe, touched=delta is not None)

    def _number_difference(
        self, at: int, name: str, due: np.ndarray, after: GradSeen, probe: str, *, touched: bool
    ) -> Difference | None:
        seen = np.array(after.values, dtype=np.float64).reshape(after.shape)
        apart = np.abs(seen - due)
        if np.all(apart <= TIGHT[self._precision] * LEAST):
            return None
        parts = (due, self.due.passes[at].deltas[name]) if touched else (due,)  # a sum may cancel
        size = max(LEAST, *(float(np.max(np.abs(p), initial=0.0, where=np.isfinite(p))) for p in parts))
        tight = TIGHT[self._precision] * size
        if np.all(apart <= tight):
            return None
        moved = self._moved(at, name) if touched else np.zeros(due.shape)
        if not np.all(moved <= UNSTABLE * size):
            return None
        far = ~(apart <= 8 * moved + tight) & np.isfinite(due)
        if not far.any():
            return None
        kind: DifferenceKind = "wrong" if touched else "unexpected"
        return Difference(
            at, name, kind, probe, _literal(due), _literal(after.values), self._between(seen, due, far, tight)
        )

    @staticmethod
    def _between(seen: np.ndarray, due: np.ndarray, far: np.ndarray, tight: float) -> float:
        """A tolerance for a script: above rounding, well below the fault."""
        apart = np.abs(seen - due)[far]
        least = float(np.min(apart, where=np.isfinite(apart), initial=np.inf))
        return max(tight, least / 4) if np.isfinite(least) else tight

    @cached_property
    def _precision(self) -> str:
        return "float32" if any(t.dtype == "float32" for t in self.due.tensors.values()) else "float64"

    @cached_property
    def _samples(self) -> list[Due]:
        return [predict(self.program, Noise(seed)) for seed in range(self.samples)]

    def _moved(self, at: int, name: str) -> np.ndarray:
        """How far rounding moves a gradient, per element; infinite where it is not even finite."""
        exact = self.due.passes[at].deltas[name]
        moved = np.zeros(exact.shape)
        for sample in self._samples:
            moved = np.maximum(moved, np.abs(sample.passes[at].deltas[name] - exact))
        return np.where(np.isfinite(moved), moved, np.inf)

    def stable(self, at: int, name: str) -> bool:
        """Is a gradient specified: does rounding not move it visibly?"""
        size = max(float(np.max(np.abs(self.due.passes[at].deltas[name]), initial=0.0)), LEAST)
        return bool(np.all(self._moved(at, name) <= UNSTABLE * size))


def _total(before: GradSeen | None, delta: Any) -> Any:
    if before is None:
        return delta
    base = 0.0 if before.values is None else np.array(before.values, dtype=np.float64).reshape(before.shape)
    return base if delta is None else base + delta


def _literal(values: Any) -> str:
    return repr(values.tolist() if isinstance(values, np.ndarray | np.generic) else values)


def _is_runtime_error(error: Error) -> bool:
    return error.kind in ("RuntimeError", "NotImplementedError", "RecursionError")
