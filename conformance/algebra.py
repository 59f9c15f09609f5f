"""Two ways to carry out a VJP: on plain numpy arrays, or on traced values that can be differentiated again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from autograd_conformance.ops import OPS
from autograd_conformance.program import Shape


def sum_to(g: Any, shape: Shape) -> Any:
    """The transpose of broadcasting: sums ``g`` down to ``shape``."""
    if g.shape == shape:
        return g
    lead = g.ndim - len(shape)
    if lead:
        g = g.sum(axis=tuple(range(lead)))
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and g.shape[i] != 1)
    return g.sum(axis=axes, keepdims=True) if axes else g


def scatter(g: Any, origins: np.ndarray, shape: Shape) -> Any:
    """The transpose of :func:`take`: adds each element of ``g`` at its flat position in zeros of ``shape``."""
    counts = np.bincount(origins.reshape(-1), weights=g.reshape(-1), minlength=prod(shape))
    return counts.reshape(shape)


def take(x: Any, positions: np.ndarray) -> Any:
    """Elements of ``x`` at flat positions."""
    return x.reshape(-1)[positions]


def broadcast_to(x: Any, shape: Shape) -> Any:
    """``x`` repeated to ``shape``; numpy's own function takes five times as long on small arrays."""
    return np.zeros(shape) + x


class Plain:
    """VJPs on numpy arrays: the derivative is a number and no more."""

    exp, log, sin, cos, power, matmul = np.exp, np.log, np.sin, np.cos, np.power, np.matmul
    where = np.where
    sum_to, scatter = staticmethod(sum_to), staticmethod(scatter)
    take, broadcast_to = staticmethod(take), staticmethod(broadcast_to)
    flip, cumsum = np.flip, np.cumsum

    @staticmethod
    def raw(x: Any) -> Any:
        """The number itself, for choices that are not differentiated."""
        return x

    @staticmethod
    def reshape(x: Any, shape: Shape) -> Any:
        """``x`` in another shape."""
        return x.reshape(shape)

    @staticmethod
    def seen(x: Traced) -> Any:
        """A parent as a VJP of this algebra reads it: its number."""
        return x.value

    @staticmethod
    def sigmoid(x: Any) -> Any:
        """1 / (1 + exp(-x))."""
        return OPS["sigmoid"].value(x)

    @staticmethod
    def swap(x: Any) -> Any:
        """The last two dimensions exchanged."""
        return x.swapaxes(-1, -2)


Pull = Callable[[Any, Any], Sequence[Any]]
_order = itertools.count()


def next_order() -> int:
    """A number greater than the order of every traced value so far, and less than that of all to come."""
    return next(_order)


class Traced:
    """A numpy value that remembers how it was made: ``pull(A, g)`` gives a cotangent for each parent."""

    __array_ufunc__ = None  # numpy leaves ``array * traced`` to __rmul__
    __slots__ = ("order", "parents", "pull", "value")

    def __init__(self, value: Any, parents: Sequence[Traced] = (), pull: Pull | None = None) -> None:
        self.value = np.asarray(value, dtype=np.float64)
        self.parents, self.pull, self.order = tuple(parents), pull, next(_order)

    @property
    def shape(self) -> Shape:
        """Shape of the value."""
        shape: Shape = self.value.shape
        return shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.value.size)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return int(self.value.ndim)

    def __neg__(self) -> Traced:
        return traced_op("neg", self)

    def __add__(self, other: Any) -> Traced:
        return traced_op("add", self, other)

    def __sub__(self, other: Any) -> Traced:
        return traced_op("sub", self, other)

    def __mul__(self, other: Any) -> Traced:
        return traced_op("mul", self, other)

    def __truediv__(self, other: Any) -> Traced:
        return traced_op("div", self, other)

    def __rsub__(self, other: Any) -> Traced:
        return traced_op("sub", other, self)

    def __pow__(self, exponent: float) -> Traced:
        value = self.value**exponent
        return Traced(value, [self], lambda A, g: (g * (exponent * A.seen(self) ** (exponent - 1)),))

    __radd__, __rmul__ = __add__, __mul__


def traced_op(name: str, *args: Any, **params: Any) -> Traced:
    """Apply an op of the table that has one output to traced values."""
    op = OPS[name]
    parents = [x if isinstance(x, Traced) else Traced(x) for x in args]
    values = op.value(*(p.value for p in parents), **params)
    if isinstance(values, tuple):
        raise TypeError(f"{name} has several outputs")

    def pull(A: Any, g: Any) -> Sequence[Any]:
        ins = [A.seen(p) for p in parents]
        assert op.vjp is not None
        gs = op.vjp(A, g, A.seen(out), *ins, **params)
        return gs if isinstance(gs, tuple) else (gs,)

    out = Traced(values, parents, pull)
    return out


