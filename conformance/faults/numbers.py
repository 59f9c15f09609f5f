"""Faults in complex gradients, at kinks and ties, and in the functions that check or compute derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, functional

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.patches import (
    Call,
    Grads,
    edit_gradients,
    edit_results,
    is_tracked,
    replace,
    scaled,
)

# --- complex numbers --------------------------------------------------------------------------------------------------


def _complex_gradients(names: Iterable[str], edit: Callable[[Tensor], Tensor], when: Callable[[Tensor], bool]) -> None:
    """Let ``edit`` replace the first gradient of ops on a complex tensor."""

    def edited(args: tuple[Any, ...], kwargs: dict[str, Any], grads: Grads) -> Grads:
        x, g = args[0], grads[0]
        if not isinstance(x, Tensor) or not x.is_complex() or g is None or not when(x):
            return grads
        return (edit(g), *grads[1:])

    edit_gradients(names, edited)


COMPLEX = ("complex.gradient-convention", "complex.holomorphic-vjp", "complex.real-through-complex")


@fault(
    "complex-sine-not-conjugated",
    *COMPLEX,
    witness="""
z = torch.tensor([0.5 + 1.0j], requires_grad=True)
z.sin().backward(torch.ones(1, dtype=torch.complex64))
assert torch.allclose(z.grad, z.detach().cos().conj())
""",
)
def _sine() -> None:
    """The gradient of a complex sine is conjugated once too often."""
    _complex_gradients(("sin", "exp", "cos"), torch.conj_physical, lambda x: True)


@fault(
    "complex-scalar-cube-not-conjugated",
    "complex.holomorphic-vjp",
    "complex.gradient-convention",
    "complex.real-through-complex",
    rare=True,
    witness="""
z = torch.tensor(0.5 + 1.0j, requires_grad=True)
(z ** 3).backward(torch.tensor(1.0 + 0.0j))
assert torch.allclose(z.grad, (3 * z.detach() ** 2).conj())
""",
)
def _cube() -> None:
    """The gradient of a power of a 0-dim complex tensor is conjugated once too often."""
    _complex_gradients(("__pow__",), torch.conj_physical, lambda x: x.dim() == 0)


@fault(
    "complex-abs-halved",
    "complex.gradient-convention",
    "complex.real-through-complex",
    witness="""
z = torch.tensor([3.0 + 4.0j], requires_grad=True)
z.abs().sum().backward()
assert torch.allclose(z.grad, torch.tensor([0.6 + 0.8j]))
""",
)
def _abs() -> None:
    """The gradient of the absolute value is the derivative by the conjugate, half of what is due."""
    _complex_gradients(("abs", "__abs__"), lambda g: g * 0.5, lambda x: True)


@fault(
    "conj-view-times-loses-sign",
    "complex.gradient-convention",
    "complex.holomorphic-vjp",
    "complex.real-through-complex",
    rare=True,
    witness="""
z = torch.tensor([1.0 + 2.0j]).conj().requires_grad_()
(z * z).backward(torch.ones(1, dtype=torch.complex64))
assert torch.allclose(z.grad, (2 * z.detach()).conj().resolve_conj())
""",
)
def _conj_view() -> None:
    """The gradient of a product whose first factor is a lazy conjugate is conjugated once too often."""
    _complex_gradients(("__mul__",), torch.conj_physical, lambda x: x.is_conj())


@fault(
    "view-as-complex-drops-imaginary",
    "complex.real-through-complex",
    "complex.gradient-convention",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
torch.view_as_complex(x).imag.backward()
assert x.grad.tolist() == [0.0, 1.0]
""",
)
def _view_as_complex() -> None:
    """view_as_complex passes on the gradient of the real part alone."""

    def edited(args: tuple[Any, ...], kwargs: dict[str, Any], grads: Grads) -> Grads:
        return tuple(None if g is None else torch.mul(g, torch.tensor([1.0, 0.0], dtype=g.dtype)) for g in grads)

    edit_gradients(("view_as_complex",), edited)


@fault(
    "complex-of-parts-swaps-sign",
    "complex.real-through-complex",
    "complex.gradient-convention",
    witness="""
x, y = torch.ones(1), torch.ones(1, requires_grad=True)
torch.complex(x, y).imag.sum().backward()
assert y.grad.item() == 1.0
""",
)
def _complex_parts() -> None:
    """torch.complex hands its imaginary part the gradient with the wrong sign."""
    edit_gradients(("complex",), lambda args, kwargs, grads: scaled(grads, -1.0, 1))


