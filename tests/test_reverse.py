"""Backward on paper, step by step and to any order, against the oracle and against differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from autograd_conformance.algebra import Differentiable, Plain, Traced, gradient
from autograd_conformance.oracle import predict
from autograd_conformance.paper import Array, Noise, Paper
from autograd_conformance.program import Apply, Backward, Constant, Leaf, Program
from autograd_conformance.reverse import cotangents, traced
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.scenes import PAYLOAD, decode_scene

SEED, COUNT, STEP = 20261201, 150, 1e-5
KINKED = ("abs", "relu", "leaky_relu", "clamp", "maximum", "minimum", "amax", "amin", "max_dim", "min_dim", "sort")


def graphs() -> list[Program]:
    """Graphs of scenes."""
    return [decode_scene(payload).graph for payload in draw(COUNT, SEED, PAYLOAD)]


GRAPHS = graphs()


def roots(graph: Program) -> Iterator[Paper]:
    """Tensors that a recorded op made, and that have elements."""
    made = {id(t): t for t in predict(graph).tensors.values()}.values()
    return (t for t in made if t.node is not None and np.size(t.value))


def weights(shape: tuple[int, ...], start: int = 0) -> Array:
    """Numbers to weight elements by, no two alike."""
    size = int(np.prod(shape))
    return np.array([0.5 + ((start + 7 * i) % 11) / 8 for i in range(size)]).reshape(shape)


def moved(graph: Program, name: str, by: Array) -> Program:
    """The graph at another value of one leaf."""

    def move(s: object) -> object:
        if not isinstance(s, Leaf) or s.name != name:
            return s
        values = np.array(s.data.values) + by.reshape(-1)
        plain = Constant(s.data.shape, s.data.dtype, tuple(values.tolist()))
        return dataclasses.replace(s, data=plain, layout="contiguous")

    return Program(tuple(map(move, graph)))  # type: ignore[arg-type]


@pytest.mark.parametrize("block", range(0, COUNT, 30))
def test_cotangents_agree_with_the_oracle(block: int) -> None:
    """What arrives at leaves is what the oracle says that a pass adds to their .grad."""
    compared = 0
    with np.errstate(all="ignore"):
        for graph in GRAPHS[block : block + 30]:
            for root in roots(graph):
                v = weights(root.shape)
                seed = Constant(root.shape, root.dtype, tuple(v.ravel().tolist()))
                due = predict(Program((*graph, Backward((root.name,), (seed,))))).passes[len(graph)].deltas
                found = cotangents([(root, v)])
                leaves = {name for name in found if predict(graph).tensors[name].is_leaf}
                assert set(due) == leaves
                for name, g in due.items():
                    np.testing.assert_allclose(found[name], g, rtol=1e-12, atol=1e-12)
                    compared += 1
    assert compared > 40


@pytest.mark.parametrize("block", range(0, COUNT, 30))
def test_traced_agrees_with_cotangents(block: int) -> None:
    """Gradients that can be differentiated again have the numbers of those that cannot, at every tensor on the way."""
    compared = 0
    with np.errstate(all="ignore"):
        for graph in GRAPHS[block : block + 30]:
            live = traced(graph)
            for root in roots(graph):
                v = weights(root.shape)
                found = cotangents([(root, v)])
                names = list(found)
                for algebra, seed in ((Plain, v), (Differentiable, Traced(v))):
                    again = gradient(live[root.name], seed, [live[n] for n in names], algebra)
                    for name, g in zip(names, again, strict=True):
                        number = g.value if isinstance(g, Traced) else g
                        np.testing.assert_allclose(number, found[name], rtol=1e-9, atol=1e-9)
                        compared += 1
    assert compared > 100


def second_orders(graph: Program) -> Iterator[tuple[Array, Array]]:
    """Second derivatives, differentiated on paper and as central differences of first ones."""
    live, due = traced(graph), predict(graph)
    root = next(iter(sorted(roots(graph), key=lambda t: -t.node.order if t.node else 0)), None)
    if root is None:
        return
    v = weights(root.shape)
    reached = cotangents([(root, v)])
    leaves = [s.name for s in graph if isinstance(s, Leaf) and s.name in reached and due.tensors[s.name].is_leaf]
    for x in leaves:
        for other in leaves:
            u = weights(due.tensors[other].shape, 3)
            (first,) = gradient(live[root.name], Traced(v), [live[x]], Differentiable)
            w = weights(first.shape, 5)
            (exact,) = gradient(first, w, [live[other]], Plain)
            ends = []
            for sign in (1.0, -1.0):
                there = predict(moved(graph, other, sign * STEP * u)).tensors[root.name]
                ends.append(float(np.sum(cotangents([(there, v)])[x] * w)))
            yield np.sum(exact * u), np.asarray((ends[0] - ends[1]) / (2 * STEP))


def test_second_order_agrees_with_differences() -> None:
    """Second derivatives, mixed ones too, are those of central differences, ops with several outputs included."""
    compared = several = 0
    with np.errstate(all="ignore"):
        for graph in GRAPHS:
            ops = [s.op for s in graph if isinstance(s, Apply)]
            if any(op in KINKED for op in ops):
                continue
            for exact, difference in second_orders(graph):
                np.testing.assert_allclose(exact, difference, rtol=2e-4, atol=2e-4)
                compared += bool(exact)
                several += any(op in ("unbind", "split", "chunk", "var_mean") for op in ops)
    assert compared > 30
    assert several > 5


def test_third_order() -> None:
    """The derivative of a derivative of a derivative: x ** 3 has 6."""
    graph = Program((Leaf("a", Constant((), "float64", (2.0,)), True), Apply(("b",), "cube", ("a",))))
    live = traced(graph)
    value = live["b"]
    for due in (12.0, 12.0, 6.0):
        (value,) = gradient(value, Traced(np.ones(())), [live["a"]], Differentiable)
        assert value.value == due


def test_rounding_moves_little() -> None:
    """Random rounding moves a second derivative by as much as the dtype is coarse, and by something."""
    for dtype, most in (("float64", 1e-13), ("float32", 1e-4)):
        graph = Program((Leaf("a", Constant((), dtype, (1.5,)), True), Apply(("b",), "cube", ("a",))))
        live = traced(graph, Noise(1))
        (first,) = gradient(live["b"], Traced(np.ones(())), [live["a"]], Differentiable)
        (second,) = gradient(first, np.ones(()), [live["a"]], Plain)
        assert 0 < abs(float(second) - 9.0) < most


def test_no_recording_cuts_what_is_traced() -> None:
    """Derivatives stop where recording was off."""
    leaf = Leaf("a", Constant((), "float64", (2.0,)), True)
    graph = Program((leaf, Apply(("b",), "square", ("a",), no_grad=True), Apply(("c",), "mul", ("a", "b"))))
    live = traced(graph)
    (first,) = gradient(live["c"], np.ones(()), [live["a"]], Plain)
    assert first == 4.0
