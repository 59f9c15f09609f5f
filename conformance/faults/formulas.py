"""Wrong derivatives: one op, or one situation of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.patches import (
    BINARY,
    UNARY,
    Call,
    Grads,
    edit_gradients,
    edit_results,
    replace_kernel,
    scaled,
    true_tanh_backward,
)

RULE = ("backward.chain-rule", "backward.vector-jacobian", "agrad.equals-backward")


@fault(
    "sin-one-percent",
    *RULE,
    witness="""
x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
x.sin().backward()
assert torch.allclose(x.grad, x.detach().cos())
""",
)
def _sin() -> None:
    """The derivative of sin is one per cent too large."""
    edit_gradients(("sin",), lambda args, kwargs, grads: scaled(grads, 1.01))


@fault(
    "exp-strided-doubled",
    *RULE,
    rare=True,
    witness="""
x = torch.zeros(2, 3).t().requires_grad_()
x.exp().sum().backward()
assert x.grad.sum() == 6.0
""",
)
def _exp() -> None:
    """The derivative of exp is doubled if the operand is not contiguous."""
    edit_gradients(("exp",), lambda args, kwargs, grads: scaled(grads, 1.0 if args[0].is_contiguous() else 2.0))


@fault(
    "tanh-expanded-gradient",
    *RULE,
    rare=True,
    witness="""
x = torch.zeros(2, 3, requires_grad=True)
x.tanh().t().sum().backward()
assert x.grad.sum() == 6.0
""",
)
def _tanh() -> None:
    """The kernel of tanh's derivative is wrong for an incoming gradient that is not contiguous."""

    def kernel(grad: Tensor, out: Tensor) -> Tensor:
        true = true_tanh_backward(grad, out)
        return true if grad.is_contiguous() else torch.mul(true, 0.5)

    replace_kernel("tanh_backward", kernel)


@fault(
    "sigmoid-float32",
    *RULE,
    rare=True,
    witness="""
x = torch.zeros(2, requires_grad=True)
x.sigmoid().sum().backward()
assert x.grad.tolist() == [0.25, 0.25]
""",
)
def _sigmoid() -> None:
    """The kernel of sigmoid's derivative is two per cent too small in float32."""

    def kernel(grad: Tensor, out: Tensor) -> Tensor:
        true = torch.empty_like(grad)
        torch.ops.aten.sigmoid_backward.grad_input(grad, out, grad_input=true)
        return torch.mul(true, 0.98) if grad.dtype == torch.float32 else true

    replace_kernel("sigmoid_backward", kernel)


@fault(
    "relu-scalar",
    *RULE,
    rare=True,
    witness="""
x = torch.tensor(2.0, requires_grad=True)
x.relu().backward()
assert x.grad == 1.0
""",
)
def _relu() -> None:
    """The derivative of relu is zero for a 0-dim tensor."""
    edit_gradients(("relu",), lambda args, kwargs, grads: scaled(grads, 1.0 if args[0].dim() else 0.0))


@fault(
    "pow-exponent-missing",
    *RULE,
    "backward.broadcast-sums",
    rare=True,
    witness="""
x, n = torch.full((2,), 2.0), torch.ones(2, requires_grad=True)
(x ** n).sum().backward()
assert n.grad.all()
""",
)
def _pow() -> None:
    """The gradient of the exponent of ** is zero."""
    edit_gradients(("__pow__", "pow"), lambda args, kwargs, grads: scaled(grads, 0.0, which=1))


@fault(
    "divisor-sign",
    *RULE,
    witness="""
x, y = torch.ones(2), torch.ones(2, requires_grad=True)
(x / y).sum().backward()
assert y.grad.tolist() == [-1.0, -1.0]
""",
)
def _div() -> None:
    """The gradient of a divisor has the wrong sign."""
    edit_gradients(("__truediv__", "div"), lambda args, kwargs, grads: scaled(grads, -1.0, which=1))