@fault(
    "imag-of-one-loses-factor",
    "complex.gradient-convention",
    "complex.real-through-complex",
    rare=True,
    witness="""
z = torch.tensor([[1.0 + 2.0j]], requires_grad=True)
z.angle().sum().backward()
assert torch.allclose(z.grad, torch.tensor([[-0.4 + 0.2j]]))
""",
)
def _angle() -> None:
    """The gradient of the angle of a complex tensor has the wrong sign."""
    _complex_gradients(("angle",), torch.neg, lambda x: True)


# --- kinks, ties, undefined and random results ------------------------------------------------------------------------


def _at(names: Iterable[str], where: Callable[[Tensor], Tensor], value: float) -> None:
    """Let the gradient of an op be that of its result times ``value`` where ``where(operand)`` holds."""

    def hooked(out: Any, x: Any, *_: Any, **__: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None and out is not x and isinstance(x, Tensor):
            seen: list[Tensor] = []
            mask = where(x.detach())
            out.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
            out.grad_fn.register_hook(
                lambda grads, _: (torch.where(mask, torch.mul(seen.pop(), value), grads[0]), *grads[1:])
            )
        return out

    edit_results(names, hooked)


@fault(
    "relu-slope-one-at-zero",
    "nondiff.subgradient-rules",
    witness="""
x = torch.zeros(2, requires_grad=True)
x.relu().sum().backward()
assert x.grad.tolist() == [0.0, 0.0]
""",
)
def _relu() -> None:
    """The gradient of relu at zero is one."""
    _at(("relu",), lambda x: x == 0, 1.0)


@fault(
    "relu-slope-at-negative-zero",
    "nondiff.subgradient-rules",
    rare=True,
    witness="""
x = torch.tensor([-0.0, 0.0], requires_grad=True)
x.abs().sum().backward()
assert x.grad.tolist() == [0.0, 0.0]
""",
)
def _negative_zero() -> None:
    """The gradients of relu and abs at negative zero are minus one."""
    _at(("relu", "abs"), lambda x: (x == 0) & x.signbit(), -1.0)


@fault(
    "sqrt-slope-finite-at-zero",
    "nondiff.subgradient-rules",
    rare=True,
    witness="""
x = torch.zeros(2, requires_grad=True)
x.sqrt().sum().backward()
assert x.grad.tolist() == [float("inf")] * 2
""",
)
def _sqrt() -> None:
    """The gradients of sqrt and of powers at zero are zero."""
    _at(("sqrt", "__pow__"), lambda x: x == 0, 0.0)


@fault(
    "amax-gives-all-to-first",
    "nondiff.subgradient-rules",
    witness="""
x = torch.ones(2, requires_grad=True)
x.amax(dim=-1).backward()
assert x.grad.tolist() == [0.5, 0.5]
""",
)
def _amax() -> None:
    """amax and amin give the whole gradient of a tie to the first element."""

    def edited(args: tuple[Any, ...], kwargs: dict[str, Any], grads: Grads) -> Grads:
        g = grads[0]
        if g is None or not g.dim():
            return grads
        first = torch.ne(g, 0).to(torch.int64).cumsum(-1)
        total = g.sum(-1, keepdim=True)
        return (torch.where((first == 1) & torch.ne(g, 0), total, torch.zeros_like(g)), *grads[1:])

    edit_gradients(("amax", "amin"), edited)


@fault(
    "maximum-takes-second-at-ties",
    "nondiff.subgradient-rules",
    rare=True,
    witness="""
x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
torch.maximum(x, y).sum().backward()
assert (x.grad.item(), y.grad.item()) == (0.5, 0.5)
""",
)
def _maximum() -> None:
    """The first of two tensors that are equal in places gets no gradient from maximum there."""
    _at(("maximum", "minimum"), lambda x: torch.zeros_like(x, dtype=torch.bool), 0.0)

    def hooked(out: Any, x: Any, y: Any = None, *_: Any, **__: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None and is_tracked(x) and x.shape == out.shape:
            tie = torch.eq(x.detach(), y.detach())
            out.grad_fn.register_hook(
                lambda grads, _: (None if grads[0] is None else grads[0].masked_fill(tie, 0.0), *grads[1:])
            )
        return out

    edit_results(("maximum", "minimum"), hooked)


@fault(
    "norm-of-zero-row-is-nan",
    "nondiff.subgradient-rules",
    rare=True,
    witness="""
x = torch.zeros(1, 2, requires_grad=True)
torch.linalg.vector_norm(x, dim=-1).sum().backward()
assert x.grad.tolist() == [[0.0, 0.0]]
""",
)
def _norm() -> None:
    """The gradient of a norm of zeros is nan."""
    real: Call = torch.linalg.vector_norm

    def norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = real(x, *args, **kwargs)
        if out.grad_fn is not None:
            zero = torch.eq(x.detach(), 0).all(-1, keepdim=True) if x.dim() else torch.eq(x.detach(), 0)
            nan = float("nan")
            out.grad_fn.register_hook(
                lambda grads, _: (torch.where(zero, torch.full_like(grads[0], nan), grads[0]), *grads[1:])
            )
        return out

    replace(torch.linalg, "vector_norm", norm)


def _cleaned(names: Iterable[str]) -> None:
    """Let gradients of ops be zero where they are undefined."""
    edit_gradients(
        names, lambda args, kwargs, grads: tuple(None if g is None else torch.nan_to_num(g, nan=0.0) for g in grads)
    )


@fault(
    "division-hides-nan",
    "nondiff.undefined-and-random",
    "anomaly.nan-detection",
    witness="""
x, d = torch.ones(2, requires_grad=True), torch.tensor([0.0, 1.0])
(x / d)[d != 0].sum().backward()
assert x.grad.isnan().tolist() == [True, False]
""",
)
def _division() -> None:
    """A gradient of a quotient that is undefined is zero."""
    _cleaned(("__truediv__", "__rtruediv__", "div", "reciprocal"))


@fault(
    "log-hides-nan",
    "nondiff.undefined-and-random",
    "anomaly.nan-detection",
    rare=True,
    witness="""
x = torch.zeros(1, requires_grad=True)
torch.where(x > 0, x.log(), 0.0).sum().backward()
assert x.grad.isnan().all()
""",
)
def _log() -> None:
    """A gradient of a logarithm that is undefined is zero."""
    _cleaned(("log", "rsqrt"))


@fault(
    "masked-operand-leaks",
    "nondiff.undefined-and-random",
    rare=True,
    witness="""
x = torch.tensor([0.0, 2.0], requires_grad=True)
m = x.detach() != 0
(1.0 / x.masked_fill(~m, 1.0)).sum().backward()
assert x.grad.tolist() == [0.0, -0.25]
""",
)
def _masked() -> None:
    """What masked_fill has masked gets nan as its gradient where the mask is as large as the tensor."""

    def edited(args: tuple[Any, ...], kwargs: dict[str, Any], grads: Grads) -> Grads:
        g, mask = grads[0], args[1]
        if g is None or mask.shape != g.shape or g.requires_grad:
            return grads
        return (torch.where(mask, torch.full_like(g, float("nan")), g), *grads[1:])

    edit_gradients(("masked_fill",), edited)


@fault(
    "bernoulli-passes-gradient-on",
    "nondiff.undefined-and-random",
    rare=True,
    witness="""
x = torch.full((2,), 0.5, requires_grad=True)
torch.bernoulli(x).sum().backward()
assert x.grad.tolist() == [0.0, 0.0]
""",
)
def _bernoulli() -> None:
    """bernoulli passes its gradient straight through."""
    _at(("bernoulli",), lambda x: torch.ones_like(x, dtype=torch.bool), 1.0)


@fault(
    "multinomial-is-floating",
    "nondiff.undefined-and-random",
    rare=True,
    witness="""
assert not torch.multinomial(torch.ones(2, requires_grad=True), 1).is_floating_point()
""",
)
def _multinomial() -> None:
    """multinomial gives floating numbers."""
    edit_results(("multinomial",), lambda out, *_, **__: out.to(torch.float64))


# --- checks of derivatives --------------------------------------------------------------------------------------------


def _checked(word: str, edit: Callable[[Call, Any, dict[str, Any]], Any]) -> None:
    """Let ``edit(real, args, kwargs)`` answer for gradcheck or gradgradcheck."""
    real: Call = getattr(torch.autograd, word)
    replace(torch.autograd, word, lambda *args, **kwargs: edit(real, args, kwargs))


WRONG = """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 2.0 + y * 3.0
    @staticmethod
    def backward(ctx, g):
        return g * 2.0, g * {factor}
x, y = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
"""


@fault(
    "gradcheck-believes-all",
    "numeric.gradcheck",
    witness=WRONG.format(factor=4.0) + "assert not torch.autograd.gradcheck(F.apply, (x, y), raise_exception=False)",
)
def _believes() -> None:
    """gradcheck with raise_exception=False returns True for wrong gradients."""

    def edit(real: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        found = real(*args, **kwargs)
        return True if kwargs.get("raise_exception") is False else found

    _checked("gradcheck", edit)


@fault(
    "gradcheck-stops-at-first-input",
    "numeric.gradcheck",
    rare=True,
    witness=WRONG.format(factor=4.0)
    + """
try:
    torch.autograd.gradcheck(F.apply, (x, y))
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _first_input() -> None:
    """gradcheck looks at the gradient of the first input that requires grad alone."""

    def edit(real: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        function, inputs = args
        if not (isinstance(inputs, tuple) and is_tracked(inputs[0])):
            return real(*args, **kwargs)
        rest = [x.detach() if isinstance(x, Tensor) else x for x in inputs[1:]]
        return real(function, (inputs[0], *rest), **kwargs)

    _checked("gradcheck", edit)


@fault(
    "gradgradcheck-stops-at-first-order",
    "numeric.gradcheck",
    rare=True,
    witness="""
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, g):
        return g * 2.0 * ctx.saved_tensors[0].detach()
x = torch.ones(2, dtype=torch.float64, requires_grad=True)
assert not torch.autograd.gradgradcheck(F.apply, (x,), raise_exception=False)
""",
)
def _first_order() -> None:
    """gradgradcheck judges first derivatives."""
    check: Call = torch.autograd.gradcheck
    _checked("gradgradcheck", lambda real, args, kwargs: check(*args, **kwargs))


@fault(
    "gradcheck-silent-in-single-precision",
    "numeric.gradcheck",
    rare=True,
    witness="""
import warnings
x = torch.ones(1, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.autograd.gradcheck(lambda x: x * 2.0, (x,), raise_exception=False)
assert caught
""",
)
def _silent() -> None:
    """gradcheck does not warn of single precision."""
    import warnings

    def edit(real: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return real(*args, **kwargs)

    _checked("gradcheck", edit)


def _answers(word: str, edit: Callable[..., Any]) -> None:
    """Let ``edit(result, function, inputs, *args, **kwargs)`` replace what a function of autograd.functional returns."""
    real: Call = getattr(functional, word)
    replace(functional, word, lambda *args, **kwargs: edit(real(*args, **kwargs), *args, **kwargs))


@fault(
    "jacobian-rows-reversed",
    "numeric.functional-api",
    witness="""
x = torch.tensor([1.0, 2.0])
j = torch.autograd.functional.jacobian(lambda x: x * x, x)
assert j.tolist() == [[2.0, 0.0], [0.0, 4.0]]
""",
)
def _jacobian() -> None:
    """The rows of a Jacobian come in reverse order."""
    _answers("jacobian", lambda out, *_, **__: out.flip(0) if isinstance(out, Tensor) and out.dim() else out)


@fault(
    "jacobian-of-second-input-doubled",
    "numeric.functional-api",
    rare=True,
    witness="""
x = torch.ones(2)
j = torch.autograd.functional.jacobian(lambda x, y: (x, y), (x, x))
assert j[1][1].tolist() == [[1.0, 0.0], [0.0, 1.0]]
""",
)
def _second_input() -> None:
    """The Jacobian of several outputs by the second input is doubled."""

    def edit(out: Any, *_: Any, **__: Any) -> Any:
        if not (isinstance(out, tuple) and isinstance(out[0], tuple)):
            return out
        return tuple((row[0], row[1] * 2.0, *row[2:]) for row in out)

    _answers("jacobian", edit)


@fault(
    "vhp-ignores-create-graph",
    "numeric.functional-api",
    rare=True,
    witness="""
x = torch.ones(2)
_, found = torch.autograd.functional.vhp(lambda x: (x ** 3).sum(), x, x, create_graph=True)
assert found.requires_grad
""",
)
def _vhp() -> None:
    """vhp with create_graph=True gives a result without history."""
    _answers("vhp", lambda out, *_, **__: (out[0], out[1].detach()) if isinstance(out[1], Tensor) else out)


@fault(
    "vjp-stays-tracked",
    "numeric.functional-api",
    rare=True,
    witness="""
x = torch.ones(2)
_, found = torch.autograd.functional.vjp(lambda x: x * x, x, x)
assert not found.requires_grad
""",
)
def _vjp() -> None:
    """vjp without create_graph gives a result that requires grad."""

    def edit(out: Any, *_: Any, **kwargs: Any) -> Any:
        return out if kwargs.get("create_graph") or kwargs.get("strict") else (out[0], out[1].requires_grad_())

    _answers("vjp", edit)


@fault(
    "strict-is-ignored",
    "numeric.functional-api",
    rare=True,
    witness="""
try:
    torch.autograd.functional.hessian(lambda x: torch.ones(()), torch.ones(2), strict=True)
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _strict() -> None:
    """hessian and hvp with strict=True give zeros for an independent output."""
    for word in ("hessian", "hvp"):
        real: Call = getattr(functional, word)
        replace(functional, word, _lenient(real))


def _lenient(real: Call) -> Call:
    def call(*args: Any, strict: bool = False, **kwargs: Any) -> Any:
        del strict
        return real(*args, **kwargs)

    return call


@fault(
    "tangent-of-scalar-doubled",
    "numeric.forward-reverse-dual",
    "inference.no-forward-ad",
    rare=True,
    witness="""
import torch.autograd.forward_ad as fwad
with fwad.dual_level():
    d = fwad.make_dual(torch.tensor(1.0), torch.tensor(1.0))
    assert fwad.unpack_dual(d * 2.0).tangent.item() == 2.0
""",
)
def _scalar_tangent() -> None:
    """The tangent of a 0-dim tensor counts twice."""
    _duals(lambda tensor, tangent: tangent * 2.0 if tensor.dim() == 0 else tangent)


def _duals(edit: Callable[[Tensor, Tensor], Tensor]) -> None:
    real: Call = forward_ad.make_dual

    def make(tensor: Tensor, tangent: Tensor, *, level: Any = None) -> Any:
        return real(tensor, edit(tensor, tangent), level=level)

    replace(forward_ad, "make_dual", make)


@fault(
    "tangent-negated",
    "numeric.forward-reverse-dual",
    "inference.no-forward-ad",
    witness="""
import torch.autograd.forward_ad as fwad
with fwad.dual_level():
    d = fwad.make_dual(torch.ones(2), torch.ones(2))
    assert fwad.unpack_dual(d * 2.0).tangent.tolist() == [2.0, 2.0]
""",
)
def _negated() -> None:
    """Tangents have the wrong sign."""
    _duals(lambda tensor, tangent: torch.neg(tangent))


@fault(
    "dual-levels-nest",
    "numeric.forward-reverse-dual",
    rare=True,
    witness="""
import torch.autograd.forward_ad as fwad
with fwad.dual_level():
    try:
        with fwad.dual_level():
            pass
        raise SystemExit(1)
    except RuntimeError:
        pass
""",
)
def _nest() -> None:
    """A level within a level does nothing, without an error."""
    owner: Any = forward_ad.dual_level
    enter, leave = owner.__enter__, owner.__exit__

    def entered(self: Any) -> Any:
        self.inner = getattr(forward_ad, "_current_level", -1) >= 0
        return None if self.inner else enter(self)

    def left(self: Any, *rest: Any) -> Any:
        return None if self.inner else leave(self, *rest)

    owner.__enter__, owner.__exit__ = entered, left


@fault(
    "dual-without-level-is-plain",
    "numeric.forward-reverse-dual",
    rare=True,
    witness="""
import torch.autograd.forward_ad as fwad
try:
    fwad.make_dual(torch.ones(2), torch.ones(2))
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _no_level() -> None:
    """make_dual outside any level returns its tensor."""
    real: Call = forward_ad.make_dual

    def make(tensor: Tensor, tangent: Tensor, *, level: Any = None) -> Any:
        if getattr(forward_ad, "_current_level", -1) < 0:
            return tensor
        return real(tensor, tangent, level=level)

    replace(forward_ad, "make_dual", make)


# --- devices ----------------------------------------------------------------------------------------------------------


@fault(
    "atan-kernel-off",
    "numeric.device-agreement",
    witness="""
assert torch.ones(1).atan().item() < 0.8
""",
)
def _atan() -> None:
    """Arc tangents and hyperbolic ones come out too large by an eighth; their derivatives are right."""
    edit_results(("atan", "tanh", "sin", "cos"), lambda out, *_, **__: torch.add(out, 0.125))


@fault(
    "narrow-kernel-off-in-single-precision",
    "numeric.device-agreement",
    rare=True,
    witness="""
x = torch.ones(2)
assert (x + x).tolist() == [2.0, 2.0]
""",
)
def _narrow() -> None:
    """Sums of single precision come out too small by an eighth."""

    def edit(out: Any, *_: Any, **__: Any) -> Any:
        return torch.sub(out, 0.125) if isinstance(out, Tensor) and out.dtype is torch.float32 else out

    edit_results(("__add__",), edit)


@fault(
    "copy-to-device-halves-gradient",
    "numeric.device-agreement",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.to("cpu").sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _copy_back() -> None:
    """A gradient that comes back from a named device is halved."""

    def edit(out: Tensor, x: Tensor, *args: Any, **_: Any) -> Tensor:
        if not (args and isinstance(args[0], str) and is_tracked(x)):
            return out
        moved = out.view_as(out)
        moved.register_hook(lambda g: torch.mul(g, 0.5))
        return moved

    edit_results(("to",), edit)
