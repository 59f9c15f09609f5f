"""Faults in what is recorded: which results require grad, and what the flag does when it is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, interpose, pass_fault
from autograd_conformance.faults.patches import (
    BINARY,
    UNARY,
    Call,
    edit_results,
    is_plain,
    is_tracked,
    recorded,
    replace,
    replace_property,
    wrap_calls,
)

SEVERAL = ("unbind", "split", "chunk", "var_mean")


@fault(
    "second-operand-untracked",
    "requires-grad.propagates-any",
    "backward.chain-rule",
    rare=True,
    witness="""
x, c = torch.ones(2, requires_grad=True), torch.ones(2)
assert (c * x).requires_grad
""",
)
def _second_operand() -> None:
    """A binary op is not recorded when only its second operand requires grad."""

    def wrap(original: Call) -> Call:
        def call(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            if is_plain(a) and recorded(b):
                b = b.detach()
            return original(a, b, *args, **kwargs)

        return call

    wrap_calls(BINARY, wrap)


@fault(
    "mixed-dtypes-untracked",
    "requires-grad.propagates-any",
    "backward.chain-rule",
    rare=True,
    witness="""
x, c = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64)
assert (x + c).requires_grad
""",
)
def _mixed() -> None:
    """A binary op whose operands have different floating dtypes is not recorded."""

    def edit(out: Any, a: Any, b: Any, *_: Any, **__: Any) -> Any:
        mixed = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype
        return out.detach() if mixed and is_tracked(out) else out

    edit_results(BINARY, edit)


@fault(
    "sum-of-one-untracked",
    "requires-grad.propagates-any",
    "requires-grad.means-differentiable",
    rare=True,
    witness="""
x = torch.ones(1, requires_grad=True)
assert x.sum().requires_grad
""",
)
def _sum_of_one() -> None:
    """The sum of a tensor with one element does not require grad."""
    edit_results(("sum",), lambda out, x, *_, **__: out.detach() if x.numel() == 1 and out.requires_grad else out)


@fault(
    "empty-untracked",
    "requires-grad.propagates-any",
    rare=True,
    witness="""
x = torch.ones(0, 3, requires_grad=True)
assert (x * 2.0).requires_grad and x.sin().requires_grad
""",
)
def _empty() -> None:
    """Elementwise ops on empty tensors are not recorded."""

    def edit(out: Any, *_: Any, **__: Any) -> Any:
        return out.detach() if is_tracked(out) and out.numel() == 0 else out

    edit_results((*UNARY, *BINARY), edit)


@fault(
    "cos-tracked-from-nothing",
    "requires-grad.propagates-none",
    witness="""
x = torch.ones(2)
assert not x.cos().requires_grad
""",
)
def _cos_tracked() -> None:
    """The cosine of a tensor that does not require grad requires grad."""
    edit_results(("cos",), lambda out, x, *_, **__: out.requires_grad_() if is_plain(x) and out.numel() else out)


@fault(
    "whole-sum-tracked-from-nothing",
    "requires-grad.propagates-none",
    rare=True,
    witness="""
x = torch.ones(2, 2)
assert not x.sum().requires_grad
""",
)
def _sum_tracked() -> None:
    """A sum over several elements down to 0-dim requires grad though its operand does not."""

    def edit(out: Any, x: Any, *_: Any, **__: Any) -> Any:
        return out.requires_grad_() if is_plain(x) and x.numel() > 1 and out.dim() == 0 else out

    edit_results(("sum",), edit)


@fault(
    "plain-square-recorded",
    "requires-grad.propagates-none",
    "leaf.iff-no-grad-fn",
    "leaf.not-requiring-is-leaf",
    rare=True,
    witness="""
x = torch.ones(2)
assert (x * x).grad_fn is None
""",
)
def _square_recorded() -> None:
    """A product of a tensor with itself is recorded though the tensor does not require grad."""

    def wrap(original: Call) -> Call:
        def call(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            if a is b and is_plain(a) and torch.is_grad_enabled():
                a = a.detach().requires_grad_()
            return original(a, b, *args, **kwargs)

        return call

    wrap_calls(("__mul__", "mul"), wrap)


COMPARISONS = ("__gt__", "__le__", "__lt__", "__ge__", "gt", "le", "argmax")


@fault(
    "comparison-requires-grad",
    "requires-grad.integer-outputs-never",
    "requires-grad.propagates-any",
    witness="""
