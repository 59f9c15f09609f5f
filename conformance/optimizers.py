"""Optimizers as plain data: the source of their construction, and their rules on paper. No torch.

The rules are written down from the pseudo-code in the documentation of each optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autograd_conformance.paper import Array, Noise
from autograd_conformance.stage import Stage

Options = dict[str, Any]


@dataclass(eq=False, slots=True)
class Weight:
    """A tensor that may be optimized: how a script names it, and what it is on paper."""

    name: str
    value: Array
    dtype: str
    requires_grad: bool = True
    grad: Array | None = None
    state: dict[str, Any] = field(default_factory=dict)

    def accumulate(self, grad: Array | None) -> None:
        """Add what a pass brings, if it brings anything."""
        if grad is not None:
            self.grad = grad if self.grad is None else self.grad + grad


@dataclass(slots=True)
class Group:
    """Parameters with the options that were given for them alone."""

    weights: list[Weight]
    options: Options = field(default_factory=dict)


@dataclass(slots=True)
class Optimizer:
    """An optimizer: ``how`` says which implementation is asked for."""

    kind: str
    options: Options
    groups: list[Group]
    how: Options = field(default_factory=dict)

    @property
    def weights(self) -> list[Weight]:
        """All parameters, in order."""
        return [w for group in self.groups for w in group.weights]

    def source(self, params: str = "") -> str:
        """The call that makes it; ``params`` for another way to hand over the parameters of the only group."""
        if not params and (len(self.groups) > 1 or self.groups[0].options):
            params = f"[{', '.join(map(group_source, self.groups))}]"
        params = params or listed(self.groups[0].weights)
        return f"torch.optim.{self.kind}({', '.join([params, *assigned({**self.options, **self.how})])})"

    def step(self, noise: Noise | None = None) -> None:
        """A step on paper."""
        rule = RULES[self.kind]
        for group in self.groups:
            options = {**DEFAULTS[self.kind], **self.options, **group.options}
            for w in group.weights:
                if w.grad is not None:
                    new = np.asarray(rule(w.value, w.grad, w.state, options))
                    if noise is not None:
                        new = noise.within(new, float(np.max(np.abs([new, w.value]), initial=0.0)), w.dtype)
                    w.value = new


def listed(weights: Sequence[Weight]) -> str:
    """A list of parameters as source."""
    return f"[{', '.join(w.name for w in weights)}]"


def assigned(options: Options) -> list[str]:
    """Keyword arguments as source."""
    return [f"{name}={value!r}" for name, value in options.items()]


def group_source(group: Group, *, bare: bool = False) -> str:
    """A parameter group as source; with ``bare`` a single parameter comes without a list around it."""
    options = "".join(f", {name!r}: {value!r}" for name, value in group.options.items())
    params = group.weights[0].name if bare and len(group.weights) == 1 else listed(group.weights)
    return f"{{'params': {params}{options}}}"


# --- rules ------------------------------------------------------------------------------------------------------------

Rule = Callable[[Array, Array, dict[str, Any], Options], Any]


def _sgd(x: Array, g: Array, state: dict[str, Any], o: Options) -> Any:
    g = -g if o["maximize"] else g
    g = g + o["weight_decay"] * x
    mu = o["momentum"]
    if mu:
        b = state["b"] = mu * state["b"] + (1 - o["dampening"]) * g if "b" in state else g
        g = g + mu * b if o["nesterov"] else b
    return x - o["lr"] * g


def _adam(x: Array, g: Array, state: dict[str, Any], o: Options) -> Any:
    g = -g if o["maximize"] else g
    return _moments(x, g + o["weight_decay"] * x, state, o)


def _adamw(x: Array, g: Array, state: dict[str, Any], o: Options) -> Any:
    g = -g if o["maximize"] else g
    return _moments(x - o["lr"] * o["weight_decay"] * x, g, state, o)


def _moments(x: Array, g: Array, state: dict[str, Any], o: Options) -> Any:
    (beta1, beta2), t = o["betas"], state.get("t", 0) + 1
    m = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    v = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    state.update(t=t, m=m, v=v)
    return x - o["lr"] * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + o["eps"])


def _rmsprop(x: Array, g: Array, state: dict[str, Any], o: Options) -> Any:
    alpha, g = o["alpha"], g + o["weight_decay"] * x
    spread = state["v"] = alpha * state.get("v", 0.0) + (1 - alpha) * g * g
    if o["centered"]:
        state["mean"] = alpha * state.get("mean", 0.0) + (1 - alpha) * g
        spread = spread - state["mean"] ** 2
    g = g / (np.sqrt(spread) + o["eps"])
    if o["momentum"]:
        g = state["b"] = o["momentum"] * state.get("b", 0.0) + g
    return x - o["lr"] * g


def _adagrad(x: Array, g: Array, state: dict[str, Any], o: Options) -> Any:
    t, g = state.get("t", 0) + 1, g + o["weight_decay"] * x
    total = state.get("sum", o["initial_accumulator_value"]) + g * g
    state.update(t=t, sum=total)
    return x - o["lr"] / (1 + (t - 1) * o["lr_decay"]) * g / (np.sqrt(total) + o["eps"])


RULES: dict[str, Rule] = {"SGD": _sgd, "Adam": _adam, "AdamW": _adamw, "RMSprop": _rmsprop, "Adagrad": _adagrad}
RULED = ("SGD", "SGD", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad")  # the quick one more often
UNRULED = ("Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")  # what they do is not worked out on paper
_MOMENTS = {"betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}
DEFAULTS: dict[str, Options] = {
    "SGD": {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False},
    "Adam": {**_MOMENTS, "weight_decay": 0.0},
    "AdamW": {**_MOMENTS, "weight_decay": 0.01},
    "RMSprop": {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    "Adagrad": {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
}


# --- chosen by dials --------------------------------------------------------------------------------------------------

RATES = (0.5, 0.125, 1.0, 0.1)
_ADAMS: tuple[Options, ...] = (
    {}, {}, {"weight_decay": 0.25}, {"betas": (0.5, 0.75)}, {"eps": 0.5}, {"maximize": True}, {"weight_decay": 0.0},
    {"betas": (0.0, 0.5), "weight_decay": 0.1}, {"betas": (0.5, 0.75), "weight_decay": 0.5, "maximize": True},
)  # fmt: skip
# By one dial, for there are few. Pages of several releases do not agree on what maximize of SGD makes of weight decay.
OPTIONS: dict[str, tuple[Options, ...]] = {
    "SGD": (
        {}, {}, {"weight_decay": 0.25}, {"momentum": 0.5}, {"momentum": 0.9, "dampening": 0.5}, {"maximize": True},
        {"momentum": 0.5, "nesterov": True}, {"momentum": 0.25, "maximize": True}, {"momentum": 0.5, "dampening": 0.25},
        {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.5},
        {"momentum": 0.5, "dampening": 0.5, "weight_decay": 0.25}, {"momentum": 0.9, "nesterov": True},
    ),
    "Adam": _ADAMS,
    "AdamW": _ADAMS,
    "RMSprop": (
        {}, {"weight_decay": 0.25}, {"alpha": 0.5}, {"momentum": 0.5}, {"centered": True}, {"alpha": 0.75, "eps": 0.5},
        {"alpha": 0.5, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    ),
    "Adagrad": ({}, {"weight_decay": 0.25}, {"lr_decay": 0.5}, {"lr_decay": 0.25, "weight_decay": 0.5}),
    "Adadelta": ({}, {"weight_decay": 0.25}),
    "ASGD": ({}, {"weight_decay": 0.25}),
}  # fmt: skip


def options_of(s: Stage, kind: str) -> Options:
    """Options of an optimizer: a learning rate, and at times others."""
    return {"lr": s.choose(RATES), **s.choose(OPTIONS.get(kind, ({},)))}


def implementation(s: Stage) -> Options:
    """Which implementation is asked for: torch's own choice, the loop, or the one over lists of tensors."""
    options: tuple[Options, ...] = ({}, {"foreach": False}, {"foreach": True})
    return dict(s.choose(options))


