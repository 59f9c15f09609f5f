"""The reference model: every rule on a program small enough to check by hand, and then on drawn ones against torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import autograd_conformance
from autograd_conformance.compare import Case, PassCase
from autograd_conformance.oracle import InvalidProgram, predict
from autograd_conformance.paper import Due, Noise, PassDue
from autograd_conformance.program import (
    REWRAPS,
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Leaf,
    Program,
    Rewrap,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
)
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.programs import decode

torch.set_num_threads(1)

PACKAGE = Path(autograd_conformance.__file__).parent


def leaf(name: str, *values: float, grad: bool = True, dtype: str = "float64") -> Leaf:
    """A vector, or a 0-dim tensor for one value."""
    shape = (len(values),) if len(values) != 1 else ()
    return Leaf(name, Constant(shape, dtype, values), grad)


def op(out: str, name: str, *args: str, no_grad: bool = False, **params: object) -> Apply:
    """An op with one output, or several as in ``"v i"``."""
    return Apply(tuple(out.split()), name, args, tuple(params.items()), no_grad)  # type: ignore[arg-type]


def seed(*values: float) -> Constant:
    """A cotangent for a vector."""
    return Constant((len(values),), "float64", values)


def due_of(*statements: Statement) -> Due:
    """What is due of a program, once torch has confirmed it: flags, errors and gradients."""
    case = Case(Program(statements), "cpu")
    assert disagreements(case) == []
    return case.due


def pass_of(*statements: Statement) -> PassDue:
    """What is due of the last pass of a program."""
    due = due_of(*statements)
    return due.passes[max(due.passes)]


def deltas(*statements: Statement) -> dict[str, object]:
    """Gradients that the last pass of a program is due to give, as plain lists."""
    return {name: g.tolist() for name, g in pass_of(*statements).deltas.items()}


# --- agreement with torch ---------------------------------------------------------------------------------------------


def disagreements(case: Case) -> list[str]:
    """Where torch does otherwise than is due: flags, refusals, errors of passes, gradients."""
    return [*_flags(case), *_changed_flags(case), *_refusals(case), *_errors(case), *map(str, case.differences)]


def _flags(case: Case) -> Iterator[str]:
    for m in case.made:
        seen = (m.seen.requires_grad, m.seen.is_leaf, m.seen.has_grad_fn, m.seen.shape, m.seen.dtype)
        tracked, is_leaf = case.due.made[m.name]
        due = (tracked, is_leaf, not is_leaf, m.paper.shape, m.paper.dtype)
        if seen != due:
            yield f"{m.at}: {m.name} is {seen}, due is {due}"


def _changed_flags(case: Case) -> Iterator[str]:
    for at, seen in case.seen.changed.items():
        statement = case.program.statements[at]
        assert isinstance(statement, SetRequiresGrad | DetachInPlace)
        paper = predict(Program(case.program.statements[: at + 1])).tensors[statement.arg]
        if (seen.requires_grad, seen.is_leaf) != (paper.requires_grad, paper.is_leaf):
            yield f"{at}: {statement} leaves {seen}"


def _refusals(case: Case) -> Iterator[str]:
    for at, statement in enumerate(case.program):
        raised = at in case.seen.errors
        if not isinstance(statement, Backward | Grad) and raised != (at in case.due.refused):
            yield f"{at}: {statement} raised {case.seen.errors.get(at)}"


def _errors(case: Case) -> Iterator[str]:
    for p in case.passes:
        if p.must_raise is not None and p.must_raise != (p.error is not None):
            yield f"{p.at}: must_raise is {p.must_raise}, but {p.error}"
    if case.seen.skipped:
        yield f"skipped {case.seen.skipped}"


@cache
def drawn() -> tuple[Case, ...]:
    """Three hundred drawn programs, run."""
    with np.errstate(all="ignore"):
        return tuple(Case(decode(payload), "cpu") for payload in draw(300, 11))


def test_drawn_programs_run_as_due() -> None:
    """Flags, errors and gradients of three hundred drawn programs are those on paper."""
    assert len(drawn()) == 300
    with np.errstate(all="ignore"):
        wrong = {case.program.to_json(): found for case in drawn() if (found := disagreements(case))}
    assert wrong == {}


def test_drawn_programs_exercise_every_rule() -> None:
    """What is compared above is not empty: errors that are due, freed nodes, refusals, gradients."""
    passes = [p for case in drawn() for p in case.passes]
    assert {p.due.why for p in passes} >= {"", "untracked", "nonscalar", "unused", "input"}
    assert {p.must_raise for p in passes} == {True, False, None}
    assert sum(p.must_raise is True and bool(p.due.again) for p in passes) >= 10
    assert {why for case in drawn() for why in case.due.refused.values()} == {"nonleaf", "view"}
    assert sum(len(case.carried(p)) for case in drawn() for p in case.judged) >= 700


def test_own_memory_is_left_to_its_claim() -> None:
    """Gradients that share memory are excluded, and are few."""
    with np.errstate(all="ignore"):
        compared = sum(len(p.after) for case in drawn() for p in case.judged)
        excluded = sum(case.excluded for case in drawn() if case.differences == [])
    assert 0 < excluded < 0.1 * compared


# --- requires_grad, leaf, grad_fn -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_result_requires_grad_if_an_operand_does(first: bool, second: bool) -> None:
    """One operand that requires grad is enough, and then the result is no leaf."""
    due = due_of(leaf("a", 2.0, grad=first), leaf("b", 3.0, grad=second), op("c", "mul", "a", "b"))
    assert due.made["a"] == (first, True)
    assert due.made["c"] == (first or second, not (first or second))
    assert bool(due.nodes) is (first or second)


def test_nothing_is_recorded_under_no_grad() -> None:
    """Under no_grad the result is a leaf that does not require grad, and no gradient passes it."""
    program = (leaf("a", 2.0), op("b", "square", "a", no_grad=True), op("c", "mul", "a", "b"), Backward(("c",)))
    assert due_of(*program).made["b"] == (False, True)
    assert deltas(*program) == {"a": 4.0}


@pytest.mark.parametrize("name", ["positive", "to_int64"])
def test_results_that_are_no_floats_are_leaves(name: str) -> None:
    """Bool and integer results do not require grad and are leaves."""
    assert due_of(leaf("a", 2.0, 3.0), op("b", name, "a")).made["b"] == (False, True)


def test_an_integer_output_beside_a_tracked_one() -> None:
    """The indices of sort are a leaf without grad; its values carry the gradient back to where they came from."""
    program = (leaf("a", 3.0, 1.0, 2.0), op("v i", "sort", "a", dim=0, descending=False))
    due = due_of(*program)
    assert due.made == {"a": (True, True), "v": (True, False), "i": (False, True)}
    assert due.tensors["i"].value.tolist() == [1.0, 2.0, 0.0]
    assert deltas(*program, Backward(("v",), (seed(10.0, 20.0, 30.0),))) == {"a": [30.0, 10.0, 20.0]}


def test_shapes_and_dtypes_on_paper() -> None:
    """Broadcasting and promotion: dimensions decide before 0-dim operands do."""
    due = due_of(leaf("a", 1.0, 2.0, dtype="float32"), leaf("b", 3.0), op("c", "mul", "a", "b"))
    assert (due.tensors["c"].shape, due.tensors["c"].dtype) == ((2,), "float32")


# --- detach -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [how for how in REWRAPS if how != "same"])
def test_nothing_passes_a_rewrap(how: str) -> None:
    """Each form of detach is a leaf with or without the flag, and its source gets the other path's gradient only."""
    _, shares, tracked = REWRAPS[how]
    program = (
        leaf("a", 3.0),
        op("b", "square", "a"),
        Rewrap("d", "b", how),
        op("c", "mul", "a", "d"),
        Backward(("c",)),
    )
    due = due_of(*program)
    assert due.made["d"] == (tracked, True)
    assert (due.tensors["d"].storage is due.tensors["b"].storage) is shares
    assert deltas(*program) == {"a": 9.0} | ({"d": 3.0} if tracked else {})


