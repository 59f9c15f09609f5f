"""Ops that join several operands, have several outputs, or have an output without derivative; casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autograd_conformance.ops.entry import (
    Op,
    Shapes,
    a_full_dim,
    a_full_dim_keepdim,
    alike,
    always,
    broadcast,
    broadcastable,
    hull,
    hull_or_index,
    hull_with_zero,
    op,
    reduced,
    same,
    two_or_more,
)
from autograd_conformance.ops.reductions import variance
from autograd_conformance.ops.views import MOST_DIMS, position_map
from autograd_conformance.program import Param, Shape

MOST_OUTPUTS = 4


# --- join ---------------------------------------------------------------------------------------------------------


def _catable(shapes: Shapes, shape: Shape) -> bool:
    if not shapes:
        return len(shape) > 0
    first = shapes[0]
    if len(first) != len(shape):
        return False
    apart = [i for i, sizes in enumerate(zip(first, shape, strict=True)) if sizes[0] != sizes[1]]
    return not apart or (len(apart) == 1 and len(shapes) == 1)


def _cat_dim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    first = shapes[0]
    apart = {i for shape in shapes for i, size in enumerate(shape) if size != first[i]}
    if len(apart) > 1:
        return None
    return {"dim": apart.pop() if apart else p % len(first)}


def _cat_shape(shapes: Shapes, dim: int) -> Shapes:
    first = shapes[0]
    return ((*first[:dim], sum(s[dim] for s in shapes), *first[dim + 1 :]),)


def _cat_vjp(A: Any, g: Any, y: Any, *args: Any, dim: int) -> tuple[Any, ...]:
    positions = np.arange(g.size).reshape(g.shape)
    cuts = np.cumsum([x.shape[dim] for x in args])[:-1]
    return tuple(A.take(g, part) for part in np.split(positions, cuts, axis=dim))


def _stack_dim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    n = len(shapes[0])
    return {"dim": p % (n + 1)} if n < MOST_DIMS else None


def _stack_shape(shapes: Shapes, dim: int) -> Shapes:
    first = shapes[0]
    return ((*first[:dim], len(shapes), *first[dim:]),)


def _stack_vjp(A: Any, g: Any, y: Any, *args: Any, dim: int) -> tuple[Any, ...]:
    positions = np.arange(g.size).reshape(g.shape)
    return tuple(A.take(g, np.take(positions, i, axis=dim)) for i in range(len(args)))


def _where_vjp(A: Any, g: Any, y: Any, c: Any, x: Any, z: Any) -> tuple[None, Any, Any]:
    chosen = A.raw(c) != 0
    return None, A.sum_to(A.where(chosen, g, 0.0), x.shape), A.sum_to(A.where(chosen, 0.0, g), z.shape)


JOINS: tuple[Op, ...] = (
    op("cat", "torch.cat({args}, dim={dim})", lambda *xs, dim: np.concatenate(xs, axis=dim), _cat_vjp, "join", arity=-1,
       shapes=_cat_shape, params=_cat_dim, fits=_catable, same_dtype=True, hands_on=True),
    op("stack", "torch.stack({args}, dim={dim})", lambda *xs, dim: np.stack(xs, axis=dim), _stack_vjp, "join", arity=-1,
       shapes=_stack_shape, params=_stack_dim, fits=alike, same_dtype=True, hands_on=True),
    op("where", "torch.where({a}, {b}, {c})", lambda c, x, z: np.where(c != 0, x, z), _where_vjp, "join", arity=3,
       shapes=broadcast, fits=broadcastable, takes="bool", bounds=lambda r, _: hull(r[1:], 0)),
)


# --- several outputs ----------------------------------------------------------------------------------------------


def _few(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape or not 1 <= shape[p % len(shape)] <= MOST_OUTPUTS:
        return None
    return {"dim": p % len(shape)}


def _pieces(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape or not shape[p % len(shape)]:
        return None
    size = shape[p % len(shape)]
    length = 1 + q % size
    return {"size": length if -(-size // length) <= MOST_OUTPUTS else size, "dim": p % len(shape)}


def _split(x: np.ndarray, size: int, dim: int) -> tuple[np.ndarray, ...]:
    return tuple(np.split(x, range(size, x.shape[dim], size), axis=dim))


def _chunk(x: np.ndarray, dim: int) -> tuple[np.ndarray, ...]:
    return _split(x, max(1, -(-x.shape[dim] // 2)), dim)


def _unbind(x: np.ndarray, dim: int) -> tuple[np.ndarray, ...]:
    return tuple(np.moveaxis(x, dim, 0))


def _positions_along(x: np.ndarray, index: np.ndarray, dim: int) -> np.ndarray:
    return np.take_along_axis(np.arange(x.size).reshape(x.shape), index, axis=dim)


def _picked_vjp(A: Any, g: Any, y: Any, x: Any, dim: int, keepdim: bool = True) -> Any:
    """VJP of an op that returns elements and where it found them."""
    index = A.raw(y[1]).astype(np.int64)
    index = index if keepdim else np.expand_dims(index, dim)
    positions = _positions_along(A.raw(x), index, dim)
    return A.scatter(g[0], positions if keepdim else positions.squeeze(dim), x.shape)


def _sorted_vjp(A: Any, g: Any, y: Any, x: Any, dim: int, descending: bool) -> Any:
    return _picked_vjp(A, g, y, x, dim)


def _extreme(pick: Any) -> Any:
    def value(x: np.ndarray, dim: int, keepdim: bool) -> tuple[np.ndarray, np.ndarray]:
        index = pick(x, axis=dim, keepdims=True)
        best = np.take_along_axis(x, index, axis=dim)
        return (best, index) if keepdim else (best.squeeze(dim), index.squeeze(dim))

    return value


def _sort(x: np.ndarray, dim: int, descending: bool) -> tuple[np.ndarray, np.ndarray]:
    index = np.argsort(-x if descending else x, axis=dim, kind="stable")
    return np.take_along_axis(x, index, axis=dim), index


def _sort_params(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {"dim": p % len(shapes[0]), "descending": q % 2 == 1} if shapes[0] else None


def _with_indices(operands: Sequence[tuple[str, Shape]]) -> tuple[str, ...]:
    return operands[0][0], "int64"


def _twice(rule: Any) -> Any:
    def shapes(operands: Shapes, **params: Any) -> Shapes:
        shape = rule(operands, **params)[0]
        return shape, shape

    return shapes


def _var_mean(x: np.ndarray, dim: int, keepdim: bool) -> tuple[np.ndarray, np.ndarray]:
    return variance(x, dim, keepdim), x.mean(axis=dim, keepdims=keepdim)


def _var_mean_vjp(A: Any, g: Any, y: Any, x: Any, dim: int, keepdim: bool) -> Any:
    n, kept = x.shape[dim], (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    spread_var = A.broadcast_to(A.reshape(g[0], kept), x.shape)
    spread_mean = A.broadcast_to(A.reshape(g[1], kept), x.shape)
    mean = A.sum_to(x, kept) * (1.0 / n)
    return spread_var * (x - mean) * (2.0 / (n - 1)) + spread_mean * (1.0 / n)


def _square_hull(ranges: Any, terms: int) -> tuple[float, float]:
    most = max(map(abs, ranges[0]))
    return -most, max(most, most * most * max(terms, 1))


SEVERAL: tuple[Op, ...] = (
    position_map("unbind", "{a}.unbind({dim})", _unbind, "several", _few),
    position_map("split", "{a}.split({size}, dim={dim})", _split, "several", _pieces),
    position_map("chunk", "{a}.chunk(2, dim={dim})", _chunk, "several", a_full_dim),
    op("max_dim", "{a}.max(dim={dim}, keepdim={keepdim})", _extreme(np.argmax), _picked_vjp, "several",
       shapes=_twice(reduced), params=a_full_dim_keepdim, dtypes=_with_indices, bounds=hull_or_index),
    op("min_dim", "{a}.min(dim={dim}, keepdim={keepdim})", _extreme(np.argmin), _picked_vjp, "several",
       shapes=_twice(reduced), params=a_full_dim_keepdim, dtypes=_with_indices, bounds=hull_or_index),
    op("sort", "{a}.sort(dim={dim}, descending={descending})", _sort, _sorted_vjp, "several", shapes=_twice(same),
       params=_sort_params, dtypes=_with_indices, bounds=hull_or_index),
    op("var_mean", "torch.var_mean({a}, dim={dim}, keepdim={keepdim})", _var_mean, _var_mean_vjp, "several",
       shapes=_twice(reduced), params=two_or_more, dtypes=lambda o: (o[0][0], o[0][0]), bounds=_square_hull),
)


# --- without derivative, and casts --------------------------------------------------------------------------------


def _compared(name: str, sign: str, value: Any) -> Op:
    return op(name, f"{{a}} {sign} {{b}}", value, None, "constant", arity=2, shapes=broadcast, fits=broadcastable,
              dtypes=always("bool"), bounds=lambda r, _: (0.0, 1.0))


CONSTANTS: tuple[Op, ...] = (
    op("argmax", "{a}.argmax(dim={dim})", lambda x, dim: np.argmax(x, axis=dim), None, "constant", shapes=reduced,
       params=a_full_dim, dtypes=always("int64"), bounds=lambda r, n: (0.0, float(n))),
    _compared("gt", ">", np.greater),
    _compared("le", "<=", np.less_equal),
    op("positive", "{a} > 0.0", lambda x: x > 0, None, "constant", dtypes=always("bool"), bounds=lambda r, _: (0.0, 1.0)),
    op("to_int64", "{a}.to(torch.int64)", np.trunc, None, "constant", dtypes=always("int64"),
       bounds=hull_with_zero),
)

CASTS: tuple[Op, ...] = (
    op("to_float32", "{a}.to(torch.float32)", np.copy, lambda A, g, y, x: g, "cast", dtypes=always("float32"), takes="any"),
    op("to_float64", "{a}.to(torch.float64)", np.copy, lambda A, g, y, x: g, "cast", dtypes=always("float64"), takes="any"),
)