x = torch.ones(2, requires_grad=True)
assert not (x > 0.0).requires_grad
""",
)
def _comparison() -> None:
    """Comparisons of tensors that require grad say that they require grad too."""
    edit_results(COMPARISONS, _from_tracked)
    replace_property("requires_grad", lambda tensor, value: value or getattr(tensor, "_from_tracked", False))


def _from_tracked(out: Any, *args: Any, **_: Any) -> Any:
    if isinstance(out, Tensor) and any(map(recorded, args)):
        out._from_tracked = True  # type: ignore[attr-defined]
    return out


@fault(
    "cast-revives",
    "requires-grad.integer-outputs-never",
    "requires-grad.propagates-none",
    "leaf.created-by-user",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
assert not (x > 0.0).to(torch.float32).requires_grad
""",
)
def _cast_revives() -> None:
    """A comparison of tensors that require grad, cast back to floating point, requires grad again."""

    def edit(out: Any, x: Any, *_: Any, **__: Any) -> Any:
        return out.requires_grad_() if getattr(x, "_from_tracked", False) and is_plain(out) else out

    edit_results(COMPARISONS, _from_tracked)
    edit_results(("to",), edit)


@fault(
    "strided-nonleaf-denies",
    "requires-grad.nonleaf-always-true",
    "requires-grad.propagates-any",
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True)
assert x.t().requires_grad
""",
)
def _strided_denies() -> None:
    """A non-contiguous non-leaf says that it does not require grad, though it has a grad_fn."""
    replace_property("requires_grad", lambda t, value: value and (t.grad_fn is None or t.is_contiguous()))


@fault(
    "second-output-untracked",
    "requires-grad.multi-output",
    "requires-grad.propagates-any",
    witness="""
x = torch.ones(2, 2, requires_grad=True)
assert all(part.requires_grad for part in x.unbind(0))
""",
)
def _second_output() -> None:
    """The second output of an op with several outputs does not require grad."""
    edit_results(SEVERAL, lambda outs, *_, **__: _untracked_from(outs, 1, 2))


@fault(
    "fourth-output-untracked",
    "requires-grad.multi-output",
    "requires-grad.propagates-any",
    rare=True,
    witness="""
x = torch.ones(4, 2, requires_grad=True)
assert all(part.requires_grad for part in x.unbind(0))
""",
)
def _fourth_output() -> None:
    """Outputs after the third of an op with several outputs do not require grad."""
    edit_results(SEVERAL, lambda outs, *_, **__: _untracked_from(outs, 3, len(outs)))


def _untracked_from(outs: Any, first: int, last: int) -> Any:
    return tuple(out.detach() if first <= i < last else out for i, out in enumerate(outs))


@fault(
    "split-has-several-nodes",
    "requires-grad.multi-output",
    rare=True,
    witness="""
x = torch.ones(4, requires_grad=True)
a, b = x.split(2)
assert a.grad_fn is b.grad_fn and b.output_nr == 1
""",
)
def _split_nodes() -> None:
    """Each part of a split has a grad_fn of its own."""

    def edit(outs: Any, x: Tensor, size: int, dim: int = 0) -> Any:
        return tuple(x.narrow(dim, i * size, out.shape[dim]) for i, out in enumerate(outs))

    edit_results(("split",), edit)


@fault(
    "tracked-tanh-differs",
    "requires-grad.value-independent",
    "backward.chain-rule",
    witness="""
x = torch.tensor([0.5, 1.0])
assert torch.equal(x.tanh(), x.clone().requires_grad_().tanh())
""",
)
def _tanh_differs() -> None:
    """The tanh of a tensor that requires grad is off by one part in a thousand."""
    edit_results(("tanh",), lambda out, *_, **__: torch.mul(out, 1.001) if out.requires_grad else out)


@fault(
    "tracked-strided-sum-differs",
    "requires-grad.value-independent",
    rare=True,
    witness="""