def test_a_conversion_that_converts_nothing_is_the_tensor_itself() -> None:
    """``to`` of the dtype that is there gives another name for the same tensor: the gradient passes."""
    program = (
        leaf("a", 3.0),
        op("b", "square", "a"),
        Rewrap("d", "b", "same"),
        op("c", "mul", "a", "d"),
        Backward(("c",)),
    )
    due = due_of(*program)
    assert due.tensors["d"] is due.tensors["b"]
    assert deltas(*program) == {"a": 27.0}


def test_detach_in_place_cuts_later_uses_only() -> None:
    """detach_() makes a leaf; what used the tensor before still differentiates into its old history."""
    before = (
        leaf("a", 3.0),
        op("b", "double", "a"),
        op("c", "shift", "b"),
        DetachInPlace("b"),
        op("d", "mul", "a", "b"),
    )
    due = due_of(*before)
    assert (due.tensors["b"].requires_grad, due.tensors["b"].is_leaf) == (False, True)
    assert deltas(*before, Backward(("d",))) == {"a": 6.0}
    assert deltas(*before, Backward(("c",))) == {"a": 2.0}


def test_detach_in_place_of_a_saved_input_must_raise() -> None:
    """Whether a pass must raise after detach_() depends on what was saved; the paper says which one did it."""
    program = Program(
        (leaf("a", 3.0), op("b", "double", "a"), op("c", "square", "b"), DetachInPlace("b"), Backward(("c",)))
    )
    case = Case(program, "cpu")
    (p,) = case.passes
    assert p.due.written == {1: {3}, 2: {3}}
    assert p.due.depends
    assert p.must_raise is None


