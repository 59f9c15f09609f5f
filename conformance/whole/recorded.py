"""Statements that make tensors: ops, views, custom Functions, checkpoints, detached tensors. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autograd_conformance.algebra import Traced, next_order, traced_op
from autograd_conformance.ops import ADDED, OPS, Op
from autograd_conformance.program import Apply
from autograd_conformance.reverse import outputs
from autograd_conformance.whole.state import Node, Tensor
from autograd_conformance.whole.tell import LARGEST, Author, Dials, Skip, mode_of, usable

# Ops whose result hangs on ties or on where the memory lies; those that do nothing to a copy; and int results.
_EXCLUDED = {"maximum", "minimum", "amax", "amin", "norm", "where", "max_dim", "min_dim", "sort", "reshape", "flatten",
             "contiguous", "pow", "atan2", "var", "var_mean", "masked_select", "prod_dim"}  # fmt: skip
SPLITS = ("unbind", "split", "chunk")
OVERLAPPING = ("expand", "unfold")
_TABLE: dict[str, tuple[Op, ...]] = {
    kind: tuple(op for op in OPS.values() if op.kind == kind and op.name not in _EXCLUDED)
    for kind in ("smooth", "binary", "view", "reduction", "contraction", "join", "several", "index")
}
_ORDER = (
    "smooth",
    "binary",
    "binary",
    "view",
    "view",
    "binary",
    "smooth",
    "reduction",
    "join",
    "several",
    "contraction",
    "index",
)
_A_VIEW = -(-256 * _ORDER.index("view") // len(_ORDER))  # the byte that picks one


def apply(author: Author, d: Dials) -> None:
    """An op of the table."""
    op = _chosen(d)
    tensors = _operands(author, op, d)
    params = op.params([t.shape for t in tensors], d.p, d.r)
    if params is None or not usable(op, tensors):
        raise Skip
    head, recording = mode_of(author, d)
    view = op.kind == "view" or op.name in SPLITS
    if view and (not recording or (tensors[0].cut and tensors[0].requires_grad) or _watched(tensors[0])):
        raise Skip  # views under no_grad: docs/not-promised.md
    tracked = recording and any(t.requires_grad for t in tensors)
    shapes = op.shapes([t.shape for t in tensors], **params)
    names = [author.name("t") for _ in shapes]
    bound = f"{names[0]}," if op.kind == "several" and len(names) == 1 else ", ".join(names)
    call = f"{bound} = {op.source([t.name for t in tensors], params)}"
    if view:
        made = _make_views(author, d, op, tensors[0], params, names)
    else:
        made = _make_results(author, d, op, tensors, params, names, tracked)
    told = author.say(call, "view" if view else "op", head)
    if not (head or view):
        author.read.append((told, [(t.name, t.memory, t.memory.version) for t in tensors]))
    author.whole.features.update([f"op {op.name}"] if op in ADDED else [])
    told.claim = "requires-grad.propagates-any" if tracked else "requires-grad.propagates-none"
    if not recording and any(t.requires_grad for t in tensors):
        told.claim = "no-grad.outputs"
    for t in made:
        author.shows(told, t, "requires-grad.value-independent", f"the value of {op.name}")


def look(author: Author, d: Dials) -> None:
    """A view."""
    apply(author, d._replace(x=_A_VIEW))


def _chosen(d: Dials) -> Op:
    """An op of the table; every third is one that users add, if there are any."""
    smooth = [op for op in ADDED if op.kind != "kinked"]
    if smooth and (d.x + d.q) % 3 == 0:
        return smooth[d.q // 3 % len(smooth)]
    table = _TABLE[_ORDER[d.x * len(_ORDER) // 256]]
    return table[d.q % len(table)]


def _watched(t: Tensor) -> bool:
    return t.base is not None and (bool(t.hooks) or t.retains)


def _operands(author: Author, op: Op, d: Dials) -> list[Tensor]:
    wanted = op.arity if op.arity > 0 else 2
    chosen: list[Tensor] = []
    for reference in (d.y, d.z, d.flags)[:wanted]:
        shapes = [t.shape for t in chosen]
        chosen.append(author.pick(reference, lambda t, shapes=shapes: op.fits(shapes, t.shape)))  # type: ignore[misc]
    return chosen


def _make_views(
    author: Author, d: Dials, op: Op, source: Tensor, params: dict[str, Any], names: Sequence[str]
) -> list[Tensor]:
    result = op.value(source.positions, **params)
    parts = result if isinstance(result, tuple) else (result,)
    source.viewed = True
    # of a leaf that is itself a view, a view loses its gradient by a write: docs/findings.md
    source.memory.split = source.memory.split or op.name in SPLITS or source.memory.hidden
    writable = op.name not in (*SPLITS, *OVERLAPPING)
    made = []
    first = next_order()
    for i, (name, positions) in enumerate(zip(names, parts, strict=True)):
        whole = np.asarray(positions, dtype=np.int64)
        made.append(author.state.view(name, (d.key + 31 * i) % 256, source, whole, writable=writable))
        author.state.read(made[-1])
        made[-1].sibling = op.name in SPLITS
    noted(author, first, next_order(), [source], made, [], source.requires_grad)
    return made


def _make_results(
    author: Author,
    d: Dials,
    op: Op,
    tensors: Sequence[Tensor],
    params: dict[str, Any],
    names: Sequence[str],
    tracked: bool,
) -> list[Tensor]:
    statement = Apply(tuple(names), op.name, tuple(t.name for t in tensors), tuple(params.items()), no_grad=not tracked)
    parents = [author.state.read(t) for t in tensors]
    first = next_order()
    values = outputs(statement, parents)
    if any(value.size > 64 or np.max(np.abs(value.value), initial=0.0) > LARGEST for value in values):
        raise Skip
    last = next_order()
    made = [
        author.state.result(name, (d.key + 31 * i) % 256, value, author.dtype, tracked=tracked)
        for i, (name, value) in enumerate(zip(names, values, strict=True))
    ]
    packs = author.packs(f"out = {op.source([f'x{i}' for i in range(len(tensors))], params)}", tensors)
    node = noted(author, first, last, tensors, made, packs, tracked)
    if node is not None:
        node.vague = not op.reads_saved
    for t in made:
        t.sibling = len(made) > 1
    return made


def noted(
    author: Author,
    first: int,
    last: int,
    tensors: Sequence[Tensor],
    made: Sequence[Tensor],
    packs: Sequence[str],
    tracked: bool,
) -> Node | None:
    """Note a statement with its operands, its results and what it saves; if it is recorded, as a node."""
    for t in tensors:
        t.memory.used = True
    if not tracked:
        return None
    slots = {f"in{i}": t.memory for i, t in enumerate(tensors)} | {f"out{i}": t.memory for i, t in enumerate(made)}
    touched = [t.memory for t in (*tensors, *made)]
    packed = [slots[name] for name in packs if name in slots]
    return author.state.record(len(author.whole.lines), first, last, touched, packed)


# What a checkpoint runs and on what, the same without a checkpoint, and the same on paper.
_REGIONS: tuple[tuple[str, str, Callable[..., Traced]], ...] = (
    ("torch.sin, {x}", "{x}.sin()", lambda x: traced_op("sin", x)),
    ("torch.tanh, {x}", "{x}.tanh()", lambda x: traced_op("tanh", x)),
    ("lambda u: (u * 2.0).mul_(u), {x}", "{x} * 2.0 * {x}", lambda x: x * 2.0 * x),
    (
        "lambda u: checkpoint(torch.sin, u * 2.0, use_reentrant=False), {x}",
        "({x} * 2.0).sin()",
        lambda x: traced_op("sin", x * 2.0),
    ),
    ("lambda u, v: (u * v).tanh(), {x}, {y}", "({x} * {y}).tanh()", lambda x, y: traced_op("tanh", x * y)),
    ("lambda u, v: u * v + u, {x}, {y}", "{x} * {y} + {x}", lambda x, y: x * y + x),
    ("lambda u, v={y}: u.sin() * v, {x}", "{x}.sin() * {y}", lambda x, y: traced_op("sin", x) * y),
)


def checkpointed(author: Author, d: Dials) -> None:
    """A few ops in a checkpoint."""
    text, bare, region = _REGIONS[d.q % len(_REGIONS)]
    x = _perhaps_watched(author, d)
    operands = [x, *([author.pick(d.z, lambda t: t.shape == x.shape)] if "{y}" in text else [])]
    parents = [author.state.read(t) for t in operands]
    first = next_order()
    value = region(*parents)
    last = next_order()
    if np.max(np.abs(value.value), initial=0.0) > LARGEST:
        raise Skip
    if author.counts.get("checkpoint", 0) == 0:
        author.name("checkpoint")
        author.say("from torch.utils.checkpoint import checkpoint", "import")
    tracked = author.state.recording and any(t.requires_grad for t in operands)
    made = author.state.result(author.name("t"), d.key, value, author.dtype, tracked=tracked)
    node = noted(author, first, last, operands, [made], [], tracked)
    if node is not None:
        node.vague = True
    run = text.format(x=x.name, y=operands[-1].name)
    told = author.say(f"{made.name} = checkpoint({run}, use_reentrant=False)", "checkpoint")
    told.claim, told.bare = "checkpoint.same-gradients", f"{made.name} = {bare.format(x=x.name, y=operands[-1].name)}"
    author.shows(told, made, "checkpoint.same-gradients", "the value of the region")


def _perhaps_watched(author: Author, d: Dials) -> Tensor:
    """A tensor with hooks if there is one, half of the time."""
    try:
        return author.pick(d.y, lambda t: d.p % 2 == 0 or bool(t.hooks))
    except Skip:
        return author.pick(d.y, lambda _: True)


def detach(author: Author, d: Dials) -> None:
    """A detached alias, or a detached copy."""
    x = author.pick(d.y, lambda t: t.size > 0)
    name = author.name("d")
    if d.q % 4 == 3:
        author.state.result(name, d.key, Traced(x.values), author.dtype, tracked=False)
        told = author.say(f"{name} = {x.name}.detach().clone()", "detach")
    else:
        author.state.alias(name, d.key, x)
        told = author.say(f"{name} = {x.name}.detach()", "detach")
        told.shares = (name, x.name)
    told.claim = "detach.never-requires-grad"
    author.shows(told, author.state.live[name], "detach.storage-shared", "detach keeps the value")
