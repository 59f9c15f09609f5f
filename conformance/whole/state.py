"""What autograd keeps track of, on paper: memory, tensors that look at it, nodes, and what has become of them. No torch.

*Memory* holds a value that is a function of the leaves (:class:`Traced`), in the shape of its base. A *tensor* looks at
some positions of one memory. An in-place write exchanges the value of the memory for one that is a function of the old
value and of what was written; so a view sees what is written to its base, and the other way round, and the gradient
finds its way through both. A *node* is a statement that was recorded: it remembers which memories it touched, in which
version, so that a pass can tell whether a saved tensor was written since, and whether an earlier pass freed it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from autograd_conformance.algebra import Traced, replaced, taken
from autograd_conformance.program import Shape

Array = np.ndarray
UNKNOWN = object()
"""A gradient of which nobody can say what it is: a pass that wrote to it may have raised half-way."""


@dataclass(eq=False, slots=True)
class Memory:
    """Storage that tensors share: its value in the shape of the base, and the version counter."""

    value: Traced
    version: int = 0
    split: bool = False  # it has views that a write leaves in a state that nobody promises
    used: bool = False  # an op has read it
    hidden: bool = False  # its base is itself a view of a tensor that has no name
    owner: Tensor | None = None  # the leaf that gets the gradient of what is here, even if its name is gone
    hooked: bool = False  # some tensor here has hooks or retains its gradient: which value they belong to matters


@dataclass(eq=False, slots=True)
class Hook:
    """A hook that notes what it gets in a list of the script; a tensor hook may scale the gradient.

    Attributes:
        log: the list.
        factor: what a tensor hook multiplies the gradient by.
        kind: a hook of a tensor, one that runs after the gradient was accumulated, or one of a node.
        home: where the model keeps it, and takes it away from when it is removed.
        calls: how often it has run.
        unsure: nobody can say how often.

    """

    log: str
    factor: float | None = None
    kind: Literal["tensor", "after", "node"] = "tensor"
    home: list[Hook] = field(default_factory=list)
    calls: int = 0
    unsure: bool = False

    @property
    def after(self) -> bool:
        """Does it run after the gradient was accumulated?"""
        return self.kind == "after"


@dataclass(eq=False, slots=True)
class Tensor:
    """A tensor on paper: where it looks, and its flags.

    Attributes:
        positions: flat positions in the memory's base, in the shape of the tensor.
        base: the tensor whose memory it views, or None.
        cut: it looks at memory whose history it does not share: what detach() returns.
        grad: None, numbers, or UNKNOWN.
        sources: of a leaf, what its value has been: gradients of all of them are its own.

    """

    name: str
    key: int
    memory: Memory
    positions: Array
    dtype: str
    requires_grad: bool
    leaf: bool
    base: Tensor | None = None
    cut: bool = False
    writable: bool = True
    retains: bool = False
    grad: Any = None
    hooks: list[Hook] = field(default_factory=list)
    sources: list[Traced] = field(default_factory=list)
    reading: Traced | None = None
    read_at: int = -1
    viewed: bool = False
    inference: bool = False  # made in inference mode
    sibling: bool = False  # one of several outputs of an op: what hooks of an output that is not used do, is open

    @property
    def shape(self) -> Shape:
        """Its shape."""
        shape: Shape = self.positions.shape
        return shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.positions.shape)

    @property
    def values(self) -> Array:
        """Its numbers now."""
        flat = self.memory.value.value.reshape(-1)
        return np.asarray(flat[self.positions])


@dataclass(eq=False, slots=True)
class Node:
    """A recorded statement.

    Attributes:
        at: its index in the script.
        first, last: the orders of the traced values that it made.
        saw: memories that it touched, with their version when it was done.
        packs: those of them that torch saves for its backward.
        vague: nothing is known of what it saves, so running it twice, or after a write, may raise or not.
        derived: it is the backward of other nodes, recorded by create_graph.
        outs: of a custom Function, its outputs; None stands for one whose gradient is never None.
        notes: of a custom Function, the list of the script in which backward notes what it gets, and its calls so far.

    """

    at: int
    first: int
    last: int
    saw: list[tuple[Memory, int]]
    packs: list[Memory]
    vague: bool = False
    derived: bool = False
    freed: bool = False
    unsure: bool = False
    outs: list[Traced | None] = field(default_factory=list)
    notes: Hook | None = None


class State:
    """All tensors that have a name, all nodes, and the grad mode."""

    def __init__(self) -> None:
        self.live: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.owners: dict[int, Tensor] = {}
        self.watched: dict[int, Tensor] = {}
        self.hooked: dict[int, list[Hook]] = {}
        self.kept: list[Traced] = []
        self.recording = True

    # --- tensors --------------------------------------------------------------------------------------------------

    def leaf(self, name: str, key: int, values: Array, dtype: str, *, requires_grad: bool) -> Tensor:
        """A tensor that the user makes."""
        memory = Memory(Traced(values))
        t = Tensor(name, key, memory, _all(values.shape), dtype, requires_grad, leaf=True)
        self.own(t)
        self.live[name] = t
        return t

    def own(self, t: Tensor) -> None:
        """Gradients that reach what the memory holds now belong to this leaf."""
        if t.requires_grad and t.leaf and not t.cut:
            t.memory.owner = t
            t.sources.append(t.memory.value)
            self.owners[id(t.memory.value)] = t

    def result(self, name: str, key: int, value: Traced, dtype: str, *, tracked: bool) -> Tensor:
        """What an op gives, in memory of its own."""
        memory = Memory(value if tracked else Traced(value.value))
        t = Tensor(name, key, memory, _all(memory.value.shape), dtype, tracked, leaf=not tracked)
        self.live[name] = t
        return t

    def view(self, name: str, key: int, source: Tensor, positions: Array, *, writable: bool = True) -> Tensor:
        """A tensor that looks at part of the memory of another."""
        base = source.base or source
        t = Tensor(name, key, source.memory, positions, source.dtype, source.requires_grad, not source.requires_grad)
        t.base, t.cut, t.writable = base, source.cut, writable and source.writable
        self.live[name] = t
        return t

    def alias(self, name: str, key: int, source: Tensor) -> Tensor:
        """What ``detach()`` returns: the same memory without the history."""
        t = Tensor(name, key, source.memory, source.positions, source.dtype, requires_grad=False, leaf=True)
        t.base, t.cut, t.writable = source.base or source, True, source.writable
        self.live[name] = t
        return t

    def read(self, t: Tensor) -> Traced:
        """The tensor as an operand: a function of the leaves, or a constant."""
        if not t.requires_grad:
            return Traced(t.values)
        if t.base is None and not t.cut:
            return t.memory.value
        if t.reading is None or t.read_at != t.memory.version:
            t.reading = self._taken(t)
            t.read_at = t.memory.version
        return t.reading

    def _taken(self, t: Tensor) -> Traced:
        if t.cut:  # a leaf of its own, made from a detached tensor
            made = Traced(t.values)
            t.sources.append(made)
            self.owners[id(made)] = t
            return made
        return taken(t.memory.value, t.positions)

    def targets(self, t: Tensor) -> list[Traced]:
        """The values whose gradient is that of the tensor."""
        reading = self.read(t)
        return [*t.sources] if t.leaf else [reading]

    def aliases(self, memory: Memory) -> list[Tensor]:
        """All tensors with a name that look at a memory."""
        return [t for t in self.live.values() if t.memory is memory]

    def tracked(self) -> list[Tensor]:
        """All tensors with a name that require grad."""
        return [t for t in self.live.values() if t.requires_grad]

    # --- writes ---------------------------------------------------------------------------------------------------

    def write(self, t: Tensor, value: Traced, *, tracked: bool, part: bool = False) -> None:
        """Put a value where ``t`` looks.

        Args:
            t: the tensor, or what of it is written.
            value: what is written.
            tracked: the write becomes part of the history.
            part: what was there before stays part of the history, even if nothing of it is left.

        """
        memory = t.memory
        everything = (
            not part
            and t.positions.shape == memory.value.shape
            and np.array_equal(t.positions, _all(t.positions.shape))
        )
        whole = value if everything else replaced(memory.value, t.positions, value)
        memory.version += 1
        if tracked:
            memory.value = whole
            for other in self.aliases(memory):
                if not other.cut:
                    other.requires_grad, other.leaf = True, False
        else:
            memory.value = Traced(whole.value)
            if memory.owner is not None:
                self.own(memory.owner)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def record(self, at: int, first: int, last: int, touched: Sequence[Memory], packs: Sequence[Memory]) -> Node:
        """Note a statement that was recorded."""
        node = Node(at, first, last, [(memory, memory.version) for memory in dict.fromkeys(touched)], list(packs))
        self.nodes.append(node)
        return node

    def node_of(self, value: Traced) -> Node | None:
        """The statement that made a value."""
        at = bisect_right(self.nodes, value.order, key=lambda node: node.first) - 1
        if at < 0 or value.order > self.nodes[at].last:
            return None
        return self.nodes[at]


def _all(shape: Shape) -> Array:
    return np.arange(prod(shape)).reshape(shape)


Packs = Callable[[str, Sequence[Tensor]], Sequence[str]]
"""Asks torch which operands (``in0`` ...) and results (``out0`` ...) a line over ``x0`` ..., of which it may name the result ``out``, saves for backward."""
