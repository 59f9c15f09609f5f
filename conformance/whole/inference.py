"""Inference mode: tensors that are made in it, and what can be done with them outside. No torch."""

from __future__ import annotations

import numpy as np

from autograd_conformance.algebra import Traced, next_order, traced_op
from autograd_conformance.whole.recorded import noted
from autograd_conformance.whole.state import Tensor
from autograd_conformance.whole.tell import LARGEST, Author, Dials, Skip

_MADE = (("{x} * 2.0", lambda v: v * 2.0), ("{x}.sin()", np.sin), ("{x}.clone()", np.copy))
_HEADS = (
    "with torch.inference_mode():",
    "with torch.no_grad(), torch.inference_mode():",
    "with torch.inference_mode(), torch.enable_grad():",
    "with torch.inference_mode(False), torch.inference_mode():",
)
_REFUSED = (
    ("{n}.mul_(2.0)", "inference.inplace-outside-error"),
    ("{n}.requires_grad_()", "inference.requires-grad-error"),
    ("{n}.add_({n})", "inference.inplace-outside-error"),
)


def infer(author: Author, d: Dials) -> None:
    """A tensor made in inference mode, or a use of one outside."""
    known = [t for t in author.state.live.values() if t.inference]
    if not known or d.q % 3 == 0:
        _make(author, d)
        return
    n = known[d.x % len(known)]
    if d.q % 3 == 1:
        text, claim = _REFUSED[d.p % len(_REFUSED)]
        author.refused(text.format(n=n.name), "inference", claim, f"{n.name} was made in inference mode")
        if claim == "inference.inplace-outside-error":
            del author.state.live[n.name]  # what is in it now, nobody promises
        return
    _use(author, d, n)


def _make(author: Author, d: Dials) -> None:
    x = author.pick(d.y, lambda t: t.size > 0)
    text, value = _MADE[d.p % len(_MADE)]
    values = value(x.values)
    if np.max(np.abs(values), initial=0.0) > LARGEST:
        raise Skip
    made = author.state.result(author.name("n"), d.key, Traced(values), author.dtype, tracked=False)
    made.inference, made.writable = True, False
    x.memory.used = True
    told = author.say(f"{made.name} = {text.format(x=x.name)}", "inference", _HEADS[d.r % len(_HEADS)])
    told.claim = "inference.outputs"
    author.shows(told, made, "inference.outputs", "inference mode computes the same numbers")


def _use(author: Author, d: Dials, n: Tensor) -> None:
    """A copy, a sum, or a product, which would have to save it."""
    if d.p % 3 == 2:
        made = author.state.result(author.name("t"), d.key, Traced(n.values), author.dtype, tracked=False)
        told = author.say(f"{made.name} = {n.name}.clone()", "inference")
        told.claim = "inference.clone-rescues"
        author.shows(told, made, "inference.clone-rescues", "a clone is a normal tensor of the same numbers")
        return
    y = author.pick(d.z, lambda t: t.shape == n.shape)
    tracked = author.state.recording and y.requires_grad
    op, sign = (("mul", "*"), ("add", "+"))[d.p % 3]
    if tracked and op == "mul":
        author.refused(
            f"{n.name} * {y.name}", "inference", "inference.save-error", f"the gradient of {y.name} needs {n.name}"
        )
        y.memory.used = True
        return
    parents = [Traced(n.values), author.state.read(y)]
    first = next_order()
    value = traced_op(op, *parents)
    if np.max(np.abs(value.value), initial=0.0) > LARGEST:
        raise Skip
    made = author.state.result(author.name("t"), d.key, value, author.dtype, tracked=tracked)
    noted(author, first, next_order(), [y], [made], [], tracked)
    told = author.say(f"{made.name} = {n.name} {sign} {y.name}", "inference")
    told.claim = "inference.save-error"
    author.shows(told, made, "requires-grad.value-independent", f"the value of {op}")