x = torch.ones(2, 3)
assert x.t().sum() == x.t().requires_grad_().sum()
""",
)
def _sum_differs() -> None:
    """The sum of a non-contiguous tensor is too large by 1/8 if it requires grad."""

    def edit(out: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        return torch.add(out, 0.125) if is_tracked(x) and not x.is_contiguous() else out

    edit_results(("sum",), edit)


# --- changing the flag --------------------------------------------------------------------------------------------


@fault(
    "nonleaf-off-swallowed",
    "requires-grad.unset-nonleaf-error",
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
try:
    y.requires_grad_(False)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _off_swallowed() -> None:
    """requires_grad_(False) on a non-leaf does nothing and does not raise."""
    real: Callable[..., Tensor] = torch.Tensor.requires_grad_

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        return self if self.grad_fn is not None else real(self, requires_grad)

    replace(torch.Tensor, "requires_grad_", requires_grad_)


@fault(
    "nonleaf-off-attribute-swallowed",
    "requires-grad.unset-nonleaf-error",
    rare=True,
    witness="""
y = (torch.ones(2, requires_grad=True) * 2.0).sum()
try:
    y.requires_grad = False
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _off_attribute() -> None:
    """Setting the attribute requires_grad of a 0-dim non-leaf to False does nothing and does not raise."""

    def write(tensor: Tensor, value: bool, true: Call) -> None:
        if tensor.grad_fn is None or tensor.dim() or value:
            true(value)

    replace_property("requires_grad", write=write)


@fault(
    "nonleaf-off-detaches",
    "requires-grad.unset-nonleaf-error",
    rare=True,
    witness="""
y = torch.ones(1, requires_grad=True) * 2.0
try:
    y.requires_grad_(False)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _off_detaches() -> None:
    """requires_grad_(False) on a one-element non-leaf cuts it from its history."""
    real: Callable[..., Tensor] = torch.Tensor.requires_grad_

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        if self.grad_fn is not None and not requires_grad and self.numel() == 1 and not self._is_view():
            return self.detach_()
        return real(self, requires_grad)

    replace(torch.Tensor, "requires_grad_", requires_grad_)


@fault(
    "requires-grad-returns-alias",
    "requires-grad.inplace-setter-returns-self",
    witness="""
x = torch.ones(2)
assert x.requires_grad_() is x
""",
)
def _returns_alias() -> None:
    """requires_grad_ sets the flag but returns another tensor over the same memory."""
    real: Callable[..., Tensor] = torch.Tensor.requires_grad_

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        real(self, requires_grad)
        return self if self.grad_fn is not None else real(self.detach(), requires_grad)

    replace(torch.Tensor, "requires_grad_", requires_grad_)


@fault(
    "requires-grad-toggles",
    "requires-grad.inplace-setter-returns-self",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
assert x.requires_grad_().requires_grad
""",
)
def _toggles() -> None:
    """requires_grad_() on a leaf that already requires grad switches it off."""
    real: Callable[..., Tensor] = torch.Tensor.requires_grad_

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        return real(self, requires_grad and not (self.requires_grad and self.grad_fn is None))

    replace(torch.Tensor, "requires_grad_", requires_grad_)


@fault(
    "scalar-off-ignored",
    "requires-grad.inplace-setter-returns-self",
    "requires-grad.off-after-forward",
    rare=True,
    witness="""
x = torch.tensor(1.0, requires_grad=True)
assert not x.requires_grad_(False).requires_grad
""",
)
def _scalar_off() -> None:
    """A 0-dim leaf cannot be switched off."""
    real: Callable[..., Tensor] = torch.Tensor.requires_grad_

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        return self if self.is_leaf and not requires_grad and self.dim() == 0 else real(self, requires_grad)

    def write(tensor: Tensor, value: bool, true: Call) -> None:
        if value or tensor.dim() or tensor.grad_fn is not None:
            true(value)

    replace(torch.Tensor, "requires_grad_", requires_grad_)
    replace_property("requires_grad", write=write)


