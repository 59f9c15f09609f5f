"""The graph of a program as plain data to draw: boxes for tensors and passes, edges for what is made from what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from autograd_conformance.ops import OPS
from autograd_conformance.oracle import InvalidProgram, predict
from autograd_conformance.paper import Paper
from autograd_conformance.program import (
    Apply,
    DetachInPlace,
    Leaf,
    Pass,
    Program,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
)
from autograd_conformance.scene import Scene

CUTS = ("detach", "data", "copy", "tensor", "new_tensor", "reattach", "tensor_tracked")
_HOOK = re.compile(r"\b([a-z]\w*)\.register_(?:\w+_)?hook\(")


@dataclass(frozen=True, slots=True)
class Box:
    """One thing in the drawing.

    Attributes:
        key: unique in the picture.
        kind: ``leaf``, ``op``, ``view``, ``detach`` or ``pass``.
        title: the name of the tensor and how it came about.
        lines: dtype and shape, flags, and what was done to it later.
        tracked: does it require grad?
        matters: does it lie on the path from the pass that was judged to what was looked at?

    """

    key: str
    kind: str
    title: str
    lines: tuple[str, ...] = ()
    tracked: bool = False
    matters: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """From what is read to what is made; ``cut`` where no gradient comes back."""

    source: str
    target: str
    cut: bool = False
    matters: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes in columns, from leaves to passes, and the edges between them."""

    columns: tuple[tuple[Box, ...], ...]
    edges: tuple[Edge, ...]


def picture(work: Program | Scene, at: int, probe: str) -> Picture | None:
    """The graph of a program or scene; None if there is nothing to draw.

    Args:
        work: what is drawn.
        at: index of the statement that was judged.
        probe: what was looked at after it.

    """
    program = work.graph if isinstance(work, Scene) else work
    sketch = _Sketch(program)
    if not sketch.boxes:
        return None
    if isinstance(work, Scene):
        sketch.hooks(work.lines)
        sketch.mark([name for name in sketch.boxes if _named(name, probe)], [])
    else:
        judged = program.statements[at] if at < len(program) else None
        looked = [name for name in sketch.boxes if _named(name, probe)]
        sketch.mark(looked, list(judged.roots) if isinstance(judged, Pass) else [], at)
    try:
        return sketch.picture()
    except nx.NetworkXUnfeasible:  # a name that is made twice, in a program from outside
        return None


