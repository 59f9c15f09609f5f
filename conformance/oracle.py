"""The reference model: a program on paper, in numpy float64. Knows no torch.

What autograd does, in the order of this file. A tensor on paper has a value, a flag and perhaps the *node* that
made it. An op records a node if one of its inputs requires grad and recording is on; the node keeps an *edge* for
each such input: to the node that made it, or to the leaf itself. A *pass* (backward or grad) starts with a seed at
each root, walks the nodes newest first, and hands each node's cotangents to its edges. What reaches a leaf is added
to its ``.grad``. Unless the graph is retained, every node that was executed is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from autograd_conformance.algebra import Plain
from autograd_conformance.ops import FLOATS, OPS, Op
from autograd_conformance.paper import Array, Due, Node, Noise, Paper, PassDue, Recipe, Storage
from autograd_conformance.program import (
    REWRAPS,
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
    SetRequiresGrad,
    Shape,
    Statement,
    Write,
    layout_view,
    reads,
)

EQUALS = ("amax", "amin")  # ops whose VJP looks for the elements that equal the result
SPLITS = ("unbind", "split", "chunk")  # ops with several outputs, all of them views


class InvalidProgram(ValueError):
    """A program that makes no sense: an unknown name, or shapes that do not fit."""


def predict(program: Program, noise: Noise | None = None, *, trusted: bool = False) -> Due:
    """Run a program on paper; of a trusted one, whose shapes are known to fit, only what its passes need.

    Raises:
        InvalidProgram: it refers to what does not exist, or shapes do not fit.

    """
    model = _Model(noise, trusted=trusted)
    for at, statement in enumerate(program):
        try:
            model.step(at, statement)
        except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
            raise InvalidProgram(f"statement {at}: {type(error).__name__}: {error}") from error
    return model.due


class _Model:
    """The state of a program on paper, statement by statement."""

    def __init__(self, noise: Noise | None, *, trusted: bool) -> None:
        self.trusted = trusted
        self.due = Due()
        self.live = self.due.tensors
        self.noise = noise
        self.wrote = False
        self.touched = False

    def step(self, at: int, statement: Statement) -> None:
        if self.wrote and any(_stale(self.live[name]) for name in reads(statement)):
            self.due.doubtful.add(at)
        match statement:
            case Apply():
                self._apply(at, statement)
            case Leaf():
                self._leaf(statement)
            case Rewrap():
                self._rewrap(statement)
            case Backward():
                self._backward(at, statement)
            case Grad():
                self._grad(at, statement)
            case SetRequiresGrad():
                self._set_requires_grad(at, statement)
            case DetachInPlace():
                self._detach_in_place(at, statement)
            case Write():
                self._write(at, statement)
            case SetData():
                self._set_data(at, statement)

    def _put(self, tensor: Paper) -> None:
        self.live[tensor.name] = tensor
        self.due.made[tensor.name] = (tensor.requires_grad, tensor.is_leaf)

    # --- making tensors -------------------------------------------------------------------------------------------

    def _leaf(self, s: Leaf) -> None:
        value = np.array(s.data.values, dtype=np.float64).reshape(s.data.shape)
        view = bool(layout_view(s))
        self._put(Paper(s.name, s.data.shape, s.data.dtype, value, s.requires_grad, Storage(), is_view=view))

    def _apply(self, at: int, s: Apply) -> None:
        op = OPS[s.op]
        inputs = tuple([self.live[name] for name in s.args])
        records = op.vjp is not None and not s.no_grad and True in [t.requires_grad for t in inputs]
        node = self._record(at, op, inputs, dict(s.params)) if records else None
        recipe = node or Recipe(op, inputs, dict(s.params), self.noise)
        shapes = op.shapes([t.shape for t in inputs], **recipe.params) if self.trusted else _shapes(recipe.work_out())
        if len(shapes) != len(s.outs):
            raise InvalidProgram(f"{s.op} gives {len(shapes)} outputs, not {len(s.outs)}")
        dtypes = op.dtypes([(t.dtype, t.shape) for t in inputs])
        if op.kind == "cast" and dtypes == inputs[0].dtype:
            raise InvalidProgram(f"{s.op} of what has that dtype already is no op")
        if isinstance(dtypes, str):
            dtypes = (dtypes,) * len(shapes)
        base = inputs[0] if op.kind == "view" or op.name in SPLITS else None
        outs = []
        for slot, name in enumerate(s.outs):
            maker = node if dtypes[slot] in FLOATS else None
            storage, counter = (Storage(), None) if base is None else (base.storage, base.own_counter)
            tracked, view = maker is not None, base is not None
            out = Paper(name, shapes[slot], dtypes[slot], None, tracked, storage, maker, slot, view, counter, recipe)
            self.live[name] = out
            self.due.made[name] = (tracked, not tracked)
            outs.append(out)
        if node is not None:
            node.outs = tuple(outs)

    def _record(self, at: int, op: Op, inputs: tuple[Paper, ...], params: dict[str, Any]) -> Node:
        edges = tuple([(t.node or t) if t.requires_grad else None for t in inputs])
        slots = tuple([t.slot for t in inputs])
        node = Node(op, inputs, params, self.noise, at=at, order=len(self.due.nodes), edges=edges, slots=slots)
        node.unsure = self.wrote and True in [_stale(t) for t in inputs]
        self.due.nodes[at] = node
        return node

    def _settle_values(self, storage: Storage) -> None:
        """Work out what lies in some memory or is made from it, before the numbers there change."""
        for t in self.live.values():
            if t.waits_for(storage):
                _ = t.value

    def _rewrap(self, s: Rewrap) -> None:
        _, shares, tracked = REWRAPS[s.how]
        t = self.live[s.arg]
        if s.how == "same":
            self.live[s.out] = t
            return
        storage = t.storage if shares else Storage()
        new = Paper(s.out, t.shape, t.dtype, t.known, tracked, storage, slot=t.slot, is_view=shares, alias=s.how)
        new.recipe = t.recipe
        if shares:
            new.own_counter = object() if s.how == "data" else t.own_counter
            storage.doubtful = storage.doubtful or s.how == "parameter"
        self._put(new)

    # --- changing tensors -----------------------------------------------------------------------------------------

    def _set_requires_grad(self, at: int, s: SetRequiresGrad) -> None:
        t = self.live[s.arg]
        if not t.is_leaf and (s.attribute or not s.value):
            self.due.refused[at] = "nonleaf"
        elif t.is_leaf:
            t.requires_grad = s.value

    def _detach_in_place(self, at: int, s: DetachInPlace) -> None:
        t = self.live[s.arg]
        if t.is_view and not t.alias:
            self.due.refused[at] = "view"
            return
        _ = t.value  # which is that of its slot
        t.node, t.slot, t.requires_grad, t.detached_at = None, 0, False, at
        self.touched = True

    def _write(self, at: int, s: Write) -> None:
        t = self.live[s.arg]
        self._settle_values(t.storage)
        t.storage.writes += ((at, t.counter),)
        self.wrote = self.touched = True
        for other in set(self.live.values()):  # one tensor may have two names
            if other.storage is t.storage:
                other.known = other.value * 2.0

    def _set_data(self, at: int, s: SetData) -> None:
        """New memory, which no version counter tells apart from the old."""
        t = self.live[s.arg]
        if t.requires_grad and s.value.dtype not in FLOATS:
            self.due.refused[at] = "dtype"
            return
        self._settle_values(t.storage)
        t.known = np.array(s.value.values, dtype=np.float64).reshape(s.value.shape)
        t.storage, t.own_counter = Storage(writes=((at, None),)), None
        self.touched = True

    # --- passes ---------------------------------------------------------------------------------------------------

    def _backward(self, at: int, s: Backward) -> None:
        targets = None if s.inputs is None else [self.live[name] for name in s.inputs]
        due = self.due.passes[at] = self._start(s, targets)
        if due.raises:
            return
        arrived = self._run(at, s, due, targets)
        due.deltas = {t.name: g for t, g in arrived if t.requires_grad}

    def _grad(self, at: int, s: Grad) -> None:
        targets = [self.live[name] for name in s.inputs]
        due = self.due.passes[at] = self._start(s, targets)
        if due.raises:
            return
        arrived = {id(t): g for t, g in self._run(at, s, due, targets)}
        for t in targets:
            if id(t) in arrived:
                due.deltas[t.name] = arrived[id(t)]
            elif s.materialize_grads:
                due.deltas[t.name] = np.zeros(t.shape)
            elif not s.allow_unused:
                due.raises, due.why = True, "unused"
        if due.raises:
            _confuse(due.executed)

    def _start(self, s: Pass, targets: Sequence[Paper] | None) -> PassDue:
        """What the arguments alone decide."""
        roots = [self.live[name] for name in s.roots]
        if targets and False in [t.requires_grad for t in targets]:
            return PassDue(raises=True, why="input")
        for root, seed in zip(roots, s.seeds, strict=True):
            if seed is None and root.requires_grad and prod(root.shape) != 1:
                return PassDue(raises=True, why="nonscalar")
        if False in [r.requires_grad for r in roots]:
            return PassDue(raises=True, why="untracked")
        return PassDue()

    def _run(self, at: int, s: Pass, due: PassDue, targets: Sequence[Paper] | None) -> list[tuple[Paper, Array]]:
        roots = [self.live[name] for name in s.roots]
        due.executed = executed = executed_nodes(roots, targets)
        due.again = [node for node in executed if node.freed]
        due.unsure = True in [node.unsure for node in executed]
        if self.touched:
            due.unsure = due.unsure or any(_stale(t) for t in (*roots, *(targets or ())))
            _look_for_writes(due)
        perhaps = _perhaps_executed(s, targets, executed) if targets else []
        due.unsure = due.unsure or any(node.freed or node.unsure or _touched_since(node) for node in perhaps)
        arrived = self._propagate(roots, s.seeds, executed, targets)
        retain = s.create_graph if s.retain_graph is None else s.retain_graph
        if not retain:
            for node in executed:
                node.freed, node.freed_by = True, at
        if due.depends or due.unsure:
            _confuse(executed)
        _confuse(perhaps)
        return arrived

    def _propagate(
        self,
        roots: Sequence[Paper],
        seeds: Sequence[Constant | None],
        executed: Sequence[Node],
        targets: Sequence[Paper] | None,
    ) -> list[tuple[Paper, Array]]:
        """Cotangents, newest node first. Returns what arrived at the leaves, or at the targets."""
        inbox: dict[tuple[int, int], Array] = {}
        for root, seed in zip(roots, seeds, strict=True):
            g = np.ones(root.shape) if seed is None else np.array(seed.values, dtype=np.float64).reshape(seed.shape)
            if g.shape != root.shape:
                raise InvalidProgram(f"seed of shape {g.shape} for root of shape {root.shape}")
            _send(inbox, root.node or root, root.slot, g)
        leaves: dict[int, Paper] = {id(r): r for r in roots if r.node is None}
        for node in executed:
            for edge, slot, part in zip(node.edges, node.slots, pull(node, inbox, self.noise), strict=True):
                if edge is not None:
                    _send(inbox, edge, slot, part)
                    if type(edge) is Paper:
                        leaves[id(edge)] = edge
        wanted = leaves.values() if targets is None else targets
        reached = [(t, inbox.get((id(t.node or t), t.slot))) for t in wanted]
        return [(t, g) for t, g in reached if g is not None]


def _send(inbox: dict[tuple[int, int], Array], edge: Node | Paper, slot: int, g: Array) -> None:
    key = (id(edge), slot)
    known = inbox.get(key)
    inbox[key] = g if known is None else known + g


def pull(node: Node, inbox: dict[tuple[int, int], Array], noise: Noise | None = None) -> Sequence[Array]:
    """Cotangents of a node's inputs from those of its outputs; an output that none reached counts as zero."""
    vjp, result, values = node.op.vjp, node.work_out(), node.values or ()
    assert vjp is not None
    full = []
    for slot, out in enumerate(node.outs):
        g = inbox.get((id(node), slot))
        full.append(np.zeros(out.shape) if g is None else g)
    if noise is not None:
        full = [noise(g, out.dtype) for g, out in zip(full, node.outs, strict=True)]
        values = tuple(noise(v, t.dtype) for v, t in zip(values, node.inputs, strict=True))
        result = node.op.value(*values, **node.params)
        if not isinstance(result, tuple) and node.op.name not in EQUALS:  # 1 - y, say, where y is nearly 1
            result = noise(result, node.outs[0].dtype)
    parts = vjp(Plain, tuple(full) if isinstance(result, tuple) else full[0], result, *values, **node.params)
    parts = parts if isinstance(parts, tuple) else (parts,)
    if noise is not None and node.op.kind in ("reduction", "several"):  # a mean inside is rounded too
        size = max(float(np.max(np.abs(v), initial=0.0)) for v in (*full, *values))
        parts = tuple(noise.within(part, size, t.dtype) for part, t in zip(parts, node.inputs, strict=True))
    return parts