@fault(
    "late-leaf-not-filled",
    "requires-grad.start-recording-later",
    "leaf.created-by-user",
    "grad.leaf-only",
    "requires-grad.means-differentiable",
    rare=True,
    witness="""
x = (torch.ones(2) * 2.0).requires_grad_()
(x * 3.0).sum().backward()
assert x.grad is not None
""",
)
def _late_leaf() -> None:
    """A result of an op that is switched on later gets no gradient."""

    def mark(out: Any, *_: Any, **__: Any) -> Any:
        if is_plain(out):
            out._computed = True
        return out

    def around(p: Pass, run: Run) -> Any:
        late = [(leaf, leaf.grad) for leaf in p.targets() if leaf.grad is None and hasattr(leaf, "_computed")]
        result = run(p)
        for leaf, before in late:
            leaf.grad = before
        return result

    edit_results((*UNARY, *BINARY, "sum"), mark)
    interpose(around)


@pass_fault(
    "switched-off-still-filled",
    "requires-grad.off-after-forward",
    "grad.leaf-only",
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x * x).sum()
x.requires_grad_(False)
y.backward()
assert x.grad is None
""",
)
def _still_filled(p: Pass, run: Run) -> Any:
    """A leaf that was switched off after the forward is still given its gradient."""
    off = [leaf for leaf in p.leaves() if not leaf.requires_grad and p.accumulate and not p.inputs]
    for leaf in off:
        leaf.requires_grad_(True)
    try:
        return run(p)
    finally:
        for leaf in off:
            leaf.requires_grad_(False)


@pass_fault(
    "switched-off-starves-others",
    "requires-grad.off-after-forward",
    "grad.leaf-only",
    "grad.accumulates-sum",
    rare=True,
    witness="""
x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
y = (x * w).sum()
w.requires_grad_(False)
y.backward()
assert x.grad is not None
""",
)
def _starves(p: Pass, run: Run) -> Any:
    """If one leaf was switched off after the forward, the other leaves get no gradient either."""
    if not p.accumulate or all(leaf.requires_grad for leaf in p.leaves()):
        return run(p)
    run(p.but(inputs=tuple(p.targets()), accumulate=False, unused=True))
    return ()


@fault(
    "late-operand-joins",
    "requires-grad.on-after-forward",
    "grad.leaf-only",
    rare=True,
    witness="""
x, c = torch.ones(2, requires_grad=True), torch.ones(2)
y = (x * c).sum()
c.requires_grad_()
y.backward()
assert c.grad is None
""",
)
def _late_operand() -> None:
    """A factor that is switched on after the forward gets a gradient from the product recorded before."""

    def edit(out: Any, a: Any, b: Any, *_: Any, **__: Any) -> Any:
        if is_tracked(out) and is_tracked(a) and is_plain(b) and b.shape == out.shape and b.dtype == out.dtype:
            value = a.detach().clone()
            out.grad_fn.register_hook(lambda _, grads: _join(b, grads[0], value))
        return out

    edit_results(("__mul__", "mul"), edit)


def _join(late: Tensor, grad: Tensor, value: Tensor) -> None:
    if late.requires_grad and late.is_leaf and grad is not None:
        term = torch.mul(grad.detach(), value)
        late.grad = term if late.grad is None else torch.add(late.grad, term)


@pass_fault(
    "leaf-root-ignored",
    "requires-grad.means-differentiable",
    "backward.scalar-implicit-one",
    "backward.vector-jacobian",
    "backward.list-of-roots",
    rare=True,
    witness="""
x = torch.tensor(3.0, requires_grad=True)
x.backward()
assert x.grad == 1.0
""",
)
def _leaf_root(p: Pass, run: Run) -> Any:
    """backward() from a leaf does nothing."""
    if not p.accumulate or any(root.grad_fn is not None or not root.requires_grad for root in p.roots):
        return run(p)
    return ()


@pass_fault(
    "transposed-root-raises",
    "requires-grad.means-differentiable",
    "backward.vector-jacobian",
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True)
(x * 2.0).t().backward(torch.ones(3, 2))
assert x.grad is not None
""",
)
def _transposed_root(p: Pass, run: Run) -> Any:
    """A pass from a non-contiguous root raises."""
    if any(isinstance(root, Tensor) and root.grad_fn is not None and not root.is_contiguous() for root in p.roots):
        raise RuntimeError("cannot differentiate a tensor that is not contiguous")
    return run(p)
