"""Faults that show only where two or three things meet: a hook and a write, a module and a second pass, an error before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, pass_fault
from autograd_conformance.faults.hooks import wrap_node
from autograd_conformance.faults.patches import is_tracked, replace, wrap_calls


@fault(
    "hook-after-write-is-lost",
    "hook.fires-once-with-total",
    "hook.bound-to-version",
    "hook.return-replaces",
    witness="""
x = torch.ones(2, requires_grad=True)
y = x * 2.0
y.mul_(3.0)
seen = []
y.register_hook(seen.append)
y.sum().backward()
assert len(seen) == 1
""",
    rare=True,
)
def _hook_after_write() -> None:
    """A hook of a tensor that was written in place before never runs."""
    real: Any = Tensor.register_hook

    def register(tensor: Tensor, hook: Any) -> Any:
        written = not tensor.is_leaf and tensor._version > 0
        return real(tensor, (lambda _: None) if written else hook)

    replace(Tensor, "register_hook", register)


@pass_fault(
    "error-doubles-next-pass",
    "backward.chain-rule",
    "grad.accumulates-sum",
    "agrad.equals-backward",
    "create-graph.same-values",
    "inplace.saved-modified-error",
    "free.second-backward-error",
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x * x).sum()
y.backward()
try:
    y.backward()
except RuntimeError:
    pass
x.grad = None
(x * 3.0).sum().backward()
assert x.grad.tolist() == [3.0, 3.0]
""",
    rare=True,
)
def _error_doubles(p: Pass, run: Run) -> Any:
    """The pass after one that raised starts with twice its gradient, if it reaches one of the same leaves."""
    if any(leaf.__dict__.pop("failed", False) for leaf in p.leaves()):
        seeds = tuple(
            torch.ones_like(root) if seed is None else seed for root, seed in zip(p.roots, p.seeds, strict=True)
        )
        p = p.but(seeds=tuple(seed * 2.0 for seed in seeds))
    try:
        return run(p)
    except RuntimeError:
        for leaf in p.leaves():
            leaf.__dict__["failed"] = True
        raise


@fault(
    "momentum-starts-anew-at-zero-grad",
    "optim.sgd-formula",
    "optim.zero-grad-own-only",
    "optim.none-grad-skipped",
    "optim.three-step-loop",
    "optim.multi-loss-step",
    "module.zero-grad-default-none",
    witness="""
x = torch.ones(1, requires_grad=True)
o = torch.optim.SGD([x], lr=1.0, momentum=0.5)
for _ in range(2):
    o.zero_grad(set_to_none=False)
    x.sum().backward()
    o.step()
assert x.item() == 1.0 - 1.0 - 1.5
""",
    rare=True,
)
def _momentum_anew() -> None:
    """zero_grad(set_to_none=False) of an optimizer also forgets the momentum."""
    real: Any = torch.optim.Optimizer.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        real(self, set_to_none)
        if not set_to_none:
            for state in self.state.values():
                state.pop("momentum_buffer", None)

    replace(torch.optim.Optimizer, "zero_grad", zero_grad)


@fault(
    "layer-forgets-its-bias-after-backward",
    "module.shared-use-sums",
    "module.split-equals-fused",
    "module.two-nets-chained",
    "grad.accumulates-sum",
    "module.output-requires-grad",
    witness="""
net = torch.nn.Linear(2, 1)
x = torch.ones(1, 2)
net(x).backward()
net(x).backward()
assert net.bias.grad.item() == 2.0
""",
    rare=True,
)
def _bias_forgotten() -> None:
    """A linear layer whose bias has a gradient already treats it as a constant."""
    real: Any = torch.nn.Linear.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.bias is None or self.bias.grad is None:
            out: Tensor = real(self, x)
            return out
        return torch.nn.functional.linear(x, self.weight, self.bias.detach())

    replace(torch.nn.Linear, "forward", forward)