def _shapes(result: Any) -> tuple[Shape, ...]:
    return tuple([np.shape(part) for part in (result if isinstance(result, tuple) else (result,))])


def executed_nodes(roots: Sequence[Paper], targets: Sequence[Paper] | None = None) -> list[Node]:
    """Nodes that a pass runs, newest first: those on a path from a root to a leaf, or to a target if there are any."""
    reached: set[Node] = set()
    pending = [r.node for r in roots if r.node is not None]
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [edge for edge in node.edges if type(edge) is Node]
    nodes = sorted(reached, key=attrgetter("order"), reverse=True)
    if targets is None:
        return nodes
    wanted: set[Node | Paper | None] = {t.node or t for t in targets}
    executed = []
    for node in reversed(nodes):  # oldest first: an edge leads to an older node
        if not wanted.isdisjoint(node.edges):
            wanted.add(node)
            executed.append(node)
    return executed[::-1]


def _perhaps_executed(s: Pass, targets: Sequence[Paper], executed: Sequence[Node]) -> list[Node]:
    """Nodes of non-leaves in ``backward(inputs=...)``: torch runs them too, and nobody promises that it does or not."""
    if not isinstance(s, Backward):
        return []
    return [t.node for t in targets if t.node is not None and t.node not in executed]


def _stale(t: Paper) -> bool:
    """A view whose base was written behind its back: what its history is now, nobody promises."""
    return t.is_view and t.node is not None and any(counter is t.counter for _, counter in t.storage.writes)


def _confuse(executed: Sequence[Node]) -> None:
    """Of these nodes nobody knows whether they were freed, by a pass that may have raised half-way, say."""
    for node in executed:
        node.unsure = True


def _touched_since(node: Node) -> bool:
    """Was anything written, or detached in place, that a node may have saved?"""
    tensors = node.inputs + node.outs
    return any(t.detached_at > node.at or any(at > node.at for at, _ in t.storage.writes) for t in tensors)


def _look_for_writes(due: PassDue) -> None:
    """Note the executed nodes whose inputs or outputs were written, or detached in place, after they were recorded."""
    for node in due.executed:
        tensors = node.inputs + node.outs
        for t in tensors:
            if t.detached_at > node.at:
                due.written.setdefault(node.at, set()).add(t.detached_at)
            for at, counter in t.storage.writes:
                if at < node.at:
                    continue
                if counter is None or t.storage.doubtful:
                    due.unsure = True
                elif counter is t.counter:
                    due.written.setdefault(node.at, set()).add(at)
                    # which of several aliases the node saved, with which counter, is the node's own business
                    due.unsure = due.unsure or any(o.storage is t.storage and o.counter is not counter for o in tensors)
                else:
                    due.spoiled = True