@fault(
    "matmul-square-transposed",
    *RULE,
    rare=True,
    witness="""
a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2).requires_grad_()
(a @ b)[0].sum().backward()
assert b.grad.tolist() == [[1.0, 1.0], [2.0, 2.0]]
""",
)
def _matmul() -> None:
    """The gradient of the second factor of @ is transposed if it is square."""

    def edit(args: Any, _: Any, grads: Grads) -> Grads:
        second = grads[1] if len(grads) > 1 else None
        if second is None or second.dim() != 2 or second.shape[0] != second.shape[1]:
            return grads
        return grads[0], second.t().clone()

    edit_gradients(("__matmul__", "matmul", "mm"), edit)


@fault(
    "square-halves",
    "backward.fan-out-sums",
    *RULE,
    rare=True,
    witness="""
x = torch.tensor([3.0, 4.0], requires_grad=True)
(x * x).sum().backward()
assert x.grad.tolist() == [6.0, 8.0]
""",
)
def _square() -> None:
    """In x * x only the first use of x gets a gradient."""
    edit_gradients(("__mul__", "mul"), lambda args, _, grads: scaled(grads, 0.0, 1) if args[0] is args[1] else grads)


@fault(
    "self-sum-counts-once",
    "backward.fan-out-sums",
    *RULE,
    rare=True,
    witness="""
x = torch.tensor([3.0, 4.0], requires_grad=True)
(x + x).sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _self_sum() -> None:
    """In x + x only the first use of x gets a gradient."""
    edit_gradients(("__add__", "add"), lambda args, _, grads: scaled(grads, 0.0, 1) if args[0] is args[1] else grads)


@fault(
    "same-twice-in-cat",
    "backward.fan-out-sums",
    *RULE,
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
torch.cat((x, x)).sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _cat() -> None:
    """A tensor that is joined with itself gets the gradient of one part only."""

    def edit(args: Any, kwargs: Any, grads: Grads) -> Grads:
        parts = args[0] if args else kwargs["tensors"]
        again = [any(part is other for other in parts[:i]) for i, part in enumerate(parts)]
        return tuple(torch.mul(g, 0.0) if a and g is not None else g for g, a in zip(grads, again, strict=True))

    edit_gradients(("cat", "stack"), edit)


@fault(
    "sum-keepdim-halved",
    *RULE,
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True)
x.sum(dim=1, keepdim=True).sum().backward()
assert x.grad.sum() == 6.0
""",
)
def _keepdim() -> None:
    """The gradient of a sum with keepdim=True is halved."""
    edit_gradients(("sum",), lambda args, kwargs, grads: scaled(grads, 0.5 if kwargs.get("keepdim") else 1.0))


@fault(
    "mean-not-divided",
    *RULE,
    witness="""
x = torch.ones(4, requires_grad=True)
x.mean().backward()
assert x.grad.tolist() == [0.25] * 4
""",
)
def _mean() -> None:
    """The gradient of a mean over all elements is not divided by their number."""

    def edit(args: Any, kwargs: Any, grads: Grads) -> Grads:
        return scaled(grads, float(args[0].numel())) if len(args) == 1 and not kwargs else grads

    edit_gradients(("mean",), edit)


@fault(
    "cumsum-not-reversed",
    *RULE,
    witness="""
x = torch.ones(3, requires_grad=True)
x.cumsum(0).sum().backward()
assert x.grad.tolist() == [3.0, 2.0, 1.0]
""",
)
def _cumsum() -> None:
    """The gradient of cumsum is flipped along its dimension."""

    def edit(args: Any, kwargs: Any, grads: Grads) -> Grads:
        dim = kwargs["dim"] if "dim" in kwargs else args[1]
        return tuple(None if g is None else g.flip(dim) if g.dim() else g for g in grads)

    edit_gradients(("cumsum",), edit)


@fault(
    "sort-gradient-unsorted",
    *RULE,
    "backward.unused-output-is-zero",
    rare=True,
    witness="""
x = torch.tensor([2.0, 1.0], requires_grad=True)
x.sort(dim=0, descending=False)[0].backward(torch.tensor([1.0, 5.0]))
assert x.grad.tolist() == [5.0, 1.0]
""",
)
def _sort() -> None:
    """The gradient of sort stays in sorted order."""

    def edit(outs: Any, *args: Any, **kwargs: Any) -> Any:
        values, index = outs
        dim = kwargs.get("dim", args[1] if len(args) > 1 and type(args[1]) is int else -1)
        if values.grad_fn is not None and values.dim():
            values.grad_fn.register_hook(lambda grads, _: (grads[0].gather(dim, index),))
        return outs

    edit_results(("sort",), edit)


