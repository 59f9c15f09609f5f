"""Ways to get between Python and torch other than the engine: calls, properties, gradients of one op, kernels."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from autograd_conformance.faults.base import fault

UNARY = ("neg", "__neg__", "sin", "cos", "tanh", "sigmoid", "atan", "exp", "expm1", "sqrt", "relu", "abs")
BINARY = ("__add__", "__sub__", "__mul__", "__truediv__", "add", "sub", "mul", "div", "maximum", "minimum")

Call = Callable[..., Any]
Grads = tuple[Tensor | None, ...]
Edit = Callable[[tuple[Any, ...], dict[str, Any], Grads], Grads]


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of torch that type checkers take for final."""
    setattr(owner, name, value)


def wrap_calls(names: Iterable[str], wrap: Callable[[Call], Call]) -> None:
    """Replace each op, as a method and as a function, by ``wrap(op)``."""
    with forward_ad.dual_level():  # compiles what it finds on torch when it is first used, and takes no wrappers
        forward_ad.make_dual(torch.ones(1), torch.ones(1))
    for name in names:
        for owner in (torch.Tensor, torch):
            original = getattr(owner, name, None)
            if original is not None:
                setattr(owner, name, _named_like(original, wrap(original)))


def _named_like(original: Call, replacement: Call) -> Call:
    functools.update_wrapper(replacement, original, assigned=("__name__", "__doc__"), updated=())
    return replacement


def edit_results(names: Iterable[str], edit: Callable[..., Any]) -> None:
    """Let ``edit(result, *args, **kwargs)`` replace the result of each call."""

    def wrap(original: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            return out if out is NotImplemented else edit(out, *args, **kwargs)

        return call

    wrap_calls(names, wrap)


def edit_gradients(names: Iterable[str], edit: Edit) -> None:
    """Let ``edit(args, kwargs, gradients)`` replace the gradients of an op's operands; the node stays torch's own."""

    def hooked(out: Any, /, *args: Any, **kwargs: Any) -> Any:
        first = out if isinstance(out, Tensor) else out[0]
        # An op that has nothing to do returns its operand, whose node belongs to someone else.
        if first.grad_fn is not None and not any(first is arg for arg in args):
            first.grad_fn.register_hook(lambda grads, _: edit(args, kwargs, tuple(grads)))
        return out

    edit_results(names, hooked)


def scaled(grads: Grads, factor: float, which: int | None = None) -> Grads:
    """All gradients times ``factor``, or one of them."""
    return tuple(
        grad if grad is None or which not in (None, i) else torch.mul(grad, factor) for i, grad in enumerate(grads)
    )


def is_tracked(value: Any) -> bool:
    """Is it a tensor that requires grad?"""
    return isinstance(value, Tensor) and value.requires_grad


def is_plain(value: Any) -> bool:
    """Is it a floating tensor that does not require grad?"""
    return isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad


def recorded(value: Any) -> bool:
    """Will an op on this tensor be recorded?"""
    return is_tracked(value) and torch.is_grad_enabled()


def replace_property(name: str, read: Callable[[Tensor, Any], Any] | None = None,
                     write: Callable[[Tensor, Any, Call], None] | None = None) -> None:  # fmt: skip
    """Put ``read(tensor, true value)`` and ``write(tensor, value, true setter)`` before a property of tensors."""
    real: Any = getattr(torch._C.TensorBase, name)

    def getter(tensor: Tensor) -> Any:
        value = real.__get__(tensor)
        return value if read is None else read(tensor, value)

    def setter(tensor: Tensor, value: Any) -> None:
        if write is None:
            real.__set__(tensor, value)
        else:
            write(tensor, value, lambda v: real.__set__(tensor, v))

    setattr(torch.Tensor, name, property(getter, setter, real.__delete__))


_libraries: list[Any] = []  # a library takes its kernels back when it is collected


def replace_kernel(name: str, kernel: Call) -> None:
    """Replace the CPU kernel of an aten op; torch's own node and formula stay above it."""
    make: Call = torch.library.Library
    library = make("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, kernel, "CPU")


def true_tanh_backward(grad: Tensor, out: Tensor) -> Tensor:
    """The derivative by the ``out=`` overload, which keeps torch's own kernel."""
    into = torch.empty_like(grad)
    torch.ops.aten.tanh_backward.grad_input(grad, out, grad_input=into)
    return into


@fault(
    "null-calls",
    witness="""
x = torch.tensor([0.5, 2.0], requires_grad=True)
y = ((x + x) * x.sin() - x / 2.0).sum()
assert y.requires_grad and (x.detach() * 2.0).grad_fn is None
y.backward()
assert torch.allclose(x.grad, (2 * x.sin() + 2 * x * x.cos() - 0.5).detach())
""",
)
def _null_calls() -> None:
    """Nothing: ops are called through a wrapper."""
    edit_results(
        (*UNARY, *BINARY, "sum", "detach", "clone", "to", "unbind", "requires_grad_"),
        lambda result, /, *_, **__: result,
    )


@fault(
    "null-gradients",
    witness="""
x = torch.tensor([0.5, 2.0], requires_grad=True)
g, = torch.autograd.grad((x * x).sum(), x, create_graph=True)
g.sum().backward()
assert g.tolist() == [1.0, 4.0] and x.grad.tolist() == [2.0, 2.0]
""",
)
def _null_gradients() -> None:
    """Nothing: a hook on the node of each op returns the gradients that it got."""
    edit_gradients((*UNARY, *BINARY, "sum"), lambda args, kwargs, grads: grads)


@fault(
    "null-properties",
    witness="""
x = torch.tensor([1.0, 2.0], requires_grad=True)
(x * x).sum().backward()
assert x.requires_grad and x.is_leaf and x.grad.tolist() == [2.0, 4.0] and not x.data.requires_grad
x.grad = None
x.requires_grad = False
assert x.grad is None and not x.requires_grad
""",
)
def _null_properties() -> None:
    """Nothing: the properties of tensors are read and written through Python."""
    for name in ("requires_grad", "is_leaf", "grad", "data"):
        replace_property(name)


@fault(
    "null-kernel",
    witness="""
x = torch.tensor([0.5, 2.0], requires_grad=True)
x.tanh().sum().backward()
assert torch.allclose(x.grad, 1 - x.detach().tanh() ** 2)
""",
)
def _null_kernel() -> None:
    """Nothing: one kernel of a derivative is reached through Python."""
    replace_kernel("tanh_backward", true_tanh_backward)
