"""Faults in what counts as a leaf, and in copies of tensors: clone, casts, torch.tensor, Parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.patches import (
    Call,
    edit_gradients,
    edit_results,
    replace,
    replace_property,
    scaled,
    wrap_calls,
)


@fault(
    "scalar-result-is-leaf",
    "leaf.iff-no-grad-fn",
    "leaf.created-by-user",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True).sum()
assert not y.is_leaf
""",
)
def _scalar_leaf() -> None:
    """A 0-dim result that requires grad says that it is a leaf."""
    replace_property("is_leaf", lambda t, value: value or t.dim() == 0)


@fault(
    "later-output-is-leaf",
    "leaf.iff-no-grad-fn",
    "leaf.created-by-user",
    rare=True,
    witness="""
a, b = torch.ones(2, requires_grad=True).unbind(0)
assert not b.is_leaf
""",
)
def _later_output() -> None:
    """An output after the first of a recorded op says that it is a leaf."""
    replace_property("is_leaf", lambda t, value: value or t.output_nr > 0)


@fault(
    "plain-view-not-leaf",
    "leaf.not-requiring-is-leaf",
    "leaf.iff-no-grad-fn",
    rare=True,
    witness="""
x = torch.ones(2, 3)
assert x.t().is_leaf
""",
)
def _plain_view() -> None:
    """A non-contiguous tensor that does not require grad says that it is no leaf."""
    replace_property("is_leaf", lambda t, value: value and (t.requires_grad or t.is_contiguous()))


@fault(
    "plain-result-not-leaf",
    "leaf.not-requiring-is-leaf",
    "leaf.iff-no-grad-fn",
    "requires-grad.propagates-none",
    witness="""
x = torch.ones(2)
assert (x + x).is_leaf
""",
)
def _plain_result() -> None:
    """A sum of tensors that do not require grad says that it is no leaf."""

    def mark(out: Any, *_: Any, **__: Any) -> Any:
        if isinstance(out, Tensor) and not out.requires_grad:
            out._added = True  # type: ignore[attr-defined]
        return out

    edit_results(("__add__", "add"), mark)
    replace_property("is_leaf", lambda t, value: value and not (hasattr(t, "_added") and not t.requires_grad))


@fault(
    "permuted-leaf-denied",
    "leaf.created-by-user",
    "leaf.iff-no-grad-fn",
    rare=True,
    witness="""
x = torch.ones(2, 3).t().requires_grad_()
assert x.is_leaf
""",
)
def _permuted_leaf() -> None:
    """A leaf with permuted memory that requires grad says that it is no leaf."""
    replace_property("is_leaf", lambda t, value: value and (not t.requires_grad or t.is_contiguous()))