def optimizer(s: Stage, weights: Sequence[Weight], kinds: Sequence[str] = RULED, *, groups: bool = False) -> Optimizer:
    """An optimizer over some weights, in one group or, with ``groups``, perhaps in two."""
    kind = s.choose(kinds)
    options = options_of(s, kind)
    if kind == "Adagrad" and s.flip():
        options["initial_accumulator_value"] = 0.5
    made = Optimizer(kind, options, [Group(list(weights))], implementation(s))
    cut = max(0, s.number(1 - len(weights), len(weights) - 1)) if groups and len(weights) > 1 else 0
    if cut:
        made.groups = [Group(list(weights[:cut])), Group(list(weights[cut:]))]
        if kind in RULED:
            made.groups[1].options = group_options(s, made)
    if nesterov(made):
        made.how = {"foreach": False}  # the other writes to .grad, which is one claim's business
    return made


def nesterov(opt: Optimizer) -> bool:
    """Has it, or a group of it, Nesterov momentum?"""
    return any({**opt.options, **group.options}.get("nesterov") for group in opt.groups)


def group_options(s: Stage, opt: Optimizer) -> Options:
    """Options of a group, at times none."""
    if s.number(0, 3) == 3:
        return {}
    given = options_of(s, opt.kind)
    if given.get("nesterov") and opt.how != {"foreach": False}:
        del given["nesterov"]  # as in optimizer()
    return given if _fit(opt.kind, {**opt.options, **given}) else {"lr": given["lr"]}


def _fit(kind: str, options: Options) -> bool:
    """May the options be combined?"""
    if kind != "SGD":
        return True
    nesterov = options.get("nesterov") and options.get("dampening")
    return not nesterov and not (options.get("maximize") and options.get("weight_decay"))
