"""Leaves: shapes, numbers, memory layouts, and the flag."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from autograd_conformance.program import Constant, Layout, Leaf, Shape
from autograd_conformance.strategies.payload import Pool, Sketch, Slot

SIZES = (1, 2, 3, 2, 3, 4, 2, 5)
_LAYOUTS: tuple[Layout, ...] = (
    "contiguous", "contiguous", "contiguous", "contiguous", "permuted", "strided", "offset", "expanded",
)  # fmt: skip


def base_shape(slot: Slot) -> Shape:
    """The shape that the leaves of a program are variations of: 0 to 4 dimensions."""
    rank = (0, 1, 2, 2, 1, 3, 2, 3, 1, 2, 4, 0, 2, 1, 3, 2)[slot.more % 16]
    sizes = [SIZES[byte % 8] for byte in (slot.first, slot.second, slot.third, slot.p)][:rank]
    if rank and slot.q >= 246:
        sizes[slot.q % rank] = 0
    return tuple(sizes)


def varied(base: Shape, how: int, which: int) -> Shape:
    """The base shape, or a partner of it: a size 1, a dimension less, 0-dim, transposed, a contraction partner."""
    rank = len(base)
    if how < 104 or not rank:
        return () if 88 <= how < 104 else base
    i = which % rank
    if how < 136:
        return (*base[:i], 1, *base[i + 1 :])
    if how < 160:
        return base[1:]
    if how < 184:
        return (*base[:-2], *reversed(base[-2:]))
    if how < 200:
        return (*base[:-2], base[-1], SIZES[which % 8])
    if how < 216:
        return base[-1:]
    if how < 232:
        return tuple(1 for _ in base)
    return (*base[:-1], SIZES[which % 8])


@lru_cache(maxsize=8192)
def numbers(size: int, seed: int, *, positive: bool = False) -> tuple[float, ...]:
    """``size`` odd sixteenths between -2 and 2 (or 0.3 and 2.2), all different up to 32; all 1 for seed 0."""
    if seed == 0:
        return (1.0,) * size
    step = 2 * (seed % 16) + 1
    if positive:
        return tuple((2 * ((seed + i * step) % 16) + 5) / 16 for i in range(size))
    return tuple((2 * ((seed + i * step) % 32) - 31) / 16 for i in range(size))


def leaf(slot: Slot, base: Shape, name: str) -> tuple[Leaf, Sketch]:
    """The leaf that a field describes, and its sketch. Zero bytes: a contiguous float64 tensor of ones that requires grad."""
    shape = varied(base, slot.first, slot.second)
    positive = slot.flags & 12 == 4
    dtype = "float32" if slot.flags & 48 == 16 else "float64"
    layout = _LAYOUTS[slot.p % 8] if shape else "contiguous"
    values = numbers(prod(shape), slot.q, positive=positive)
    if layout == "expanded":
        values = values[: prod(shape[1:])] * shape[0]
    requires_grad = slot.flags & 3 != 3 and slot.kind != 1
    made = Leaf(name, Constant(shape, dtype, values), requires_grad, layout)
    low, high = (0.3, 2.2) if positive or slot.q == 0 else (-2.0, 2.0)
    sketch = Sketch(name, slot.key, shape, dtype, low, high, requires_grad, leaf=True)
    sketch.writable = layout != "expanded"
    sketch.tied = prod(shape) > 1 and (layout == "expanded" or slot.q == 0)
    return made, sketch


def add_leaf(pool: Pool, slot: Slot, base: Shape, name: str) -> Leaf:
    """Decode a leaf and put it into the pool."""
    made, sketch = leaf(slot, base, name)
    pool.add(sketch)
    return made