@fault(
    "cast-is-leaf",
    "leaf.cast-makes-nonleaf",
    "leaf.created-by-user",
    "requires-grad.propagates-any",
    "backward.chain-rule",
    witness="""
x = torch.ones(2, requires_grad=True)
assert not x.to(torch.float64).is_leaf
""",
)
def _cast_leaf() -> None:
    """A cast of a leaf that requires grad is a leaf again, without history."""

    def edit(out: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        return out.detach().requires_grad_() if out is not x and x.is_leaf and out.requires_grad else out

    edit_results(("to",), edit)


@fault(
    "same-cast-copies",
    "leaf.cast-makes-nonleaf",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
assert x.to(torch.float32) is x
""",
)
def _same_cast() -> None:
    """A cast to the dtype that the tensor already has returns a copy."""
    edit_results(("to",), lambda out, x, *_, **__: out.clone() if out is x else out)


@fault(
    "clone-untracked-strided",
    "leaf.clone-is-differentiable",
    "requires-grad.propagates-any",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True)
assert x.t().clone().requires_grad
""",
)
def _clone_untracked() -> None:
    """The clone of a non-contiguous tensor does not require grad."""
    edit_results(("clone",), lambda out, x, *_, **__: out if x.is_contiguous() else out.detach())


@fault(
    "clone-of-one-shares-memory",
    "leaf.clone-is-differentiable",
    rare=True,
    witness="""
x = torch.ones(1, requires_grad=True)
assert x.clone().data_ptr() != x.data_ptr()
""",
)
def _clone_shares() -> None:
    """The clone of a tensor with one element shares its memory."""
    edit_results(("clone",), lambda out, x, *_, **__: x.view_as(x) if x.numel() == 1 and x.requires_grad else out)


@fault(
    "clone-halves-gradient",
    "leaf.clone-is-differentiable",
    "backward.chain-rule",
    witness="""
x = torch.ones(2, requires_grad=True)
x.clone().sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _clone_halves() -> None:
    """The gradient that passes a clone is halved."""
    edit_gradients(("clone",), lambda args, kwargs, grads: scaled(grads, 0.5))


@fault(
    "tensor-shares-memory",
    "leaf.torch-tensor-copies",
    witness="""
import warnings; warnings.simplefilter("ignore")
x = torch.ones(2)
assert torch.tensor(x).data_ptr() != x.data_ptr()
""",
)
def _tensor_shares() -> None:
    """torch.tensor of a tensor shares its memory."""

    def edit(out: Tensor, data: Any, *_: Any, **kwargs: Any) -> Tensor:
        if not isinstance(data, Tensor) or data.dtype != out.dtype or data.device != out.device:
            return out
        return data.detach().requires_grad_(bool(kwargs.get("requires_grad", False)))

    _edit_tensor(edit)


def _edit_tensor(edit: Call) -> None:
    real: Callable[..., Tensor] = torch.tensor
    replace(torch, "tensor", lambda *args, **kwargs: edit(real(*args, **kwargs), *args, **kwargs))


@fault(
    "tensor-keeps-history",
    "leaf.torch-tensor-copies",
    "leaf.created-by-user",
    "backward.chain-rule",
    rare=True,
    witness="""
import warnings; warnings.simplefilter("ignore")
y = torch.ones(2, requires_grad=True) * 2.0
assert torch.tensor(y).grad_fn is None
""",
)
def _tensor_history() -> None:
    """torch.tensor of a non-leaf is a recorded copy of it."""

    def edit(out: Tensor, data: Any, *_: Any, **kwargs: Any) -> Tensor:
        return data.clone() if isinstance(data, Tensor) and data.grad_fn is not None and not kwargs else out

    _edit_tensor(edit)


@fault(
    "new-tensor-shares-scalar",
    "leaf.torch-tensor-copies",
    rare=True,
    witness="""
import warnings; warnings.simplefilter("ignore")
x = torch.tensor(1.0)
assert x.new_tensor(x).data_ptr() != x.data_ptr()
""",
)
def _new_tensor() -> None:
    """new_tensor of a 0-dim tensor shares its memory."""

    def edit(out: Tensor, _: Tensor, data: Any, **__: Any) -> Tensor:
        return data.detach() if isinstance(data, Tensor) and data.dim() == 0 else out

    edit_results(("new_tensor",), edit)


def _edit_parameter(edit: Call) -> None:
    real: Call = torch.nn.Parameter.__new__

    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        return edit(real(cls, data, requires_grad), data) if data is not None else real(cls, data, requires_grad)

    replace(torch.nn.Parameter, "__new__", new)


@fault(
    "parameter-copies",
    "leaf.parameter-of-nonleaf",
    witness="""
x = torch.ones(2)
assert torch.nn.Parameter(x).data_ptr() == x.data_ptr()
""",
)
def _parameter_copies() -> None:
    """nn.Parameter copies the memory of the tensor that it wraps."""

    def edit(parameter: Any, data: Tensor) -> Any:
        parameter.data = parameter.data.clone()
        return parameter

    _edit_parameter(edit)


@fault(
    "parameter-of-nonleaf-off",
    "leaf.parameter-of-nonleaf",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
assert torch.nn.Parameter(y).requires_grad
""",
)
def _parameter_off() -> None:
    """nn.Parameter of a non-leaf does not require grad."""
    _edit_parameter(lambda parameter, data: parameter.requires_grad_(data.grad_fn is None and parameter.requires_grad))


@fault(
    "switch-on-makes-zero-grad",
    "grad.none-initially",
    "detach.reattach-as-leaf",
    "grad.unreached-stays-none",
    "grad.leaf-only",
    witness="""
x = torch.ones(2).requires_grad_()
assert x.grad is None
""",
)
def _zero_grad() -> None:
    """Switching a tensor on gives it a .grad of zeros."""

    def wrap(original: Call) -> Call:
        def call(self: Tensor, requires_grad: bool = True) -> Tensor:
            fresh = requires_grad and not self.requires_grad
            out: Tensor = original(self, requires_grad)
            if fresh and out.grad is None:
                out.grad = torch.zeros_like(out)
            return out

        return call

    wrap_calls(("requires_grad_",), wrap)
