"""What was generated, counted by ourselves: in how many programs does each thing occur, on paths that carry gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np

from autograd_conformance.paper import Due, Node
from autograd_conformance.program import (
    Apply,
    Backward,
    DetachInPlace,
    Grad,
    Leaf,
    Pass,
    Program,
    Rewrap,
    SetGrad,
    Write,
)

# word -> (sentence, least share of programs); a test holds the floors
FLOORS: dict[str, tuple[str, float]] = {
    "0-dim": ("a 0-dim tensor", 0.15),
    "size 1": ("a dimension of size 1", 0.30),
    "empty": ("a tensor without elements", 0.03),
    "float32": ("a float32 tensor", 0.15),
    "mixed dtypes": ("tensors of both float dtypes", 0.10),
    "broadcast": ("an operand that is broadcast", 0.20),
    "reused": ("a tensor that is used twice or more", 0.40),
    "used twice by one op": ("one tensor as both operands of an op", 0.05),
    "diamond": ("two paths from a root to one tensor", 0.20),
    "mixed requires_grad": ("leaves that require grad and leaves that do not", 0.50),
    "non-contiguous leaf": ("a permuted, strided or expanded leaf", 0.15),
    "permuted leaf": ("a permuted leaf", 0.05),
    "expanded leaf": ("an expanded leaf", 0.05),
    "view": ("a view", 0.30),
    "several outputs": ("an op with several outputs", 0.15),
    "detach": ("a detach in some form", 0.10),
    "two roots": ("a pass from two roots", 0.10),
    "backward twice": ("two backward calls or more", 0.40),
    "same nodes again": ("two passes over one node", 0.30),
    "inputs=": ("backward with inputs=", 0.10),
    "autograd.grad": ("autograd.grad", 0.20),
    "reset": (".grad set, zeroed or assigned", 0.15),
    "create_graph": ("create_graph=True", 0.03),
    "deep": ("a path of five nodes or more", 0.10),
}

# The same for the graphs of scenes, which are smaller and have no passes of their own.
SCENE_FLOORS: dict[str, float] = {
    "0-dim": 0.15,
    "size 1": 0.25,
    "empty": 0.03,
    "float32": 0.10,
    "mixed dtypes": 0.05,
    "broadcast": 0.10,
    "reused": 0.30,
    "used twice by one op": 0.05,
    "diamond": 0.10,
    "mixed requires_grad": 0.30,
    "non-contiguous leaf": 0.15,
    "permuted leaf": 0.05,
    "expanded leaf": 0.05,
    "view": 0.25,
    "several outputs": 0.10,
    "detach": 0.05,
}


def words(program: Program, due: Due) -> set[str]:
    """What occurs in a program. Tensors count where a gradient passes or arrives that is not all zero."""
    found = set(_arguments(program))
    executed: dict[int, Node] = {}
    for p in due.passes.values():
        if not p.raises and any(np.any(delta) for delta in p.deltas.values()):
            found.update(_shape_of_paths(p.executed))
            if any(node.at in executed for node in p.executed):
                found.add("same nodes again")
            executed.update({node.at: node for node in p.executed})
    leaves = [s for s in program if isinstance(s, Leaf)]
    if len({s.requires_grad for s in leaves}) > 1:
        found.add("mixed requires_grad")
    touched = {t.name for node in executed.values() for t in (*node.inputs, *node.outs)}
    for s in leaves:
        if s.name in touched and s.requires_grad and s.layout in ("permuted", "strided", "expanded"):
            found.update(("non-contiguous leaf", f"{s.layout} leaf"))
    empty_runs = any(not prod(out.shape) for p in due.passes.values() for node in p.executed for out in node.outs)
    if empty_runs:
        found.add("empty")
    found.update(f"op {node.op.name}" for node in executed.values())
    return found


def graph_words(program: Program, due: Due) -> set[str]:
    """What occurs in a graph without passes: in all that is recorded, for the lines of a claim may differentiate any of it."""
    found = set(_arguments(program))
    nodes = sorted(due.nodes.values(), key=lambda node: -node.order)
    found.update(_shape_of_paths(nodes))
    leaves = [s for s in program if isinstance(s, Leaf)]
    if len({s.requires_grad for s in leaves}) > 1:
        found.add("mixed requires_grad")
    for s in leaves:
        if s.requires_grad and s.layout in ("permuted", "strided", "expanded"):
            found.update(("non-contiguous leaf", f"{s.layout} leaf"))
    if any(not prod(out.shape) for node in nodes for out in node.outs):
        found.add("empty")
    found.update(f"op {node.op.name}" for node in nodes)
    return found


def _of_pass(s: Pass) -> Iterator[str]:
    if len(s.roots) > 1:
        yield "two roots"
    if s.create_graph:
        yield "create_graph"
    if isinstance(s, Grad):
        yield "autograd.grad"
    elif s.inputs is not None:
        yield "inputs="


def _arguments(program: Program) -> Iterator[str]:
    if sum(isinstance(s, Backward) for s in program) >= 2:
        yield "backward twice"
    for s in program:
        match s:
            case Backward() | Grad():
                yield from _of_pass(s)
            case SetGrad():
                yield "reset"
            case Rewrap() | DetachInPlace():
                yield "detach"
            case Write():
                yield "write through an alias"
            case Apply(no_grad=True):
                yield "no_grad"


def _shape_of_paths(executed: list[Node]) -> Iterator[str]:
    """Words for the nodes of one pass, newest first."""
    ways: dict[int, int] = {}
    depth: dict[int, int] = {}
    for node in executed:
        here = depth.get(id(node), 1)
        if here >= 5:
            yield "deep"
        yield from _node_words(node)
        edges = [id(e) for e in node.edges if e is not None]
        if len(set(edges)) < len(edges):
            yield "used twice by one op"
            yield "reused"
        for edge in set(edges):
            ways[edge] = ways.get(edge, 0) + 1
            depth[edge] = max(depth.get(edge, 1), here + 1)
    if any(count > 1 for count in ways.values()):
        yield "reused"
        yield "diamond"


def _node_words(node: Node) -> Iterator[str]:
    tensors = (*node.inputs, *node.outs)
    shapes = [t.shape for t in tensors]
    if () in shapes:
        yield "0-dim"
    if any(1 in shape for shape in shapes):
        yield "size 1"
    dtypes = {t.dtype for t in tensors}
    if "float32" in dtypes:
        yield "float32"
        if "float64" in dtypes:
            yield "mixed dtypes"
    if node.op.kind == "view":
        yield "view"
    if node.op.kind == "several":
        yield "several outputs"
    if node.op.kind == "binary" and any(t.shape != node.outs[0].shape for t in node.inputs):
        yield "broadcast"


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counters added up, by word."""
    added: dict[str, int] = {}
    for count in counts:
        for word, n in count.items():
            added[word] = added.get(word, 0) + n
    return dict(sorted(added.items()))
