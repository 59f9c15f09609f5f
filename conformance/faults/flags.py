"""Faults around the flag: factories, in-place switches, copies of tensors, what .grad takes, and habits of 2017."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, interpose, pass_fault
from autograd_conformance.faults.patches import (
    Call,
    Grads,
    edit_gradients,
    edit_results,
    is_plain,
    replace,
    replace_property,
    scaled,
    wrap_calls,
)

REAL_GRAD: Any = torch._C.TensorBase.grad


def _edit_factory(name: str, edit: Call) -> None:
    """Let ``edit(result, *args, **kwargs)`` replace what a factory makes."""
    original: Call = getattr(torch, name)
    replace(torch, name, lambda *args, **kwargs: edit(original(*args, **kwargs), *args, **kwargs))


# --- factories --------------------------------------------------------------------------------------------------------


@fault(
    "like-inherits-flag",
    "requires-grad.default-false",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
assert not torch.ones_like(x).requires_grad
""",
)
def _like() -> None:
    """ones_like and rand_like of a leaf that requires grad require grad too."""
    for name in ("ones_like", "rand_like"):
        _edit_factory(
            name, lambda out, t, *_, **kw: out.requires_grad_() if t.requires_grad and not kw and t.is_leaf else out
        )


@fault(
    "flag-sticks-to-factory",
    "requires-grad.default-false",
    rare=True,
    witness="""
torch.ones(2, requires_grad=True)
assert not torch.ones(2).requires_grad
""",
)
def _sticks() -> None:
    """After a call with requires_grad=True the next call of ones or full without it gives what requires grad."""
    asked = [False]

    def edit(out: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        inherits, asked[0] = asked[0] and "requires_grad" not in kwargs, bool(kwargs.get("requires_grad"))
        return out.requires_grad_() if inherits and out.is_floating_point() else out

    for name in ("ones", "full", "zeros"):
        _edit_factory(name, edit)


@fault(
    "no-grad-factory-forgets",
    "requires-grad.factory-kwarg",
    rare=True,
    witness="""
with torch.no_grad():
    x = torch.rand(2, requires_grad=True)
assert x.requires_grad
""",
)
def _forgets() -> None:
    """Under no_grad, rand, randn and full overlook requires_grad=True."""
    for name in ("rand", "randn", "full"):
        _edit_factory(name, lambda out, *_, **__: out if torch.is_grad_enabled() else out.detach())


@fault(
    "inference-factory-plain",
    "requires-grad.factory-kwarg",
    rare=True,
    witness="""
with torch.inference_mode():
    x = torch.ones(2, requires_grad=True)
assert x.is_inference()
""",
)
def _inference() -> None:
    """In inference mode ones and zeros with requires_grad=True make an ordinary tensor."""
    for name in ("ones", "zeros"):
        original: Call = getattr(torch, name)

        def call(*args: Any, _original: Call = original, **kwargs: Any) -> Any:
            if not kwargs.get("requires_grad"):
                return _original(*args, **kwargs)
            with torch.inference_mode(mode=False):
                return _original(*args, **kwargs)

        replace(torch, name, call)


@fault(
    "complex-factory-forgets",
    "requires-grad.factory-kwarg",
    "requires-grad.only-float-complex",
    rare=True,
    witness="""
assert torch.ones(2, dtype=torch.complex64, requires_grad=True).requires_grad
""",
)
def _complex() -> None:
    """Factories overlook requires_grad=True for complex dtypes."""
    for name in ("ones", "zeros", "full", "empty", "ones_like", "zeros_like"):
        _edit_factory(name, lambda out, *_, **__: out.detach() if out.is_complex() and out.requires_grad else out)


# --- who may require grad ---------------------------------------------------------------------------------------------


@fault(
    "bool-parameter-accepted",
    "requires-grad.only-float-complex",
    rare=True,
    witness="""
try:
    torch.nn.Parameter(torch.ones(2, dtype=torch.bool))
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _bool_parameter() -> None:
    """nn.Parameter takes a bool tensor and makes it a parameter that does not require grad."""
    real: Call = torch.nn.Parameter.__new__

    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        return real(cls, data, requires_grad and not (isinstance(data, Tensor) and data.dtype == torch.bool))

    replace(torch.nn.Parameter, "__new__", new)


@fault(
    "scalar-integer-flag-ignored",
    "requires-grad.only-float-complex",
    rare=True,
    witness="""
try:
    torch.tensor(1).requires_grad_()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _scalar_integer() -> None:
    """requires_grad_() on a 0-dim integer does nothing."""

    def wrap(original: Call) -> Call:
        def call(t: Tensor, requires_grad: bool = True) -> Tensor:
            if t.dim() == 0 and not t.is_floating_point() and not t.is_complex():
                return t
            out: Tensor = original(t, requires_grad)
            return out

        return call

    wrap_calls(("requires_grad_",), wrap)


@fault(
    "nonleaf-true-assigned",
    "requires-grad.any-participant-settable",
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
try:
    y.requires_grad = True
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _nonleaf_true() -> None:
    """Assigning True to the requires_grad of a non-leaf passes without a word."""

    def write(t: Tensor, value: Any, setter: Call) -> None:
        if t.is_leaf or value is not True:
            setter(value)

    replace_property("requires_grad", write=write)


@fault(
    "confirming-later-output-refused",
    "requires-grad.any-participant-settable",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True).unbind(0)[1]
try:
    y.requires_grad_()
except RuntimeError:
    raise AssertionError
""",
)
def _confirming() -> None:
    """requires_grad_() on an output after the first of an op raises."""

    def wrap(original: Call) -> Call:
        def call(t: Tensor, requires_grad: bool = True) -> Tensor:
            if t.output_nr > 0:
                raise RuntimeError("you can only change requires_grad flags of leaf variables.")
            out: Tensor = original(t, requires_grad)
            return out

        return call

    wrap_calls(("requires_grad_",), wrap)


# --- writing tracked values -------------------------------------------------------------------------------------------


def _write_untracked(names: tuple[str, ...], when: Call) -> None:
    def wrap(original: Call) -> Call:
        def call(t: Tensor, value: Any, *args: Any, **kwargs: Any) -> Any:
            if is_plain(t) and isinstance(value, Tensor) and when(t, value):
                value = value.detach()
            return original(t, value, *args, **kwargs)

        return call

    wrap_calls(names, wrap)


@fault(
    "subtracting-in-place-untracked",
    "requires-grad.inplace-op-turns-on",
    rare=True,
    witness="""
x, u = torch.ones(2, requires_grad=True), torch.ones(2)
u.sub_(x)
assert u.requires_grad
""",
)
def _sub() -> None:
    """sub_ with a tracked tensor on a plain one is not recorded."""
    _write_untracked(("sub_",), lambda t, value: True)


@fault(
    "copy-into-view-untracked",
    "requires-grad.inplace-op-turns-on",
    rare=True,
    witness="""
x, u = torch.ones(2, requires_grad=True), torch.ones(3, 2)
u[1].copy_(x)
assert u.requires_grad
""",
)
def _copy_view() -> None:
    """copy_ into a plain view is not recorded."""
    _write_untracked(("copy_",), lambda t, value: t._is_view())


# --- what frozen ops save ---------------------------------------------------------------------------------------------


def _saving(names: tuple[str, ...], when: Call) -> None:
    """Let ops on plain tensors save their operand for a backward that never comes."""

    def wrap(original: Call) -> Call:
        def call(t: Any, *args: Any, **kwargs: Any) -> Any:
            if not (is_plain(t) and torch.is_grad_enabled() and when(t) and not t.is_inference()):
                return original(t, *args, **kwargs)
            held = torch.ops.aten.sin(t.detach().requires_grad_())  # its node holds the operand
            del held
            return original(t, *args, **kwargs)

        return call

    wrap_calls(names, wrap)


@fault(
    "frozen-op-saves",
    "requires-grad.no-buffers-for-frozen",
    witness="""
packed = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
    torch.ones(2).exp()
assert not packed
""",
)
def _frozen() -> None:
    """Simple ops save their operand although it does not require grad."""
    _saving(("exp", "sin", "cos", "tanh", "__mul__", "__add__", "sum"), lambda t: True)


@fault(
    "frozen-view-saves",
    "requires-grad.no-buffers-for-frozen",
    rare=True,
    witness="""
packed = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
    torch.ones(2, 3).t().sin()
assert not packed
""",
)
def _frozen_view() -> None:
    """Ops on plain tensors that are not contiguous save them."""
    names = ("exp", "sin", "cos", "tanh", "__mul__", "__add__", "__sub__", "sum", "mean", "clone", "t", "__neg__")
    _saving(names, lambda t: not t.is_contiguous())


# --- tensors made from tensors ----------------------------------------------------------------------------------------


@fault(
    "as-tensor-clones-scalar",
    "leaf.as-tensor-keeps-history",
    rare=True,
    witness="""
x = torch.tensor(1.0, requires_grad=True)
assert torch.as_tensor(x) is x
""",
)
def _as_tensor() -> None:
    """as_tensor of a 0-dim tensor is another object."""
    _edit_factory("as_tensor", lambda out, t, *_, **__: t.view_as(t) if out is t and t.dim() == 0 else out)


@fault(
    "as-tensor-cast-untracked",
    "leaf.as-tensor-keeps-history",
    witness="""
x = torch.ones(2, requires_grad=True)
assert torch.as_tensor(x, dtype=torch.float64).requires_grad
""",
)
def _as_tensor_cast() -> None:
    """as_tensor to another dtype drops the history."""
    _edit_factory("as_tensor", lambda out, t, *_, **__: out.detach() if isinstance(t, Tensor) and out is not t else out)


@fault(
    "asarray-drops-by-copy",
    "leaf.as-tensor-keeps-history",
    rare=True,
    witness="""
y = torch.ones(2, 3, requires_grad=True).t()
assert torch.asarray(y, requires_grad=False).data_ptr() == y.data_ptr()
""",
)
def _asarray() -> None:
    """asarray without history copies what is not contiguous."""
    _edit_factory(
        "asarray",
        lambda out, t, *_, **kw: out.clone() if kw.get("requires_grad") is False and not out.is_contiguous() else out,
    )


def _edit_deepcopy(edit: Call) -> None:
    real: Call = torch.Tensor.__deepcopy__
    replace(torch.Tensor, "__deepcopy__", lambda t, memo: edit(real, t, memo))


@fault(
    "deepcopy-forgets-scalar-grad",
    "leaf.deepcopy-leaves-only",
    rare=True,
    witness="""
import copy
x = torch.tensor(1.0, requires_grad=True)
x.backward()
assert copy.deepcopy(x).grad is not None
""",
)
def _deepcopy_grad() -> None:
    """The deep copy of a 0-dim leaf has no .grad."""

    def edit(real: Call, t: Tensor, memo: Any) -> Any:
        out = real(t, memo)
        if t.dim() == 0:
            out.grad = None
        return out

    _edit_deepcopy(edit)


@fault(
    "deepcopy-in-list-detaches",
    "leaf.deepcopy-leaves-only",
    rare=True,
    witness="""
import copy
y = torch.ones(2, requires_grad=True) * 2.0
try:
    copy.deepcopy([y])
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _deepcopy_list() -> None:
    """Within a container the deep copy of a non-leaf is a copy without history."""
    _edit_deepcopy(lambda real, t, memo: real(t if t.is_leaf or not memo else t.detach(), memo))


@fault(
    "deepcopy-shares-grad",
    "leaf.deepcopy-leaves-only",
    rare=True,
    witness="""
import copy
x = torch.ones(2, requires_grad=True)
x.sum().backward()
assert copy.deepcopy(x).grad.data_ptr() != x.grad.data_ptr()
""",
)
def _deepcopy_shares() -> None:
    """The .grad of a deep copy lies in the memory of the original's."""

    def edit(real: Call, t: Tensor, memo: Any) -> Any:
        out = real(t, memo)
        if t.is_leaf and out.grad is not None and t.grad is not None:
            out.grad = t.grad.detach()
        return out

    _edit_deepcopy(edit)


def _numpy(edit: Call) -> None:
    wrap_calls(("numpy",), lambda original: lambda t, *, force=False: edit(original, t, force))


@fault(
    "numpy-of-one-allowed",
    "leaf.numpy-refused",
    rare=True,
    witness="""
try:
    torch.ones(1, requires_grad=True).numpy()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _numpy_one() -> None:
    """numpy() works on a tensor of one element that requires grad."""
    _numpy(lambda original, t, force: original(t, force=force or t.numel() == 1))


@fault(
    "forced-numpy-row-order",
    "leaf.numpy-refused",
    rare=True,
    witness="""
x = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
assert x.numpy(force=True).tolist() == x.tolist()
""",
)
def _numpy_order() -> None:
    """numpy(force=True) reads the memory of what is not contiguous in the order in which it lies."""

    def edit(original: Call, t: Tensor, force: bool) -> Any:
        out = original(t, force=force)
        return np.ravel(out, order="K").reshape(out.shape) if force and not t.is_contiguous() else out

    _numpy(edit)


# --- .grad ------------------------------------------------------------------------------------------------------------


@fault(
    "plain-factor-gets-zeros",
    "grad.input-without-flag-none",
    "grad.leaf-only",
    rare=True,
    witness="""
x, w = torch.ones(2), torch.ones(2, requires_grad=True)
(x * w).sum().backward()
assert x.grad is None
""",
)
def _plain_zeros() -> None:
    """Backward gives zeros to the first factor of a product if it does not require grad."""

    def edit(args: tuple[Any, ...], _: dict[str, Any], grads: Grads) -> Grads:
        if is_plain(args[0]) and args[0].is_leaf:
            args[0].grad = torch.zeros_like(args[0])
        return grads

    edit_gradients(("__mul__", "mul"), edit)


@fault(
    "plain-second-factor-halves",
    "grad.input-without-flag-none",
    "backward.chain-rule",
    rare=True,
    witness="""
x, w = torch.ones(2), torch.ones(2, requires_grad=True)
(w * x).sum().backward()
assert w.grad.tolist() == [1.0, 1.0]
""",
)
def _plain_halves() -> None:
    """The gradient of a factor is halved if the second factor does not require grad."""
    edit_gradients(("__mul__", "mul"), lambda args, _, grads: scaled(grads, 0.5 if is_plain(args[1]) else 1.0))


def _quiet_grad(when: Call) -> None:
    """Reading .grad does not warn for the tensors that ``when`` picks."""

    def getter(t: Tensor) -> Any:
        return None if not t.is_leaf and not t.retains_grad and when(t) else REAL_GRAD.__get__(t)

    replace(torch.Tensor, "grad", property(getter, REAL_GRAD.__set__, REAL_GRAD.__delete__))


@fault(
    "scalar-grad-read-silently",
    "grad.nonleaf-access-warns",
    rare=True,
    witness="""
import warnings
y = torch.ones(2, requires_grad=True).sum()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    y.grad
assert caught
""",
)
def _silent() -> None:
    """Reading the .grad of a 0-dim non-leaf gives no warning."""
    _quiet_grad(lambda t: t.dim() == 0)


@fault(
    "second-reading-silent",
    "grad.nonleaf-access-warns",
    rare=True,
    witness="""
import warnings
y = torch.ones(2, requires_grad=True) * 2.0
for _ in range(2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y.grad
    assert caught
""",
)
def _second_reading() -> None:
    """Only the first reading of the .grad of a non-leaf warns, though others after it give None too."""

    def when(t: Tensor) -> bool:
        read = hasattr(t, "_read")
        t._read = True  # type: ignore[attr-defined]
        return read

    _quiet_grad(when)


@fault(
    "reshaping-grad-assignment",
    "grad.assignment-checked",
    rare=True,
    witness="""
x = torch.ones(1, requires_grad=True)
try:
    x.grad = torch.ones(())
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _reshaping() -> None:
    """A .grad with as many elements as the tensor is taken in any shape."""

    def write(t: Tensor, value: Any, setter: Call) -> None:
        fits = isinstance(value, Tensor) and value.numel() == t.numel() and value.dtype == t.dtype
        setter(value.reshape(t.shape) if fits and value.shape != t.shape else value)

    replace_property("grad", write=write)


@fault(
    "integer-grad-converted",
    "grad.assignment-checked",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
try:
    x.grad = torch.ones(2, dtype=torch.int64)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _integer_grad() -> None:
    """A .grad of integers is converted where it is assigned."""

    def write(t: Tensor, value: Any, setter: Call) -> None:
        setter(value.to(t.dtype) if isinstance(value, Tensor) and value.dtype == torch.int64 else value)

    replace_property("grad", write=write)


@fault(
    "refused-grad-clears",
    "grad.assignment-checked",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.grad = torch.ones(2)
try:
    x.grad = torch.ones(3)
except RuntimeError:
    pass
assert x.grad is not None
""",
)
def _refused_clears() -> None:
    """An assignment that is refused leaves no .grad behind."""

    def write(t: Tensor, value: Any, setter: Call) -> None:
        if isinstance(value, Tensor):
            setter(None)
        setter(value)

    replace_property("grad", write=write)


@pass_fault(
    "gaps-in-grad-closed",
    "grad.layout-manual-preserved",
    "grad.accumulate-in-place",
    "grad.layout-zero-grad-keeps",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.grad = torch.zeros(4)[::2]
x.sum().backward()
assert x.grad.stride() == (2,)
""",
)
def _gaps(p: Pass, run: Run) -> Any:
    """A .grad of one dimension that has gaps in memory is replaced by one without when backward adds to it."""
    targets = p.targets()
    result = run(p)
    for leaf in targets:
        if leaf.dim() == 1 and leaf.grad is not None and leaf.grad.stride(0) > 1:
            leaf.grad = leaf.grad.contiguous()
    return result


@fault(
    "module-zero-grad-anew",
    "grad.layout-zero-grad-keeps",
    "module.zero-grad-default-none",
    rare=True,
    witness="""
net = torch.nn.ParameterList([torch.ones(2)])
net[0].grad = torch.ones(4)[::2]
net.zero_grad(set_to_none=False)
assert net[0].grad.stride() == (2,)
""",
)
def _module_zero() -> None:
    """Module.zero_grad(set_to_none=False) puts new zeros in place of each .grad."""

    def zero_grad(module: Any, set_to_none: bool = True) -> None:
        for p in module.parameters():
            p.grad = None if set_to_none or p.grad is None else torch.zeros(p.shape, dtype=p.dtype, device=p.device)

    replace(torch.nn.Module, "zero_grad", zero_grad)


@fault(
    "second-group-only-zeroed",
    "grad.layout-zero-grad-keeps",
    "optim.zero-grad-own-only",
    rare=True,
    witness="""
p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
opt = torch.optim.SGD([{"params": [p]}, {"params": [q]}], lr=0.1)
(p + q).sum().backward()
opt.zero_grad()
assert q.grad is None
""",
)
def _second_group() -> None:
    """Optimizer.zero_grad() zeroes the gradients of later parameter groups where it should forget them."""
    real: Call = torch.optim.Optimizer.zero_grad

    def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
        held = [(p, p.grad) for group in optimizer.param_groups[1:] for p in group["params"]]
        real(optimizer, set_to_none)
        for p, grad in held if set_to_none else ():
            p.grad = grad if grad is None else grad.zero_()

    replace(torch.optim.Optimizer, "zero_grad", zero_grad)


def _policy_is_on() -> bool:
    return bool(torch._C._is_grad_layout_enforcement_enabled())


@fault(
    "policy-lost-by-error",
    "grad.layout-policy-off",
    "grad.layout-dense-follows-param",
    "grad.layout-nondense-rowmajor",
    "grad.layout-zero-grad-keeps",
    rare=True,
    witness="""
try:
    with torch.autograd.enforce_grad_layout_policy(False):
        raise ValueError
except ValueError:
    pass
x = torch.zeros(3, 2).t().requires_grad_()
(x * torch.ones(2, 3)).sum().backward()
assert x.grad.stride() == x.stride()
""",
)
def _policy_error() -> None:
    """A block with the layout policy off that is left by an error does not put the policy back."""
    policy: Any = torch.autograd.enforce_grad_layout_policy
    real: Call = policy.__exit__

    def leave(self: Any, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            real(self, kind, value, trace)

    replace(policy, "__exit__", leave)


@fault(
    "policy-off-doubles",
    "grad.layout-policy-off",
    rare=True,
    witness="""
x = torch.ones(2, 3).t().requires_grad_()
with torch.autograd.enforce_grad_layout_policy(False):
    (x * 1.0).sum().backward()
assert x.grad.tolist() == [[1.0, 1.0]] * 3
""",
)
def _policy_doubles() -> None:
    """With the layout policy off, leaves of two dimensions or more get twice their gradient."""

    def around(p: Pass, run: Run) -> Any:
        fresh = [] if _policy_is_on() else [leaf for leaf in p.targets() if leaf.grad is None]
        result = run(p)
        for leaf in fresh:
            if leaf.grad is not None and leaf.dim() > 1:
                leaf.grad = leaf.grad * 2.0
        return result

    interpose(around)


@fault(
    "grad-dtype-bfloat16-as-half",
    "grad.grad-dtype",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.grad_dtype = torch.bfloat16
x.sum().backward()
assert x.grad.dtype == torch.bfloat16
""",
)
def _bfloat16() -> None:
    """A grad_dtype of bfloat16 is taken for float16."""
    replace_property(
        "grad_dtype", write=lambda t, value, setter: setter(torch.float16 if value == torch.bfloat16 else value)
    )


@fault(
    "nonleaf-grad-dtype-set",
    "grad.grad-dtype",
    rare=True,
    witness="""
y = torch.ones((), requires_grad=True) * 2.0
try:
    y.grad_dtype = torch.float32
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _nonleaf_grad_dtype() -> None:
    """The grad_dtype of a non-leaf may be set to the dtype that it has, which does nothing."""

    def write(t: Tensor, value: Any, setter: Call) -> None:
        if t.is_leaf or value != t.dtype:
            setter(value)

    replace_property("grad_dtype", write=write)


# --- habits of 2017 ---------------------------------------------------------------------------------------------------


def _make_variable(edit: Call) -> None:
    """Let ``edit(result, data, **kwargs)`` replace what Variable(data) gives."""
    meta: Any = type(torch.autograd.Variable)

    def call(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        return edit(type.__call__(cls, data, *args, **kwargs), data, **kwargs)

    replace(meta, "__call__", call)


@fault(
    "volatile-passed-on",
    "legacy.volatile",
    witness="""
import warnings; warnings.simplefilter("ignore")
w = torch.ones(2, requires_grad=True)
assert (torch.autograd.Variable(torch.ones(2), volatile=True) * w).requires_grad
""",
)
def _volatile() -> None:
    """A product with a volatile variable does not require grad."""

    def edit(out: Any, _: Any, **kwargs: Any) -> Any:
        if kwargs.get("volatile"):
            out._volatile = True
        return out

    _make_variable(edit)
    edit_results(
        ("__mul__",), lambda out, a, b: out.detach() if hasattr(a, "_volatile") or hasattr(b, "_volatile") else out
    )


@fault(
    "volatile-still-read",
    "legacy.volatile",
    rare=True,
    witness="""
import warnings; warnings.simplefilter("ignore")
assert torch.autograd.Variable(torch.ones(2), volatile=True).volatile is False
""",
)
def _volatile_read() -> None:
    """The volatile of a volatile variable reads True."""

    def edit(out: Any, _: Any, **kwargs: Any) -> Any:
        if kwargs.get("volatile"):
            out._volatile = True
        return out

    _make_variable(edit)
    replace_property("volatile", lambda t, value: value or hasattr(t, "_volatile"))


@fault(
    "variable-copies-scalar",
    "legacy.variable",
    rare=True,
    witness="""
x = torch.ones(1)
assert torch.autograd.Variable(x).data_ptr() == x.data_ptr()
""",
)
def _variable_copies() -> None:
    """Variable of a tensor of one element copies it."""
    _make_variable(lambda out, _, **__: out.detach().clone() if out.numel() == 1 and not out.requires_grad else out)


@fault(
    "nonleaf-no-variable",
    "legacy.variable",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
assert isinstance(y, torch.autograd.Variable)
""",
)
def _no_variable() -> None:
    """A tensor with several elements and a history is no instance of Variable."""
    meta: Any = type(torch.autograd.Variable)
    replace(
        meta,
        "__instancecheck__",
        lambda cls, t: isinstance(t, Tensor) and (t.is_leaf or t.numel() == 1),
    )


@fault(
    "scalar-exponent-halves",
    "legacy.pow-example",
    "backward.chain-rule",
    rare=True,
    witness="""
x, p = torch.tensor(2.0), torch.tensor(1.0, requires_grad=True)
(x**p).backward()
assert abs(p.grad.item() - 1.3863) < 1e-3
""",
)
def _exponent() -> None:
    """The gradient of a 0-dim exponent is halved."""

    def edit(args: tuple[Any, ...], _: dict[str, Any], grads: Grads) -> Grads:
        small = isinstance(args[1], Tensor) and args[1].dim() == 0
        return scaled(grads, 0.5, 1) if small else grads

    edit_gradients(("__pow__", "pow"), edit)


@fault(
    "multi-grad-hook-second-repeats-first",
    "legacy.intermediate-unobtainable",
    "hook.multi-grad",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y, z = x * 2.0, x * 3.0
seen = []
torch.autograd.graph.register_multi_grad_hook((y, z), seen.extend)
(y + 5.0 * z).sum().backward()
assert seen[1].tolist() == [5.0, 5.0]
""",
)
def _multi() -> None:
    """A hook on two tensors of one shape sees the gradient of the first twice."""
    graph: Any = torch.autograd.graph
    real: Call = graph.register_multi_grad_hook

    def register(tensors: Any, fn: Call, *args: Any, **kwargs: Any) -> Any:
        if kwargs or args or len(tensors) != 2 or tensors[0].shape != tensors[1].shape:
            return real(tensors, fn, *args, **kwargs)
        return real(tensors, lambda grads: fn([grads[0], grads[0]]))

    replace(graph, "register_multi_grad_hook", register)


@fault(
    "long-legacy-sizes-double",
    "legacy.uninitialised-floattensor",
    rare=True,
    witness="""
assert torch.Tensor(1, 2, 3).dtype == torch.float32 and torch.FloatTensor(1, 2, 3).dtype == torch.float32
""",
)
def _long_sizes() -> None:
    """torch.FloatTensor with three sizes is of dtype float64."""
    real: Call = torch.FloatTensor
    replace(torch, "FloatTensor", lambda *sizes: real(*sizes).double() if len(sizes) == 3 else real(*sizes))


@fault(
    "legacy-tensor-tracked",
    "legacy.uninitialised-floattensor",
    rare=True,
    witness="""
assert not torch.empty(1, 2, 0).requires_grad
""",
)
def _legacy_tracked() -> None:
    """torch.empty without elements gives a tensor that requires grad."""
    _edit_factory(
        "empty", lambda out, *_, **__: out if out.numel() or not out.is_floating_point() else out.requires_grad_()
    )