def test_detach_in_place_is_refused_on_a_view() -> None:
    """A view cannot be detached in place, and stays what it was."""
    program = (leaf("a", 1.0, 2.0), op("b", "unsqueeze", "a", dim=0), DetachInPlace("b"))
    due = due_of(*program)
    assert due.refused == {2: "view"}
    assert due.tensors["b"].requires_grad


# --- the flag, later --------------------------------------------------------------------------------------------------


def test_switched_off_after_forward() -> None:
    """A leaf that is switched off gets nothing, while the others get theirs."""
    program = (leaf("a", 2.0), leaf("b", 5.0), op("c", "mul", "a", "b"), SetRequiresGrad("a", False), Backward(("c",)))
    assert deltas(*program) == {"b": 2.0}


def test_switched_on_after_forward() -> None:
    """A leaf that is switched on after its use is not in the graph."""
    program = (leaf("a", 2.0), leaf("b", 5.0, grad=False), op("c", "mul", "a", "b"), SetRequiresGrad("b", True))
    assert deltas(*program, Backward(("c",))) == {"a": 5.0}
    assert deltas(*program, op("d", "mul", "a", "b"), Backward(("d",))) == {"a": 5.0, "b": 2.0}


@pytest.mark.parametrize("attribute", [True, False])
def test_a_nonleaf_cannot_be_switched_off(attribute: bool) -> None:
    """Switching off a result is refused and changes nothing."""
    program = (leaf("a", 2.0), op("b", "double", "a"), SetRequiresGrad("b", False, attribute), Backward(("b",)))
    due = due_of(*program)
    assert due.refused == {2: "nonleaf"}
    assert deltas(*program) == {"a": 2.0}


@pytest.mark.parametrize(("attribute", "refused"), [(True, {2: "nonleaf"}), (False, {})])
def test_a_nonleaf_switched_on(attribute: bool, refused: dict[int, str]) -> None:
    """requires_grad_() of a result says nothing new; assigning its attribute is refused."""
    assert due_of(leaf("a", 2.0), op("b", "double", "a"), SetRequiresGrad("b", True, attribute)).refused == refused


# --- gradients --------------------------------------------------------------------------------------------------------


def test_chain_and_fan_out() -> None:
    """Products along a path and sums over paths: d(a*a + sin(a)*3a)/da at a point."""
    program = (
        leaf("a", 0.5), op("s", "square", "a"), op("t", "sin", "a"), op("u", "mul", "t", "a"), op("c", "add", "s", "u"),
        Backward(("c",)),
    )  # fmt: skip
    assert pass_of(*program).deltas["a"] == pytest.approx(1.0 + np.sin(0.5) + 0.5 * np.cos(0.5), rel=1e-12)


def test_one_tensor_twice_in_one_op() -> None:
    """Both operands of one op count."""
    assert deltas(leaf("a", 3.0), op("b", "mul", "a", "a"), Backward(("b",))) == {"a": 6.0}


def test_broadcast_operands_are_summed() -> None:
    """The gradient of a broadcast operand is the sum over where it went."""
    program = (
        leaf("a", 1.0, 2.0, 3.0),
        leaf("b", 2.0),
        op("c", "mul", "a", "b"),
        Backward(("c",), (seed(1.0, 10.0, 100.0),)),
    )
    assert deltas(*program) == {"a": [2.0, 20.0, 200.0], "b": 321.0}


def test_a_seed_is_multiplied() -> None:
    """A seed of the root's shape enters as the cotangent."""
    assert deltas(leaf("a", 1.0, 2.0), op("b", "square", "a"), Backward(("b",), (seed(3.0, 0.5),))) == {"a": [6.0, 2.0]}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_needs_no_seed(shape: tuple[int, ...]) -> None:
    """A root with one element, of whatever shape, is seeded with one."""
    program = (Leaf("a", Constant(shape, "float64", (3.0,)), True), op("b", "square", "a"), Backward(("b",)))
    assert pass_of(*program).deltas["a"].ravel().tolist() == [6.0]


