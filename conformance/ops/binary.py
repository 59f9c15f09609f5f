"""Ops of two operands: broadcasting arithmetic and contractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autograd_conformance.ops.entry import (
    Op,
    Range,
    Shapes,
    alike,
    broadcast,
    broadcastable,
    hull,
    op,
    positive,
    products,
    scalar,
)
from autograd_conformance.program import Shape


def _sum_range(ranges: Sequence[Range], _: int) -> Range:
    (a, b), (c, d) = ranges
    return a + c, b + d


def _difference_range(ranges: Sequence[Range], _: int) -> Range:
    (a, b), (c, d) = ranges
    return a - d, b - c


def _product_range(ranges: Sequence[Range], _: int) -> Range:
    corners = [x * y for x in ranges[0] for y in ranges[1]]
    return min(corners), max(corners)


def _quotient_range(ranges: Sequence[Range], _: int) -> Range:
    corners = [x / y for x in ranges[0] for y in ranges[1]]
    return min(corners), max(corners)


def _power_range(ranges: Sequence[Range], _: int) -> Range:
    corners = [x**y for x in ranges[0] for y in ranges[1]]
    return min(corners), max(corners)


def _power_domain(ranges: Sequence[Range]) -> bool:
    (low, high), exponent = ranges
    return low >= 0.05 and high <= 20.0 and max(map(abs, exponent)) <= 3.0


def _both(A: Any, x: Any, y: Any, gx: Any, gy: Any) -> tuple[Any, Any]:
    """Cotangents summed over the broadcast dimensions, down to the operands' shapes."""
    return A.sum_to(gx, x.shape), A.sum_to(gy, y.shape)


def _arithmetic(name: str, call: str, value: Any, vjp: Any, **rules: Any) -> Op:
    return op(name, call, value, vjp, "binary", arity=2, **({"shapes": broadcast, "fits": broadcastable} | rules))


def _larger(A: Any, x: Any, y: Any) -> np.ndarray:
    """1 where ``x`` is larger than ``y``, 0 where it is smaller, half where they are equal."""
    x, y = A.raw(x), A.raw(y)
    return np.where(x == y, 0.5, x > y)


def _chosen_vjp(A: Any, g: Any, x: Any, y: Any, share: Any) -> tuple[Any, Any]:
    """VJP of a choice between ``x`` and ``y``, of which ``x`` has a share."""
    return _both(A, x, y, g * share, g * (1.0 - share))


ARITHMETIC: tuple[Op, ...] = (
    _arithmetic("add", "{a} + {b}", np.add, lambda A, g, _, x, y: _both(A, x, y, g, g), bounds=_sum_range, hands_on=True),
    _arithmetic("sub", "{a} - {b}", np.subtract, lambda A, g, _, x, y: _both(A, x, y, g, -g), bounds=_difference_range,
                hands_on=True),
    _arithmetic("mul", "{a} * {b}", np.multiply, lambda A, g, _, x, y: _both(A, x, y, g * y, g * x), bounds=_product_range),
    _arithmetic("div", "{a} / {b}", np.divide, lambda A, g, z, x, y: _both(A, x, y, g / y, -(g * z) / y),
                bounds=_quotient_range, domain=lambda r: positive(r[1:])),
    _arithmetic("pow", "{a} ** {b}", np.power,
                lambda A, g, z, x, y: _both(A, x, y, g * y * A.power(x, y - 1.0), g * z * A.log(x)),
                bounds=_power_range, domain=_power_domain),
    _arithmetic("atan2", "torch.atan2({a}, {b})", np.arctan2,
                lambda A, g, _, x, y: _both(A, x, y, g * y / (x * x + y * y), -(g * x) / (x * x + y * y)),
                bounds=lambda r, _: (-1.6, 1.6), domain=lambda r: positive(r[1:])),
    _arithmetic("maximum", "torch.maximum({a}, {b})", np.maximum,
                lambda A, g, _, x, y: _chosen_vjp(A, g, x, y, _larger(A, x, y)),
                bounds=hull),
    _arithmetic("minimum", "torch.minimum({a}, {b})", np.minimum,
                lambda A, g, _, x, y: _chosen_vjp(A, g, x, y, 1.0 - _larger(A, x, y)),
                bounds=hull),
    _arithmetic("lerp", "torch.lerp({a}, {b}, 0.25)", lambda x, y: x + 0.25 * (y - x),
                lambda A, g, _, x, y: _both(A, x, y, g * 0.75, g * 0.25), bounds=hull, same_dtype=True),
)


def _matmul_vjp(A: Any, g: Any, _: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return A.matmul(g, A.swap(y)), A.matmul(A.swap(x), g)


def _mv_vjp(A: Any, g: Any, _: Any, x: Any, v: Any) -> tuple[Any, Any]:
    column = A.reshape(g, (*g.shape, 1))
    return column * v, A.reshape(A.matmul(A.swap(x), column), v.shape)


def _outer_vjp(A: Any, g: Any, _: Any, x: Any, y: Any) -> tuple[Any, Any]:
    gx = A.matmul(g, A.reshape(y, (*y.shape, 1)))
    gy = A.matmul(A.swap(g), A.reshape(x, (*x.shape, 1)))
    return A.reshape(gx, x.shape), A.reshape(gy, y.shape)


def _of_rank(rank: int) -> Any:
    def fits(shapes: Shapes, shape: Shape) -> bool:
        if not shapes:
            return len(shape) == rank
        return len(shape) == rank and shape[:-2] == shapes[0][:-2] and shape[-2] == shapes[0][-1]

    return fits


def _matrix_vector(shapes: Shapes, shape: Shape) -> bool:
    return len(shape) == 1 and shape[0] == shapes[0][1] if shapes else len(shape) == 2


def _vectors(shapes: Shapes, shape: Shape) -> bool:
    return len(shape) == 1


def _vectors_alike(shapes: Shapes, shape: Shape) -> bool:
    return len(shape) == 1 and alike(shapes, shape)


def _contracted(shapes: Shapes, **_: Any) -> Shapes:
    return ((*shapes[0][:-1], shapes[1][-1]),)


def _contraction(name: str, call: str, value: Any, vjp: Any, fits: Any, shapes: Any) -> Op:
    return op(name, call, value, vjp, "contraction", arity=2, fits=fits, shapes=shapes, same_dtype=True, bounds=products)


CONTRACTIONS: tuple[Op, ...] = (
    _contraction("mm", "{a} @ {b}", np.matmul, _matmul_vjp, _of_rank(2), _contracted),
    _contraction("bmm", "torch.bmm({a}, {b})", np.matmul, _matmul_vjp, _of_rank(3), _contracted),
    _contraction("mv", "torch.mv({a}, {b})", np.matmul, _mv_vjp, _matrix_vector, lambda s: (s[0][:1],)),
    _contraction("dot", "torch.dot({a}, {b})", np.dot, lambda A, g, _, x, y: (g * y, g * x), _vectors_alike, scalar),
    _contraction("outer", "torch.outer({a}, {b})", np.outer, _outer_vjp, _vectors, lambda s: ((s[0][0], s[1][0]),)),
)
