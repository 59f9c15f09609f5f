"""Tensors, nodes and passes on paper: what the oracle computes with, and what it says is due. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autograd_conformance.ops import FLOATS, Op
from autograd_conformance.program import Shape

Array = np.ndarray


@dataclass(eq=False, slots=True)
class Storage:
    """Memory that tensors may share, and the statements that wrote to it after it was filled.

    ``writes`` holds (statement, counter): the version counter that noticed the write. Views and ``detach()`` share the
    counter of their source; ``.data`` has one of its own, so a write on one side is not noticed on the other. Nobody
    says which counter a Parameter has, or what becomes of it when ``.data`` is assigned (counter None): ``doubtful``.
    """

    writes: tuple[tuple[int, object], ...] = ()
    doubtful: bool = False


@dataclass(eq=False, slots=True)
class Paper:
    """A tensor on paper."""

    name: str
    shape: Shape
    dtype: str
    known: Array | None
    requires_grad: bool
    storage: Storage
    node: Node | None = None
    slot: int = 0
    is_view: bool = False
    own_counter: object = None
    recipe: Recipe | None = None
    alias: str = ""
    detached_at: int = -1

    @property
    def value(self) -> Array:
        """The numbers, worked out when they are asked for first."""
        if self.known is None:
            assert self.recipe is not None
            result = self.recipe.work_out()
            self.known = np.asarray(result[self.slot] if isinstance(result, tuple) else result, dtype=np.float64)
        return self.known

    def waits_for(self, storage: Storage) -> bool:
        """Is it yet to be worked out, and lies in this memory or is made from it?"""
        if self.known is not None or self.recipe is None:
            return False
        return self.storage is storage or True in [t.storage is storage for t in self.recipe.inputs]

    @property
    def counter(self) -> object:
        """The version counter: that of the memory, if the tensor has none of its own."""
        return self.own_counter or self.storage

    @property
    def is_leaf(self) -> bool:
        """Has no node, be it that the user made it or that nothing was recorded."""
        return self.node is None


@dataclass(eq=False, slots=True)
class Recipe:
    """How the result of an op comes about. Much of a program leads nowhere, so it is worked out on demand."""

    op: Op
    inputs: tuple[Paper, ...]
    params: dict[str, Any]
    noise: Noise | None = None
    values: tuple[Array, ...] | None = None
    result: Any = None

    def work_out(self) -> Any:
        """The result, as the table gives it; ``values`` are then those of the operands."""
        if self.values is None:
            noise = self.noise
            values = [t.value for t in self.inputs] if noise is None else [noise(t.value, t.dtype) for t in self.inputs]
            self.values = tuple(values)
            self.result = self.op.value(*self.values, **self.params)
        return self.result


@dataclass(eq=False, slots=True)
class Node(Recipe):
    """A recorded op: what a backward pass needs of it, besides how its result comes about."""

    at: int = -1
    order: int = -1
    edges: tuple[Node | Paper | None, ...] = ()
    slots: tuple[int, ...] = ()
    outs: tuple[Paper, ...] = ()
    freed: bool = False
    freed_by: int = -1
    unsure: bool = False


@dataclass(slots=True)
class PassDue:
    """What is due of one pass.

    Attributes:
        raises: it must raise, whatever else (a wrong argument).
        why: which rule says so: ``untracked``, ``nonscalar``, ``unused``, ``input``; or empty.
        deltas: per tensor name what the pass adds to its ``.grad`` (Backward), or returns (Grad).
        executed: nodes that run.
        again: those of them that an earlier pass freed: if one packed a tensor, the pass must raise.
        written: executed nodes whose tensors were written or detached in place since, and by which statements.
        unsure: a pass that raised may or may not have freed some of these nodes: nothing is due.
        spoiled: something was written through ``.data``, which nobody notices: values are not due.

    """

    raises: bool = False
    why: str = ""
    deltas: dict[str, Array] = field(default_factory=dict)
    executed: list[Node] = field(default_factory=list)
    again: list[Node] = field(default_factory=list)
    written: dict[int, set[int]] = field(default_factory=dict)
    unsure: bool = False
    spoiled: bool = False

    @property
    def depends(self) -> bool:
        """Whether it must raise depends on what the executed nodes packed."""
        return bool(self.again or self.written)


@dataclass(slots=True)
class Due:
    """All that is due of a program.

    Attributes:
        tensors: every tensor, in its last state.
        made: (requires_grad, is_leaf) of every tensor when it was made.
        passes: per statement that is a pass.
        refused: per statement that must raise although it is no pass, which rule says so.
        nodes: per statement that recorded a node.
        doubtful: statements that may raise or not, because they use a view whose base was written.

    """

    tensors: dict[str, Paper] = field(default_factory=dict)
    made: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    passes: dict[int, PassDue] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)


class Noise:
    """Random rounding: each number gets an error of a few units in its last place (Monte Carlo arithmetic).

    Running a program several times so shows how far rounding can move each of its results, kinks and ties included.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, x: Array, dtype: str) -> Array:
        """``x`` with relative errors of 4 eps of ``dtype``, and absolute ones where it is zero."""
        if dtype not in FLOATS or not np.size(x):
            return x
        eps = 4 * float(np.finfo(dtype).eps)
        size = np.abs(x)
        size = np.where(size == 0, np.max(size, initial=1e-3), size)
        return np.asarray(x + eps * size * self.random.uniform(-1, 1, np.shape(x)))

    def within(self, x: Array, size: float, dtype: str) -> Array:
        """``x`` with absolute errors as of intermediate results that are as large as ``size``."""
        eps = 4 * float(np.finfo(dtype).eps)
        return np.asarray(x + eps * size * self.random.uniform(-1, 1, np.shape(x)))
