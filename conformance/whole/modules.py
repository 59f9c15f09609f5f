"""Modules and optimizers that live on in a program. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autograd_conformance.algebra import Traced, next_order, traced_op
from autograd_conformance.whole.passes import backward_from
from autograd_conformance.whole.recorded import noted
from autograd_conformance.whole.state import UNKNOWN, Tensor
from autograd_conformance.whole.tell import LARGEST, Author, Dials, Skip, mode_of, within

SIZES = (1, 2, 3)


@dataclass(eq=False, slots=True)
class Layer:
    """A linear layer of the program, or one with a tanh behind it."""

    name: str
    weight: Tensor
    bias: Tensor
    bent: bool


@dataclass(eq=False, slots=True)
class Optimizer:
    """An SGD of the program: its parameters, and the momentum of each."""

    name: str
    owned: list[Tensor]
    momentum: float
    velocity: dict[Tensor, np.ndarray] = field(default_factory=dict)


def module(author: Author, d: Dials) -> None:
    """A call of a module; a new one, or one that has been called before."""
    x = author.pick(d.y, lambda t: len(t.shape) == 2 and t.size > 0)
    known = [layer for layer in author.layers if layer.weight.shape[1] == x.shape[1]]
    layer = known[d.q % len(known)] if known and d.r % 3 else _made(author, d, x.shape[1])
    head, recording = mode_of(author, d)
    _called(author, d.key, layer, x, head, recording=recording)


def _called(author: Author, key: int, layer: Layer, x: Tensor, head: str = "", *, recording: bool = True) -> Tensor:
    """The statement that calls a layer, and what it makes."""
    operands = [x, layer.weight, layer.bias]
    tracked = recording and any(t.requires_grad for t in operands)
    values = [author.state.read(t) for t in operands]
    first = next_order()
    flat = traced_op("add", traced_op("mm", values[0], traced_op("transpose", values[1], dim0=0, dim1=1)), values[2])
    value = traced_op("tanh", flat) if layer.bent else flat
    if value.size > 64 or np.max(np.abs(value.value), initial=0.0) > LARGEST:
        raise Skip
    made = author.state.result(author.name("t"), key, value, author.dtype, tracked=tracked)
    body = "torch.nn.functional.linear(x0, x1, x2)"
    packs = author.packs(f"out = {body}.tanh()" if layer.bent else f"out = {body}", operands)
    noted(author, first, next_order(), operands, [made], packs, tracked)
    told = author.say(f"{made.name} = {layer.name}({x.name})", "module", head)
    told.claim, told.bare = "module.output-requires-grad", within(head, f"{made.name} = {_bare(layer, x)}")
    author.shows(told, made, "module.split-equals-fused", f"what {layer.name} makes of it")
    return made


def _bare(layer: Layer, x: Tensor) -> str:
    """What the layer does, without the layer."""
    text = f"({x.name} @ {layer.weight.name}.transpose(0, 1) + {layer.bias.name})"
    return f"{text}.tanh()" if layer.bent else text


def _made(author: Author, d: Dials, size: int) -> Layer:
    """A new module, with numbers that are known, and names for its parameters."""
    out, bent = SIZES[d.p % 3], d.x >= 128
    name = author.name("net")
    weight_source, weight = author.constant((out, size), d.p)
    bias_source, bias = author.constant((out,), d.p + 5)
    layer = f"torch.nn.Linear({size}, {out}, dtype=torch.{author.dtype}{author.on})"
    inner = f"{name}[0]" if bent else name
    lines = [
        f"{name} = torch.nn.Sequential({layer}, torch.nn.Tanh())" if bent else f"{name} = {layer}",
        f"w{name}, b{name} = {inner}.weight, {inner}.bias",
        f"with torch.no_grad(): w{name}.copy_({weight_source}), b{name}.copy_({bias_source})",
    ]
    made = Layer(
        name,
        author.state.leaf(f"w{name}", (d.key + 61) % 256, weight, author.dtype, requires_grad=True),
        author.state.leaf(f"b{name}", (d.key + 122) % 256, bias, author.dtype, requires_grad=True),
        bent,
    )
    author.say("\n".join(lines), "module").claim = "module.params-require-grad"
    author.layers.append(made)
    return made


def zeroed(author: Author, d: Dials) -> None:
    """zero_grad of a module, by which the gradients of its parameters go."""
    if not author.layers:
        raise Skip
    layer = author.layers[d.x % len(author.layers)]
    _reset(author, layer.name, [layer.weight, layer.bias], "module.zero-grad-default-none", zeros=d.q % 2 == 1)


def _reset(author: Author, name: str, tensors: Sequence[Tensor], claim: str, *, zeros: bool) -> None:
    if zeros and any(t.grad is UNKNOWN for t in tensors):
        raise Skip
    for t in tensors:
        t.grad = np.zeros(t.shape) if zeros and t.grad is not None else None
    told = author.say(f"{name}.zero_grad({'set_to_none=False' if zeros else ''})", "reset")
    told.cleared = () if zeros else tuple(t.name for t in tensors)
    for t in tensors:
        if t.name in author.state.live:
            author.shows_grad(told, t, claim, "zero_grad resets it")


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimize(author: Author, d: Dials) -> None:
    """A step or a zero_grad of an optimizer that lives on; a new one if there is none, or now and then."""
    if author.optimizers and d.r % 4:
        known = author.optimizers[d.x % len(author.optimizers)]
        if d.q % 4 == 3:
            _reset(author, known.name, known.owned, "optim.zero-grad-own-only", zeros=d.p % 2 == 1)
        else:
            _step(author, known)
        return
    owned = [t for t in author.state.live.values() if t.leaf and t.requires_grad and t.base is None and not t.cut]
    if d.q % 3 == 2 and len(owned) > 1:
        owned.pop(d.x % len(owned))
    if not owned:
        raise Skip
    momentum = 0.5 if d.p % 2 else 0.0
    made = Optimizer(author.name("opt"), owned, momentum)
    author.optimizers.append(made)
    names = ", ".join(t.name for t in owned)
    option = f", momentum={momentum}" if momentum else ""
    author.say(f"{made.name} = torch.optim.SGD([{names}], lr=0.25{option}, foreach=False)", "import")


def train(author: Author, d: Dials) -> None:
    """A round of training or two: a loss, backward, a step, and perhaps a reset."""
    if not author.optimizers:
        optimize(author, d)
    known = author.optimizers[-1]
    if not author.state.recording:
        raise Skip
    for _ in range(1 + d.y % 2):
        backward_from(author, _loss(author, d, known), retain=d.z % 4 == 3)
        if d.q % 4 < 3:
            _step(author, known)
        if d.p % 4 > 1:
            _reset(author, known.name, known.owned, "optim.zero-grad-own-only", zeros=d.p % 4 == 3)


def _loss(author: Author, d: Dials, known: Optimizer) -> Tensor:
    """What a layer makes of some tensor, or the square of a parameter."""
    if author.layers and d.r % 2:
        layer = author.layers[d.x % len(author.layers)]
        x = author.pick(d.flags, lambda t: t.shape[1:] == layer.weight.shape[1:] and len(t.shape) == 2 and t.size > 0)
        made = _called(author, d.key, layer, x)
        if not made.requires_grad:
            raise Skip
        return made
    able = [t for t in known.owned if t.name in author.state.live and t.size]
    if not able:
        raise Skip
    t = able[d.x % len(able)]
    parent = author.state.read(t)
    first = next_order()
    value = parent * parent
    if np.max(np.abs(value.value), initial=0.0) > LARGEST:
        raise Skip
    made = author.state.result(author.name("t"), d.key, value, author.dtype, tracked=True)
    noted(author, first, next_order(), [t, t], [made], ["in0"], tracked=True)
    author.say(f"{made.name} = {t.name} * {t.name}", "op").claim = "requires-grad.propagates-any"
    return made


def _step(author: Author, known: Optimizer) -> None:
    if any(t.grad is UNKNOWN for t in known.owned):
        raise Skip
    moved = [t for t in known.owned if t.grad is not None]
    if any(t.memory.split or t.memory.hooked for t in moved):
        raise Skip
    pushed = {t: _velocity(known, t) for t in moved}
    if any(np.max(np.abs(t.values - 0.25 * v), initial=0.0) > LARGEST for t, v in pushed.items()):
        raise Skip
    for t, v in pushed.items():
        known.velocity[t] = v
        author.state.write(t, Traced(t.values - 0.25 * v), tracked=False)
    told = author.say(f"{known.name}.step()", "step")
    told.claim = "optim.step-untracked"
    told.wrote = tuple(o.name for t in moved for o in author.state.aliases(t.memory))
    for t in known.owned:
        if t.name in author.state.live:
            author.shows(told, t, "optim.sgd-formula", "lr times the gradient, or its momentum, is subtracted")


def _velocity(known: Optimizer, t: Tensor) -> np.ndarray:
    before = known.velocity.get(t)
    return np.asarray(t.grad if before is None else known.momentum * before + t.grad)
