"""Custom Functions beside their twins on paper: one for each thing that ctx offers. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograd_conformance.algebra import Traced, next_order, traced_op
from autograd_conformance.whole.recorded import noted
from autograd_conformance.whole.state import Hook, Node, Tensor
from autograd_conformance.whole.tell import LARGEST, Author, Dials, Skip, mode_of, within
from autograd_conformance.whole.words import Plainly

PRODUCT = """class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y if ctx.needs_input_grad[0] else None, g * x if ctx.needs_input_grad[1] else None"""

HALVES = """class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, log):
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        ctx.log = log
        return x * y, x - y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        ctx.log.append((g is None, h is None))
        g = torch.zeros_like(x) if g is None else g
        h = torch.zeros_like(x) if h is None else h
        return g * y + h, g * x - h, None"""

MARKED = """class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        y, positive = x.sin(), (x > 0.0).to(x.dtype)
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(x)
        ctx.log = log
        return y, positive

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        ctx.log.append((g is None, h is None))
        return (g + h) * x.cos(), None"""

DOUBLED = """class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2.0)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2.0"""


def _defined(author: Author, name: str, source: str) -> None:
    """The class, once in a program."""
    if author.counts.get(name, 0) == 0:
        author.name(name)
        author.say(source, "function")


def product(author: Author, d: Dials) -> None:
    """One that saves both operands and gives gradients where they are needed."""
    x = author.pick(d.y, lambda t: True)
    y = author.pick(d.z, lambda t: t.shape == x.shape)
    parents = [author.state.read(t) for t in (x, y)]
    first = next_order()
    value = traced_op("mul", *parents)
    if np.max(np.abs(value.value), initial=0.0) > LARGEST:
        raise Skip
    _defined(author, "Product", PRODUCT)
    head, recording = mode_of(author, d)
    tracked = recording and (x.requires_grad or y.requires_grad)
    name = author.name("t")
    made = author.state.result(name, d.key, value, author.dtype, tracked=tracked)
    noted(author, first, next_order(), [x, y], [made], ["in0", "in1"], tracked)
    _said(author, f"{name} = Product.apply({x.name}, {y.name})", f"{name} = {x.name} * {y.name}", head, [made])


def _said(author: Author, text: str, bare: str, head: str, made: Sequence[Tensor]) -> None:
    told = author.say(text, "function", head)
    told.bare = within(head, bare)
    told.claim = "function.acts-as-op"
    for t in made:
        author.shows(told, t, "function.acts-as-op", f"what forward makes of it, in {t.name}")


def halves(author: Author, d: Dials) -> None:
    """One with two outputs, and None for the gradient of one that is not used."""
    x = author.pick(d.y, lambda t: t.size > 0)
    y = author.pick(d.z, lambda t: t.shape == x.shape)
    parents = [author.state.read(x), author.state.read(y)]
    first = next_order()
    values = [traced_op("mul", *parents), traced_op("sub", *parents)]
    if any(np.max(np.abs(value.value), initial=0.0) > LARGEST for value in values):
        raise Skip
    _defined(author, "Halves", HALVES)
    head, recording = mode_of(author, d)
    tracked = recording and (x.requires_grad or y.requires_grad)
    made, log = _outputs(author, d, values, [tracked, tracked])
    node = noted(author, first, next_order(), [x, y], made, ["in0", "in1"], tracked)
    _notes(node, values, log)
    names = f"{made[0].name}, {made[1].name}"
    bare = f"{names} = {x.name} * {y.name}, {x.name} - {y.name}"
    _said(author, f"{log} = []\n{names} = Halves.apply({x.name}, {y.name}, {log})", bare, head, made)


def marked(author: Author, d: Dials) -> None:
    """One with an output that is not differentiable: it does not require grad, and backward gets zeros for it."""
    x = author.pick(d.y, lambda t: t.size > 0)
    parent = author.state.read(x)
    first = next_order()
    values = [traced_op("sin", parent), Traced((parent.value > 0.0).astype(np.float64))]
    _defined(author, "Marked", MARKED)
    head, recording = mode_of(author, d)
    tracked = recording and x.requires_grad
    made, log = _outputs(author, d, values, [tracked, False])
    node = noted(author, first, next_order(), [x], made, ["in0"], tracked)
    _notes(node, [None, None], log)
    names = f"{made[0].name}, {made[1].name}"
    bare = f"{names} = {x.name}.sin(), ({x.name} > 0.0).to({x.name}.dtype)"
    _said(author, f"{log} = []\n{names} = Marked.apply({x.name}, {log})", bare, head, made)
    told = author.whole.lines[-1]
    claim, why = "function.non-differentiable-and-materialize", f"{made[1].name} was marked"
    told.plain.append(Plainly(f"{made[1].name}.requires_grad", False, claim, why))


def _outputs(author: Author, d: Dials, values: Sequence[Traced], tracked: Sequence[bool]) -> tuple[list[Tensor], str]:
    made = []
    for i, (value, recorded) in enumerate(zip(values, tracked, strict=True)):
        t = author.state.result(author.name("t"), (d.key + 31 * i) % 256, value, author.dtype, tracked=recorded)
        t.sibling = True
        made.append(t)
    return made, author.name("log")


def _notes(node: Node | None, values: Sequence[Traced | None], log: str) -> None:
    if node is not None:
        node.outs, node.notes = list(values), Hook(log)


def doubled(author: Author, d: Dials) -> None:
    """One that changes its operand in place and says so."""
    x = author.pick(d.y, lambda t: t.writable and t.size > 0 and t.base is None and not _taken(t))
    head, recording = mode_of(author, d)
    if recording and x.requires_grad and x.leaf:
        raise Skip  # it raises, but after forward has changed the leaf
    tracked = recording and x.requires_grad
    if (x.requires_grad and not x.leaf and not tracked) or np.max(np.abs(x.values), initial=0.0) > LARGEST / 2:
        raise Skip
    _defined(author, "Doubled", DOUBLED)
    old = author.state.read(x)
    first = next_order()
    new = old * 2.0
    author.state.write(x, new if tracked else Traced(new.value), tracked=tracked)
    x.memory.used = True
    if tracked:
        author.state.record(len(author.whole.lines), first, next_order(), [x.memory], [])
    told = author.say(f"Doubled.apply({x.name})", "function", head)
    told.claim, told.bare = "function.mark-dirty", within(head, f"{x.name}.mul_(2.0)")
    told.wrote = (x.name,)
    author.shows(told, x, "function.mark-dirty", f"{x.name} was changed in place")


def _taken(t: Tensor) -> bool:
    """Others look at its memory, or it matters which value of it they have."""
    return t.viewed or t.cut or t.memory.hooked or t.memory.split or t.memory.hidden