def test_unused_outputs_count_as_zero() -> None:
    """Of the outputs of one op only those that lead to the root contribute."""
    program = (leaf("a", 1.0, 2.0, 3.0), op("x y z", "unbind", "a", dim=0), op("c", "square", "y"), Backward(("c",)))
    assert deltas(*program) == {"a": [0.0, 4.0, 0.0]}


def test_backward_of_a_leaf() -> None:
    """A leaf as a root gets the seed itself."""
    assert deltas(leaf("a", 2.0), Backward(("a",))) == {"a": 1.0}


def test_several_roots_add_up() -> None:
    """Two roots with a seed each: one pass, one sum."""
    roots = Backward(("b", "c"), (seed(1.0, 2.0), None))
    program = (leaf("a", 3.0, 5.0), op("b", "square", "a"), op("c", "sum", "a"), roots)
    assert deltas(*program) == {"a": [7.0, 21.0]}


def test_the_same_root_twice() -> None:
    """A root that is given twice counts twice."""
    assert deltas(leaf("a", 3.0), op("b", "square", "a"), Backward(("b", "b"), (None, None))) == {"a": 12.0}


def test_a_tensor_that_is_a_root_and_on_the_way() -> None:
    """A root below another root gets both, its seed and what arrives."""
    program = (leaf("a", 3.0), op("b", "double", "a"), op("c", "square", "b"), Backward(("c", "b"), (None, None)))
    assert deltas(*program) == {"a": 26.0}


def test_every_pass_gives_its_own_delta() -> None:
    """What a pass adds does not depend on what is there; torch's .grad is the sum, by the comparison of cases."""
    once = Backward(("b",), retain_graph=True)
    case = Case(Program((leaf("a", 3.0), op("b", "square", "a"), once, once, SetGrad("a", "zero"), once)), "cpu")
    assert disagreements(case) == []
    assert [p.due.deltas["a"].tolist() for p in case.passes] == [6.0, 6.0, 6.0]
    assert [p.after["a"].values for p in case.passes if p.after["a"]] == [6.0, 12.0, 6.0]


def test_an_assigned_gradient_is_the_base() -> None:
    """Backward adds to what the user assigned."""
    base = SetGrad("a", "assign", Constant((), "float64", (100.0,)))
    case = Case(Program((leaf("a", 3.0), op("b", "square", "a"), base, Backward(("b",)))), "cpu")
    assert disagreements(case) == []
    assert [p.after["a"].values for p in case.passes if p.after["a"]] == [106.0]


# --- inputs= ----------------------------------------------------------------------------------------------------------

TWO = (leaf("a", 2.0), leaf("b", 5.0), op("m", "mul", "a", "b"), op("c", "square", "m"))


def test_inputs_restrict_what_is_filled() -> None:
    """Only the named leaf gets a gradient, with the value of a full pass."""
    assert deltas(*TWO, Backward(("c",))) == {"a": 100.0, "b": 40.0}
    assert deltas(*TWO, Backward(("c",), inputs=("b",))) == {"b": 40.0}


def test_inputs_may_be_nonleaves() -> None:
    """A non-leaf in inputs= gets a gradient, and the leaves beyond it get none."""
    assert deltas(*TWO, Backward(("c",), inputs=("m",))) == {"m": 20.0}


def test_inputs_that_are_nonleaves_run_their_own_node() -> None:
    """For inputs=[nonleaf] torch runs the node of that tensor too, and frees it: another pass over it may raise."""
    program = (leaf("a", 2.0), op("m", "exp", "a"), Backward(("m",)), Backward(("m",), inputs=("m",)))
    case = Case(Program(program), "cpu")
    assert case.passes[1].error is not None
    assert case.passes[1].must_raise is not False
    first = Case(Program((*program[:2], Backward(("m",), inputs=("m",)), Backward(("m",)))), "cpu")
    assert first.passes[1].error is not None
    assert first.passes[1].must_raise is not False


def test_inputs_that_are_not_reached_get_nothing() -> None:
    """backward is silent about an input that the root does not depend on."""
    assert deltas(*TWO, leaf("z", 1.0), Backward(("c",), inputs=("a", "z"))) == {"a": 100.0}


def test_partial_execution_frees_only_what_ran() -> None:
    """A pass that leads to one leaf leaves the branches that do not lead there for another pass."""
    program = (
        leaf("a", 2.0), leaf("b", 5.0), op("x", "exp", "b"), op("m", "mul", "a", "x"),
        Backward(("m",), inputs=("a",)), Backward(("x",)),
    )  # fmt: skip
    due = due_of(*program)
    assert [node.at for node in due.passes[4].executed] == [3]
    assert due.passes[5].again == []
    assert deltas(*program)["b"] == pytest.approx(np.exp(5.0))


