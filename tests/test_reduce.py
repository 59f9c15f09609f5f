"""Reduction: whatever fails, what is shown in the end is small, makes sense, and fails for the same reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from statistics import median

import numpy as np
import pytest

from autograd_conformance.oracle import InvalidProgram, predict
from autograd_conformance.program import (
    Apply,
    Backward,
    Constant,
    Grad,
    Leaf,
    Program,
    Rewrap,
    SetGrad,
    reads,
    writes,
)
from autograd_conformance.reduce import Reducer, Shows, refitted
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.programs import decode
from autograd_conformance.verdicts import Violation

Where = Callable[[Program], int | None]
BUDGET = 400  # calls that a reduction may take


def fault(at: int) -> Violation:
    """A violation at a statement; nothing else of it matters here."""
    return Violation("grad.leaf-only", at, "a.grad is None", "False", "True")


def shows_at(where: Where) -> Shows:
    """A fault that shows at the statement that ``where`` names, in programs that make sense."""

    def shows(program: Program) -> Violation | None:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # variance of one number
            predict(program)
            at = where(program)
        return None if at is None else fault(at)

    return shows


# --- faults -----------------------------------------------------------------------------------------------------------


def _executed(program: Program, at: int) -> set[str]:
    """Ops that a pass executes."""
    return {node.op.name for node in predict(program).passes[at].executed}


def runs(name: str) -> Where:
    """The first backward that executes an op."""

    def where(program: Program) -> int | None:
        backwards = (i for i, s in enumerate(program) if isinstance(s, Backward))
        return next((i for i in backwards if name in _executed(program, i)), None)

    return where


def contains(name: str) -> Where:
    """The first backward after an op, whether it has to do with it or not."""

    def where(program: Program) -> int | None:
        found = [i for i, s in enumerate(program) if isinstance(s, Apply) and s.op == name]
        return next((i for i, s in enumerate(program) if isinstance(s, Backward) and found and i > found[0]), None)

    return where


def accumulated(program: Program) -> int | None:
    """The second backward that adds to one leaf."""
    filled: set[str] = set()
    for at, p in predict(program).passes.items():
        if isinstance(program.statements[at], Backward) and not p.raises:
            if filled & set(p.deltas):
                return at
            filled |= set(p.deltas)
    return None


def restricted(program: Program) -> int | None:
    """A backward with inputs=."""
    return next((i for i, s in enumerate(program) if isinstance(s, Backward) and s.inputs is not None), None)


def behind_a_detach(program: Program) -> int | None:
    """A backward from what a detached copy went into."""
    rewrapped: set[str] = set()
    for at, s in enumerate(program):
        if isinstance(s, Rewrap) or (isinstance(s, Apply) and rewrapped & set(s.args)):
            rewrapped.update(writes(s))
        if isinstance(s, Backward) and rewrapped & set(s.roots) and not predict(program).passes[at].raises:
            return at
    return None


def reset(program: Program) -> int | None:
    """A backward after a reset of a leaf that it fills."""
    dropped: set[str] = set()
    for at, s in enumerate(program):
        if isinstance(s, SetGrad):
            dropped.add(s.arg)
        if isinstance(s, Backward) and dropped & set(predict(program).passes[at].deltas):
            return at
    return None


def second_order(program: Program) -> int | None:
    """autograd.grad with create_graph."""
    return next((i for i, s in enumerate(program) if isinstance(s, Grad) and s.create_graph), None)


# fault -> where it shows
FAULTS: dict[str, Where] = {
    "sort and a backward": contains("sort"),
    "mul and a backward": contains("mul"),
    "backward of sort": runs("sort"),
    "backward of mul": runs("mul"),
    "backward of stack": runs("stack"),
    "backward of var": runs("var"),
    "backward of mm": runs("mm"),
    "accumulation": accumulated,
    "inputs=": restricted,
    "detach": behind_a_detach,
    "reset": reset,
    "create_graph": second_order,
}


@cache
def pool() -> tuple[Program, ...]:
    """Drawn programs to start from."""
    return tuple(decode(payload) for payload in draw(1000, 5))


@cache
def failing(where: Where, count: int) -> tuple[Program, ...]:
    """The first programs that show a fault."""
    shows = shows_at(where)
    found = []
    for program in pool():
        if shows(program) is not None:
            found.append(program)
        if len(found) == count:
            break
    return tuple(found)


@cache
def reduced(where: Where, program: Program, budget: int = BUDGET) -> tuple[Program, Violation]:
    """A program reduced by a fault."""
    violation = shows_at(where)(program)
    assert violation is not None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Reducer(shows_at(where), budget).reduce(program, violation)


def _largest_leaf(program: Program) -> int:
    return max(len(s.data.values) for s in program if isinstance(s, Leaf))


@pytest.mark.parametrize("name", FAULTS)
def test_reduced_programs_are_small(name: str) -> None:
    """From drawn programs each fault comes down to four statements or fewer, over leaves of few elements."""
    count = 30 if name.startswith("sort") else 6
    starts = failing(FAULTS[name], count)
    assert len(starts) == count
    ends = [reduced(FAULTS[name], program)[0] for program in starts]
    assert max(program.size() for program in ends) <= 4, max(ends, key=Program.size)
    assert median(program.size() for program in ends) <= 3
    assert median(map(_largest_leaf, ends)) <= (4 if "var" in name else 1)
    assert sum(_largest_leaf(program) <= 4 for program in ends) >= 0.9 * len(ends)
    assert max(sum(isinstance(s, Leaf) for s in program) for program in ends) <= 3


@pytest.mark.parametrize("name", FAULTS)
def test_reduced_programs_make_sense_and_still_fail(name: str) -> None:
    """What comes out can be predicted, ends with the fault, and has no leaf that nothing needs."""
    where = FAULTS[name]
    for start in failing(where, 6):
        program, violation = reduced(where, start)
        predict(program)
        assert shows_at(where)(program) == violation
        assert violation.at == len(program) - 1
        assert _unused(program) == set()


def _unused(program: Program) -> set[str]:
    """Leaves that no statement reads."""
    read = {name for s in program for name in reads(s)}
    return {s.name for s in program if isinstance(s, Leaf)} - read


def test_reduced_statements_are_plain() -> None:
    """Arguments that the fault does not need are gone: flags, retain_graph, seeds, layouts, float32, odd numbers."""
    plain = Program(
        (Leaf("a", Constant((), "float64", (1.0,)), True), Apply(("b",), "mul", ("a", "a")), Backward(("b",)))
    )
    ends = {reduced(runs("mul"), start)[0] for start in failing(runs("mul"), 6)}
    assert plain in ends
    for program in ends:
        assert all(s.layout == "contiguous" and s.data.dtype == "float64" for s in program if isinstance(s, Leaf))
        last = program.statements[-1]
        assert isinstance(last, Backward)
        assert (last.retain_graph, last.create_graph, last.inputs, last.seeds) == (None, False, None, (None,))


def test_names_are_compact() -> None:
    """Tensors of a reduced program are named a, b, c in the order in which they are made, never g."""
    for start in failing(behind_a_detach, 8):
        program, _ = reduced(behind_a_detach, start)
        made = [name for s in program for name in writes(s)]
        assert made == list("abcdefhijk"[: len(made)])


# --- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 7, 40])
def test_the_budget_is_kept(budget: int) -> None:
    """No more candidates are tried than the budget allows, and one more for the new names."""
    calls: list[Program] = []
    true = shows_at(runs("mul"))

    def counted(program: Program) -> Violation | None:
        calls.append(program)
        return true(program)

    for start in failing(runs("mul"), 4):
        violation = true(start)
        assert violation is not None
        calls.clear()
        program, _ = Reducer(counted, budget).reduce(start, violation)
        assert len(calls) <= budget + 1
        predict(program)
        assert true(program) is not None


def test_a_larger_budget_is_no_worse() -> None:
    """With more calls the program is no larger."""
    for start in failing(runs("stack"), 4):
        lengths = [len(reduced(runs("stack"), start, budget)[0]) for budget in (0, 20, 100, 400)]
        assert lengths == sorted(lengths, reverse=True)


def test_reduction_is_deterministic() -> None:
    """The same program reduces to the same program."""
    for start in failing(runs("sort"), 2):
        assert reduced.__wrapped__(runs("sort"), start) == reduced.__wrapped__(runs("sort"), start)


def test_senseless_candidates_are_dropped() -> None:
    """A candidate that makes no sense counts as one that does not fail; other errors are not swallowed."""
    start = failing(runs("mul"), 1)[0]
    violation = shows_at(runs("mul"))(start)
    assert violation is not None

    def senseless(program: Program) -> Violation | None:
        if program != start and len(program) < len(start):
            raise InvalidProgram("no")
        return shows_at(runs("mul"))(program)

    assert len(Reducer(senseless, 60).reduce(start, violation)[0]) == len(start)


def test_a_fault_that_never_shows_again_is_kept() -> None:
    """If nothing smaller fails, and the renamed program neither, the program stays as it was found."""
    start = failing(runs("mul"), 1)[0]
    violation = fault(len(start) - 1)
    assert Reducer(lambda program: None, BUDGET).reduce(start, violation) == (start, violation)


def test_seeds_are_refitted() -> None:
    """When shapes shrink, seeds and assigned gradients follow."""
    wide = Constant((3,), "float32", (1.0, 2.0, 3.0))
    program = Program(
        (
            Leaf("a", Constant((2,), "float64", (1.0, 1.0)), True),
            SetGrad("a", "assign", wide),
            Backward(("a",), (wide,)),
        )
    )
    _, assigned, backward = refitted(program)
    assert isinstance(assigned, SetGrad)
    assert isinstance(backward, Backward)
    assert assigned.value == backward.seeds[0] == Constant((2,), "float64", (1.0, 2.0))
