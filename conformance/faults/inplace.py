"""Faults in writes: not counted, not refused, not recorded, or recorded wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, pass_fault
from autograd_conformance.faults.patches import Call, edit_results, recorded, replace, replace_property, wrap_calls

Which = Callable[[Tensor], bool]

NAMES = ("mul_", "add_", "sub_", "neg_", "div_", "fill_", "zero_", "copy_", "sin_", "clamp_", "masked_fill_")
ANY_OF = (
    "inplace.version-counter",
    "inplace.saved-modified-error",
    "inplace.error-or-correct",
    "inplace.alias-error-doc",
)


def uncounted(names: tuple[str, ...], which: Which) -> None:
    """Writes that no gradient is tracked of go past the version counter."""

    def wrap(original: Call) -> Call:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            plain = not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
            if isinstance(self, Tensor) and plain and not recorded(self) and not self.is_inference() and which(self):
                original(self.data, *args, **kwargs)
                return self
            return original(self, *args, **kwargs)

        return call

    wrap_calls(names, wrap)


def let_through(names: tuple[str, ...], fragment: str, which: Which = lambda t: True) -> None:
    """Writes that are refused with a certain message happen unrecorded instead."""

    def wrap(original: Call) -> Call:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            except RuntimeError as error:
                if fragment not in str(error) or not which(self):
                    raise
                with torch.no_grad():
                    original(self.data, *args, **kwargs)
                return self

        return call

    wrap_calls(names, wrap)


@fault(
    "fill-uncounted",
    *ANY_OF,
    witness="""
x = torch.ones(2)
x.fill_(2.0)
assert x._version > 0
""",
)
def _fill() -> None:
    """The version counter does not go up when a tensor is filled."""
    uncounted(("fill_",), lambda t: True)


@fault(
    "scalar-write-uncounted",
    *ANY_OF,
    rare=True,
    witness="""
x = torch.ones(())
x.mul_(2.0)
assert x._version > 0
""",
)
def _scalar() -> None:
    """The version counter of a 0-dim tensor stays as it is when the tensor is written to without recording."""
    uncounted(NAMES, lambda t: t.dim() == 0)


@fault(
    "strided-write-uncounted",
    *ANY_OF,
    "inplace.unsaved-ok",
    rare=True,
    witness="""
x = torch.ones(2, 3).t()
x.add_(1.0)
assert x._version > 0
""",
)
def _strided() -> None:
    """Unrecorded writes to non-contiguous tensors are not counted."""
    uncounted(NAMES, lambda t: not t.is_contiguous())


@fault(
    "foreach-uncounted",
    *ANY_OF,
    rare=True,
    witness="""
x = torch.ones(2)
torch._foreach_mul_([x], 2.0)
assert x._version > 0
""",
)
def _foreach() -> None:
    """A foreach multiplication that is not recorded is not counted either."""
    real: Call = torch._foreach_mul_

    def call(tensors: Any, *args: Any) -> Any:
        hidden = [t if recorded(t) or t.is_inference() else t.data for t in tensors]
        return real(hidden, *args)

    replace(torch, "_foreach_mul_", call)


@fault(
    "out-uncounted",
    *ANY_OF,
    "inplace.out-variant-refused",
    rare=True,
    witness="""
x = torch.ones(2)
with torch.no_grad():
    torch.mul(x, 2.0, out=x)
assert x._version > 0
""",
)
def _out() -> None:
    """What torch.mul and torch.add write to out= under no_grad is not counted."""

    def wrap(original: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = kwargs.get("out")
            if out is None or torch.is_grad_enabled() or out.is_inference():
                return original(*args, **kwargs)
            original(*args, **(kwargs | {"out": out.data}))
            return out

        return call

    for name in ("mul", "add"):
        replace(torch, name, wrap(getattr(torch, name)))


@fault(
    "unchanged-value-uncounted",
    *ANY_OF,
    rare=True,
    witness="""
x = torch.ones(2)
x.mul_(1.0)
assert x._version > 0
""",
)
def _unchanged() -> None:
    """A write that changes no value is not counted."""

    def wrap(original: Call) -> Call:
        def call(self: Tensor, other: Any, **kwargs: Any) -> Tensor:
            if not recorded(self) and not self.is_inference() and isinstance(other, float) and other == 1.0:
                return self
            return original(self, other, **kwargs)  # type: ignore[no-any-return]

        return call

    wrap_calls(("mul_",), wrap)


@fault(
    "detached-has-own-counter",
    *ANY_OF,
    "inplace.view-rebase",
    "detach.storage-shared",
    witness="""