class Differentiable:
    """VJPs on traced values: each step is an op of the table, so the result can be differentiated again."""

    @staticmethod
    def raw(x: Any) -> Any:
        """The number itself, for choices that are not differentiated."""
        return x.value if isinstance(x, Traced) else x

    @staticmethod
    def seen(x: Traced) -> Traced:
        """A parent as a VJP of this algebra reads it: still traced."""
        return x

    exp, log, sin, cos = (staticmethod(partial(traced_op, name)) for name in ("exp", "log", "sin", "cos"))
    sigmoid, power, matmul = (staticmethod(partial(traced_op, name)) for name in ("sigmoid", "pow", "mm"))

    @staticmethod
    def where(mask: Any, x: Any, y: Any) -> Traced:
        """``x`` where the mask is set, ``y`` elsewhere."""
        return traced_op("where", mask, x, y)

    @staticmethod
    def reshape(x: Any, shape: Shape) -> Traced:
        """``x`` in another shape."""
        return traced_op("reshape", x, shape=shape)

    @staticmethod
    def swap(x: Traced) -> Traced:
        """The last two dimensions exchanged."""
        return traced_op("transpose", x, dim0=x.ndim - 2, dim1=x.ndim - 1)

    @staticmethod
    def flip(x: Traced, dim: int) -> Traced:
        """``x`` backwards along ``dim``."""
        return traced_op("flip", x, dim=dim)

    @staticmethod
    def cumsum(x: Traced, dim: int) -> Traced:
        """Running sums along ``dim``."""
        return traced_op("cumsum", x, dim=dim)

    @staticmethod
    def broadcast_to(x: Traced, shape: Shape) -> Traced:
        """``x`` repeated to ``shape``."""
        return Traced(np.broadcast_to(x.value, shape), [x], lambda A, g: (A.sum_to(g, x.shape),))

    @staticmethod
    def sum_to(x: Traced, shape: Shape) -> Traced:
        """``x`` summed down to ``shape``."""
        return Traced(sum_to(x.value, shape), [x], lambda A, g: (A.broadcast_to(g, x.shape),))

    @staticmethod
    def take(x: Traced, positions: np.ndarray) -> Traced:
        """Elements of ``x`` at flat positions."""
        return Traced(take(x.value, positions), [x], lambda A, g: (A.scatter(g, positions, x.shape),))

    @staticmethod
    def scatter(x: Traced, origins: np.ndarray, shape: Shape) -> Traced:
        """The transpose of ``take``."""
        return Traced(scatter(x.value, origins, shape), [x], lambda A, g: (A.take(g, origins),))


def taken(source: Traced, positions: np.ndarray) -> Traced:
    """The elements of a value at flat positions, in the shape of these: what a view sees."""
    value = source.value.reshape(-1)[positions]
    return Traced(value, [source], lambda A, g: (A.scatter(g, positions, source.shape),))


def replaced(source: Traced, positions: np.ndarray, part: Traced) -> Traced:
    """A value with ``part`` at some flat positions: what a write leaves. Cotangents go to both, each for its elements."""
    value = source.value.copy().reshape(-1)
    value[positions] = part.value
    keep = np.ones(source.size)
    keep[positions] = 0.0
    mask = keep.reshape(source.shape)
    return Traced(value.reshape(source.shape), [source, part], lambda A, g: (g * mask, A.take(g, positions)))


def spread(x: Traced, shape: Shape) -> Traced:
    """A value broadcast to a shape; itself if it has it."""
    if x.shape == shape:
        return x
    return Traced(np.broadcast_to(x.value, shape).copy(), [x], lambda A, g: (A.sum_to(g, x.shape),))


def gradient(root: Traced, seed: Any, wrt: Sequence[Traced], algebra: Any = Plain) -> list[Any]:
    """Reverse mode: cotangents of ``wrt`` for the cotangent ``seed`` of ``root``; zeros where nothing arrives."""
    cotangents: dict[int, Any] = {id(root): seed}
    for node in sorted(ancestors(root), key=lambda n: -n.order):
        g = cotangents.get(id(node))
        if g is None or node.pull is None:
            continue
        for parent, part in zip(node.parents, node.pull(algebra, g), strict=True):
            if part is not None:
                known = cotangents.get(id(parent))
                cotangents[id(parent)] = part if known is None else known + part
    zero = Traced if algebra is Differentiable else np.asarray
    return [cotangents.get(id(x), zero(np.zeros(x.shape))) for x in wrt]


def ancestors(root: Traced) -> list[Traced]:
    """A value and all that it was made from."""
    found: dict[int, Traced] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if id(node) not in found:
            found[id(node)] = node
            pending.extend(node.parents)
    return list(found.values())
