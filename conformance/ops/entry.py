"""What an entry of the op table says, and the rules that entries share.

Rules are small pure functions of shapes and of two drawn bytes ``p`` and ``q``; zero bytes give the simplest choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

import numpy as np

from autograd_conformance.program import Param, Shape

Shapes = Sequence[Shape]
Range = tuple[float, float]
Kind = Literal["smooth", "kinked", "binary", "contraction", "reduction", "view", "index", "join", "several", "constant", "cast"]

LIMIT = 4096.0  # a result that may be larger than this is not drawn: float32 would drown in cancellation
FLOATS = ("float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op: how torch computes it, how paper does, and how it differentiates.

    Attributes:
        name: key in the table.
        call: torch source; ``{a} {b} {c}`` stand for the operands (``{args}`` for all of a variadic op),
            other braces for the parameters. The runner compiles it and the printer prints it.
        value: the same on numpy float64 arrays: ``value(*args, **params)``; a tuple for several outputs.
        vjp: ``vjp(A, g, y, *args, **params)`` with an algebra ``A``, the cotangent(s) and value(s) of the output(s);
            one cotangent per operand, or a bare one when there is one operand. None for an op without derivative.
        kind: what it is, for counting and for swarm selection.
        arity: operands; -1 for two or more.
        shapes: shapes of the outputs from the shapes of the operands and the parameters.
        params: drawn parameters, or None where the op cannot be applied to these shapes.
        fits: may the next operand have ``shape``, given the shapes of those before it?
        dtypes: dtypes of the outputs from (dtype, shape) of the operands.
        takes: what the first operand may be: ``"float"``, ``"bool"`` or ``"any"``.
        same_dtype: torch does not promote here; all operands must agree.
        bounds: range of the result from ranges of the operands and the number of terms summed.
        domain: ranges of operands for which the op is smooth and finite.
        hands_on: backward may pass on the incoming gradient, or a view of it, without a copy.
        reads_saved: backward reads whatever the op saved, so that it notices what became of it.

    """

    name: str
    call: str
    value: Callable[..., Any]
    vjp: Callable[..., Any] | None
    kind: Kind
    arity: int = 1
    shapes: Callable[..., Shapes]
    params: Callable[..., dict[str, Param] | None]
    fits: Callable[[Shapes, Shape], bool]
    dtypes: Callable[[Sequence[tuple[str, Shape]]], str | tuple[str, ...]]
    takes: str = "float"
    same_dtype: bool = False
    bounds: Callable[[Sequence[Range], int], Range]
    domain: Callable[[Sequence[Range]], bool]
    hands_on: bool = False
    reads_saved: bool = True

    @cached_property
    def differentiable(self) -> bool:
        """Has a derivative at all."""
        return self.vjp is not None

    def source(self, args: Sequence[str], params: dict[str, Param]) -> str:
        """The torch call with names and literals filled in."""
        if self.arity < 0:
            return self.call.format(args=f"({', '.join(args)})", **params)
        return self.call.format(**dict(zip("abc", args, strict=False)), **params)


# --- shapes -------------------------------------------------------------------------------------------------------


def same(shapes: Shapes, **_: Param) -> Shapes:
    """The shape of the first operand."""
    return (shapes[0],)


_broadcast = lru_cache(maxsize=4096)(np.broadcast_shapes)


def broadcast(shapes: Shapes, **_: Param) -> Shapes:
    """The broadcast shape of all operands."""
    return (_broadcast(*shapes),)


def reduced(shapes: Shapes, *, dim: int, keepdim: bool = False, **_: Param) -> Shapes:
    """Without dimension ``dim``, or with size 1 there."""
    shape = shapes[0]
    return ((*shape[:dim], 1, *shape[dim + 1 :]) if keepdim else shape[:dim] + shape[dim + 1 :],)


def scalar(_: Shapes, **__: Param) -> Shapes:
    """0-dim."""
    return ((),)


# --- parameters ---------------------------------------------------------------------------------------------------


def nothing(_: Shapes, p: int, q: int) -> dict[str, Param]:
    """No parameters."""
    return {}


def a_dim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    """Some dimension of the first operand."""
    return {"dim": p % len(shapes[0])} if shapes[0] else None


def a_dim_keepdim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    """Some dimension, kept with size 1 or not."""
    return {"dim": p % len(shapes[0]), "keepdim": q % 2 == 1} if shapes[0] else None