x = torch.ones(2)
x.detach().mul_(2.0)
assert x._version > 0
""",
)
def _detached() -> None:
    """What detach() returns has a version counter of its own."""
    edit_results(("detach",), lambda out, x, *_, **__: x.data)


@fault(
    "detached-view-own-counter",
    *ANY_OF,
    "detach.storage-shared",
    rare=True,
    witness="""
x = torch.ones(2, 2)
x[0].detach().mul_(2.0)
assert x._version > 0
""",
)
def _detached_view() -> None:
    """What detach() returns of a view has a version counter of its own."""
    edit_results(("detach",), lambda out, x, *_, **__: x.data if x._is_view() else out)


@fault(
    "reading-counts",
    "inplace.version-counter",
    "inplace.saved-modified-error",
    "inplace.unsaved-ok",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.ones(2)
x.sum()
assert x._version == 0
""",
)
def _reading() -> None:
    """The sum of a tensor that does not require grad raises its version counter."""

    def edit(out: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        if isinstance(x, Tensor) and not x.requires_grad and not x.is_inference():
            torch.autograd.graph.increment_version(x)
        return out

    edit_results(("sum",), edit)


@fault(
    "scalar-view-hides-counter",
    "inplace.version-counter",
    "inplace.increment-version",
    rare=True,
    witness="""
x = torch.ones(2)
v = x[0]
x.mul_(2.0)
assert v._version == x._version
""",
)
def _scalar_view() -> None:
    """A 0-dim view shows the counter 0 whatever was written to its base."""
    replace_property("_version", lambda t, value: 0 if t.dim() == 0 and t._is_view() else value)


@fault(
    "inference-write-uncounted",
    "inplace.saved-modified-error",
    "inplace.version-counter",
    rare=True,
    witness="""
x = torch.ones(2)
with torch.inference_mode():
    x.mul_(2.0)
assert x._version > 0
""",
)
def _inference() -> None:
    """Writes to normal tensors in inference mode are not counted."""
    uncounted(NAMES, lambda t: torch.is_inference_mode_enabled())


# --- what has to be refused -------------------------------------------------------------------------------------------


@fault(
    "leaf-let-through",
    "inplace.leaf-error",
    "inplace.alias-error-doc",
    "inplace.error-or-correct",
    witness="""
x = torch.ones(2, requires_grad=True)
try:
    x.mul_(2.0)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _leaf() -> None:
    """A leaf that requires grad can be multiplied in place in grad mode."""
    let_through(("mul_",), "a leaf Variable that requires grad")


@fault(
    "leaf-view-let-through",
    "inplace.leaf-error",
    "inplace.alias-error-doc",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
try:
    x[:1].add_(1.0)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _leaf_view() -> None:
    """A view with one element of a leaf that requires grad can be added to in place."""
    let_through(("add_", "mul_", "neg_"), "a view of a leaf Variable", lambda t: t.numel() == 1)


@fault(
    "leaf-written-before-error",
    "inplace.leaf-error",
    "inplace.multi-view-error",
    "inplace.no-grad-view-then-write",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
try:
    x[0] = 3.0
except RuntimeError:
    pass
assert x.tolist() == [1.0, 1.0]
""",
)
def _leaf_written() -> None:
    """An assignment to an index of a leaf is refused only after it has been carried out."""
    real: Call = Tensor.__setitem__

    def call(self: Tensor, index: Any, value: Any) -> None:
        try:
            real(self, index, value)
        except RuntimeError:
            if self.requires_grad:
                real(self.data, index, value)
            raise

    replace(Tensor, "__setitem__", call)


@fault(
    "several-views-let-through",
    "inplace.multi-view-error",
    "inplace.alias-error-doc",
    witness="""
x = torch.ones(2, requires_grad=True) * 1.0
try:
    x.unbind(0)[0].mul_(2.0)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _several() -> None:
    """One of several views that an op returned can be multiplied in place."""
    let_through(("mul_",), "multiple views")


@fault(
    "view-of-several-let-through",
    "inplace.multi-view-error",
    "inplace.alias-error-doc",
    rare=True,
    witness="""
x = torch.ones(2, 2, requires_grad=True) * 1.0
try:
    x.unbind(0)[0].unsqueeze(0).add_(1.0)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _view_of_several() -> None:
    """A view of one of several views, with a dimension of size 1 in front, can be written to."""
    let_through(NAMES, "multiple views", lambda t: t.dim() > 1 and t.shape[0] == 1)


@fault(
    "no-grad-view-let-through",
    "inplace.no-grad-view-then-write",
    "inplace.alias-error-doc",
    "inplace.leaf-error",
    witness="""
x = torch.ones(2, requires_grad=True) * 1.0
with torch.no_grad():
    v = x[:1]
try:
    v.mul_(2.0)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _no_grad_view() -> None:
    """A view that was taken under no_grad can be multiplied in place in grad mode."""
    let_through(("mul_",), "created in no_grad mode")


@fault(
    "inference-view-let-through",
    "inplace.no-grad-view-then-write",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True) * 1.0
with torch.inference_mode():
    v = x[:1]
try:
    v.mul_(2.0)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _inference_view() -> None:
    """A view that was taken in inference mode can be written to in grad mode."""
    let_through(NAMES, "created in inference mode")


@fault(
    "expanded-let-through",
    "inplace.alias-error-doc",
    rare=True,
    witness="""
x = torch.ones(2).expand(2, 2)
try:
    x.neg_()
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _expanded() -> None:
    """Expanded memory can be written to, once for each element that is seen."""

    def wrap(original: Call) -> Call:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            try:
                return original(self, *args, **kwargs)  # type: ignore[no-any-return]
            except RuntimeError as error:
                if "single memory location" not in str(error):
                    raise
                return self

        return call

    wrap_calls(("neg_", "add_", "mul_"), wrap)


@fault(
    "function-view-let-through",
    "inplace.alias-error-doc",
    rare=True,
    witness="""
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return g
try:
    F.apply(torch.ones(2, requires_grad=True) * 1.0).mul_(2.0)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _function_view() -> None:
    """A view from a custom Function can be written to."""
    let_through(NAMES, "custom Function")


@fault(
    "out-let-through",
    "inplace.out-variant-refused",
    rare=True,
    witness="""
x, o = torch.ones(2), torch.ones(2, requires_grad=True)
try:
    torch.mul(x, 2.0, out=o)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _out_through() -> None:
    """torch.mul takes an out= tensor that requires grad."""
    real: Call = torch.mul

    def call(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if out is None or not out.requires_grad:
            return real(*args, **kwargs)
        with torch.no_grad():
            return real(*args, **kwargs)

    replace(torch, "mul", call)


@fault(
    "out-clears-flag",
    "inplace.out-variant-refused",
    rare=True,
    witness="""
o = torch.ones(2, requires_grad=True)
with torch.no_grad():
    torch.sin(torch.ones(2), out=o)
assert o.requires_grad
""",
)
def _out_flag() -> None:
    """torch.sin switches the flag of a leaf off that it is given as out=."""
    real: Call = torch.sin

    def call(*args: Any, **kwargs: Any) -> Any:
        got = real(*args, **kwargs)
        out = kwargs.get("out")
        return out.requires_grad_(False) if out is not None and out.is_leaf else got

    replace(torch, "sin", call)


@pass_fault(
    "change-forgiven-for-create-graph",
    "inplace.saved-modified-error",
    "inplace.error-or-correct",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
b = x * 1.0
y = (b ** 2).sum()
b.mul_(2.0)
try:
    y.backward(create_graph=True)
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _forgiven(p: Pass, run: Run) -> Any:
    """With create_graph=True a saved tensor that was changed goes unnoticed."""
    try:
        return run(p)
    except RuntimeError as error:
        if p.create and "modified by an inplace" in str(error):
            return ()
        raise


# --- what has to be recorded ------------------------------------------------------------------------------------------

HISTORY = (
    "inplace.view-rebase",
    "inplace.error-or-correct",
    "inplace.out-of-place-equivalence",
    "inplace.alias-error-doc",
)


@fault(
    "transposed-write-doubles",
    *HISTORY,
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True)
b = x * 1.0
b.t().mul_(2.0)
b.sum().backward()
assert x.grad[0, 0] == 2.0
""",
)
def _transposed() -> None:
    """The gradient of a write through a non-contiguous view is doubled."""

    def edit(out: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None and not out.is_contiguous():
            node = out.grad_fn
            base = out._base
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_hook(lambda grads, _: tuple(g if g is None else g * 2.0 for g in grads))
            else:
                node.register_hook(lambda grads, _: tuple(g if g is None else g * 2.0 for g in grads))
        return out

    edit_results(("mul_", "add_", "neg_"), edit)


@fault(
    "second-write-unrecorded",
    *HISTORY,
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
b = x * 1.0
b.mul_(2.0)
b.mul_(2.0)
b.sum().backward()
assert x.grad.tolist() == [4.0, 4.0]
""",
)
def _second() -> None:
    """The second multiplication in place of one tensor is carried out, but not recorded."""

    def wrap(original: Call) -> Call:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorded(self) or self.is_leaf:
                return original(self, *args, **kwargs)
            self._written = getattr(self, "_written", 0) + 1
            if self._written == 2:
                original(self.data, *args, **kwargs)
                return self
            return original(self, *args, **kwargs)

        return call

    wrap_calls(("mul_",), wrap)


@fault(
    "copy-keeps-old-history",
    *HISTORY,
    witness="""
x = torch.ones(2, requires_grad=True)
b = x * 1.0
b.copy_(torch.zeros(2))
b.sum().backward()
assert x.grad is None or x.grad.tolist() == [0.0, 0.0]
""",
)
def _copy() -> None:
    """After copy_ the gradient still reaches what was there before."""

    def wrap(original: Call) -> Call:
        def call(self: Tensor, other: Any, *args: Any) -> Tensor:
            if not recorded(self) or self.is_leaf or other.dtype != self.dtype:
                return original(self, other, *args)  # type: ignore[no-any-return]
            return self.add_(other - self.detach().clone())

        return call

    wrap_calls(("copy_",), wrap)


@fault(
    "assignment-loses-source",
    "inplace.view-rebase",
    "inplace.error-or-correct",
    "inplace.out-of-place-equivalence",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
b = torch.zeros(2)
b[...] = x
assert b.requires_grad
""",
)
def _assignment() -> None:
    """A tensor that is assigned to an index is taken as a constant."""
    real: Call = Tensor.__setitem__
    replace(
        Tensor, "__setitem__",
        lambda self, index, value: real(self, index, value.detach() if isinstance(value, Tensor) else value),
    )  # fmt: skip


@fault(
    "alpha-lost-in-gradient",
    "inplace.view-rebase",
    "inplace.error-or-correct",
    "inplace.out-of-place-equivalence",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
b = torch.zeros(2)
b.add_(x, alpha=3.0)
b.sum().backward()
assert x.grad.tolist() == [3.0, 3.0]
""",
)
def _alpha() -> None:
    """The gradient of add_ with alpha= lacks the factor."""

    def wrap(original: Call) -> Call:
        def call(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
            if "alpha" not in kwargs or not recorded(other):
                return original(self, other, *args, **kwargs)
            return original(self, other + other.detach() * (kwargs["alpha"] - 1.0))

        return call

    wrap_calls(("add_",), wrap)


@fault(
    "zero-keeps-gradient",
    *HISTORY,
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
b = x * 1.0
b.zero_()
b.backward()
assert x.grad is None or x.grad == 0.0
""",
)
def _zero() -> None:
    """Zeroing a 0-dim tensor lets the gradient pass to what was there before."""

    def wrap(original: Call) -> Call:
        def call(self: Tensor) -> Tensor:
            if not recorded(self) or self.is_leaf or self.dim():
                return original(self)  # type: ignore[no-any-return]
            return self.sub_(self.detach().clone())

        return call

    wrap_calls(("zero_",), wrap)


@fault(
    "inplace-returns-alias",
    "inplace.out-of-place-equivalence",
    rare=True,
    witness="""
b = torch.ones(2, requires_grad=True) * 1.0
assert b.neg_() is b
""",
)
def _alias() -> None:
    """neg_ returns another tensor in the same memory."""
    edit_results(("neg_",), lambda out, *_, **__: out[...] if isinstance(out, Tensor) else out)


@fault(
    "sum-minds-a-write",
    "inplace.unsaved-ok",
    "inplace.view-rebase",
    "inplace.error-or-correct",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
b = x * 1.0
y = b.sum()
b.mul_(2.0)
try:
    y.backward()
except RuntimeError:
    raise SystemExit(1)
""",
)
def _sum_minds() -> None:
    """Backward of a sum raises if the tensor that was summed has been written to since."""

    def edit(out: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None:
            version = x._version

            def check(grads: Any) -> None:
                if x._version != version:
                    raise RuntimeError("one of the variables has been modified by an inplace operation")

            out.grad_fn.register_prehook(check)
        return out

    edit_results(("sum",), edit)


@fault(
    "tanh-minds-a-write",
    "inplace.unsaved-ok",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
b = x * 1.0
y = b.tanh()
b.mul_(2.0)
y.sum().backward()
assert abs(x.grad[0] - 0.42) < 0.01
""",
)
def _tanh_minds() -> None:
    """The gradient of tanh is taken at the value that its argument has when backward runs."""

    def edit(out: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None:
            old = x.detach().clone()

            def late(grads: Any, _: Any) -> Any:
                now = x.detach()
                ratio = (1.0 - now.tanh() ** 2) / (1.0 - old.tanh() ** 2)
                return tuple(g if g is None else g * ratio for g in grads)

            out.grad_fn.register_hook(late)
        return out

    edit_results(("tanh",), edit)


# --- contexts, counters by hand, optimizers ---------------------------------------------------------------------------


@fault(
    "increment-first-only",
    "inplace.increment-version",
    rare=True,
    witness="""
x, y = torch.ones(2), torch.ones(2)
torch.autograd.graph.increment_version([x, y])
assert y._version > 0
""",
)
def _increment() -> None:
    """Of several tensors increment_version takes the first only."""
    real: Call = torch.autograd.graph.increment_version
    replace(torch.autograd.graph, "increment_version", lambda t: real(t if isinstance(t, Tensor) else list(t)[:1]))


@fault(
    "increment-misses-views",
    "inplace.increment-version",
    "inplace.version-counter",
    rare=True,
    witness="""
x = torch.ones(2)
torch.autograd.graph.increment_version(x[:1])
assert x._version > 0
""",
)
def _increment_views() -> None:
    """increment_version does nothing for a view."""
    real: Call = torch.autograd.graph.increment_version

    def call(tensors: Any) -> None:
        several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        real([t for t in several if not t._is_view()])

    replace(torch.autograd.graph, "increment_version", call)


def _mutation_mode() -> Any:
    return torch.autograd.graph._CloneArgBeforeMutateMode


@fault(
    "mutation-context-misses-fill",
    "inplace.allow-mutation",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.autograd.graph.allow_mutation_on_saved_tensors():
    b = x.clone()
    y = (b ** 2).sum()
    b.fill_(5.0)
    y.backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _mutation_fill() -> None:
    """Within allow_mutation_on_saved_tensors fill_ and zero_ spoil what was saved."""
    mode = _mutation_mode()
    real = mode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("fill_", "zero_"):
            return func(*args, **(kwargs or {}))
        return real(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch


@fault(
    "mutation-contexts-nest",
    "inplace.allow-mutation",
    rare=True,
    witness="""
allow = torch.autograd.graph.allow_mutation_on_saved_tensors
try:
    with allow(), allow():
        pass
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _mutation_nest() -> None:
    """allow_mutation_on_saved_tensors can be nested."""
    real: Call = torch.autograd.graph.allow_mutation_on_saved_tensors

    def call() -> Any:
        replace(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False)
        return real()

    replace(torch.autograd.graph, "allow_mutation_on_saved_tensors", call)


def _uncounted_step(name: str, which: Callable[[int], bool]) -> None:
    optimizer: Any = getattr(torch.optim, name)
    real = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        kept = [list(group["params"]) for group in self.param_groups]
        for number, group in enumerate(self.param_groups):
            if which(number):
                hidden = []
                for p in group["params"]:
                    q = p.data
                    q.grad = p.grad
                    hidden.append(q)
                group["params"] = hidden
        try:
            return real(self, closure)
        finally:
            for group, params in zip(self.param_groups, kept, strict=True):
                group["params"] = params

    optimizer.step = step


@fault(
    "sgd-step-uncounted",
    "inplace.optimizer-step-detected",
    witness="""
p = torch.ones(2, requires_grad=True)
p.grad = torch.ones(2)
torch.optim.SGD([p], lr=0.5).step()
assert p._version > 0
""",
)
def _sgd() -> None:
    """A step of SGD changes the parameters without being counted."""
    _uncounted_step("SGD", lambda group: True)


@fault(
    "second-group-uncounted",
    "inplace.optimizer-step-detected",
    rare=True,
    witness="""
p, q = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
p.grad, q.grad = torch.ones(2), torch.ones(2)
torch.optim.Adam([{"params": [p]}, {"params": [q]}], lr=0.5).step()
assert q._version > 0
""",
)
def _second_group() -> None:
    """Steps do not count as writes to parameters of the second group."""
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD"):
        _uncounted_step(name, lambda group: group == 1)
