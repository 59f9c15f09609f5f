"""Statements that change tensors in place, and steps of an optimizer, which do so too. No torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autograd_conformance.algebra import Traced, next_order, spread, taken, traced_op
from autograd_conformance.whole.state import UNKNOWN, Tensor
from autograd_conformance.whole.tell import LARGEST, Author, Dials, Skip, mode_of

Edit = Callable[[Traced, Traced], Traced]
_WRITES: tuple[tuple[str, str, Edit], ...] = (
    ("mul_", "{x}.mul_(2.0)", lambda x, _: x * 2.0),
    ("mul_ tensor", "{x}.mul_({y})", lambda x, y: x * y),
    ("add_ tensor", "{x}.add_({y})", lambda x, y: x + y),
    ("add_ alpha", "{x}.add_({y}, alpha=-0.5)", lambda x, y: x + y * -0.5),
    ("augmented", "{x} += {y}", lambda x, y: x + y),
    ("copy_", "{x}.copy_({y})", lambda x, y: x * 0.0 + y),
    ("zero_", "{x}.zero_()", lambda x, _: x * 0.0),
    ("fill_", "{x}.fill_(1.5)", lambda x, _: x * 0.0 + 1.5),
    ("sin_", "{x}.sin_()", lambda x, _: traced_op("sin", x)),
    ("neg_", "{x}.neg_()", lambda x, _: -x),
    ("index", "{x}[0] = {y}", lambda x, y: y),
    ("index number", "{x}[0] = 0.5", lambda x, y: y),
    ("sub_", "{x}.sub_({y})", lambda x, y: x - y),
    ("tanh_", "{x}.tanh_()", lambda x, _: traced_op("tanh", x)),
)


def write(author: Author, d: Dials) -> None:
    """An in-place op."""
    what, text, edit = _WRITES[d.x * len(_WRITES) // 256]
    x = _target(author, d)
    binary = "{y}" in text
    if what.startswith("index") and not (x.shape and x.shape[0]):
        raise Skip
    shape = x.shape[1:] if what.startswith("index") else x.shape
    y = author.pick(d.z, lambda t: t.memory is not x.memory and _fills(t.shape, shape)) if binary else None
    head, recording = mode_of(author, d)
    if not recording and head and d.p % 3 == 2:
        head, recording = "with torch.inference_mode():", False
    source = text.format(x=x.name, y=y.name if y else "")
    owner = x.base or x
    if recording and owner.requires_grad and owner.leaf and not x.cut:
        because = f"{x.name} is {'a view of ' + owner.name + ', ' if x.base else ''}a leaf that requires grad"
        author.refused(source, "write", "inplace.leaf-error", because, head)
        return
    tracked = recording and (x.requires_grad or (y is not None and y.requires_grad))
    if not _can_write(x, owner, tracked):
        raise Skip
    _write(author, x, y, (what, text, edit), head, tracked=tracked)


def _target(author: Author, d: Dials) -> Tensor:
    """A view if there is one, half of the time."""

    def fits(t: Tensor) -> bool:
        return t.writable and t.size > 0 and not (t.memory.hooked or t.memory.split)

    try:
        return author.pick(d.y, lambda t: fits(t) and (d.r % 2 == 0 or (t.base is not None and not t.cut)))
    except Skip:
        return author.pick(d.y, fits)


def _fills(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _can_write(x: Tensor, owner: Tensor, tracked: bool) -> bool:
    """Is it promised what becomes of the history?"""
    if x.cut:
        return not tracked and (owner.leaf or not owner.requires_grad) and not x.requires_grad
    return tracked or owner.leaf


def _write(
    author: Author, x: Tensor, y: Tensor | None, how: tuple[str, str, Edit], head: str, *, tracked: bool
) -> None:
    what, text, edit = how
    source = text.format(x=x.name, y=y.name if y else "")
    state = author.state
    old = state.read(x)
    operand = state.read(y) if y is not None else Traced(np.array(0.5))
    first = next_order()
    positions = x.positions[0] if what.startswith("index") else x.positions
    row = np.arange(positions.size).reshape(positions.shape)  # the first of x
    before = taken(old, row) if what.startswith("index") else old
    new = edit(before, spread(operand, positions.shape))
    if np.max(np.abs(new.value), initial=0.0) > LARGEST:
        raise Skip
    on_view = x.base is not None or what.startswith("index")
    tensors = [x, *([y] if y else [])]
    packs = () if on_view else author.packs(text.format(x="x0", y="x1"), tensors)
    target = Tensor("", 0, x.memory, positions, x.dtype, x.requires_grad, x.leaf, base=x.base, cut=x.cut)
    state.write(target, new if tracked else Traced(new.value), tracked=tracked, part=what.startswith("index"))
    for t in tensors:
        t.memory.used = True
    if tracked:
        slots = {f"in{i}": t.memory for i, t in enumerate(tensors)}
        touched = [t.memory for t in tensors]
        node = state.record(
            len(author.whole.lines), first, next_order(), touched, [slots[p] for p in packs if p in slots]
        )
        node.vague = on_view
    told = author.say(source, "write", head)
    told.claim = "inplace.out-of-place-equivalence"
    told.features = ("write on a view",) if on_view and tracked else ()
    author.whole.features.update(told.features)
    told.wrote = tuple(t.name for t in state.aliases(x.memory))
    claim = "inplace.view-rebase" if on_view or x.viewed else "inplace.out-of-place-equivalence"
    for t in state.aliases(x.memory):
        author.shows(told, t, claim, f"{t.name} shares the memory that was written")


def step(author: Author, d: Dials) -> None:
    """A step of SGD over all leaves, or all but one."""
    owned = [
        t
        for t in author.state.live.values()
        if t.leaf and t.requires_grad and t.base is None and not t.cut and t.grad is not UNKNOWN
    ]
    if d.q % 3 == 2 and len(owned) > 1:
        owned.pop(d.x % len(owned))
    if not owned:
        raise Skip
    names = ", ".join(t.name for t in owned)
    moved = [t for t in owned if t.grad is not None]
    if any(t.memory.split or t.memory.hooked for t in moved):
        raise Skip
    for t in moved:
        new = t.values - 0.25 * t.grad
        if np.max(np.abs(new), initial=0.0) > LARGEST:
            raise Skip
    for t in moved:
        author.state.write(t, Traced(t.values - 0.25 * t.grad), tracked=False)
    told = author.say(f"torch.optim.SGD([{names}], lr=0.25, foreach=False).step()", "step")
    told.claim = "optim.step-untracked"
    told.wrote = tuple(o.name for t in moved for o in author.state.aliases(t.memory))
    for t in owned:
        author.shows(told, t, "optim.sgd-formula", "lr times .grad is subtracted")
