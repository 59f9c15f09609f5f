"""Networks for scenes: stacks of modules with exact numbers, chosen by dials, and the same on paper. No torch.

A :class:`Net` has two faces. :meth:`Net.build` adds the lines that make the network with torch and fill it by a formula,
so no random number is drawn; ``net(x)`` is its output on paper, a :class:`Traced` that :func:`slopes` differentiates.
Derivatives are of first order only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from autograd_conformance.algebra import Plain, Traced, gradient
from autograd_conformance.paper import Array, Noise, Paper
from autograd_conformance.program import Shape
from autograd_conformance.scene import Line
from autograd_conformance.stage import Stage

CLEAR = 1e-3  # numbers that are closer to a kink are left out
LARGEST = 64.0  # so are larger ones
FILL = """def fill(net, start=0):
    with torch.no_grad():
        for i, p in enumerate(net.parameters(), start):
            values = [((k * 7 + i * 5) % 16 * 2 - 15) / 16 for k in range(p.numel())]
            p.copy_(torch.tensor(values).view(p.shape))"""
CHAIN = """class Chain(torch.nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x"""
SCALE = """class Scale(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones((), **options))

    def forward(self, x):
        return self.factor * x + 1.0"""
POWER = """class Power(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.exponent = torch.nn.Parameter(torch.ones(1, **options))

    def forward(self, x):
        return x ** self.exponent"""


def filling(shape: Shape, i: int) -> Array:
    """What ``fill`` writes into parameter number ``i``."""
    return np.array([((k * 7 + i * 5) % 16 * 2 - 15) / 16 for k in range(math.prod(shape))]).reshape(shape)


@dataclass(eq=False, slots=True)
class Parameter:
    """A parameter on paper; ``path`` is where the script finds it, and ``at`` its value now."""

    attribute: str
    shape: Shape
    path: str = ""
    at: Traced = field(default_factory=lambda: Traced(0.0))
    requires_grad: bool = True

    def set(self, value: Array) -> None:
        """Give it another value; what was computed from the old one stays as it is."""
        self.at = Traced(value)


Apply = Callable[..., Traced]
Rough = Callable[[Array], Array]


@dataclass(eq=False, slots=True)
class Layer:
    """A module on paper.

    Attributes:
        text: the source that makes it; ``{tail}`` stands for device and dtype.
        apply: ``apply(x, *parameters)`` on traced values.
        parameters: in the order of torch.
        margin: how far an input is from the next kink.
        defines: the class that must be defined first, if it is not torch's.
        rounds: takes ``rough``, random rounding for what is computed on the way.

    """

    text: str
    apply: Apply
    parameters: tuple[Parameter, ...] = ()
    margin: Callable[[Array], float] | None = None
    defines: str = ""
    rounds: bool = False


# --- layers on paper --------------------------------------------------------------------------------------------------


def _elementwise(value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Apply:
    def apply(x: Traced) -> Traced:
        return Traced(value(x.value), [x], lambda A, g: (g * slope(x.value),))

    return apply


def _linear(x: Traced, weight: Traced, bias: Traced | None = None) -> Traced:
    value = x.value @ weight.value.T + (0.0 if bias is None else bias.value)

    def pull(_: Any, g: Array) -> Sequence[Array]:
        rows, flat = x.value.reshape(-1, weight.shape[1]), g.reshape(-1, weight.shape[0])
        gs = (g @ weight.value, flat.T @ rows)
        return gs if bias is None else (*gs, flat.sum(axis=0))

    return Traced(value, [x, weight] if bias is None else [x, weight, bias], pull)


def _normalise(x: Traced, weight: Traced, bias: Traced, *, axis: int, rough: Rough = np.asarray) -> Traced:
    """(x - mean) / sqrt(var + eps) along an axis, scaled and shifted along the last one."""
    apart = rough(1.0 / np.sqrt(x.value.var(axis=axis, keepdims=True) + 1e-5))
    unit = rough((x.value - rough(x.value.mean(axis=axis, keepdims=True))) * apart)

    def pull(_: Any, g: Array) -> Sequence[Array]:
        gu = g * weight.value
        along, across = gu.mean(axis=axis, keepdims=True), (gu * unit).mean(axis=axis, keepdims=True)
        lead = tuple(range(g.ndim - 1))
        return apart * (gu - along - unit * across), (g * unit).sum(axis=lead), g.sum(axis=lead)

    return Traced(unit * weight.value + bias.value, [x, weight, bias], pull)


def _batch_norm_eval(x: Traced, weight: Traced, bias: Traced) -> Traced:
    scale = 1.0 / math.sqrt(1.0 + 1e-5)
    return Traced(
        x.value * scale * weight.value + bias.value,
        [x, weight, bias],
        lambda A, g: (g * scale * weight.value, (g * x.value * scale).sum(axis=0), g.sum(axis=0)),
    )


def _convolve(x: Traced, weight: Traced, bias: Traced) -> Traced:
    """Convolution over all dimensions after the first two, without padding."""
    size = weight.shape[2:]
    axes = tuple(range(2, 2 + len(size)))
    positions = np.lib.stride_tricks.sliding_window_view(np.arange(x.size).reshape(x.shape), size, axis=axes)
    positions = np.moveaxis(positions, 1, 1 + len(size))  # batch, places, channels, window
    places = positions.shape[: 1 + len(size)]
    flat = positions.reshape(math.prod(places), -1)
    kernel = weight.value.reshape(weight.shape[0], -1)
    columns = x.value.reshape(-1)[flat]
    value = np.moveaxis((columns @ kernel.T + bias.value).reshape(*places, -1), -1, 1)

    def pull(_: Any, g: Array) -> Sequence[Array]:
        rows = np.moveaxis(g, 1, -1).reshape(-1, weight.shape[0])
        gx = np.bincount(flat.reshape(-1), weights=(rows @ kernel).reshape(-1), minlength=x.size).reshape(x.shape)
        return gx, (rows.T @ columns).reshape(weight.shape), rows.sum(axis=0)

    return Traced(value, [x, weight, bias], pull)


def _prelu(x: Traced, weight: Traced) -> Traced:
    up = x.value > 0
    return Traced(
        np.where(up, x.value, weight.value * x.value),
        [x, weight],
        lambda A, g: (g * np.where(up, 1.0, weight.value), np.sum(g * np.where(up, 0.0, x.value)).reshape(1)),
    )


def _scale(x: Traced, factor: Traced) -> Traced:
    return Traced(
        factor.value * x.value + 1.0, [x, factor], lambda A, g: (g * factor.value, np.asarray(np.sum(g * x.value)))
    )


def _power(x: Traced, exponent: Traced) -> Traced:
    value = x.value**exponent.value

    def pull(_: Any, g: Array) -> Sequence[Array]:
        return g * exponent.value * value / x.value, np.sum(g * value * np.log(x.value)).reshape(1)

    return Traced(value, [x, exponent], pull)


def _reshaped(shape: Callable[[Shape], Shape]) -> Apply:
    return lambda x: Traced(x.value.reshape(shape(x.shape)), [x], lambda A, g: (g.reshape(x.shape),))


def _embed(x: Traced, weight: Traced) -> Traced:
    rows = x.value.astype(int)

    def pull(_: Any, g: Array) -> Sequence[Array]:
        gw = np.zeros(weight.shape)
        np.add.at(gw, rows, g)
        return (gw,)

    return Traced(weight.value[rows], [weight], pull)


_erf = np.vectorize(math.erf, otypes=[float])


def _sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _bell(x: Array) -> Array:
    return np.asarray(np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def _silu_slope(x: Array) -> Array:
    return np.asarray(_sigmoid(x) * (1 + x * (1 - _sigmoid(x))))


def _step(x: Array, low: float) -> Array:
    return np.where(x > 0, 1.0, low)


def _inside(x: Array) -> Array:
    return (abs(x) < 1).astype(np.float64)


# name -> value, slope, kinks
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array], tuple[float, ...]]] = {
    "ReLU()": (lambda x: np.maximum(x, 0.0), lambda x: _step(x, 0.0), (0.0,)),
    "Tanh()": (np.tanh, lambda x: 1 - np.tanh(x) ** 2, ()),
    "Sigmoid()": (_sigmoid, lambda x: _sigmoid(x) * (1 - _sigmoid(x)), ()),
    "LeakyReLU(0.25)": (lambda x: np.where(x > 0, x, x / 4), lambda x: _step(x, 0.25), (0.0,)),
    "Softplus()": (lambda x: np.log1p(np.exp(x)), _sigmoid, ()),
    "GELU()": (
        lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
        lambda x: (1 + _erf(x / math.sqrt(2))) / 2 + x * _bell(x),
        (),
    ),
    "SiLU()": (lambda x: x * _sigmoid(x), _silu_slope, ()),
    "Softsign()": (lambda x: x / (1 + abs(x)), lambda x: 1 / (1 + abs(x)) ** 2, ()),
    "ELU()": (
        lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
        lambda x: np.exp(np.minimum(x, 0.0)),
        (0.0,),
    ),
    "Hardtanh()": (lambda x: np.clip(x, -1.0, 1.0), _inside, (-1.0, 1.0)),
    "LogSigmoid()": (lambda x: -np.log1p(np.exp(-x)), lambda x: _sigmoid(-x), ()),
    "Tanhshrink()": (lambda x: x - np.tanh(x), lambda x: np.tanh(x) ** 2, ()),
    "Identity()": (lambda x: x + 0.0, np.ones_like, ()),
}


def _away(kinks: Iterable[float]) -> Callable[[Array], float]:
    return lambda x: min(float(abs(x - kink).min(initial=np.inf)) for kink in kinks)


def activation(name: str) -> Layer:
    """A module without parameters that acts on each element."""
    value, slope, kinks = ACTIVATIONS[name]
    return Layer(f"torch.nn.{name}", _elementwise(value, slope), margin=_away(kinks) if kinks else None)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> Layer:
    """A Linear."""
    weight, without = Parameter("weight", (outputs, inputs)), "" if bias else ", bias=False"
    parameters = (weight, Parameter("bias", (outputs,))) if bias else (weight,)
    return Layer(f"torch.nn.Linear({inputs}, {outputs}{without}{{tail}})", _linear, parameters)


def embedding(count: int, features: int) -> Layer:
    """An Embedding; what goes in are numbers below ``count``."""
    return Layer(f"torch.nn.Embedding({count}, {features}{{tail}})", _embed, (Parameter("weight", (count, features)),))


def _spread(axis: int) -> Callable[[Array], float]:
    """Normalisation of numbers that are all equal is no smooth function: far from it is 1, near is 0."""
    return lambda x: float(np.min(x.var(axis=axis), initial=np.inf) > 0.05)


def _affine(size: int) -> tuple[Parameter, Parameter]:
    return Parameter("weight", (size,)), Parameter("bias", (size,))


def _convolution(size: int, channels: int, dims: int) -> list[Layer]:
    """A convolution of rows of numbers: they are given a channel first, and are rows again behind it."""
    window = min(2, size)
    inner: Shape = (1, size) if dims == 1 else (1, 1, size)
    kernel: Shape = (window,) if dims == 1 else (1, window)
    source = str(window) if dims == 1 else f"(1, {window})"
    weight, bias = Parameter("weight", (channels, 1, *kernel)), Parameter("bias", (channels,))
    return [
        Layer(f"torch.nn.Unflatten(1, {inner})", _reshaped(lambda shape: (shape[0], *inner))),
        Layer(f"torch.nn.Conv{dims}d(1, {channels}, {source}{{tail}})", _convolve, (weight, bias)),
        Layer("torch.nn.Flatten()", _reshaped(lambda shape: (shape[0], math.prod(shape[1:])))),
    ]


def _layers(kind: str, choice: int, x: Array) -> list[Layer]:
    """The layers of a kind that follow on ``x``; ``choice`` from 0 to 11 says which."""
    size = x.shape[-1]
    match kind:
        case "linear":
            return [linear(size, 1 + choice % 3, bias=choice < 8)]
        case "activation":
            return [activation(list(ACTIVATIONS)[choice])]
        case "LayerNorm":
            return [
                Layer(
                    f"torch.nn.LayerNorm({size}{{tail}})",
                    partial(_normalise, axis=-1),
                    _affine(size),
                    _spread(-1),
                    rounds=True,
                )
            ]
        case "BatchNorm1d":
            if choice % 3 == 1:
                return [Layer(f"torch.nn.BatchNorm1d({size}{{tail}}).eval()", _batch_norm_eval, _affine(size))]
            return [
                Layer(
                    f"torch.nn.BatchNorm1d({size}{{tail}})",
                    partial(_normalise, axis=0),
                    _affine(size),
                    _spread(0),
                    rounds=True,
                )
            ]
        case "Conv":
            return _convolution(size, 1 + choice % 2, 1 + choice // 2 % 2)
        case "PReLU":
            return [Layer("torch.nn.PReLU({tail0})", _prelu, (Parameter("weight", (1,)),), _away([0.0]))]
        case "Power":
            exponent = Parameter("exponent", (1,))
            return [Layer("Power({tail0})", _power, (exponent,), lambda x: float(np.min(x) > 0.05), POWER)]
        case _:
            return [Layer("Scale({tail0})", _scale, (Parameter("factor", ()),), defines=SCALE)]


MENU = ("linear", "activation", "linear", "LayerNorm", "activation", "BatchNorm1d", "Conv", "PReLU", "Scale", "Power")


def _fitting(x: Array) -> list[str]:
    """The kinds that may follow; two numbers alone, normalised, are always 1 and -1, whatever they were."""
    flat = {"BatchNorm1d": x.ndim == 2 and x.shape[0] > 2, "Conv": x.ndim == 2, "LayerNorm": x.shape[-1] > 2}
    return [kind for kind in MENU if flat.get(kind, True) and not (kind == "Power" and np.min(x) <= 0.05)]


# --- networks ---------------------------------------------------------------------------------------------------------

Tree = list[Any]  # of layers, and of such lists


class Net:
    """A network: layers in a tree of containers.

    Args:
        name: the variable of the script.
        tree: layers, or lists of them, each of which becomes a ``Sequential``; a layer may stand there twice.
        dtype: of its parameters.
        start: number of the first parameter for ``fill``.
        kind: ``"Sequential"`` or ``"Chain"``, a class of the script; what the outermost list is.

    """

    def __init__(
        self, s: Stage, name: str, tree: Tree, dtype: str, *, start: int = 0, kind: str = "Sequential"
    ) -> None:
        self.name, self.tree, self.dtype, self.start, self.kind = name, tree, dtype, start, kind
        self.noise, self.margin = s.noise, np.inf
        self.bare = len(tree) == 1 and isinstance(tree[0], Layer) and kind == "Sequential"
        self.layers: list[Layer] = _flat(tree)
        self.shared: dict[int, str] = {}
        self.ties: list[tuple[str, str]] = []
        for layer in self.layers:
            if self.layers.count(layer) > 1 and id(layer) not in self.shared:
                self.shared[id(layer)] = s.name("part")
        self.paths: dict[int, str] = {}  # of each layer, where it stands first
        self._place(tree, name)
        self.parameters: list[Parameter] = []
        for layer in dict.fromkeys(self.layers):
            self._enter(layer)
        for i, p in enumerate(self.parameters, start):
            p.set(filling(p.shape, i))

    def _place(self, tree: Tree, path: str) -> None:
        at = ".parts" if self.kind == "Chain" and path == self.name else ""
        for i, part in enumerate(tree):
            place = self.name if self.bare else f"{path}{at}[{i}]"
            if isinstance(part, Layer):
                self.paths.setdefault(id(part), place)
            else:
                self._place(part, place)

    def _enter(self, layer: Layer) -> None:
        for p in layer.parameters:
            path = f"{self.paths[id(layer)]}.{p.attribute}"
            if p in self.parameters:
                self.ties.append((path, p.path))
            else:
                p.path = path
                self.parameters.append(p)

    @property
    def modules(self) -> list[str]:
        """The paths of all modules, containers first."""
        return list(dict.fromkeys([*_containers(self.tree, self.name, self), *self.paths.values()]))

    def build(self, s: Stage, *, fill: bool = True) -> None:
        """Add the lines that make the network, and fill it."""
        s.narrow |= self.dtype == "float32"
        for text in dict.fromkeys([layer.defines for layer in self.layers] + [CHAIN] * (self.kind == "Chain")):
            if text:
                define(s, text)
        tail = f"{s.on}, dtype=torch.{self.dtype}" if self.dtype != "float32" else s.on
        for layer in dict.fromkeys(self.layers):
            if id(layer) in self.shared:
                s.do(f"{self.shared[id(layer)]} = {_source(layer, tail)}")
        s.do(f"{self.name} = {self._text(self.tree, tail, outermost=True)}")
        for path, first in self.ties:
            s.do(f"{path} = {first}")
        if fill:
            define(s, FILL)
            s.do(f"fill({self.name}, {self.start})" if self.start else f"fill({self.name})")

    def _text(self, part: Any, tail: str, *, outermost: bool = False) -> str:
        if isinstance(part, Layer):
            return self.shared.get(id(part)) or _source(part, tail)
        if outermost and self.bare:
            return self._text(part[0], tail)
        inner = ", ".join(self._text(each, tail) for each in part)
        return f"{self.kind if outermost and self.kind == 'Chain' else 'torch.nn.Sequential'}({inner})"

    def __call__(self, x: Traced, layers: Iterable[Layer] | None = None) -> Traced:
        """The output on paper, or that of some of the layers."""
        for layer in self.layers if layers is None else layers:
            if layer.margin is not None:
                self.margin = min(self.margin, layer.margin(x.value))
            if self.noise is None:
                x = layer.apply(x, *(p.at for p in layer.parameters))
                continue
            inner = {"rough": partial(self.noise, dtype=self.dtype)} if layer.rounds else {}
            x = rounded(layer.apply(x, *(p.at for p in layer.parameters), **inner), self.noise, self.dtype)
        if not abs(x.value).max(initial=0.0) < LARGEST:
            self.margin = 0.0
        return x

    @property
    def clear(self) -> bool:
        """Were all numbers away from kinks, and not too large?"""
        return self.margin > CLEAR


def rounded(x: Traced, noise: Noise, dtype: str) -> Traced:
    """The same with random rounding, of the value and of what comes back."""
    return Traced(noise(x.value, dtype), [x], lambda A, g: (noise(g, dtype),))


def define(s: Stage, text: str) -> None:
    """Add a definition, unless the script has it already."""
    if not any(isinstance(item, Line) and item.text == text for item in s.script.items):
        s.do(text)


def _source(layer: Layer, tail: str) -> str:
    return layer.text.replace("{tail}", tail).replace("{tail0}", tail.removeprefix(", "))


def _flat(tree: Tree) -> list[Layer]:
    return [layer for part in tree for layer in ([part] if isinstance(part, Layer) else _flat(part))]


def _containers(tree: Tree, path: str, net: Net) -> list[str]:
    at = ".parts" if net.kind == "Chain" and path == net.name else ""
    inner = [_containers(part, f"{path}{at}[{i}]", net) for i, part in enumerate(tree) if not isinstance(part, Layer)]
    return [path, *([f"{path}.parts"] if at else []), *(each for part in inner for each in part)]


def layers(s: Stage, x: Traced, count: int, *, last: int = 0, start: int = 0) -> list[Layer]:
    """Random layers that follow on each other, by two dials each, of which at least one has parameters.

    Args:
        s: the stage.
        x: the input on paper; no layer gets numbers close to its kinks.
        count: how many.
        last: features of the output, if a number is needed: then the last layer is a Linear.
        start: number of the first parameter.

    """
    found: list[Layer] = []
    probe = Net(s, "", [], "float64")
    for i in range(count):
        kind, choice = s.choose(_fitting(x.value)), s.number(0, 11)
        final = i == count - 1
        if final and last:
            at = [linear(x.shape[-1], last, bias=choice < 8)]
        elif final and not any(layer.parameters for layer in found):
            at = _layers("linear", choice, x.value)
        else:
            at = _layers(kind, choice, x.value)
        _number(at, start + sum(len(layer.parameters) for layer in found))
        probe.margin, after = np.inf, probe(x, at)
        if not probe.clear:
            at = [activation("Tanh()") if any(layer.parameters for layer in found) else linear(x.shape[-1], 1)]
            _number(at, start + sum(len(layer.parameters) for layer in found))
            after = probe(x, at)
        found, x = [*found, *at], after
    return found


def _number(added: Iterable[Layer], start: int) -> None:
    for i, p in enumerate([p for layer in added for p in layer.parameters], start):
        p.set(filling(p.shape, i))


def nested(s: Stage, flat: Sequence[Layer]) -> tuple[Tree, str]:
    """Layers in a row, in containers of some depth; by one dial. Also the kind of the outermost one."""
    whole = list(flat)
    half = max(1, len(whole) // 2)
    options: list[tuple[Tree, str]] = [
        (whole, "Sequential"),
        ([whole], "Sequential"),
        ([whole[:half], *whole[half:]], "Sequential"),
        ([[whole[:1], *whole[1:]]], "Sequential"),
        (whole, "Chain"),
        ([[[whole[:half]], whole[half:]]] if len(whole) > 1 else [[whole]], "Chain"),
    ]
    return s.choose(options)


def network(
    s: Stage, name: str, x: Traced, dtype: str, *, least: int = 1, most: int = 3, start: int = 0, last: int = 0
) -> Net:
    """A random network for an input: one Linear, or up to ``most`` layers in nested containers (2 + 2 x layers dials)."""
    tree, kind = nested(s, layers(s, x, s.number(least, most), last=last, start=start))
    return Net(s, name, tree, dtype, start=start, kind=kind)


# --- what goes in -----------------------------------------------------------------------------------------------------

SHAPES: tuple[Shape, ...] = ((1, 1), (2, 3), (1, 2), (2, 1), (3, 2), (3, 4), (2, 6), (4,), (2, 2, 3))


@dataclass(slots=True)
class Input:
    """What a network is given: numbers of its own, or a tensor of the scene's graph."""

    name: str
    at: Traced
    dtype: str
    requires_grad: bool
    paper: Paper | None = None


def entry(
    s: Stage,
    *,
    graph: bool = True,
    nodes: bool = True,
    tracked: bool | None = None,
    shapes: Sequence[Shape] = SHAPES,
) -> Input:
    """Add the lines of an input: one that is made for it, or, if ``graph``, perhaps a tensor of the graph (3 dials).

    Args:
        s: the stage.
        graph: may a tensor of the graph be taken? Then the graph is played.
        nodes: may it be the result of a recorded op? A pass then frees the graph.
        tracked: must the input require grad, or must it not; None: either.
        shapes: those to choose from.

    """
    if graph and s.flip():
        fitting = [
            t for t in s.tensors if _usable(t) and tracked in (None, t.requires_grad) and (nodes or t.node is None)
        ]
        if fitting:
            t = s.choose(fitting[::-1])
            s.play()
            return Input(t.name, Traced(t.value), t.dtype, t.requires_grad, t)
    dtype = s.choose(("float32", s.wide))
    flag = s.flip() if tracked is None else tracked
    values, name = s.numbers(s.choose(shapes)), s.name("x")
    s.do(f"{name} = {s.tensor(values, dtype, requires_grad=flag)}")
    return Input(name, Traced(values), dtype, flag)


def _usable(t: Paper) -> bool:
    return 1 <= len(t.shape) <= 3 and 1 <= np.size(t.value) <= 24 and bool(np.max(abs(t.value)) <= 8)


# --- losses -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Loss:
    """A scalar of an output: ``text.format(y)`` is its source; ``loss(y)`` the same on paper."""

    text: str
    apply: Apply
    lines: tuple[str, ...] = ()
    margin: Callable[[Array], float] | None = None

    def __call__(self, y: Traced) -> Traced:
        """The loss on paper."""
        return self.apply(y)

    def build(self, s: Stage) -> None:
        """Add the lines that make criterion and label."""
        for line in self.lines:
            s.do(line)


def _cross_entropy(y: Array, label: Array) -> tuple[Array, Array]:
    e = np.exp(y - y.max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    one = np.eye(y.shape[1])[label.astype(int)]
    return -np.log((p * one).sum(axis=1)).mean(), (p - one) / len(y)


Slopes = Callable[[Array, Array], tuple[Array, Array]]
_CROSS_ENTROPY: Slopes = _cross_entropy
_DIFFERENCES: dict[str, Slopes] = {
    "MSELoss()": lambda y, t: (((y - t) ** 2).mean(), 2 * (y - t) / y.size),
    "MSELoss(reduction='sum')": lambda y, t: (((y - t) ** 2).sum(), 2 * (y - t)),
    "L1Loss()": lambda y, t: (abs(y - t).mean(), np.sign(y - t) / y.size),
    "SmoothL1Loss()": lambda y, t: (
        np.where(abs(y - t) < 1, (y - t) ** 2 / 2, abs(y - t) - 0.5).mean(),
        np.clip(y - t, -1.0, 1.0) / y.size,
    ),
    "HuberLoss()": lambda y, t: (
        np.where(abs(y - t) < 1, (y - t) ** 2 / 2, abs(y - t) - 0.5).mean(),
        np.clip(y - t, -1.0, 1.0) / y.size,
    ),
    "BCEWithLogitsLoss()": lambda y, t: ((np.log1p(np.exp(y)) - y * t).mean(), (_sigmoid(y) - t) / y.size),
    "SoftMarginLoss()": lambda y, t: (np.log1p(np.exp(-t * y)).mean(), -t * _sigmoid(-t * y) / y.size),
}


def _loss_of(both: Slopes, label: Array) -> Apply:
    def apply(y: Traced) -> Traced:
        value, slope = both(y.value, label)
        return Traced(value, [y], lambda A, g: (g * slope,))

    return apply


def loss(s: Stage, shape: Shape, dtype: str) -> Loss:
    """A random loss for outputs of a shape (2 dials): their sum, or a criterion of torch."""
    names = ["", *_DIFFERENCES, *(["CrossEntropyLoss()"] if len(shape) == 2 else [])]
    name, label = s.choose(names), s.numbers(shape)
    if not name:
        return Loss("{0}.sum()", lambda y: Traced(np.sum(y.value), [y], lambda A, g: (g * np.ones(shape),)))
    if name == "CrossEntropyLoss()":
        label = np.arange(shape[0]) % shape[1]
        source, both = s.tensor(label, "int64"), _CROSS_ENTROPY
    else:
        if name == "BCEWithLogitsLoss()":
            label = (label > 0) * 0.75
        source, both = s.tensor(label, dtype), _DIFFERENCES[name]
    criterion, target = s.name("criterion"), s.name("label")
    margin = (lambda y: _away([0.0])(y - label)) if name == "L1Loss()" else None
    lines = (f"{criterion} = torch.nn.{name}", f"{target} = {source}")
    return Loss(f"{criterion}({{0}}, {target})", _loss_of(both, label), lines, margin)


def slopes(root: Traced, wrt: Sequence[Parameter | Traced], seed: Array | None = None) -> list[Array]:
    """The derivative of a loss by parameters and other values; by default that of its sum."""
    targets = [p.at if isinstance(p, Parameter) else p for p in wrt]
    found: list[Array] = gradient(root, np.ones(root.shape) if seed is None else seed, targets, Plain)
    return found
