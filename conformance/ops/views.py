"""Views and indexing: ops whose every output element is one input element.

Such an op is a map of positions. Applied to the numbers 0, 1, 2 ... in the operand's shape it tells where each
output element came from, and its VJP adds each cotangent element back there. One line serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from autograd_conformance.ops.entry import Op, Shapes, hull_with_zero, op
from autograd_conformance.program import Param, Shape

MOST_DIMS = 4


@lru_cache(maxsize=4096)
def _origins(value: Callable[..., Any], shape: Shape, params: tuple[tuple[str, Param], ...]) -> Any:
    origins = value(np.arange(prod(shape)).reshape(shape), **dict(params))
    if isinstance(origins, tuple):
        return tuple(np.asarray(part, order="C") for part in origins)
    return np.asarray(origins, order="C")


@lru_cache(maxsize=4096)
def _mapped_shapes(value: Callable[..., Any], shape: Shape, params: tuple[tuple[str, Param], ...]) -> Shapes:
    origins = _origins(value, shape, params)
    return tuple(o.shape for o in origins) if isinstance(origins, tuple) else (origins.shape,)


def position_map(name: str, call: str, value: Callable[..., Any], kind: Any, params: Any, **rules: Any) -> Op:
    """An op whose output elements are input elements; ``value`` works on arrays of anything."""

    def shapes(operands: Shapes, **given: Param) -> Shapes:
        return _mapped_shapes(value, operands[0], tuple(given.items()))

    def vjp(A: Any, g: Any, y: Any, x: Any, **given: Param) -> Any:
        origins = _origins(value, x.shape, tuple(given.items()))
        if not isinstance(origins, tuple):
            return A.scatter(g, origins, x.shape)
        total = A.scatter(g[0], origins[0], x.shape)
        for part, where in zip(g[1:], origins[1:], strict=True):
            total = total + A.scatter(part, where, x.shape)
        return total

    return op(name, call, value, rules.pop("vjp", vjp), kind, shapes=shapes, params=params, **rules)


def _same_elements(A: Any, g: Any, y: Any, x: Any, **_: Param) -> Any:
    """VJP of a view that keeps all elements in their order."""
    return A.reshape(g, x.shape)


def _view(name: str, call: str, value: Callable[..., Any], params: Any, **rules: Any) -> Op:
    return position_map(name, call, value, "view", params, **({"hands_on": True} | rules))


# --- parameters of views ------------------------------------------------------------------------------------------


def _new_shape(shapes: Shapes, p: int, q: int) -> dict[str, Param]:
    shape, size = shapes[0], prod(shapes[0])
    choices = [(size,), tuple(reversed(shape)), (1, *shape), (*shape, 1), (shape[0], size // shape[0]) if shape and shape[0] else (size, 1)]
    choices = [c for c in choices if len(c) <= MOST_DIMS]
    return {"shape": choices[p % len(choices)]}


def _two_dims(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    n = len(shapes[0])
    if n < 2:
        return None
    first = p % n
    return {"dim0": first, "dim1": (first + 1 + q % (n - 1)) % n}


def _order(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    n = len(shapes[0])
    if n < 2:
        return None
    dims = list(range(n))
    order = [dims.pop((p >> 2 * i) % len(dims)) for i in range(n)]
    return {"dims": tuple(reversed(order))}


def _dim_index(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape or not shape[p % len(shape)]:
        return None
    return {"dim": p % len(shape), "index": q % shape[p % len(shape)]}


def _start_step(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {"start": p % (shapes[0][-1] + 1), "step": 1 + q % 2} if shapes[0] else None


def _part(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape:
        return None
    dim = p % len(shape)
    start = q % (shape[dim] + 1)
    return {"dim": dim, "start": start, "length": (shape[dim] - start + 1) // 2 if q & 64 else shape[dim] - start}


def _larger(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape, more = shapes[0], 2 + q % 2
    ones = [i for i, size in enumerate(shape) if size == 1]
    if ones and p % 2 == 0:
        return {"shape": tuple(more if i == ones[q % len(ones)] else size for i, size in enumerate(shape))}
    return {"shape": (more, *shape)} if len(shape) < MOST_DIMS else None


def _a_gap(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    n = len(shapes[0])
    return {"dim": p % (n + 1)} if n < MOST_DIMS else None


def _any_dim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    ones = [i for i, size in enumerate(shape) if size == 1]
    if ones:
        return {"dim": ones[p % len(ones)]}
    return {"dim": p % len(shape)} if shape else None


def _offset(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {"offset": (0, 1, -1)[p % 3]} if len(shapes[0]) >= 2 else None


def _windows(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape or len(shape) >= MOST_DIMS or not shape[p % len(shape)]:
        return None
    dim = p % len(shape)
    return {"dim": dim, "size": 1 + q % shape[dim], "step": 1 + (q >> 6) % 2}


def _some_dims(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {} if len(shapes[0]) != 1 else None  # torch's flatten returns a 1-dim tensor itself


def _unfold(x: np.ndarray, dim: int, size: int, step: int) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis=dim)
    return windows[(slice(None),) * dim + (slice(None, None, step),)]


def _narrow(x: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
    return x[(slice(None),) * dim + (slice(start, start + length),)]


def _squeeze(x: np.ndarray, dim: int) -> np.ndarray:
    return x.squeeze(dim) if x.shape[dim] == 1 else x


VIEWS: tuple[Op, ...] = (
    _view("reshape", "{a}.reshape({shape})", lambda x, shape: x.reshape(shape), _new_shape, vjp=_same_elements),
    _view("flatten", "{a}.flatten()", lambda x: x.reshape(-1), _some_dims, vjp=_same_elements),
    _view("transpose", "{a}.transpose({dim0}, {dim1})", lambda x, dim0, dim1: x.swapaxes(dim0, dim1), _two_dims),
    _view("permute", "{a}.permute({dims})", lambda x, dims: x.transpose(dims), _order),
    _view("select", "{a}.select({dim}, {index})", lambda x, dim, index: np.take(x, index, axis=dim), _dim_index, hands_on=False),
    _view("slice", "{a}[..., {start}::{step}]", lambda x, start, step: x[..., start::step], _start_step),
    _view("narrow", "{a}.narrow({dim}, {start}, {length})", _narrow, _part, hands_on=False),
    _view("expand", "{a}.expand({shape})", lambda x, shape: np.broadcast_to(x, shape), _larger, hands_on=False),
    _view("unsqueeze", "{a}.unsqueeze({dim})", lambda x, dim: np.expand_dims(x, dim), _a_gap, vjp=_same_elements),
    _view("squeeze", "{a}.squeeze({dim})", _squeeze, _any_dim, vjp=_same_elements),
    _view("diagonal", "{a}.diagonal({offset})", lambda x, offset: np.diagonal(x, offset), _offset, hands_on=False),
    _view("unfold", "{a}.unfold({dim}, {size}, {step})", _unfold, _windows, hands_on=False),
)


# --- indexing -----------------------------------------------------------------------------------------------------


def _nest(flat: list[Any], shape: Shape) -> Any:
    if not shape:
        return flat[0]
    if len(shape) == 1:
        return tuple(flat)
    step = prod(shape[1:])
    return tuple(_nest(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))


def _drawn_indices(count: int, size: int, p: int, q: int) -> list[int]:
    return [(p + i * (2 * q + 1)) % size if q else p % size for i in range(count)]


def _gather_index(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape or not prod(shape):
        return None
    dim = p % len(shape)
    target = (*shape[:dim], 1 + q % 3, *shape[dim + 1 :])
    return {"dim": dim, "index": _nest(_drawn_indices(prod(target), shape[dim], p, q), target)}


def _some_of_a_dim(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape or not shape[p % len(shape)]:
        return None
    return {"dim": p % len(shape), "index": tuple(_drawn_indices(1 + q % 3, shape[p % len(shape)], p, q))}


def _some_rows(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    return {"index": tuple(_drawn_indices(1 + q % 3, shape[0], p, q))} if shape and shape[0] else None


def _some_elements(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    size = prod(shapes[0])
    return {"index": tuple(_drawn_indices(1 + q % 4, size, p, q))} if size else None


def _mask(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not prod(shape):
        return None
    bits = p | q << 8
    return {"mask": _nest([not bits >> (i % 16) & 1 for i in range(prod(shape))], shape)}


def _twofold(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    """Memory with a stride of 0, so that contiguous() has to copy; otherwise it returns the tensor itself."""
    shape = shapes[0]
    return {"shape": (2, *shape)} if prod(shape) and len(shape) < MOST_DIMS else None


def _bool(nested: Param, shape: Shape) -> np.ndarray:
    return np.array(nested, dtype=bool).reshape(shape)


def _gather(x: np.ndarray, dim: int, index: Any) -> np.ndarray:
    return np.take_along_axis(x, np.array(index, dtype=np.int64), axis=dim)


def _matrix(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {"diagonal": (0, 1, -1)[p % 3]} if len(shapes[0]) >= 2 else None


def _times(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    shape = shapes[0]
    if not shape:
        return None
    return {"sizes": tuple(2 if i == p % len(shape) else 1 for i in range(len(shape)))}


def _dim_of(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {"dim": p % len(shapes[0])} if shapes[0] else None


def _roll(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {"shift": 1 + q % 2, "dim": p % len(shapes[0])} if shapes[0] else None


def _edges(shapes: Shapes, p: int, q: int) -> dict[str, Param] | None:
    return {"left": p % 2, "right": 1 + q % 2} if shapes[0] else None


def _pad(x: np.ndarray, left: int, right: int) -> np.ndarray:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(left, right)])


def _padded(shapes: Shapes, left: int, right: int) -> Shapes:
    return ((*shapes[0][:-1], shapes[0][-1] + left + right),)


def _index(name: str, call: str, value: Callable[..., Any], params: Any, **rules: Any) -> Op:
    return position_map(name, call, value, "index", params, **rules)


_INDEX = "torch.tensor({index}, dtype=torch.int64, device={a}.device)"
_MASK = "torch.tensor({mask}, dtype=torch.bool, device={a}.device)"

INDEXING: tuple[Op, ...] = (
    _index("index", f"{{a}}[{_INDEX}]", lambda x, index: x[np.array(index, dtype=np.int64)], _some_rows),
    _index("index_select", f"{{a}}.index_select({{dim}}, {_INDEX})",
           lambda x, dim, index: np.take(x, np.array(index, dtype=np.int64), axis=dim), _some_of_a_dim),
    _index("gather", f"{{a}}.gather({{dim}}, {_INDEX})", _gather, _gather_index),
    _index("take", f"torch.take({{a}}, {_INDEX})", lambda x, index: x.reshape(-1)[np.array(index, dtype=np.int64)], _some_elements),
    _index("masked_select", f"{{a}}[{_MASK}]", lambda x, mask: x[_bool(mask, x.shape)], _mask),
    _index("contiguous", "{a}.expand({shape}).contiguous()", lambda x, shape: np.broadcast_to(x, shape), _twofold),
    _index("flip", "{a}.flip({dim})", lambda x, dim: np.flip(x, dim), _dim_of),
    _index("roll", "{a}.roll({shift}, {dim})", lambda x, shift, dim: np.roll(x, shift, dim), _roll),
    _index("repeat", "{a}.repeat({sizes})", lambda x, sizes: np.tile(x, sizes), _times),
    op("masked_fill", f"{{a}}.masked_fill({_MASK}, 0.5)", lambda x, mask: np.where(_bool(mask, x.shape), 0.5, x),
       lambda A, g, y, x, mask: A.where(_bool(mask, x.shape), 0.0, g), "index", params=_mask,
       bounds=lambda r, _: (min(r[0][0], 0.5), max(r[0][1], 0.5))),
    op("tril", "{a}.tril({diagonal})", lambda x, diagonal: np.tril(x, diagonal),
       lambda A, g, y, x, diagonal: A.where(np.tril(np.ones(x.shape), diagonal) > 0, g, 0.0), "index",
       params=_matrix, bounds=hull_with_zero),
    op("pad", "torch.nn.functional.pad({a}, ({left}, {right}))", _pad,
       lambda A, g, y, x, left, right: A.take(
           g, np.arange(prod(g.shape)).reshape(g.shape)[..., left : left + x.shape[-1]]),
       "index", shapes=_padded, params=_edges, bounds=hull_with_zero),
)