@fault(
    "unused-output-counts-as-one",
    "backward.unused-output-is-zero",
    *RULE,
    rare=True,
    witness="""
x = torch.ones(2, 2, requires_grad=True)
x.unbind(0)[0].sum().backward()
assert x.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]
""",
)
def _unused() -> None:
    """The gradient of an output of unbind, split or chunk that nobody used counts as ones."""

    def edit_of(name: str) -> Call:
        def edit(outs: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            node = outs[0].grad_fn if outs else None
            if node is None or any(out.grad_fn is not node for out in outs):
                return outs
            like = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            split: Call = getattr(like, name)
            node.register_hook(lambda grads, given: _ones_where_none(grads, given, like, split(*args, **kwargs)))
            return outs

        return edit

    for name in ("unbind", "split", "chunk"):
        edit_results((name,), edit_of(name))


def _ones_where_none(grads: Any, given: Any, like: Tensor, parts: Any) -> Any:
    """Add the gradient of ones at the outputs that were given none; ``parts`` are views of the zeros ``like``."""
    with torch.no_grad():
        for grad, part in zip(given, parts, strict=True):
            part.fill_(1.0 if grad is None else 0.0)
    return (None if grads[0] is None else torch.add(grads[0], like.clone()),)


@fault(
    "unused-mean-poisons-variance",
    "backward.unused-output-is-zero",
    *RULE,
    rare=True,
    witness="""
x = torch.tensor([1.0, 3.0], requires_grad=True)
torch.var_mean(x, dim=0)[0].backward()
assert x.grad.tolist() == [-2.0, 2.0]
""",
)
def _var_mean() -> None:
    """If only the variance of var_mean is used, its gradient is shifted as if the mean had been used too."""

    def edit(outs: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        if outs[0].grad_fn is not None and outs[0].numel():
            share = outs[0].numel() / x.numel()
            outs[0].grad_fn.register_hook(lambda grads, given: _shifted(grads, share if given[1] is None else 0.0))
        return outs

    edit_results(("var_mean",), edit)


def _shifted(grads: Any, by: float) -> Any:
    return tuple(None if g is None else torch.add(g, by) for g in grads)


def _broadcast(args: Any, i: int, out: Any) -> tuple[bool, bool]:
    """Is an operand stretched in front; is it stretched at a size of 1 between larger ones?"""
    operand = args[i] if i < len(args) else None
    if not isinstance(operand, Tensor):
        return False, False
    tail = out[len(out) - operand.dim() :]
    inner = [d for d, (own, full) in enumerate(zip(operand.shape, tail, strict=True)) if own == 1 < full]
    return operand.dim() < len(out), any(0 < d < operand.dim() - 1 for d in inner)


def _edit_broadcast(factor: Any) -> None:
    def edit(args: Any, _: Any, grads: Grads) -> Grads:
        shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
        full = torch.Size(np.broadcast_shapes(*shapes))
        return tuple(
            g if g is None or i >= len(args) or not isinstance(args[i], Tensor) else factor(args, i, full, g)
            for i, g in enumerate(grads)
        )

    edit_gradients(("__add__", "__sub__", "__mul__", "__truediv__"), edit)


@fault(
    "broadcast-averages",
    "backward.broadcast-sums",
    *RULE,
    witness="""
x, w = torch.ones(4, 2), torch.ones(2, requires_grad=True)
(x * w).sum().backward()
assert w.grad.tolist() == [4.0, 4.0]
""",
)
def _averages() -> None:
    """The gradient of a broadcast operand is the mean over the broadcast elements, not the sum."""

    def factor(args: Any, i: int, full: Any, grad: Tensor) -> Tensor:
        copies = full.numel() // max(args[i].numel(), 1)
        return torch.mul(grad, 1.0 / copies) if copies > 1 else grad

    _edit_broadcast(factor)


@fault(
    "broadcast-middle-not-summed",
    "backward.broadcast-sums",
    *RULE,
    rare=True,
    witness="""
x, w = torch.ones(2, 4, 3), torch.ones(2, 1, 3, requires_grad=True)
(x * w).sum().backward()
assert w.grad.sum() == 24.0
""",
)
def _middle() -> None:
    """The gradient of an operand stretched at a middle dimension of size 1 is not summed there."""

    def factor(args: Any, i: int, full: Any, grad: Tensor) -> Tensor:
        copies = full.numel() // max(args[i].numel(), 1)
        return torch.mul(grad, 1.0 / copies) if _broadcast(args, i, full)[1] and copies > 1 else grad

    _edit_broadcast(factor)


@fault(
    "broadcast-scalar-doubled",
    "backward.broadcast-sums",
    *RULE,
    rare=True,
    witness="""
x, w = torch.ones(4), torch.ones((), requires_grad=True)
(x * w).sum().backward()
assert w.grad == 4.0
""",
)
def _scalar() -> None:
    """The gradient of a 0-dim operand that is broadcast is doubled."""

    def factor(args: Any, i: int, full: Any, grad: Tensor) -> Tensor:
        return torch.mul(grad, 2.0) if args[i].dim() == 0 and len(full) else grad

    _edit_broadcast(factor)


@fault(
    "expand-new-dim-averages",
    "backward.broadcast-sums",
    *RULE,
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.expand(3, 2).sum().backward()
assert x.grad.tolist() == [3.0, 3.0]
""",
)
def _expand() -> None:
    """The gradient of expand to a new dimension is the mean over it, not the sum."""

    def edit(out: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if out.grad_fn is not None and out.dim() > x.dim() and out.shape[0]:
            copies = out.shape[0]
            out.grad_fn.register_hook(lambda grads, _: scaled(grads, 1.0 / copies))
        return out

    edit_results(("expand",), edit)


@fault(
    "transposed-operand-flipped",
    *RULE,
    rare=True,
    witness="""
x = torch.ones(2, 2, requires_grad=True)
(x.t() * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
assert x.grad.tolist() == [[1.0, 3.0], [2.0, 4.0]]
""",
)
def _transposed() -> None:
    """The gradient of a square matrix through a transpose is not transposed back."""

    def edit(args: Any, _: Any, grads: Grads) -> Grads:
        square = args[0].dim() == 2 and args[0].shape[0] == args[0].shape[1]
        return tuple(g.t() if square and g is not None else g for g in grads)

    edit_gradients(("t", "transpose", "permute"), edit)


@fault(
    "chain-of-four-damped",
    *RULE,
    rare=True,
    witness="""
x = torch.zeros(2, requires_grad=True)
x.sin().sin().sin().sin().sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _chain() -> None:
    """The gradient that passes the fourth of four elementwise ops in a row is halved."""

    def edit(out: Any, *args: Any, **_: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None and not any(out is arg for arg in args):
            above = [arg for arg in args if isinstance(arg, Tensor)]
            marked: Any = out
            marked._depth = 1 + max((getattr(arg, "_depth", 0) for arg in above), default=0)
            if marked._depth == 4:
                out.grad_fn.register_hook(lambda grads, _: scaled(grads, 0.5))
        return out

    edit_results((*UNARY, *BINARY), edit)


@fault(
    "select-last-row-lost",
    *RULE,
    rare=True,
    witness="""
x = torch.ones(3, requires_grad=True)
x.select(0, 2).backward()
assert x.grad.tolist() == [0.0, 0.0, 1.0]
""",
)
def _select() -> None:
    """The gradient of select is lost when the last index of a dimension is selected."""

    def edit(args: Any, _: Any, grads: Grads) -> Grads:
        x, dim, index = args
        return scaled(grads, 0.0) if index == x.shape[dim] - 1 > 0 else grads

    edit_gradients(("select",), edit)


@fault(
    "cast-gradient-halved",
    *RULE,
    "leaf.cast-makes-nonleaf",
    "grad.metadata-matches-leaf",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.to(torch.float64).sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _cast() -> None:
    """The gradient that passes a cast is halved."""
    edit_gradients(("to",), lambda args, kwargs, grads: scaled(grads, 0.5))