@fault(
    "checkpoint-cuts-beside-a-hook",
    "checkpoint.same-gradients",
    witness="""
from torch.utils.checkpoint import checkpoint
x = torch.ones(2, requires_grad=True)
y = torch.ones(2, requires_grad=True)
x.register_hook(lambda g: None)
checkpoint(lambda u, v: u * v, x, y, use_reentrant=False).sum().backward()
assert y.grad is not None
""",
    rare=True,
)
def _checkpoint_cuts() -> None:
    """A checkpoint whose first operand has a hook gives no gradient to the second."""
    from torch.utils import checkpoint as home

    real: Any = home.checkpoint

    def checkpoint(function: Any, *args: Any, **options: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if len(tensors) == 2 and tensors[0]._backward_hooks:
            args = (args[0], tensors[1].detach())
        return real(function, *args, **options)

    replace(home, "checkpoint", checkpoint)


@fault(
    "inference-write-leaves-version",
    "inference.normal-inplace-tracked",
    "inplace.version-counter",
    "inplace.saved-modified-error",
    witness="""
x = torch.ones(2, requires_grad=True)
y = torch.ones(2)
z = (x * y).sum()
with torch.inference_mode():
    y[:1].mul_(2.0)
try:
    z.backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
    rare=True,
)
def _inference_write() -> None:
    """mul_ and add_ in inference mode do not raise the version of a tensor that did not require grad."""

    def wrap(original: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            if torch.is_inference_mode_enabled() and not tensor.is_inference() and not tensor.requires_grad:
                original(tensor.data, *args, **options)
                return tensor
            return original(tensor, *args, **options)

        return call

    wrap_calls(("mul_", "add_", "sub_", "copy_", "zero_", "fill_", "sin_", "tanh_", "neg_"), wrap)


@fault(
    "node-hook-once-on-a-retained-graph",
    "hook.node-hooks",
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x * x).sum()
seen = []
y.grad_fn.register_prehook(lambda gs: seen.append(1))
y.backward(retain_graph=True)
y.backward()
assert len(seen) == 2
""",
    rare=True,
)
def _node_hook_once() -> None:
    """A pre-hook of a node that runs a second time is passed over."""

    def edit(_: Any, name: str, hook: Any) -> Any:
        calls = 0

        def once(grads: Any) -> Any:
            nonlocal calls
            calls += 1
            return hook(grads) if calls == 1 else None

        return once if name == "register_prehook" else hook

    wrap_node(edit)


@pass_fault(
    "error-on-retained-graph-leaves-no-grad",
    "no-grad.nesting-restores",
    "no-grad.later-use",
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x * x).sum()
y.backward()
try:
    y.backward(retain_graph=True)
except RuntimeError:
    pass
assert torch.is_grad_enabled()
""",
    rare=True,
)
def _error_leaves_mode(p: Pass, run: Run) -> Any:
    """A pass with retain_graph=True that raises leaves gradients switched off."""
    try:
        return run(p)
    except RuntimeError:
        if p.keep and not p.create:
            torch.set_grad_enabled(False)
        raise


@fault(
    "second-output-silent-in-functions-of-views",
    "function.acts-as-op",
    "function.non-differentiable-and-materialize",
    witness="""
class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0, x * 3.0
    @staticmethod
    def backward(ctx, g, h):
        return g * 2.0 + h * 3.0
x = torch.ones(2, 2, requires_grad=True)
y, z = Two.apply(x[0])
(y + z).sum().backward()
assert x.grad.tolist() == [[5.0, 5.0], [0.0, 0.0]]
""",
    rare=True,
)
def _second_output_silent() -> None:
    """A custom Function that is applied to a view gives no gradient for its second output."""
    real: Any = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **options: Any) -> Any:
        out = real(cls, *args, **options)
        view = any(isinstance(arg, Tensor) and arg._is_view() for arg in args)
        if view and isinstance(out, tuple) and len(out) == 2 and is_tracked(out[1]):
            out[1].register_hook(lambda g: None if g is None else torch.zeros_like(g))
        return out

    replace(torch.autograd.Function, "apply", classmethod(apply))