def a_full_dim_keepdim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    """Some dimension of size 1 or more: there is no largest element of nothing."""
    params = a_dim_keepdim(shapes, p, q)
    return params if params and shapes[0][p % len(shapes[0])] else None


def two_or_more(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    """Some dimension of size 2 or more: there is no spread of fewer."""
    params = a_dim_keepdim(shapes, p, q)
    return params if params and prod(shapes[0]) and shapes[0][p % len(shapes[0])] >= 2 else None


def a_full_dim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    """Some dimension of size 1 or more."""
    params = a_dim(shapes, p, q)
    return params if params and shapes[0][p % len(shapes[0])] else None


def nonempty(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    """No parameters, but there must be an element."""
    return {} if prod(shapes[0]) else None


# --- operands -----------------------------------------------------------------------------------------------------


def any_shape(_: Shapes, shape: Shape) -> bool:
    """Every shape will do."""
    return True


def broadcastable(shapes: Shapes, shape: Shape) -> bool:
    """Broadcasts with the operands before it, up to four dimensions."""
    if not shapes:
        return True
    before = shapes[0] if len(shapes) == 1 else _broadcast(*shapes)
    if before == shape:
        return True
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(before), reversed(shape), strict=False))


def alike(shapes: Shapes, shape: Shape) -> bool:
    """The very shape of the first operand."""
    return not shapes or shapes[0] == shape


# --- dtypes -------------------------------------------------------------------------------------------------------


def promoted(operands: Sequence[tuple[str, Shape]]) -> str:
    """torch's rule for float operands: operands with dimensions decide before 0-dim ones."""
    if len(operands) == 1:
        return operands[0][0]
    deciding = [dtype for dtype, shape in operands if shape and dtype in FLOATS]
    deciding = deciding or [dtype for dtype, _ in operands if dtype in FLOATS]
    return max(deciding)


def always(dtype: str) -> Callable[[Sequence[tuple[str, Shape]]], str]:
    """One dtype whatever the operands."""
    return lambda _: dtype


# --- ranges -------------------------------------------------------------------------------------------------------


def anywhere(_: Sequence[Range]) -> bool:
    """Smooth and finite everywhere."""
    return True


def positive(ranges: Sequence[Range]) -> bool:
    """Every operand stays away from zero and above it."""
    return all(low >= 0.05 for low, _ in ranges)


def hull(ranges: Sequence[Range], _: int) -> Range:
    """Between the least and the greatest of the operands."""
    if len(ranges) == 1:
        return ranges[0]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def hull_with_zero(ranges: Sequence[Range], terms: int) -> Range:
    """Between the operands' extremes and zero."""
    low, high = hull(ranges, terms)
    return min(low, 0.0), max(high, 0.0)


def hull_or_index(ranges: Sequence[Range], terms: int) -> Range:
    """Between the operands' extremes, or a position among ``terms`` elements."""
    low, high = hull(ranges, terms)
    return min(low, 0.0), max(high, float(terms))


def summed(ranges: Sequence[Range], terms: int) -> Range:
    """A sum of up to ``terms`` elements, perhaps of none."""
    low, high = ranges[0]
    return min(low, low * terms, 0.0), max(high, high * terms, 0.0)


def products(ranges: Sequence[Range], terms: int) -> Range:
    """A sum of up to ``terms`` products of two operands."""
    most = max(map(abs, ranges[0])) * max(map(abs, ranges[1])) * max(terms, 1)
    return -most, most


def within(low: float, high: float) -> Callable[[Sequence[Range], int], Range]:
    """A fixed range."""
    return lambda _ranges, _terms: (low, high)


def rising(f: Callable[[float], float]) -> Callable[[Sequence[Range], int], Range]:
    """The image of the range under an increasing function."""
    return lambda ranges, _: (float(f(ranges[0][0])), float(f(ranges[0][1])))


# --- builders -----------------------------------------------------------------------------------------------------


def op(
    name: str, call: str, value: Callable[..., Any], vjp: Callable[..., Any] | None, kind: Kind, **rules: Any
) -> Op:
    """An entry; rules that are not given are those of an elementwise op."""
    elementwise = {
        "shapes": same,
        "params": nothing,
        "fits": any_shape,
        "dtypes": promoted,
        "bounds": hull,
        "domain": anywhere,
    }
    return Op(name=name, call=call, value=value, vjp=vjp, kind=kind, **(elementwise | rules))
