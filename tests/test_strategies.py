"""What is drawn: it shrinks to what a person would write, reaches everything, and is the same everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, TypeVar, get_args

import numpy as np
import pytest
import torch
from hypothesis import Phase, find, settings
from hypothesis.strategies import SearchStrategy

from autograd_conformance.census import FLOORS, words
from autograd_conformance.compare import Case
from autograd_conformance.ops import LIMIT, OPS, TABLE
from autograd_conformance.oracle import predict
from autograd_conformance.program import (
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
    Shape,
    Statement,
    Write,
    reads,
)
from autograd_conformance.strategies import graphs, leaves, programs, shape_pairs, shapes
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.programs import PAYLOAD, decode
from autograd_conformance.transform import compact

torch.set_num_threads(1)

T = TypeVar("T")
SHRINK = settings(
    max_examples=2000, database=None, derandomize=True, deadline=None, phases=(Phase.generate, Phase.shrink)
)


def minimal(strategy: SearchStrategy[T], predicate: Callable[[T], bool]) -> T:
    """The smallest value that Hypothesis finds."""
    return find(strategy, predicate, settings=SHRINK)


def ones(*shape: int, name: str = "a", grad: bool = True, layout: str = "contiguous", dtype: str = "float64") -> Leaf:
    """The leaf that others shrink to."""
    return Leaf(name, Constant(shape, dtype, (1.0,) * prod(shape)), grad, layout)  # type: ignore[arg-type]


def has(kind: type) -> Callable[[Program], bool]:
    """Programs with a statement of a kind."""
    return lambda program: any(isinstance(s, kind) for s in program)


def runs(name: str) -> Callable[[Program], bool]:
    """Programs with an op."""
    return lambda program: any(isinstance(s, Apply) and s.op == name for s in program)


def some(kind: type, test: Callable[[Any], bool]) -> Callable[[Program], bool]:
    """Programs with a statement of a kind that passes a test."""
    return lambda program: any(isinstance(s, kind) and test(s) for s in program)


def smallest(strategy: SearchStrategy[Program], predicate: Callable[[Program], bool]) -> tuple[Statement, ...]:
    """Statements of the smallest program, with its tensors named a, b, c."""
    return compact(minimal(strategy, predicate)).statements


# --- shrinking: shapes ------------------------------------------------------------------------------------------------

SMALLEST_SHAPES: dict[str, tuple[Callable[[Shape], bool], Shape]] = {
    "any": (lambda s: True, ()),
    "one dimension": (lambda s: len(s) == 1, (1,)),
    "two dimensions": (lambda s: len(s) == 2, (1, 1)),
    "three dimensions": (lambda s: len(s) == 3, (1, 1, 1)),
    "four dimensions": (lambda s: len(s) == 4, (1, 1, 1, 1)),
    "empty": (lambda s: 0 in s, (0,)),
    "a size of three": (lambda s: 3 in s, (3,)),
    "a size of four": (lambda s: 4 in s, (4,)),
    "two sizes": (lambda s: len(s) == 2 and s[0] != s[1], (1, 2)),
}


@pytest.mark.parametrize("what", SMALLEST_SHAPES)
def test_smallest_shapes(what: str) -> None:
    """Shapes shrink to few dimensions of size one."""
    predicate, due = SMALLEST_SHAPES[what]
    assert minimal(shapes(), predicate) == due


SMALLEST_PAIRS: dict[str, tuple[Callable[[Shape, Shape], bool], tuple[Shape, Shape]]] = {
    "any": (lambda a, b: True, ((), ())),
    "different": (lambda a, b: a != b, ((1,), ())),
    "a dimension less": (lambda a, b: len(b) == len(a) - 1, ((1,), ())),
    "two dimensions": (lambda a, b: len(a) == 2, ((1, 1), (1, 1))),
    "broadcast": (lambda a, b: len(a) == len(b) == 2 and 1 in b and 1 not in a, ((2, 2), (1, 2))),
    "transposed": (lambda a, b: a != b and a == b[::-1], ((1, 2), (2, 1))),
    "contraction": (lambda a, b: len(a) == len(b) == 2 and a[1] == b[0] != b[1], ((1, 2), (2, 1))),
}


@pytest.mark.parametrize("what", SMALLEST_PAIRS)
def test_smallest_shape_pairs(what: str) -> None:
    """Pairs shrink to equal shapes, and to the simplest partner that differs as asked."""
    predicate, due = SMALLEST_PAIRS[what]
    assert minimal(shape_pairs(), lambda pair: predicate(*pair)) == due


# --- shrinking: leaves ------------------------------------------------------------------------------------------------

SMALLEST_LEAVES: dict[str, tuple[Callable[[Leaf], bool], Leaf]] = {
    "any": (lambda s: True, ones()),
    "no grad": (lambda s: not s.requires_grad, ones(grad=False)),
    "float32": (lambda s: s.data.dtype == "float32", ones(dtype="float32")),
    "two dimensions": (lambda s: len(s.data.shape) == 2, ones(1, 1)),
    "empty": (lambda s: not s.data.values, ones(0)),
    "permuted": (lambda s: s.layout == "permuted" and len(s.data.shape) == 2, ones(1, 1, layout="permuted")),
    "permuted, larger": (
        lambda s: s.layout == "permuted" and len(s.data.shape) > 1 and 1 not in s.data.shape,
        ones(2, 2, layout="permuted"),
    ),
    "strided": (lambda s: s.layout == "strided", ones(1, layout="strided")),
    "offset": (lambda s: s.layout == "offset", ones(1, layout="offset")),
    "expanded": (lambda s: s.layout == "expanded", ones(1, layout="expanded")),
}


@pytest.mark.parametrize("what", SMALLEST_LEAVES)
def test_smallest_leaves(what: str) -> None:
    """Leaves shrink to a contiguous float64 one that requires grad, and keep only what was asked for."""
    predicate, due = SMALLEST_LEAVES[what]
    (found,) = smallest(leaves(), lambda program: predicate(program.statements[0]))  # type: ignore[arg-type]
    assert found == due


# --- shrinking: graphs and programs -----------------------------------------------------------------------------------

ADD = Apply(("b",), "add", ("a", "a"))
SMALLEST_GRAPHS: dict[str, tuple[Callable[[Program], bool], tuple[Statement, ...]]] = {
    "any": (lambda p: True, (ones(),)),
    "an op": (has(Apply), (ones(), ADD)),
    "mul": (runs("mul"), (ones(), Apply(("b",), "mul", ("a", "a")))),
    "sin": (runs("sin"), (ones(), Apply(("b",), "sin", ("a",)))),
    "log": (runs("log"), (ones(), Apply(("b",), "log", ("a",)))),
    "stack": (runs("stack"), (ones(), Apply(("b",), "stack", ("a", "a"), (("dim", 0),)))),
    "mm": (runs("mm"), (ones(1, 1), Apply(("b",), "mm", ("a", "a")))),
    "no_grad": (some(Apply, lambda s: s.no_grad), (ones(), Apply(("b",), "add", ("a", "a"), (), True))),
    "detach": (has(Rewrap), (ones(), Rewrap("b", "a", "detach"))),
    "detach_": (has(DetachInPlace), (ones(), ADD, DetachInPlace("b"))),
}
SMALLEST_PROGRAMS: dict[str, tuple[Callable[[Program], bool], tuple[Statement, ...]]] = {
    "any": (lambda p: True, (ones(),)),
    "the flag": (has(SetRequiresGrad), (ones(), ADD, SetRequiresGrad("b", False))),
    "a reset": (has(SetGrad), (ones(), SetGrad("a", "none"))),
    "backward": (has(Backward), (ones(), Backward(("a",)))),
    "backward of mul": (
        lambda p: runs("mul")(p) and has(Backward)(p),
        (ones(), Apply(("b",), "mul", ("a", "a")), Backward(("b",))),
    ),
    "autograd.grad": (has(Grad), (ones(), Grad(("a",), ("a",)))),
}


@pytest.mark.parametrize("what", SMALLEST_GRAPHS)
def test_smallest_graphs(what: str) -> None:
    """Graphs shrink to the op that was asked for and its one leaf."""
    predicate, due = SMALLEST_GRAPHS[what]
    assert smallest(graphs(), predicate) == due


@pytest.mark.parametrize("what", SMALLEST_PROGRAMS)
def test_smallest_programs(what: str) -> None:
    """Programs shrink to what a person would write: no argument that nobody asked for."""
    predicate, due = SMALLEST_PROGRAMS[what]
    assert smallest(programs(nodes=8, closings=3), predicate) == due


# Whose operands need a shape, a dtype or a sign: another statement may stay where a better leaf would do.
NEEDY = ("sort", "softmax", "unbind", "bmm", "where", "log1p", "var", "gather")


@pytest.mark.parametrize("name", NEEDY)
def test_little_stays_around_an_op(name: str) -> None:
    """Where the smallest program is missed, two statements stay at most, and nothing that the op does not use."""
    found = smallest(graphs(), runs(name))
    *before, last = found
    assert isinstance(last, Apply)
    assert last.op == name
    assert len(before) <= len(set(last.args)) + 2
    used = {name for s in found for name in reads(s)}
    assert all(s.name in used for s in before if isinstance(s, Leaf))


def test_three_ops() -> None:
    """Three ops shrink to three times the simplest one, on one leaf."""
    found = smallest(graphs(), lambda p: sum(isinstance(s, Apply) for s in p) >= 3)
    assert found[0] == ones()
    assert [s.op for s in found[1:] if isinstance(s, Apply)] == ["add"] * 3
    assert len(found) == 4


def test_a_write() -> None:
    """A write shrinks to a detached leaf that is written to, and one idle op at most."""
    found = smallest(programs(), has(Write))
    alias = next(s for s in found if isinstance(s, Rewrap))
    assert (found[0], alias.arg, alias.how) == (ones(), "a", "detach")
    assert found[-1] == Write(alias.out)
    assert len(found) <= 4


def test_two_backward_calls() -> None:
    """Two calls shrink to the same call twice, and no op."""
    found = smallest(programs(), lambda p: sum(isinstance(s, Backward) for s in p) >= 2)
    assert found[0] == ones()
    assert [type(s) for s in found] == [Leaf, Backward, Backward]
    assert [(s.roots, s.inputs) for s in found if isinstance(s, Backward)] == [(("a",), None)] * 2


def test_the_zero_payload_is_the_smallest_program() -> None:
    """All zero bytes are one leaf that requires grad."""
    assert decode(bytes(PAYLOAD)).statements == (ones(name="d"),)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@cache
def drawn() -> tuple[Program, ...]:
    """A thousand programs, in shards of a hundred as a run draws them."""
    return tuple(decode(payload) for shard in range(10) for payload in draw(100, shard))


@cache
def shares() -> dict[str, float]:
    """Share of the programs in which a word occurs."""
    counts: dict[str, int] = {}
    with np.errstate(all="ignore"):
        for program in drawn():
            for word in words(program, predict(program)):
                counts[word] = counts.get(word, 0) + 1
    return {word: count / len(drawn()) for word, count in counts.items()}


def test_as_many_programs_as_were_asked_for() -> None:
    """The draws give about as many payloads as asked for, the first of them zero, and nearly all different."""
    payloads = draw(200, 4)
    assert 190 <= len(payloads) <= 200
    assert payloads[0] == bytes(PAYLOAD)
    assert all(len(payload) == PAYLOAD for payload in payloads)
    assert len(set(payloads)) > 0.9 * len(payloads)


@pytest.mark.parametrize("word", FLOORS)
def test_floors(word: str) -> None:
    """Everything that matters occurs in the share of programs that was set for it."""
    assert shares().get(word, 0.0) >= FLOORS[word][1]


@pytest.mark.parametrize("name", [op.name for op in TABLE if op.differentiable])
def test_every_op_carries_gradients_often_enough(name: str) -> None:
    """Every differentiable op is executed on a path that carries gradient in one program of a hundred."""
    assert shares().get(f"op {name}", 0.0) >= 0.01


def test_every_op_without_derivative_is_drawn() -> None:
    """Ops without derivative carry no gradient, but occur."""
    drawn_ops = {s.op for program in drawn() for s in program if isinstance(s, Apply)}
    assert drawn_ops == set(OPS)


def test_every_statement_and_argument_is_drawn() -> None:
    """Every kind of statement, every rewrap and every argument of a pass occurs."""
    statements = [s for program in drawn() for s in program]
    assert {type(s) for s in statements} == set(get_args(Statement))
    backwards = [s for s in statements if isinstance(s, Backward)]
    grads = [s for s in statements if isinstance(s, Grad)]
    for passes in (backwards, grads):
        assert {s.retain_graph for s in passes} >= {None, True}
        assert {s.create_graph for s in passes} == {True, False}
        assert {len(s.roots) for s in passes} >= {1, 2}
        assert {seed is None for s in passes for seed in s.seeds} == {True, False}
    assert {s.inputs is None for s in backwards} == {True, False}
    assert {(s.allow_unused, s.materialize_grads) for s in grads} == {(False, False), (True, False), (False, True)}
    assert {s.how for s in statements if isinstance(s, SetGrad)} == {"none", "zero", "assign"}


def test_every_program_makes_sense() -> None:
    """No drawn program is senseless, and its numbers are finite and none too large for float32."""
    for program in drawn():
        with np.errstate(all="ignore"):
            tensors = predict(program).tensors.values()
        for t in tensors:
            assert t.value.size <= 625
            assert np.all(np.abs(t.value) <= LIMIT), (t.name, program.to_json())


def test_most_gradients_are_specified() -> None:
    """At least nine in ten compared gradients, and of their elements, are not moved visibly by rounding."""
    sizes: list[tuple[int, int]] = []
    for payload in (payload for shard in range(4) for payload in draw(60, shard)):
        case = Case(decode(payload), "cpu", samples=8)
        with np.errstate(all="ignore"):
            for p in case.judged:
                for name in case.carried(p):
                    size = p.due.deltas[name].size
                    sizes.append((size, size if case.stable(p.at, name) else 0))
    assert len(sizes) > 300
    assert sum(bool(stable) for _, stable in sizes) >= 0.9 * len(sizes)
    assert sum(stable for _, stable in sizes) >= 0.9 * sum(size for size, _ in sizes)


# --- the same everywhere ----------------------------------------------------------------------------------------------

DIGEST = """
import hashlib
from autograd_conformance.strategies.drawing import draw
print(hashlib.sha256(b"".join(draw(50, 7))).hexdigest())
"""


@pytest.mark.parametrize(
    "ci", [{"CI": "1"}, {"CI": "true", "GITHUB_ACTIONS": "true", "PYTHONHASHSEED": "7"}, {}], ids=str
)
def test_draws_are_the_same_in_every_process(ci: dict[str, str]) -> None:
    """The same seed draws the same, on a build server too, where Hypothesis changes its defaults."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "GITHUB_ACTIONS", "PYTHONHASHSEED")} | ci
    done = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(b"".join(draw(50, 7))).hexdigest()


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    """A second draw with the same seed is equal, and one with another seed is not."""
    first = draw(50, 7)
    assert draw(50, 8) != first
    assert draw(50, 7) == first


def test_a_profile_of_the_user_changes_nothing() -> None:
    """Settings that a user of Hypothesis registers do not change what is drawn."""
    first = draw(30, 7)
    previous = settings.default
    try:
        settings.register_profile("strange", max_examples=3, derandomize=True, deadline=1)
        settings.load_profile("strange")
        assert draw(30, 7) == first
    finally:
        settings.register_profile("previous", previous)
        settings.load_profile("previous")