class _Sketch:
    """A picture in the making."""

    def __init__(self, program: Program) -> None:
        self.boxes: dict[str, Box] = {}
        self.edges: dict[tuple[str, str], Edge] = {}
        self.passes: dict[tuple[str, ...], list[tuple[int, Pass]]] = {}
        self.states = _states(program)
        for at, statement in enumerate(program):
            self._add(at, statement)
        for roots, calls in self.passes.items():
            self._add_pass(roots, calls)

    def _add(self, at: int, s: Statement) -> None:
        match s:
            case Leaf(name=name):
                self._put(name, "leaf", f"{name}  leaf")
            case Apply():
                self._apply(s)
            case Rewrap(out=out, arg=arg, how=how):
                self._put(out, "detach" if how in CUTS else "op", f"{out}  {how}")
                self._link(arg, out, cut=how in CUTS)
            case SetGrad() | SetData() | SetRequiresGrad() | Write() | DetachInPlace():
                self._remark(s.arg, f"{_deed(s)} (line {at})")
            case _:
                self.passes.setdefault(s.roots, []).append((at, s))

    def _apply(self, s: Apply) -> None:
        kind = "view" if s.op in OPS and OPS[s.op].kind == "view" else "op"
        self._put(s.out, kind, f"{', '.join(s.outs)}  {s.op}")
        for name in s.outs[1:]:
            self._put(name, kind, f"{name}  of {s.op}")
            self._link(s.out, name)
        for arg in s.args:
            self._link(arg, s.out, cut=s.no_grad)
        if s.no_grad:
            self._remark(s.out, "under no_grad")

    def _add_pass(self, roots: tuple[str, ...], calls: Sequence[tuple[int, Pass]]) -> None:
        key = f"pass of {', '.join(roots)}"
        names = list(dict.fromkeys("backward" if type(s).__name__ == "Backward" else "autograd.grad" for _, s in calls))
        times = f" x {len(calls)}" if len(calls) > 1 else ""
        where = ", ".join(str(at) for at, _ in calls)
        lines = [f"line {where}" if len(calls) == 1 else f"lines {where}", *_asked(calls)]
        self.boxes[key] = Box(key, "pass", f"{' and '.join(names)}{times}", tuple(lines))
        for root in roots:
            self._link(root, key)

    def _put(self, name: str, kind: str, title: str) -> None:
        state = self.states.get(name)
        tracked = state is not None and state.requires_grad
        lines = () if state is None else (f"{state.dtype} {list(state.shape)}", _flag(state))
        self.boxes[name] = Box(name, kind, title, lines, tracked)

    def _link(self, source: str, target: str, *, cut: bool = False) -> None:
        if source in self.boxes and source != target:
            self.edges[source, target] = Edge(source, target, cut)

    def _remark(self, name: str, remark: str) -> None:
        if name in self.boxes:
            box = self.boxes[name]
            self.boxes[name] = replace(box, lines=(*box.lines, remark))

    def hooks(self, lines: Sequence[str]) -> None:
        """Note on each tensor which lines of the script put a hook on it."""
        for at, line in enumerate(lines):
            for name in _HOOK.findall(line):
                self._remark(name, f"hook (line {at})")

    def mark(self, looked: Sequence[str], roots: Sequence[str], at: int = -1) -> None:
        """Mark what lies between the roots of the judged pass and what was looked at."""
        graph = self._graph()
        judged = [
            f"pass of {', '.join(group)}" for group, calls in self.passes.items() if at in [call for call, _ in calls]
        ]
        below = {n for name in looked for n in (name, *nx.descendants(graph, name))}
        above = {n for name in (*roots, *judged) if name in graph for n in (name, *nx.ancestors(graph, name))}
        path = (below & above if roots else set()) | set(looked)
        self.boxes = {key: replace(box, matters=key in path) for key, box in self.boxes.items()}
        self.edges = {k: replace(edge, matters=path.issuperset(k) and bool(roots)) for k, edge in self.edges.items()}

    def _graph(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from(self.boxes)
        graph.add_edges_from(self.edges)
        return graph

    def picture(self) -> Picture:
        """Columns by the longest way from a leaf, and in each the order with few crossings."""
        graph = self._graph()
        columns = [list(column) for column in nx.topological_generations(graph)]
        _untangle(graph, columns)
        return Picture(tuple(tuple(self.boxes[key] for key in c) for c in columns), tuple(self.edges.values()))


def _named(name: str, source: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _states(program: Program) -> dict[str, Paper]:
    try:
        return predict(program).tensors
    except (InvalidProgram, ArithmeticError, LookupError, TypeError, ValueError):
        return {}  # a program from outside that makes no sense is drawn without shapes


def _flag(state: Paper) -> str:
    return "requires grad" if state.requires_grad else "no grad"


def _deed(s: Statement) -> str:
    match s:
        case SetGrad(how=how):
            return {"none": ".grad = None", "zero": ".grad zeroed"}.get(how, ".grad = ...")
        case SetData():
            return ".data = ..."
        case SetRequiresGrad(value=value):
            return f"requires_grad = {value}"
        case Write():
            return "written in place"
        case _:
            return "detach_()"


def _asked(calls: Sequence[tuple[int, Pass]]) -> Iterator[str]:
    """The arguments that some of the calls have."""
    for name, shown in (("retain_graph", "retain_graph"), ("create_graph", "create_graph")):
        if any(getattr(s, name) for _, s in calls):
            yield shown
    inputs = dict.fromkeys(name for _, s in calls for name in s.inputs or ())
    if inputs:
        yield f"inputs {', '.join(inputs)}"


def _untangle(graph: nx.DiGraph, columns: list[list[str]]) -> None:
    """Order each column by where the neighbours of its boxes stand, forth and back."""
    for before, after in [*((i - 1, i) for i in range(1, len(columns))), *((i, i - 1) for i in range(1, len(columns)))]:
        place = {key: index / len(columns[before]) for index, key in enumerate(columns[before])}
        ranks = {key: _middle(graph, key, place, index) for index, key in enumerate(columns[after])}
        columns[after].sort(key=ranks.__getitem__)


def _middle(graph: nx.DiGraph, key: str, place: dict[str, float], index: int) -> float:
    near = [place[n] for n in (*graph.predecessors(key), *graph.successors(key)) if n in place]
    return sum(near) / len(near) if near else index / (graph.number_of_nodes() or 1)
