"""What is done with a graph once it stands: passes with every argument, resets, flags flipped, graphs rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from autograd_conformance.ops import FLOATS, LIMIT, OPS
from autograd_conformance.program import (
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
    renamed,
    writes,
)
from autograd_conformance.strategies.graphs import MAYBE_VIEWS
from autograd_conformance.strategies.leaves import numbers
from autograd_conformance.strategies.payload import Pool, Sketch, Slot


@dataclass(slots=True)
class Draft:
    """A program under construction."""

    pool: Pool
    statements: list[Statement] = field(default_factory=list)
    rebuilt: int = 0


def add_closing(draft: Draft, slot: Slot, *, last: bool) -> None:
    """Append what a field describes; mostly a backward call."""
    kind = slot.kind
    if kind < 140:
        _backward(draft, slot, last=last)
    elif kind < 180:
        _grad(draft, slot, last=last)
    elif kind < 202:
        _set_grad(draft, slot)
    elif kind < 226:
        _set_requires_grad(draft, slot)
    elif kind < 242:
        _rebuild(draft, slot)
    else:
        _write(draft, slot)


def _root(pool: Pool, slot: Slot, reference: int) -> Sketch | None:
    if slot.flags >= 248:  # backward of what does not require grad is an error that is due
        stray = pool.pick(reference, lambda s: not s.tracked and s.dtype in FLOATS)
        if stray is not None:
            return stray
    if reference < 144:
        deep = max(pool.made, key=lambda s: s.depth if s.tracked else -1)
        if deep.tracked and not deep.leaf:
            return deep
    return pool.pick(reference, lambda s: s.tracked and not s.leaf) or pool.pick(reference, lambda s: s.tracked)


def _roots(pool: Pool, slot: Slot) -> list[Sketch]:
    """One root mostly; else two or three, now and then the same twice."""
    first = _root(pool, slot, slot.first)
    if first is None:
        return []
    more = (0, 0, 0, 0, 0, 0, 1, 2)[slot.more % 8]
    if (slot.more >> 3) % 8 == 7:
        return [first] * (1 + more)
    roots = [first]
    for i in range(more):
        found = pool.pick(112 + (slot.second + 53 * i) % 144, lambda s: s.tracked and not s.leaf and s not in roots)
        if found is not None:
            roots.append(found)
    return roots


def _seed(root: Sketch, slot: Slot, salt: int) -> Constant | None:
    size = prod(root.shape)
    if size == 1 and slot.q % 2 == 0:
        return None
    if size != 1 and 240 <= slot.flags < (244 if size else 256):
        return None  # an implicit seed for a non-scalar is an error that is due
    return Constant(root.shape, root.dtype, numbers(size, slot.q + salt if slot.q else 0))


def _retain(slot: Slot, *, last: bool, create_graph: bool, often: int) -> bool | None:
    """Retain mostly, so that there is something left for the next pass."""
    if create_graph and slot.flags % 4 == 1:
        return False
    if last:
        return True if slot.flags % 4 == 3 else None
    if slot.flags % 16 == 15:
        return False
    return None if slot.flags % 8 < often else True


def _backward(draft: Draft, slot: Slot, *, last: bool) -> None:
    roots = _roots(draft.pool, slot)
    if not roots:
        return
    small = max(-roots[0].low, roots[0].high) * prod(roots[0].shape) <= LIMIT
    if len(roots) == 1 and prod(roots[0].shape) != 1 and small and slot.flags % 4 == 2:
        roots = [_summed(draft, slot, roots[0])]
    inputs = None
    if slot.third >= 216:
        leaves = _several(draft.pool, slot, lambda s: s.tracked and (s.leaf or (last and slot.third >= 236)))
        inputs = tuple(s.name for s in leaves) or None
    create_graph = slot.second >= 236
    draft.statements.append(
        Backward(
            tuple(r.name for r in roots),
            tuple(_seed(r, slot, i) for i, r in enumerate(roots)),
            _retain(slot, last=last, create_graph=create_graph, often=1),
            create_graph,
            inputs,
        )
    )


def _summed(draft: Draft, slot: Slot, root: Sketch) -> Sketch:
    """``root.sum()``: the loss that most people call backward on, and whose gradient is an expanded number."""
    draft.rebuilt += 1
    total = Sketch(f"s{draft.rebuilt}", slot.key, (), root.dtype, root.low, root.high, root.tracked, op="sum")
    total.depth = root.depth + 1
    draft.statements.append(Apply((total.name,), "sum", (root.name,)))
    draft.pool.add(total)
    return total


def _several(pool: Pool, slot: Slot, fits: Callable[[Sketch], bool]) -> list[Sketch]:
    chosen: list[Sketch] = []
    for i in range(1 + slot.p % 3):
        found = pool.pick(96 + (slot.second + 67 * i) % 160, lambda s: fits(s) and s not in chosen)
        if found is not None:
            chosen.append(found)
    return chosen


def _grad(draft: Draft, slot: Slot, *, last: bool) -> None:
    roots = _roots(draft.pool, slot)
    if not roots:
        return
    stray, create_graph = slot.third >= 240, 20 <= slot.third < 40
    inputs = _several(draft.pool, slot, lambda s: s.dtype in FLOATS and (s.tracked or stray))
    if not inputs:
        return
    forgiving = slot.third % 4
    draft.statements.append(
        Grad(
            tuple(r.name for r in roots),
            tuple(s.name for s in (inputs if slot.q % 16 != 15 else [*inputs, inputs[0]])),
            tuple(_seed(r, slot, i) for i, r in enumerate(roots)),
            _retain(slot, last=last, create_graph=create_graph, often=3),
            create_graph,
            allow_unused=forgiving in (1, 2),
            materialize_grads=forgiving == 3,
        )
    )


def _set_grad(draft: Draft, slot: Slot) -> None:
    t = draft.pool.pick(96 + slot.first % 160, lambda s: s.leaf and s.tracked)
    if t is None:
        return
    if slot.p % 16 == 15:  # an integer dtype is refused if the leaf requires grad
        dtype = "int64" if slot.q % 4 == 3 else t.dtype
        draft.statements.append(SetData(t.name, Constant(t.shape, dtype, numbers(prod(t.shape), 0))))
        return
    how = ("none", "none", "zero", "assign")[slot.p % 4]
    value = Constant(t.shape, t.dtype, numbers(prod(t.shape), slot.q)) if how == "assign" else None
    draft.statements.append(SetGrad(t.name, how, value))  # type: ignore[arg-type]


def _set_requires_grad(draft: Draft, slot: Slot) -> None:
    attribute = slot.q % 2 == 1
    if slot.p % 3 == 0:  # refused: only leaves can be switched
        t = draft.pool.pick(slot.first, lambda s: s.tracked and not s.leaf)
        if t is not None:
            draft.statements.append(SetRequiresGrad(t.name, False, attribute))
        return
    on = slot.p % 3 == 1
    t = draft.pool.pick(96 + slot.first % 160, lambda s: _can_be_switched(draft, s, on=on))
    if t is None:
        return
    t.tracked = on
    draft.statements.append(SetRequiresGrad(t.name, on, attribute))


def _can_be_switched(draft: Draft, t: Sketch, *, on: bool) -> bool:
    """A leaf that is in use; to be switched on it must have no views.

    A view taken before its base is switched on says that it requires grad, and nobody promises what that means.
    """
    if not (t.leaf and t.uses and t.dtype in FLOATS and not t.view):
        return False
    if t.tracked is on:
        return on and t.key % 4 == 0  # switched on twice is switched on
    return not on or not any(
        isinstance(s, Apply) and t.name in s.args and OPS[s.op].kind in ("view", "several") for s in draft.statements
    )


def _rebuild(draft: Draft, slot: Slot) -> None:
    """Run the ops that lead to a root once more, under new names."""
    root = draft.pool.pick(slot.first, lambda s: s.tracked and not s.leaf)
    if root is None:
        return
    draft.rebuilt += 1
    made_by = {name: s for s in draft.statements if isinstance(s, Apply) for name in writes(s)}
    cut = {s.arg for s in draft.statements if isinstance(s, DetachInPlace)}
    wanted: set[str] = set()
    pending = [root.name]
    while pending:
        name = pending.pop()
        if name in made_by and name not in wanted and (name not in cut or name == root.name):
            wanted.update(made_by[name].outs)
            pending.extend(made_by[name].args)
    again = [s for s in draft.statements if isinstance(s, Apply) and s.outs[0] in wanted]
    names = {name: f"{name}_r{draft.rebuilt}" for s in again for name in s.outs}
    draft.statements.extend(renamed(s, names) for s in again)
    fresh = Sketch(names[root.name], root.key, root.shape, root.dtype, root.low, root.high, root.tracked, op=root.op)
    draft.pool.add(fresh)


def _write(draft: Draft, slot: Slot) -> None:
    """Write to a tensor that is in use through a detached alias, behind the back of autograd."""
    t = draft.pool.pick(112 + slot.first % 144, lambda s: _can_be_written(draft, s))
    if t is None:
        return
    t.writable = False
    draft.rebuilt += 1
    alias = f"w{draft.rebuilt}"
    draft.statements += [Rewrap(alias, t.name, "data" if slot.p % 4 == 3 else "detach"), Write(alias)]


def _can_be_written(draft: Draft, t: Sketch) -> bool:
    """In use, in memory of its own, and without results that are views or copies of it as memory allows."""
    if not (t.writable and t.uses > 0 and t.dtype in FLOATS and not t.view):
        return False
    family = {t.name}
    for s in draft.statements:
        if isinstance(s, Apply) and OPS[s.op].kind in ("view", "several") and s.args[0] in family:
            if s.op in MAYBE_VIEWS:
                return False
            family.update(s.outs)
    return True