def test_executed_nodes_come_newest_first() -> None:
    """A full pass runs every node below the root, newest first, and nothing beside it."""
    program = (*TWO, op("x", "sin", "a"), op("d", "double", "c"), Backward(("d",)))
    assert [node.at for node in pass_of(*program).executed] == [5, 3, 2]


# --- freed graphs -----------------------------------------------------------------------------------------------------


def _again(*passes: Statement) -> list[list[int]]:
    """Per pass the statements of nodes that an earlier one freed."""
    due = due_of(*TWO, *passes)
    return [[node.at for node in p.again] for p in due.passes.values()]


def test_a_pass_frees_its_graph() -> None:
    """Without retain_graph every executed node is freed, and a second pass must raise for what it saved."""
    assert _again(Backward(("c",)), Backward(("c",))) == [[], [3, 2]]
    case = Case(Program((*TWO, Backward(("c",)), Backward(("c",)))), "cpu")
    assert [p.must_raise for p in case.passes] == [False, True]


@pytest.mark.parametrize(
    ("keywords", "kept"),
    [
        ({"retain_graph": True}, True),
        ({"create_graph": True}, True),
        ({"retain_graph": False, "create_graph": True}, False),
        ({"retain_graph": False}, False),
        ({}, False),
    ],
)
def test_what_retains_a_graph(keywords: dict[str, bool], kept: bool) -> None:
    """retain_graph decides; left at None it takes the value of create_graph."""
    assert _again(Backward(("c",), **keywords), Backward(("c",)))[1] == ([] if kept else [3, 2])  # type: ignore[arg-type]


def test_a_shared_trunk_is_freed() -> None:
    """Two roots over one trunk: the first pass frees the trunk, and not the second root's own node."""
    program = (*TWO, op("d", "cube", "m"), Backward(("c",)), Backward(("d",)))
    due = due_of(*program)
    assert [node.at for node in due.passes[6].executed] == [4, 2]
    assert [node.at for node in due.passes[6].again] == [2]


def test_nodes_that_saved_nothing_promise_nothing() -> None:
    """Whether a pass over freed nodes must raise is left to what torch packed: an addition packs nothing."""
    case = Case(Program((leaf("a", 2.0), op("b", "shift", "a"), Backward(("b",)), Backward(("b",)))), "cpu")
    assert [node.at for node in case.passes[1].due.again] == [1]
    assert case.passes[1].must_raise is None


def test_a_pass_that_must_raise_frees_nothing() -> None:
    """A call that is refused for its arguments does not touch the graph."""
    wrong = Backward(("c",), inputs=("k",))
    due = due_of(leaf("k", 1.0, grad=False), *TWO, wrong, Backward(("c",)))
    assert due.passes[5].why == "input"
    assert due.passes[6].again == []


def test_after_an_unused_input_nobody_knows_what_was_freed() -> None:
    """autograd.grad that raises for an unused input has run already: the next pass promises nothing."""
    program = (*TWO, leaf("z", 1.0), Grad(("c",), ("a", "z")), Backward(("c",)))
    due = due_of(*program)
    assert (due.passes[5].raises, due.passes[5].why) == (True, "unused")
    assert due.passes[6].unsure


# --- errors that are due ----------------------------------------------------------------------------------------------

