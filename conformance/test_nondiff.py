"""Area nondiff: kinks, ties, undefined results and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autograd_conformance.paper import Array
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

Slope = Callable[[Array], Array]
# Elementwise functions: source, points where they are not differentiable, the gradient due there, and that elsewhere.
KINKS: tuple[tuple[str, tuple[float, ...], float, Slope], ...] = (
    ("torch.relu({x})", (0.0, -0.0), 0.0, lambda v: np.where(v > 0, 1.0, 0.0)),
    ("{x}.abs()", (0.0, -0.0), 0.0, np.sign),
    ("{x}.sqrt()", (0.0,), np.inf, lambda v: 0.5 / np.sqrt(v)),
    ("torch.nn.functional.relu6({x})", (6.0, 0.0), 0.0, lambda v: np.where((v > 0) & (v < 6), 1.0, 0.0)),
    ("{x} ** 0.5", (0.0,), np.inf, lambda v: 0.5 / np.sqrt(v)),
    ("torch.nn.functional.hardtanh({x})", (1.0, -1.0), 0.0, lambda v: np.where(abs(v) < 1, 1.0, 0.0)),
    ("torch.nn.functional.leaky_relu({x}, 0.25)", (0.0, -0.0), 0.25, lambda v: np.where(v > 0, 1.0, 0.25)),
    ("torch.relu({x} - 1.0)", (1.0,), 0.0, lambda v: np.where(v > 1, 1.0, 0.0)),
    ("({x} + 1.0).abs()", (-1.0,), 0.0, lambda v: np.sign(v + 1)),
    ("torch.relu({x}) + torch.relu(-{x})", (0.0, -0.0), 0.0, np.sign),
    ("({x} * 2.0).abs()", (0.0,), 0.0, lambda v: 2.0 * np.sign(v)),
    ("{x}.clone().relu_()", (0.0,), 0.0, lambda v: np.where(v > 0, 1.0, 0.0)),
    ("{x}.clone().abs_()", (0.0, -0.0), 0.0, np.sign),
    ("torch.nn.functional.l1_loss({x}, torch.zeros_like({x}), reduction='none')", (0.0,), 0.0, np.sign),
    ("-torch.relu({x})", (0.0,), 0.0, lambda v: np.where(v > 0, -1.0, 0.0)),
)


@scene("nondiff.subgradient-rules")
def test_subgradient_rules(s: Stage) -> None:
    """Kinks and ties get the gradient of least norm among elements that have an ordinary one."""
    for _ in range(s.number(1, 4)):
        s.choose((_kinks, _norms, _shares, _pairs, _kinks, _kinks))(s)


def _kinks(s: Stage) -> None:
    shape = _shape(s)
    text, points, due, slope = s.choose(KINKS)
    values, at = s.numbers(shape), _positions(s, shape)
    if np.isinf(due):
        values = np.array(np.abs(values))
    values.reshape(-1)[at] = [s.choose(points) for _ in at]
    x = _leaf(s, values)
    y = text.format(x=x)
    with np.errstate(all="ignore"):
        grad = np.array(slope(values))
    grad.reshape(-1)[at] = due
    _judge(s, [(x, grad)], y, shape, "a kink: the gradient of least norm, or what continuity says")


NORMS: tuple[tuple[str, float], ...] = (
    ("torch.linalg.vector_norm({x}, dim=-1)", 2.0),
    ("{x}.norm(dim=-1)", 2.0),
    ("torch.norm({x}, dim=-1)", 2.0),
    ("torch.linalg.vector_norm({x}, 1, dim=-1)", 1.0),
    ("torch.linalg.norm({x}, dim=-1)", 2.0),
)


def _norms(s: Stage) -> None:
    """Rows of zeros among others."""
    shape = (s.number(1, 3), s.number(1, 4))
    text, order = s.choose(NORMS)
    values = s.numbers(shape)
    zero = s.some(range(shape[0]))
    values[zero] = 0.0
    size = np.abs(values).sum(-1) if order == 1.0 else np.sqrt((values * values).sum(-1))
    grad = np.sign(values) if order == 1.0 else values / np.where(size == 0, 1.0, size)[:, None]
    x = _leaf(s, values)
    seed = s.numbers(shape[:1])
    _backward(s, text.format(x=x), seed)
    s.close(f"{x}.grad", grad * seed[:, None], "a norm is convex: at zero the gradient of least norm is zero")


def _shares(s: Stage) -> None:
    """Ties along a dimension, or of all elements."""
    shape = (s.number(1, 3), s.number(2, 4))
    whole, least = s.flip(), s.flip()
    values = s.numbers(shape)
    rows: Sequence[Array] = [values.reshape(-1)] if whole else list(values)
    for row in rows:
        tied = s.some(range(len(row)))
        row[tied] = -2.5 if least else 2.5
    dim = None if whole else -1
    top = (np.min if least else np.max)(values, axis=dim, keepdims=True)
    hit = values == top
    share = hit / hit.sum(axis=dim, keepdims=True)
    x = _leaf(s, values)
    word = "min" if least else "max"
    text = s.choose((f"{x}.{word}()", f"{x}.a{word}()")) if whole else f"{x}.a{word}(dim=-1)"
    seed = s.numbers(() if whole else shape[:1])
    _backward(s, text, seed)
    s.close(f"{x}.grad", share * (seed if whole else seed[:, None]), "equal shares for all that are tied")


def _pairs(s: Stage) -> None:
    """The larger or smaller of two tensors that are equal in places."""
    shape = _shape(s)
    one, other, at = s.numbers(shape), s.numbers(shape)[..., ::-1] if shape else s.numbers(shape), _positions(s, shape)
    other = np.array(other)
    other.reshape(-1)[at] = one.reshape(-1)[at]
    least = s.flip()
    wins = np.where(one == other, 0.5, ((one < other) if least else (one > other)) * 1.0)
    x, y = _leaf(s, one), _leaf(s, other)
    word = "min" if least else "max"
    text = s.choose((f"torch.{word}imum({x}, {y})", f"torch.{word}({x}, {y})"))
    _judge(s, [(x, wins), (y, 1.0 - wins)], text, shape, "equal shares for all that are tied")


def _judge(s: Stage, grads: Sequence[tuple[str, Array]], text: str, shape: tuple[int, ...], because: str) -> None:
    """Backward with some gradient; each leaf must get its own part of it."""
    seed = s.numbers(shape)
    passes = s.number(1, 2)
    for i in range(passes):
        _backward(s, text, seed)
        for name, slope in grads:
            _grad(s, name, slope * seed * (i + 1), because)


def _backward(s: Stage, text: str, seed: Array) -> None:
    s.do(f"y = {text}\ny.backward({s.tensor(seed, 'float32' if s.narrow else '')})")


def _grad(s: Stage, name: str, due: Array, because: str) -> None:
    """A gradient that may have infinite or undefined numbers, which are looked at one by one."""
    flat = due.reshape(-1)
    odd = np.flatnonzero(~np.isfinite(flat))
    if not odd.size:
        s.close(f"{name}.grad", due, because)
        return
    for k in odd.tolist():
        number = f"{name}.grad.reshape(-1)[{k}].item()"
        s.true(f"{number} != {number}" if np.isnan(flat[k]) else f"{number} == float('{flat[k]}')", because)
    finite = np.flatnonzero(np.isfinite(flat)).tolist()
    if finite:
        s.close(f"{name}.grad.reshape(-1)[{finite}]", flat[finite], "the elements beside it")


def _shape(s: Stage) -> tuple[int, ...]:
    """The shape of some tensor of the graph."""
    return s.choose([t for t in s.tensors if 0 < np.size(t.value) <= 24]).shape


def _positions(s: Stage, shape: tuple[int, ...]) -> list[int]:
    """Some positions, at most four."""
    size = int(np.prod(shape))
    return sorted({s.number(0, size - 1) for _ in range(s.number(1, 4))})


def _leaf(s: Stage, values: Array) -> str:
    """A leaf that requires grad, its memory in one of several orders; the dtype is that of the whole scene."""
    if not s.script.items:
        s.narrow = s.wide == "float32" or s.flip()
    name = s.name("x")
    dtype = "float32" if s.narrow else s.wide
    layout = s.choose(("plain", "permuted", "strided", "offset") if values.ndim else ("plain",))
    if layout == "permuted":
        text = f"{s.tensor(values.T, dtype)}.permute({tuple(reversed(range(values.ndim)))}).requires_grad_()"
    elif layout == "strided":
        text = f"torch.stack([{s.tensor(values, dtype)}] * 2, -1)[..., 0].requires_grad_()"
    elif layout == "offset":
        text = f"torch.cat([{s.tensor(values, dtype)}] * 2)[{len(values)}:].requires_grad_()"
    else:
        text = s.tensor(values, dtype, requires_grad=True)
    s.do(f"{name} = {text}")
    return name


# --- undefined and random ---------------------------------------------------------------------------------------------

# Functions that have no finite value at ``bad``: source, that point, derivative elsewhere.
UNDEFINED: tuple[tuple[str, float, Slope], ...] = (
    ("1.0 / {x}", 0.0, lambda v: -1.0 / v**2),
    ("{x}.reciprocal()", 0.0, lambda v: -1.0 / v**2),
    ("{x}.log()", 0.0, lambda v: 1.0 / v),
    ("{x}.rsqrt()", 0.0, lambda v: -0.5 * v**-1.5),
    ("2.0 / ({x} * {x})", 0.0, lambda v: -4.0 / v**3),
)
MASKS_AFTER = ("y[m]", "torch.where(m, y, 0.0)", "y.masked_fill(~m, 0.0)", "y.masked_select(m)")
MASKS_BEFORE = ("torch.where(m, {x}, 1.0)", "{x}.masked_fill(~m, 1.0)", "{x}[m]", "{x}.masked_select(m)")


@scene("nondiff.undefined-and-random")
def test_undefined_and_random(s: Stage) -> None:
    """A mask on the result leaves nan behind, one on the operand does not; random ops pass on zeros."""
    for _ in range(s.number(1, 2)):
        s.choose((_masked, _divided, _random, _masked, _random))(s)


def _masked(s: Stage) -> None:
    shape, (text, bad, slope) = _shape(s), s.choose(UNDEFINED)
    values, at = np.array(np.abs(s.numbers(shape))), _positions(s, shape)
    values.reshape(-1)[at] = bad
    x = _leaf(s, values)
    s.do(f"m = {x}.detach() != {bad}")
    with np.errstate(all="ignore"):
        due = np.array(slope(values))
    if s.flip():
        due.reshape(-1)[at] = np.nan
        s.do(f"y = {text.format(x=x)}\nz = {s.choose(MASKS_AFTER)}")
        because = "nothing times infinity: the mask came too late"
    else:
        due.reshape(-1)[at] = 0.0
        mask = s.choose(MASKS_BEFORE).format(x=x)
        again = "" if "[m]" in mask or "masked_select" in mask else "\nz = torch.where(m, z, 0.0)"
        s.do(f"h = {mask}\nz = {text.format(x='h')}{again}")
        because = "what was masked before has no part in it"
    factor = s.factor()
    s.do(f"(z * {factor}).sum().backward()")
    _grad(s, x, due * factor, because)


def _divided(s: Stage) -> None:
    """A quotient with zeros below: both of its operands get nan there, however it is masked afterwards."""
    shape = _shape(s)
    above, below, at = s.numbers(shape), s.numbers(shape), _positions(s, shape)
    below.reshape(-1)[at] = 0.0
    x, d = _leaf(s, above), _leaf(s, below)
    s.do(f"m = {d}.detach() != 0.0\ny = {x} / {d}\nz = {s.choose(MASKS_AFTER)}")
    s.do("z.sum().backward()")
    with np.errstate(all="ignore"):
        dues = [(x, np.array(1.0 / below)), (d, np.array(-above / below**2))]
    for name, due in dues:
        due.reshape(-1)[at] = np.nan
        _grad(s, name, due, "nothing times infinity: the mask came too late")


# Random ops of a positive ``x`` below one, and of which leaves they pass on zeros.
RANDOM = (
    "torch.bernoulli({x})",
    "torch.poisson({x})",
    "torch.normal({x}, 1.0)",
    "torch.normal({x}, {y})",
    "torch.normal(0.0, {x})",
    "{x}.bernoulli()",
)


def _random(s: Stage) -> None:
    shape = _shape(s)
    values = np.abs(s.numbers(shape)) / 4.0
    x, y = _leaf(s, values), _leaf(s, values + 0.25)
    if shape and len(shape) <= 2 and s.flip():
        s.do(f"r = torch.multinomial({x}, 1)")
        s.equal("(r.requires_grad, r.is_floating_point())", (False, False), "indices have no gradient")
        return
    text = s.choose(RANDOM)
    s.do(f"r = {text.format(x=x, y=y)}")
    s.true("r.requires_grad", "it has a gradient, if one of zeros")
    s.do(f"(r * 2.0 + {x} * 3.0).sum().backward()")
    s.close(f"{x}.grad", np.full(shape, 3.0), "the random part passes on zeros")
    if "{y}" in text:
        s.true(f"{y}.grad is not None and not {y}.grad.any()", "the random part passes on zeros")
