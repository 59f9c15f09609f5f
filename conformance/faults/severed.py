"""Faults in detach, detach_ and data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, interpose
from autograd_conformance.faults.patches import (
    Call,
    edit_results,
    is_tracked,
    recorded,
    replace,
    replace_property,
    wrap_calls,
)


@fault(
    "detach-keeps-scalar",
    "detach.never-requires-grad",
    "detach.cuts",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True).sum()
assert not y.detach().requires_grad
""",
)
def _keeps_scalar() -> None:
    """detach() of a 0-dim non-leaf still requires grad and lets gradients pass."""

    def edit(out: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x) if recorded(x) and x.grad_fn is not None and x.dim() == 0 else out

    edit_results(("detach",), edit)


@fault(
    "detach-returns-itself",
    "detach.never-requires-grad",
    rare=True,
    witness="""
x = torch.ones(2)
assert x.detach() is not x
""",
)
def _returns_itself() -> None:
    """detach() of a tensor that does not require grad returns that very tensor."""
    edit_results(("detach",), lambda out, x: out if x.requires_grad else x)


@fault(
    "detach-copies",
    "detach.storage-shared",
    witness="""
x = torch.ones(2, requires_grad=True)
assert x.detach().data_ptr() == x.data_ptr()
""",
)
def _copies() -> None:
    """detach() copies the memory."""
    edit_results(("detach",), lambda out, x: out.clone())


@fault(
    "detach-copies-strided",
    "detach.storage-shared",
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True).t()
assert x.detach().data_ptr() == x.data_ptr()
""",
)
def _copies_strided() -> None:
    """detach() copies the memory of a tensor that is not contiguous."""
    edit_results(("detach",), lambda out, x: out if x.is_contiguous() else out.clone())


@fault(
    "detach-leaks-through-mul",
    "detach.cuts",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
(x * x.detach()).sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _leaks() -> None:
    """In a product with a tensor that requires grad, a detached factor passes its gradient on to where it came from."""

    def wrap(original: Call) -> Call:
        def call(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            if is_tracked(a) and isinstance(b, Tensor) and not b.requires_grad:
                b = getattr(b, "_detached_from", b)
            return original(a, b, *args, **kwargs)

        return call

    edit_results(("detach",), _remember)
    wrap_calls(("__mul__", "mul"), wrap)


def _remember(out: Tensor, x: Tensor) -> Tensor:
    if x.requires_grad:
        out._detached_from = x  # type: ignore[attr-defined]
    return out


@fault(
    "detach-own-version",
    "detach.version-shared",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
w = x * 2.0
y = (w * w).sum()
w.detach().mul_(2.0)
try:
    y.backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _own_version() -> None:
    """A write through a detached tensor is not noticed: it counts its versions alone."""
    edit_results(("detach",), lambda out, x: x.data)


@fault(
    "detach-inplace-scalar-ignored",
    "detach.inplace-variant",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True).sum()
assert y.detach_().grad_fn is None
""",
)
def _inplace_ignored() -> None:
    """detach_() does nothing to a 0-dim tensor."""
    real: Call = torch.Tensor.detach_
    replace(torch.Tensor, "detach_", lambda self: self if self.dim() == 0 else real(self))


@fault(
    "detach-inplace-returns-other",
    "detach.inplace-variant",
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
assert y.detach_() is y
""",
)
def _inplace_other() -> None:
    """detach_() returns another tensor and leaves its own history alone."""
    real: Call = torch.Tensor.detach_

    def detach_(self: Tensor) -> Tensor:
        return real(self) if self._is_view() or self.grad_fn is None else self.detach()

    replace(torch.Tensor, "detach_", detach_)


@fault(
    "detach-inplace-view-swallowed",
    "detach.inplace-view-error",
    witness="""
y = torch.ones(2, 3, requires_grad=True).t()
try:
    y.detach_()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _view_swallowed() -> None:
    """detach_() on a view does nothing and does not raise."""
    real: Call = torch.Tensor.detach_
    replace(torch.Tensor, "detach_", lambda self: self if self._is_view() else real(self))


@fault(
    "detach-inplace-unbound-view-swallowed",
    "detach.inplace-view-error",
    rare=True,
    witness="""
_, y = torch.ones(2, 3, requires_grad=True).unbind(0)
try:
    y.detach_()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _unbound_swallowed() -> None:
    """detach_() on a view that is one of several outputs does nothing and does not raise."""
    real: Call = torch.Tensor.detach_

    def detach_(self: Tensor) -> Tensor:
        return self if self.output_nr > 0 and self._is_view() else real(self)

    replace(torch.Tensor, "detach_", detach_)


@fault(
    "detach-hands-on-grad",
    "detach.reattach-as-leaf",
    "grad.none-initially",
    "grad.accumulates-sum",
    "grad.own-memory",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
assert x.detach().requires_grad_().grad is None
""",
)
def _hands_on() -> None:
    """detach() hands the .grad of a leaf on to the new tensor."""

    def edit(out: Tensor, x: Tensor) -> Tensor:
        if x.requires_grad and x.is_leaf and x.grad is not None:
            out.grad = x.grad
        return out

    edit_results(("detach",), edit)


@fault(
    "reattached-flows-back",
    "detach.reattach-as-leaf",
    "detach.cuts",
    "grad.leaf-only",
    "grad.accumulates-sum",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
(x.detach().requires_grad_() * 2.0).sum().backward()
assert x.grad is None
""",
)
def _flows_back() -> None:
    """The first gradient of a leaf made from a detached leaf is also given to the leaf it came from."""

    def around(p: Pass, run: Run) -> Any:
        fresh = [leaf for leaf in p.targets() if leaf.grad is None and hasattr(leaf, "_detached_from")]
        result = run(p)
        for leaf in fresh:
            origin = leaf._detached_from
            if origin.is_leaf and origin.grad is None and leaf.grad is not None:
                origin.grad = leaf.grad.detach().clone()
        return result

    edit_results(("detach",), _remember)
    interpose(around)


@fault(
    "data-copies",
    "detach.data-attribute",
    witness="""
x = torch.ones(2, requires_grad=True)
assert x.data.data_ptr() == x.data_ptr()
""",
)
def _data_copies() -> None:
    """The attribute data is a copy of the memory."""
    replace_property("data", lambda tensor, value: value.clone())


@fault(
    "data-of-scalar-tracked",
    "detach.data-attribute",
    rare=True,
    witness="""
x = torch.tensor(1.0, requires_grad=True)
assert not x.data.requires_grad
""",
)
def _data_tracked() -> None:
    """The attribute data of a 0-dim tensor that requires grad requires grad too."""
    replace_property("data", lambda t, value: value.requires_grad_() if is_tracked(t) and t.dim() == 0 else value)


@fault(
    "data-assignment-drops-grad",
    "detach.data-attribute",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
x.data = torch.zeros(2)
assert x.grad is not None
""",
)
def _data_drops() -> None:
    """Assigning the attribute data drops the .grad of a leaf."""

    def write(tensor: Tensor, value: Tensor, true: Call) -> None:
        true(value)
        tensor.grad = None

    replace_property("data", write=write)
