"""Tensors that share memory, on paper: a view is a map of positions, a write makes the memory another value. No torch.

The functional meaning of a program with in-place ops. A *memory* has a value, which a write replaces by a new one: the
old one everywhere else, the written one at the positions of the view. Reading a view takes its positions from the value
that the memory has then. Both steps are differentiable, so gradients follow without any in-place op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograd_conformance.algebra import Plain, Traced, gradient, replaced, spread, taken
from autograd_conformance.ops import OPS
from autograd_conformance.paper import Array
from autograd_conformance.program import Param, Shape

VIEWS = ("select", "narrow", "transpose", "slice", "permute", "unsqueeze", "diagonal", "squeeze")


@dataclass(eq=False, slots=True)
class Memory:
    """Memory of some elements: what is there now, and whether autograd tracks it."""

    now: Traced
    dtype: str
    tracked: bool


@dataclass(eq=False, slots=True)
class Part:
    """A tensor in some memory.

    Attributes:
        name: of the tensor.
        memory: where it lies.
        where: the flat positions of its elements.
        depth: views between it and the tensor that owns the memory.
        settled: the memory was tracked when it was made.

    """

    name: str
    memory: Memory
    where: Array
    depth: int = 0
    settled: bool = True

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        shape: Shape = self.where.shape
        return shape

    def read(self) -> Traced:
        """Its value now."""
        return taken(self.memory.now, self.where)

    def write(self, new: Any) -> None:
        """Replace its elements by a value that broadcasts to its shape."""
        new = new if isinstance(new, Traced) else Traced(new)
        self.memory.now = replaced(self.memory.now, self.where, spread(new, self.shape))

    def inner(self, name: str, where: Array) -> Part:
        """A view of this part; ``where`` picks positions out of its own."""
        return Part(name, self.memory, where, self.depth + 1, self.memory.tracked)

    @property
    def writable(self) -> bool:
        """May it be written to in grad mode?

        torch 2.13 takes a view for a leaf, and refuses, if the memory was not tracked when the view was made and is now.
        """
        return self.depth == 0 or self.settled or not self.memory.tracked

    def overlaps(self, other: Part) -> bool:
        """Do the two have an element in common?"""
        return self.memory is other.memory and bool(np.isin(self.where, other.where).any())


def whole(name: str, value: Traced, dtype: str, *, tracked: bool) -> Part:
    """A tensor with memory of its own that starts with a value."""
    flat = Traced(value.value.reshape(-1), [value], lambda _, g: (g.reshape(value.shape),))
    return Part(name, Memory(flat, dtype, tracked), np.arange(value.size).reshape(value.shape))


def views_of(part: Part, p: int) -> list[tuple[str, Array]]:
    """Views that can be taken of a part, none of them with an element twice: source with ``{}``, and positions."""
    found: list[tuple[str, Array]] = [("{}[...]", part.where)]
    for name in VIEWS:
        op = OPS[name]
        params: dict[str, Param] | None = op.params([part.shape], p, 7 * p + 3)
        if params is not None:
            where = np.asarray(op.value(part.where, **params))
            if where.size:
                found.append((op.source(["{}"], params), where))
    return found


def mapped(x: Traced, name: str, rounded: Callable[[Array], Array] | None = None) -> Traced:
    """An elementwise op of the table; ``rounded`` puts random rounding on what its gradient is made from."""
    op = OPS[name]
    y = op.value(x.value)
    seen = y if rounded is None else rounded(y)
    return Traced(y, [x], lambda _, g: (op.vjp(Plain, g, seen, x.value),))  # type: ignore[misc]


def total(parts: Sequence[tuple[Traced, Array]], wrt: Sequence[Traced]) -> list[Array]:
    """Gradients for several roots, each with its cotangent."""
    seeds = [seed for _, seed in parts]
    root = Traced(0.0, [part for part, _ in parts], lambda *_: seeds)
    found: list[Array] = gradient(root, np.ones(()), wrt)
    return found