VECTOR = (leaf("a", 1.0, 2.0), leaf("k", 1.0, 2.0, grad=False), op("b", "square", "a"), op("n", "square", "k"))
ERRORS: dict[str, tuple[Statement, str]] = {
    "implicit seed of a vector": (Backward(("b",)), "nonscalar"),
    "implicit seed of a vector, grad": (Grad(("b",), ("a",)), "nonscalar"),
    "second root without a seed": (Backward(("b", "b"), (seed(1.0, 1.0), None)), "nonscalar"),
    "untracked leaf": (Backward(("k",), (seed(1.0, 1.0),)), "untracked"),
    "untracked result": (Backward(("n",), (seed(1.0, 1.0),)), "untracked"),
    "untracked second root": (Backward(("b", "n"), (seed(1.0, 1.0), seed(1.0, 1.0))), "untracked"),
    "untracked root, grad": (Grad(("n",), ("a",), (seed(1.0, 1.0),)), "untracked"),
    "input without grad": (Grad(("b",), ("k",), (seed(1.0, 1.0),)), "input"),
    "input without grad, unused allowed": (Grad(("b",), ("k",), (seed(1.0, 1.0),), allow_unused=True), "input"),
    "inputs= without grad": (Backward(("b",), (seed(1.0, 1.0),), inputs=("k",)), "input"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_that_are_due(error: str) -> None:
    """A wrong argument must raise, for the reason that is named."""
    statement, why = ERRORS[error]
    due = pass_of(*VECTOR, statement)
    assert (due.raises, due.why, due.deltas) == (True, why, {})
    case = Case(Program((*VECTOR, statement)), "cpu")
    assert case.passes[0].must_raise is True


def test_an_empty_root_needs_a_seed() -> None:
    """A root without elements has no implicit seed."""
    empty = Leaf("a", Constant((0,), "float64", ()), True)
    assert pass_of(empty, op("b", "square", "a"), Backward(("b",))).why == "nonscalar"
    assert deltas(empty, op("b", "square", "a"), Backward(("b",), (Constant((0,), "float64", ()),))) == {"a": []}


# --- autograd.grad ----------------------------------------------------------------------------------------------------


def test_grad_returns_and_accumulates_nothing() -> None:
    """autograd.grad gives gradients by name, of non-leaves too, and no .grad is filled."""
    case = Case(Program((*TWO, Grad(("c",), ("b", "m", "a")))), "cpu")
    assert disagreements(case) == []
    (p,) = case.passes
    assert {name: g.tolist() for name, g in p.due.deltas.items()} == {"b": 40.0, "m": 20.0, "a": 100.0}
    assert set(p.after.values()) == {None}


@pytest.mark.parametrize(
    ("keywords", "due"),
    [({"allow_unused": True}, {"a": 100.0}), ({"materialize_grads": True}, {"a": 100.0, "z": [0.0, 0.0]})],
)
def test_unused_inputs_of_grad(keywords: dict[str, bool], due: dict[str, object]) -> None:
    """None where unused inputs are allowed, zeros of their shape where they are materialized."""
    assert deltas(*TWO, leaf("z", 1.0, 1.0), Grad(("c",), ("a", "z"), **keywords)) == due  # type: ignore[arg-type]


def test_the_root_as_an_input() -> None:
    """The gradient of a root with respect to itself is its seed."""
    assert deltas(*TWO, Grad(("c",), ("c", "m"))) == {"c": 1.0, "m": 20.0}


def test_grad_of_several_roots() -> None:
    """autograd.grad sums over its roots."""
    assert deltas(*TWO, Grad(("c", "m"), ("a",), (None, None))) == {"a": 105.0}


def test_grad_frees_only_what_it_executes() -> None:
    """Nodes that do not lead to an input stay usable."""
    program = (*TWO, Grad(("c",), ("m",)), Backward(("m",)), Backward(("c",)))
    due = due_of(*program)
    assert [[node.at for node in p.again] for p in due.passes.values()] == [[], [], [3, 2]]


# --- writes through an alias ------------------------------------------------------------------------------------------


def _written(how: str, *later: Statement) -> tuple[Case, PassCase]:
    program = (
        leaf("k", 2.0, grad=False),
        leaf("a", 3.0),
        op("c", "mul", "a", "k"),
        Rewrap("d", "k", how),
        Write("d"),
        *later,
    )
    case = Case(Program(program), "cpu")
    assert disagreements(case) == []
    return case, case.passes[-1]


def test_a_write_through_detach_is_noticed() -> None:
    """A saved tensor that was written through its detached twin makes the pass raise."""
    case, p = _written("detach", Backward(("c",)))
    assert p.due.written == {2: {4}}
    assert (p.must_raise, p.due.spoiled) == (True, False)
    assert case.due.tensors["k"].value == case.due.tensors["d"].value == 4.0


def test_a_write_through_data_is_not_noticed() -> None:
    """A write through .data goes unnoticed: no error is due, and no value."""
    _, p = _written("data", Backward(("c",)))
    assert (p.due.written, p.due.spoiled, p.must_raise, p.judged) == ({}, True, False, False)


def test_a_write_before_the_use_does_not_matter() -> None:
    """An op that runs after the write sees the new numbers, and its pass is judged."""
    _, p = _written("detach", op("e", "mul", "a", "k"), Backward(("e",)))
    assert (p.due.written, p.must_raise, p.due.deltas["a"].tolist()) == ({}, False, 4.0)


def test_a_write_to_what_was_not_saved_does_not_matter() -> None:
    """Addition saves nothing, so a write to its operand changes nothing."""
    program = (
        leaf("k", 2.0, grad=False),
        leaf("a", 3.0),
        op("c", "add", "a", "k"),
        Rewrap("d", "k", "detach"),
        Write("d"),
    )
    case = Case(Program((*program, Backward(("c",)))), "cpu")
    assert disagreements(case) == []
    assert case.passes[0].due.written == {2: {4}}
    assert case.passes[0].must_raise is False


def test_a_view_whose_base_was_written_is_unsure() -> None:
    """What the history of a view is after a write to its base, nobody promises."""
    program = (
        leaf("a", 1.0, 2.0), op("b", "double", "a"), op("v", "unsqueeze", "b", dim=0), Rewrap("d", "b", "detach"),
        Write("d"), op("w", "sum", "v"), Backward(("w",)),
    )  # fmt: skip
    case = Case(Program(program), "cpu")
    assert case.due.nodes[5].unsure
    (p,) = case.passes
    assert (p.due.unsure, p.must_raise) == (True, None)
    assert case.differences == []


# --- rounding, and programs that make no sense ------------------------------------------------------------------------


def test_noise_is_small_and_repeatable() -> None:
    """Random rounding moves numbers by a few units in the last place, the same for the same seed."""
    x = np.array([1.0, -3.0, 0.0])
    moved, again, other = Noise(1)(x, "float32"), Noise(1)(x, "float32"), Noise(2)(x, "float32")
    assert moved.tolist() == again.tolist() != other.tolist()
    assert 0 < np.max(np.abs(moved - x)) <= 3.0 * 4 * np.finfo("float32").eps
    assert Noise(1)(x, "int64") is x


def test_a_tie_is_unstable_and_a_smooth_gradient_is_not() -> None:
    """Random rounding tells what is specified: a smooth gradient is, the gradient at a tie is not."""
    top = op("m", "amax", "a", dim=0, keepdim=False)
    tie = Case(Program((leaf("a", 1.0, 1.0, 0.0), top, Backward(("m",)))), "cpu")
    assert not np.all(tie.stable(2, "a"))
    smooth = Case(Program((leaf("a", 1.0, 2.0), op("b", "exp", "a"), Backward(("b",), (seed(1.0, 1.0),)))), "cpu")
    assert np.all(smooth.stable(2, "a"))


SENSELESS: dict[str, tuple[Statement, ...]] = {
    "unknown tensor": (Backward(("a",)),),
    "unknown op": (leaf("a", 1.0), op("b", "sine", "a")),
    "shapes that do not fit": (leaf("a", 1.0, 2.0), leaf("b", 1.0, 2.0, 3.0), op("c", "add", "a", "b")),
    "wrong number of outputs": (leaf("a", 1.0, 2.0), op("b", "unbind", "a", dim=0)),
    "a dimension that is not there": (leaf("a", 1.0, 2.0), op("b", "cumsum", "a", dim=3)),
    "a parameter missing": (leaf("a", 1.0, 2.0), op("b", "cumsum", "a")),
    "seed of another shape": (leaf("a", 1.0, 2.0), op("b", "exp", "a"), Backward(("b",), (seed(1.0, 2.0, 3.0),))),
    "values that do not fill the shape": (Leaf("a", Constant((3,), "float64", (1.0,))),),
    "fewer seeds than roots": (leaf("a", 1.0), Backward(("a", "a"), (None,))),
    "unknown rewrap": (leaf("a", 1.0), Rewrap("b", "a", "tear")),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_programs(name: str) -> None:
    """A program that makes no sense is told from one that fails, with the number of the statement."""
    with pytest.raises(InvalidProgram, match=r"statement \d+|outputs"):
        predict(Program(SENSELESS[name]))


# --- who may import whom ----------------------------------------------------------------------------------------------

WORDS = ("program", "ops", "claims", "scene", "seeds", "verdicts", "errors", "seen")
MIDDLE = {
    "oracle": "model",
    "paper": "model",
    "algebra": "model",
    "reverse": "model",
    "strategies": "strategies",
    "reports": "reports",
}


def test_paper_knows_no_torch() -> None:
    """Words, model, strategies and reports can be imported without torch, in a process of its own."""
    parts = [
        *WORDS,
        *MIDDLE,
        "strategies.drawing",
        "strategies.programs",
        *(f"reports.{p.stem}" for p in _folder("reports")),
    ]
    names = ", ".join(f"autograd_conformance.{part}" for part in parts if not part.endswith("__init__"))
    code = f"import sys, {names}; print('torch' in sys.modules, 'autograd_conformance.oracle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def _folder(part: str) -> list[Path]:
    return sorted((PACKAGE.parent / part).glob("*.py"))


def _modules() -> dict[str, Path]:
    """Every module of the package, by its name below ``autograd_conformance``."""
    found = {f"{part}.{path.stem}": path for part in ("strategies", "reports") for path in _folder(part)}
    for path in sorted(PACKAGE.rglob("*.py")):
        found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _ours(path: Path) -> set[str]:
    """Parts of the package that a module imports anywhere in its text: ``ops``, ``strategies`` ..."""
    names = _imported(ast.parse(path.read_text(encoding="utf-8")))
    return {parts[1] for name in names if (parts := name.split("."))[0] == "autograd_conformance" and len(parts) > 1}


IMPORTS = {name: _ours(path) for name, path in _modules().items()}


def test_imports_are_found() -> None:
    """The rules below look at the whole package."""
    assert len(IMPORTS) > 40
    assert {"oracle", "runner", "program"} <= IMPORTS["compare"]
    assert {"ops.entry", "strategies.graphs", "reports.script", "plugin", "test_grad"} <= set(IMPORTS)


TRIAL = "ops.trial"  # tries the entries of others, by the algebra; nothing but ops.added needs it


@pytest.mark.parametrize("name", [n for n in IMPORTS if n.split(".")[0] in WORDS and n != TRIAL])
def test_words_import_only_words(name: str) -> None:
    """The words stand at the bottom."""
    assert IMPORTS[name] <= set(WORDS)


@pytest.mark.parametrize("name", [n for n in IMPORTS if n.split(".")[0] in MIDDLE])
def test_the_middle_imports_words_and_itself(name: str) -> None:
    """Model, strategies and reports stand on the words and know nothing of each other, nor of what is above."""
    group = MIDDLE[name.split(".", maxsplit=1)[0]]
    own = {part for part, other in MIDDLE.items() if other == group}
    if name == "reports.picture":  # the drawing of a graph shows shapes and flags, which the model works out
        own |= {"oracle", "paper"}
    assert IMPORTS[name] <= set(WORDS) | own


@pytest.mark.parametrize("name", IMPORTS)
def test_nobody_imports_a_test(name: str) -> None:
    """The claims are found by pytest, and imported by nobody."""
    assert not [part for part in IMPORTS[name] if part.startswith("test_")]


def test_words_import_each_other_one_way() -> None:
    """Among the words, and among all modules, nobody imports in a circle at the top of a file."""
    order = ["errors", "program", "claims", "scene", "verdicts", "ops"]
    for lower, upper in pairwise(order):
        assert upper not in IMPORTS[lower]
    assert IMPORTS["program"] == set()
    assert IMPORTS["errors"] == set()


def test_the_plugin_is_light() -> None:
    """The plug-in is loaded in every pytest run of its user: at the top it imports the standard library and pytest."""
    tree = ast.parse((PACKAGE / "plugin.py").read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {name.split(".")[0] for node in top for name in _imported(node)}
    assert "pytest" in roots
    assert roots - {"pytest"} <= set(sys.stdlib_module_names)


def test_trusted_programs_are_predicted_alike() -> None:
    """Working out only what the passes need gives the same tensors and the same gradients."""
    for payload in draw(100, 21):
        program = decode(payload)
        with np.errstate(all="ignore"):
            whole, part = predict(program), predict(program, trusted=True)
            assert whole.made == part.made
            assert {n: t.shape for n, t in whole.tensors.items()} == {n: t.shape for n, t in part.tensors.items()}
            for at, due in whole.passes.items():
                other = part.passes[at]
                assert due.deltas.keys() == other.deltas.keys()
                assert all(np.array_equal(g, other.deltas[n], equal_nan=True) for n, g in due.deltas.items())
            for name, tensor in whole.tensors.items():
                assert np.array_equal(tensor.value, part.tensors[name].value, equal_nan=True)


def test_a_later_output_keeps_its_value_when_it_is_detached() -> None:
    """detach_() of the second output of an op changes its history and not its number."""
    program = Program(
        (
            leaf("a", 1.0, 3.0),
            Apply(("b", "c"), "var_mean", ("a",), (("dim", 0), ("keepdim", False))),
            DetachInPlace("c"),
            op("d", "square", "c"),
        )
    )
    assert predict(program, trusted=True).tensors["d"].value == 4.0


def test_a_write_doubles_a_tensor_of_two_names_once() -> None:
    """A cast to the dtype it has gives the tensor another name, and no second memory."""
    program = Program(
        (leaf("a", 1.0), Rewrap("b", "a", "same"), Rewrap("w", "a", "detach"), Write("w"), op("d", "neg", "b"))
    )
    assert predict(program).tensors["d"].value == -2.0
