"""Faults of many areas that show only in passes, scripts and arguments of a seldom kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import functional

from autograd_conformance.faults.arguments import Arguments, wrap_function
from autograd_conformance.faults.base import fault
from autograd_conformance.faults.patches import Call, replace


@fault(
    "strided-gradient-is-ones",
    "backward.gradient-shape",
    "backward.gradient-complexness",
    rare=True,
    witness="""
x = torch.ones(2, 2, requires_grad=True)
(x * 2.0).backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t())
assert x.grad.tolist() == [[2.0, 6.0], [4.0, 8.0]]
""",
)
def _strided_gradient() -> None:
    """A gradient argument that is not contiguous is taken for ones."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        if len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_contiguous():
            args = (args[0], torch.ones_like(args[1]), *args[2:])
        return original(*args, **kwargs)

    wrap_function("backward", change)


@fault(
    "list-of-one-root-twice-retains",
    "free.buffers-released",
    "free.saved-attr-after-free",
    "free.old-message",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
y = x * x
torch.autograd.backward([y, y])
try:
    y.backward()
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _list_retains() -> None:
    """backward of two roots that are one tensor retains the graph."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        twice = isinstance(args[0], list | tuple) and len(args[0]) == 2 and args[0][0] is args[0][1]
        if twice and len(args) < 3 and "retain_graph" not in kwargs:
            kwargs = {**kwargs, "retain_graph": True}
        return original(*args, **kwargs)

    wrap_function("backward", change)


@fault(
    "positional-retain-graph-ignored",
    "free.buffers-released",
    "free.saved-attr-after-free",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
y = x * x
y.backward(None, True)
try:
    y.backward()
except RuntimeError:
    raise SystemExit(1)
""",
)
def _positional_retain() -> None:
    """Tensor.backward knows retain_graph only by its name."""
    original: Call = torch.Tensor.backward

    def backward(self: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, gradient, *((None, *args[1:]) if args else ()), **kwargs)

    replace(torch.Tensor, "backward", backward)


@fault(
    "retain-grad-needs-grad-mode",
    "retain-grad.populates",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
y = x * 2.0
with torch.no_grad():
    y.retain_grad()
y.backward()
assert y.grad == 1.0
""",
)
def _retain_in_grad_mode() -> None:
    """retain_grad() does nothing under no_grad."""
    original: Call = torch.Tensor.retain_grad

    def retain_grad(self: Tensor) -> None:
        if torch.is_grad_enabled() or not self.requires_grad:
            original(self)

    replace(torch.Tensor, "retain_grad", retain_grad)


@fault(
    "leaf-hooks-cut-second-derivatives",
    "create-graph.second-order",
    "create-graph.gradient-penalty",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.register_hook(lambda g: g * 2.0)
(g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
assert g.requires_grad
""",
)
def _hooks_cut() -> None:
    """A hook on a leaf gets a gradient without history, also where it is to be differentiated."""
    original: Call = torch.Tensor.register_hook

    def register_hook(self: Tensor, hook: Call) -> Any:
        if not self.is_leaf:
            return original(self, hook)
        return original(self, lambda g: hook(g.detach()))

    replace(torch.Tensor, "register_hook", register_hook)


@fault(
    "module-pre-hooks-change-first-pass-only",
    "hook.module-pre-and-legacy",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3.0,))
x = torch.ones(1, 1, requires_grad=True)
y = net(x)
y.backward(retain_graph=True)
first = x.grad.clone()
y.backward()
assert torch.allclose(x.grad, 2.0 * first)
""",
)
def _pre_hooks_once() -> None:
    """What a full backward pre-hook returns counts in the first pass alone."""
    original: Call = torch.nn.Module.register_full_backward_pre_hook

    def register(self: torch.nn.Module, hook: Call, prepend: bool = False) -> Any:
        ran: list[bool] = []

        def once(module: torch.nn.Module, grads: Any) -> Any:
            result = hook(module, grads)
            ran.append(True)
            return result if len(ran) == 1 else None

        return original(self, once, prepend)

    replace(torch.nn.Module, "register_full_backward_pre_hook", register)


@fault(
    "no-grad-left-by-value-error-stays",
    "no-grad.nesting-restores",
    "no-grad.set-grad-enabled-function",
    rare=True,
    witness="""
try:
    with torch.no_grad():
        raise ValueError
except ValueError:
    pass
assert torch.is_grad_enabled()
""",
)
def _stays_off() -> None:
    """no_grad that is left by a ValueError leaves grad mode off."""
    original: Call = torch.no_grad.__exit__

    def leave(self: Any, kind: Any, value: Any, trace: Any) -> None:
        if kind is not ValueError:
            original(self, kind, value, trace)

    replace(torch.no_grad, "__exit__", leave)


@fault(
    "vjp-tracks-second-result",
    "numeric.functional-api",
    rare=True,
    witness="""
x, y = torch.ones(2), torch.ones(2)
_, found = torch.autograd.functional.vjp(lambda x, y: (x * y).sum(), (x, y))
assert not any(g.requires_grad for g in found)
""",
)
def _vjp_tracks() -> None:
    """Of several results of vjp the second and further ones require grad."""
    original: Call = functional.vjp

    def vjp(*args: Any, **kwargs: Any) -> Any:
        out, found = original(*args, **kwargs)
        if isinstance(found, tuple):
            found = (found[0], *(g.requires_grad_() for g in found[1:]))
        return out, found

    replace(functional, "vjp", vjp)


@fault(
    "nan-unnoticed-under-create-graph",
    "anomaly.nan-detection",
    rare=True,
    witness="""
x = torch.zeros(1, requires_grad=True)
with torch.autograd.set_detect_anomaly(True):
    try:
        torch.autograd.grad((x.sqrt() * 0.0).sum(), x, create_graph=True)
        raise SystemExit(1)
    except RuntimeError:
        pass
""",
)
def _nan_unnoticed() -> None:
    """Anomaly mode does not look for nan in autograd.grad with create_graph."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        if torch.is_anomaly_enabled() and kwargs.get("create_graph"):
            with torch.autograd.set_detect_anomaly(False):
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    wrap_function("grad", change)
