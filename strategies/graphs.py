"""Graphs: ops over a pool of tensors, with reuse, dead branches, detach and no_grad inside. Nothing is rejected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from autograd_conformance.ops import ADDED, FLOATS, LIMIT, MOST_DIMS, OPS, TABLE, Op
from autograd_conformance.program import Apply, DetachInPlace, Rewrap, SetRequiresGrad, Shape, Statement
from autograd_conformance.strategies.payload import Pool, Sketch, Slot

MOST_ELEMENTS = 128
# Ops that make equal elements or exact zeros, and ops that choose between elements or have a kink at zero: what a choice
# between equals gives as a gradient, nobody promises, so the second kind is not applied to what the first has made.
_TYING = {"expand", "contiguous", "repeat", "gather", "index", "index_select", "take", "tril", "pad", "masked_fill", "relu", "clamp",
          "unfold", "to_int64", "var", "var_mean"}  # fmt: skip
_CHOOSING = {"amax", "amin", "max_dim", "min_dim", "sort", "relu", "abs", "leaky_relu", "clamp"}
_ALL = (*FLOATS, "int64", "bool")
MAYBE_VIEWS = ("reshape", "flatten")  # a view or a copy, as memory allows
TRIES = 12

_GROUPS: tuple[tuple[str, ...], ...] = (
    ("binary", "smooth", "view", "reduction", "contraction", "join", "several", "index", "kinked", "constant", "cast"),
    ("binary", "smooth", "view", "reduction", "contraction", "join", "several", "index", "kinked", "constant", "cast"),
    ("binary", "view", "join", "reduction"),
    ("binary", "smooth", "reduction", "contraction"),
    ("view", "several", "index", "join", "binary"),
    ("smooth", "kinked", "binary", "several", "cast"),
    ("binary", "reduction", "contraction", "view", "kinked"),
    ("join", "several", "constant", "cast", "binary", "smooth"),
)
_REWRAPS = (
    "detach", "detach", "detach", "data", "reattach", "reattach", "copy", "tensor", "tensor_tracked", "new_tensor", "parameter", "same",
)  # fmt: skip
# Ops that are picked more often than their even share, for what they have found.
_WEIGHT = {"add": 3, "mul": 3, "stack": 2, "where": 4, "to_float32": 2, "to_float64": 3, "positive": 1, "gt": 1, "bmm": 5,
           "mv": 2, "dot": 3, "mm": 3, "prod_dim": 6, "pow": 2, "atan2": 1, "log": 2, "sqrt": 2, "rsqrt": 2, "norm": 3, "reciprocal": 2, "gather": 2, "var": 2, "index_select": 2, "tril": 2, "permute": 2, "transpose": 2}  # fmt: skip


def choices(group: int) -> tuple[Op, ...]:
    """The ops of a swarm group, each as often as its weight; simplest first.

    What users add is in every group, and is every third op.
    """
    ops = _choices(group)
    if not ADDED:
        return ops
    return ops + tuple(ADDED) * max(1, len(ops) // (2 * len(ADDED)))


@lru_cache(maxsize=8)
def _choices(group: int) -> tuple[Op, ...]:
    kinds = _GROUPS[group]
    return tuple(op for op in TABLE if op.kind in kinds for _ in range(_WEIGHT.get(op.name, 1)))


def names_of(slot_name: str, count: int) -> tuple[str, ...]:
    """Names for the outputs of an op."""
    return (slot_name,) if count == 1 else tuple(f"{slot_name}_{i}" for i in range(count))


def add_op(pool: Pool, slot: Slot, group: int, name: str) -> list[Statement]:
    """The statements that a field describes: an op, or rarely a detach, and what belongs to it."""
    if slot.flags >= 240:
        return _cut(pool, slot, name)
    table = choices(group)
    at = ((slot.kind - 1) * 256 + slot.more) * len(table) // (255 * 256)
    last = None
    for _ in range(TRIES):
        op = table[at % len(table)]
        at += 1 + slot.third
        if op is last:
            continue
        last = op
        made = _try_op(pool, slot, op, name)
        if made is not None:
            return [made]
    return []


def _cut(pool: Pool, slot: Slot, name: str) -> list[Statement]:
    """A detach in one of its forms, detach_, or a flag that is switched on."""
    if slot.flags >= 252:
        views = slot.flags == 255  # detach_ is refused on a view
        t = pool.pick(slot.first, _is_view if views else _can_be_detached)
        if t is None:
            return []
        if not views:
            t.tracked, t.leaf = False, True
        return [DetachInPlace(t.name)]
    if slot.flags >= 250:
        t = pool.pick(
            slot.first, lambda s: not s.tracked and bool(s.op) and not (s.view or s.uses) and s.dtype in FLOATS
        )
        if t is not None:
            t.tracked = t.leaf = True
            return [SetRequiresGrad(t.name, True, attribute=slot.q % 4 == 3)]
    t = pool.pick(slot.first, lambda s: s.dtype in FLOATS)
    if t is None:
        return []
    how = _REWRAPS[slot.p % len(_REWRAPS)]
    tracked = how in ("reattach", "tensor_tracked", "parameter")
    t.uses += 1
    made: list[Statement] = [Rewrap(name, t.name, how)]
    if how == "same":
        return made
    sketch = Sketch(name, slot.key, t.shape, t.dtype, t.low, t.high, tracked, leaf=True, view=True, op=how)
    sketch.writable = t.writable and how in ("detach", "data") and not t.view
    sketch.tied = t.tied
    if how in ("copy", "tensor", "new_tensor") and slot.q % 2:
        made.append(SetRequiresGrad(name, True, attribute=slot.q % 4 == 3))
        sketch.tracked = True
    pool.add(sketch)
    return made


def _is_view(s: Sketch) -> bool:
    return s.view and s.op in OPS and s.op not in MAYBE_VIEWS


def _can_be_detached(s: Sketch) -> bool:
    return s.tracked and not (s.leaf or s.view)


_FIRST: dict[str, tuple[str, ...]] = {"float": FLOATS, "bool": ("bool",), "any": _ALL}


def _operands(pool: Pool, slot: Slot, op: Op) -> list[Sketch] | None:
    """Operands that fit, or None; the dtypes of the first are those that the op takes."""
    references = (slot.first, slot.second, slot.third)
    dtypes = _FIRST[op.takes]
    chosen: list[Sketch] = []
    shapes: list[Shape] = []
    for reference in references[: op.arity if op.arity > 0 else 2 + slot.third % 2]:
        for found in pool.candidates(reference):
            if found.dtype in dtypes and op.fits(shapes, found.shape):
                break
        else:
            return None
        chosen.append(found)
        shapes.append(found.shape)
        dtypes = (chosen[0].dtype,) if op.same_dtype else FLOATS
    return chosen


def _try_op(pool: Pool, slot: Slot, op: Op, name: str) -> Apply | None:
    operands = _operands(pool, slot, op)
    if operands is None:
        return None
    if op.kind == "cast" and operands[0].dtype == op.name[3:]:
        return None  # a cast to the dtype that it has returns the tensor itself
    ranges = [(s.low, s.high) for s in operands]
    shapes = [s.shape for s in operands]
    chooses = op.name in _CHOOSING or op.kind == "kinked"
    if not op.domain(ranges) or (chooses and any(s.tied for s in operands)):
        return None
    params = op.params(shapes, slot.p, slot.q)
    if params is None:
        return None
    outs = op.shapes(shapes, **params)
    for out in outs:
        if prod(out) > MOST_ELEMENTS or len(out) > MOST_DIMS:
            return None
    low, high = op.bounds(ranges, prod(shapes[0]))
    if max(-low, high) > LIMIT:
        return None
    no_grad = 232 <= slot.flags < 240 and op.kind not in ("view", "several")
    made = Apply(names_of(name, len(outs)), op.name, tuple([s.name for s in operands]), tuple(params.items()), no_grad)
    _sketch_outputs(pool, slot, op, operands, outs, made, (low, high))
    return made


def _sketch_outputs(
    pool: Pool,
    slot: Slot,
    op: Op,
    operands: Sequence[Sketch],
    outs: Sequence[tuple[int, ...]],
    made: Apply,
    bounds: tuple[float, float],
) -> None:
    dtypes = op.dtypes([(s.dtype, s.shape) for s in operands])
    if isinstance(dtypes, str):
        dtypes = (dtypes,) * len(outs)
    view = op.kind == "view" or op.name in ("unbind", "split", "chunk")
    fresh = op.kind not in ("view", "several", "cast")
    tied = _ties(op, operands)
    tracked, depth = False, 0
    for s in operands:
        s.uses += 1
        tracked = tracked or s.tracked
        depth = max(depth, s.depth)
    tracked = tracked and not made.no_grad and op.vjp is not None
    low, high = bounds
    for i, (out, shape, dtype) in enumerate(zip(made.outs, outs, dtypes, strict=True)):
        floating = dtype in FLOATS
        recorded, key = tracked and floating, (slot.key + 31 * i) % 256
        sketch = Sketch(out, key, shape, dtype, low, high, recorded, not recorded, view)
        sketch.writable, sketch.tied, sketch.op = fresh and floating, tied, op.name
        sketch.depth = depth + 1 if recorded else 0
        pool.add(sketch)


def _ties(op: Op, operands: Sequence[Sketch]) -> bool:
    """May the op give equal elements or zeros, or hand them on?"""
    if op.name in _TYING or True in [s.tied for s in operands]:
        return True
    if len(operands) == 1:
        return False
    if op.kind in ("join", "contraction") and len(set(map(id, operands))) < len(operands):
        return True
    return len({s.shape for s in operands}) > 1
