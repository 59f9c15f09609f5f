"""Faults in custom Functions: what forward, backward and their context get, and what is made of what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.patches import Call, is_tracked, replace

TWICE = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2.0
    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors
        return g * 2.0
"""
PRODUCT = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y, g * x
"""
ANY = """
class Any(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        ctx.n = len(args)
        return args[0] * 2.0
    @staticmethod
    def backward(ctx, g):
        return give(ctx, g)
"""


def _around_apply(around: Callable[..., Any]) -> None:
    """Let ``around(cls, real apply of cls, args, kwargs)`` stand for apply."""
    real: Any = Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return around(cls, lambda *a, **k: real(cls, *a, **k), args, kwargs)

    replace(Function, "apply", classmethod(apply))


def _edit_results(edit: Callable[[Any, tuple[Any, ...]], Any]) -> None:
    """Let ``edit(result, args)`` replace what apply gives."""
    _around_apply(lambda cls, run, args, kwargs: edit(run(*args, **kwargs), args))


def _around_backward(around: Callable[[Any, Call, tuple[Any, ...]], Any]) -> None:
    """Let ``around(ctx, backward, gradients)`` stand for the backward of every Function."""
    replace(BackwardCFunction, "apply", lambda self, *gs: around(self, self._get_user_fn(), gs))


def _remember_arguments() -> None:
    """Put the arguments of apply on the node that it makes."""

    def edit(out: Any, args: tuple[Any, ...]) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and isinstance(first.grad_fn, BackwardCFunction):
            first.grad_fn._arguments = args
        return out

    _edit_results(edit)


def _edit_returned(edit: Callable[[Any, tuple[Any, ...]], Any]) -> None:
    """Let ``edit(ctx, returned)`` replace what backward returns, always a tuple."""

    def around(ctx: Any, backward: Call, gs: tuple[Any, ...]) -> Any:
        made = backward(ctx, *gs)
        return edit(ctx, made if isinstance(made, tuple) else (made,))

    _around_backward(around)


# --- as an op ---------------------------------------------------------------------------------------------------------


@fault(
    "function-recorded-under-no-grad",
    "function.acts-as-op",
    "function.forward-untracked",
    witness=TWICE
    + """
with torch.no_grad():
    y = Twice.apply(torch.ones(2, requires_grad=True))
assert not y.requires_grad
""",
)
def _under_no_grad() -> None:
    """apply of a custom Function is recorded although grad mode is off."""

    def around(_: Any, run: Call, args: Any, kwargs: Any) -> Any:
        with torch.enable_grad():
            return run(*args, **kwargs)

    _around_apply(around)


@fault(
    "function-of-scalar-untracked",
    "function.acts-as-op",
    "function.forward-untracked",
    "function.double-backward",
    "function.needs-input-grad",
    "function.api-errors",
    "function.backward-contract",
    rare=True,
    witness=TWICE
    + """
assert Twice.apply(torch.ones((), requires_grad=True)).requires_grad
""",
)
def _scalar() -> None:
    """The only result of a custom Function does not require grad if it is 0-dim."""
    _edit_results(lambda out, _: out.detach() if is_tracked(out) and out.dim() == 0 else out)


@fault(
    "function-second-argument-untracked",
    "function.acts-as-op",
    "function.needs-input-grad",
    "function.double-backward",
    rare=True,
    witness=PRODUCT
    + """
assert Product.apply(torch.ones(2), torch.ones(2, requires_grad=True)).requires_grad
""",
)
def _second() -> None:
    """A custom Function is not recorded when of its arguments only later ones require grad."""

    def around(_: Any, run: Call, args: Any, kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and not args[0].requires_grad:
            args = tuple(a.detach() if is_tracked(a) else a for a in args)
        return run(*args, **kwargs)

    _around_apply(around)


@fault(
    "function-gradient-of-transposed-lost",
    "function.acts-as-op",
    "function.double-backward",
    "function.backward-contract",
    "function.forward-untracked",
    "function.api-errors",
    "function.memory-flags",
    "function.mark-dirty",
    "function.non-differentiable-and-materialize",
    rare=True,
    witness=TWICE
    + """
x = torch.ones(2, 3, requires_grad=True)
Twice.apply(x.t()).backward(torch.ones(2, 3).t() * 3.0)
assert x.grad[0, 0].item() == 6.0
""",
)
def _transposed() -> None:
    """A gradient in another order of memory reaches backward as if it were all ones."""

    def around(ctx: Any, backward: Call, gs: tuple[Any, ...]) -> Any:
        return backward(ctx, *[g if g is None or g.is_contiguous() else torch.ones_like(g) for g in gs])

    _around_backward(around)


# --- forward ----------------------------------------------------------------------------------------------------------


def _wrap_forward(wrap: Callable[[Call], Call]) -> None:
    """Let ``wrap(forward)`` stand for the forward of each class in the combined style."""
    done: set[int] = set()

    def around(cls: Any, run: Call, args: Any, kwargs: Any) -> Any:
        if id(cls) not in done and cls.setup_context is Function.setup_context and "forward" in cls.__dict__:
            done.add(id(cls))
            cls.kept_alive = cls  # lest another class gets its id
            cls.forward = staticmethod(wrap(cls.forward))
        return run(*args, **kwargs)

    _around_apply(around)


@fault(
    "forward-gets-detached-vectors",
    "function.forward-untracked",
    "function.double-backward",
    "function.save-for-backward",
    "function.mark-dirty",
    rare=True,
    witness="""
class See(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(x.requires_grad)
        return x * 2.0
    @staticmethod
    def backward(ctx, g):
        return g * 2.0
seen = []
See.apply(torch.ones(3, requires_grad=True))
assert seen == [True]
""",
)
def _detached() -> None:
    """Arguments of one dimension reach forward without their history."""

    def wrap(forward: Call) -> Call:
        return lambda ctx, *args: forward(ctx, *[a.detach() if is_tracked(a) and a.dim() == 1 else a for a in args])

    _wrap_forward(wrap)


@fault(
    "forward-in-grad-mode",
    "function.forward-untracked",
    "function.save-for-backward",
    "function.mark-dirty",
    witness="""
class See(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(torch.is_grad_enabled())
        return x * 2.0
    @staticmethod
    def backward(ctx, g):
        return g * 2.0
seen = []
See.apply(torch.ones(3, requires_grad=True))
assert seen == [False]
""",
)
def _in_grad_mode() -> None:
    """forward runs in grad mode."""
    _wrap_forward(lambda forward: torch.enable_grad()(forward))


_inside: list[bool] = []


@fault(
    "function-in-forward-recorded",
    "function.forward-untracked",
    rare=True,
    witness=TWICE
    + """
class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(Twice.apply(x).requires_grad)
        return x * 2.0
    @staticmethod
    def backward(ctx, g):
        return g * 2.0
seen = []
Outer.apply(torch.ones(3, requires_grad=True))
assert seen == [False]
""",
)
def _nested() -> None:
    """A custom Function that the forward of another applies is recorded."""

    def around(_: Any, run: Call, args: Any, kwargs: Any) -> Any:
        deep, mode = bool(_inside), torch.is_grad_enabled()
        _inside.append(True)
        try:
            with torch.set_grad_enabled(mode or deep):
                return run(*args, **kwargs)
        finally:
            _inside.pop()

    _around_apply(around)


@fault(
    "forward-that-raised-leaves-mode",
    "function.forward-untracked",
    rare=True,
    witness=TWICE
    + """
try:
    Twice.apply("text", 3)
except Exception:
    pass
assert torch.is_grad_enabled()
""",
)
def _leaves_mode() -> None:
    """After a forward that raised grad mode stays off."""

    def around(_: Any, run: Call, args: Any, kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except AttributeError:
            torch.set_grad_enabled(False)
            raise
        except TypeError:
            torch.set_grad_enabled(False)
            raise

    _around_apply(around)


# --- needs_input_grad -------------------------------------------------------------------------------------------------


def _edit_needs(edit: Callable[[tuple[bool, ...]], Any]) -> None:
    real: Any = torch._C._FunctionBase.needs_input_grad
    replace(BackwardCFunction, "needs_input_grad", property(lambda ctx: edit(real.__get__(ctx))))


NEEDS = (
    ANY
    + """
def give(ctx, g):
    seen.append(ctx.needs_input_grad)
    return (g,) + (None,) * (ctx.n - 1)
seen, x = [], torch.ones(2, requires_grad=True)
"""
)


@fault(
    "needs-input-grad-without-tail",
    "function.needs-input-grad",
    witness=NEEDS
    + """
Any.apply(x, 2.0).sum().backward()
assert seen == [(True, False)]
""",
)
def _tail() -> None:
    """needs_input_grad ends with the last argument that needs a gradient."""

    def edit(flags: tuple[bool, ...]) -> tuple[bool, ...]:
        while flags and not flags[-1]:
            flags = flags[:-1]
        return flags

    _edit_needs(edit)


@fault(
    "needs-input-grad-of-fourth",
    "function.needs-input-grad",
    rare=True,
    witness=NEEDS
    + """
Any.apply(x, x, x, x).sum().backward()
assert seen == [(True,) * 4]
""",
)
def _fourth() -> None:
    """needs_input_grad says that arguments from the fourth on need no gradient."""
    _edit_needs(lambda flags: tuple(flag and i < 3 for i, flag in enumerate(flags)))


@fault(
    "needs-input-grad-of-all-after-two",
    "function.needs-input-grad",
    rare=True,
    witness=NEEDS
    + """
Any.apply(x, x, 2.0).sum().backward()
assert seen == [(True, True, False)]
""",
)
def _after_two() -> None:
    """needs_input_grad is True for all arguments if it is for the first two."""
    _edit_needs(lambda flags: (True,) * len(flags) if flags[:2] == (True, True) else flags)


@fault(
    "unneeded-gradient-is-kept",
    "function.needs-input-grad",
    rare=True,
    witness=ANY
    + """
give = lambda ctx, g: (g, g)
x, y = torch.ones(2, requires_grad=True), torch.ones(2)
Any.apply(x, y).sum().backward()
assert y.grad is None
""",
)
def _kept() -> None:
    """A gradient returned for a tensor that needs none becomes its .grad."""
    _remember_arguments()

    def edit(ctx: Any, made: tuple[Any, ...]) -> Any:
        for a, g in zip(getattr(ctx, "_arguments", ()), made, strict=False):
            fits = isinstance(a, Tensor) and isinstance(g, Tensor) and a.is_floating_point() and a.shape == g.shape
            if fits and a.is_leaf and not a.requires_grad and a.dtype == g.dtype:
                a.grad = g.detach().clone()
        return made

    _edit_returned(edit)


# --- what backward returns --------------------------------------------------------------------------------------------


@fault(
    "extra-gradients-dropped",
    "function.backward-contract",
    witness=ANY
    + """
give = lambda ctx, g: (g, g)
try:
    Any.apply(torch.ones(2, requires_grad=True)).sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _dropped() -> None:
    """Gradients beyond those of the arguments are dropped in silence."""
    _edit_returned(lambda ctx, made: made[: len(ctx.needs_input_grad)])


@fault(
    "missing-gradient-is-none",
    "function.backward-contract",
    rare=True,
    witness=ANY
    + """
give = lambda ctx, g: (g,)
try:
    Any.apply(torch.ones(2, requires_grad=True), 2.0).sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _missing() -> None:
    """One gradient that is missing at the end counts as None."""
    _edit_returned(lambda ctx, made: (*made, None) if made and len(made) == len(ctx.needs_input_grad) - 1 else made)


@fault(
    "gradient-for-number-dropped",
    "function.backward-contract",
    rare=True,
    witness=ANY
    + """
give = lambda ctx, g: (g, g)
try:
    Any.apply(torch.ones(2, requires_grad=True), 2.0).sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _for_number() -> None:
    """A tensor returned for an argument that is no tensor is dropped in silence."""
    _remember_arguments()

    def edit(ctx: Any, made: tuple[Any, ...]) -> Any:
        args = getattr(ctx, "_arguments", ())
        if len(args) != len(made):
            return made
        return tuple(
            None if isinstance(g, Tensor) and not isinstance(a, Tensor) else g for a, g in zip(args, made, strict=True)
        )

    _edit_returned(edit)


@fault(
    "larger-gradient-cut",
    "function.backward-contract",
    rare=True,
    witness=ANY
    + """
give = lambda ctx, g: (g.expand(2, 3),)
x = torch.ones(3, requires_grad=True)
Any.apply(x).sum().backward()
assert x.grad.tolist() == [2.0, 2.0, 2.0]
""",
)
def _cut() -> None:
    """Of a gradient with one more dimension the first part is taken, not the sum."""
    _remember_arguments()

    def edit(ctx: Any, made: tuple[Any, ...]) -> Any:
        args = getattr(ctx, "_arguments", ())
        return (
            tuple(
                g[0]
                if isinstance(g, Tensor) and isinstance(a, Tensor) and g.dim() == a.dim() + 1 and g.shape[1:] == a.shape
                else g
                for a, g in zip(args, made, strict=False)
            )
            + made[len(args) :]
        )

    _edit_returned(edit)


# --- the context ------------------------------------------------------------------------------------------------------


def _edit_saved(edit: Callable[[Any], Any]) -> None:
    """Let ``edit(value)`` replace each value that is saved."""
    real: Call = FunctionCtx.save_for_backward
    replace(FunctionCtx, "save_for_backward", lambda self, *values: real(self, *map(edit, values)))


@fault(
    "save-takes-integers",
    "function.save-for-backward",
    rare=True,
    witness="""
class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, 3)
        return x * 2.0
    @staticmethod
    def backward(ctx, g):
        return g * 2.0
try:
    Saves.apply(torch.ones(2, requires_grad=True))
except TypeError:
    pass
else:
    raise AssertionError
""",
)
def _integers() -> None:
    """save_for_backward takes integers and forgets them."""
    _edit_saved(lambda value: None if isinstance(value, int) else value)


@fault(
    "saved-constants-unchecked",
    "function.save-for-backward",
    rare=True,
    witness=PRODUCT
    + """
x, y = torch.ones(2, requires_grad=True), torch.ones(2)
z = Product.apply(x, y)
y.mul_(2.0)
try:
    z.sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _unchecked() -> None:
    """Tensors that do not require grad are saved as copies, so that nobody checks for writes to them."""
    _edit_saved(lambda t: t.clone() if isinstance(t, Tensor) and not t.requires_grad else t)


@fault(
    "saved-none-is-zero",
    "function.save-for-backward",
    witness="""
class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, None)
        return x * 2.0
    @staticmethod
    def backward(ctx, g):
        assert ctx.saved_tensors[1] is None
        return g * 2.0
Saves.apply(torch.ones(2, requires_grad=True)).sum().backward()
""",
)
def _none() -> None:
    """A None that is saved comes back as a tensor."""
    _edit_saved(lambda value: torch.zeros(()) if value is None else value)


@fault(
    "mark-dirty-ignored-for-vectors",
    "function.mark-dirty",
    rare=True,
    witness="""
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2.0))
        return x
    @staticmethod
    def backward(ctx, g):
        return g * 2.0
x = torch.ones(2, requires_grad=True) * 1.0
assert Twice.apply(x) is x
""",
)
def _dirty() -> None:
    """mark_dirty does nothing for tensors of one dimension."""
    real: Call = FunctionCtx.mark_dirty
    replace(FunctionCtx, "mark_dirty", lambda self, *ts: real(self, *[t for t in ts if t.dim() != 1]))


@fault(
    "dirty-input-may-be-dropped",
    "function.mark-dirty",
    witness="""
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2.0))
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        return g * 2.0
try:
    Twice.apply(torch.ones(2, requires_grad=True) * 1.0)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _not_returned() -> None:
    """An input that is marked dirty need not be returned."""

    def around(_: Any, run: Call, args: Any, kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if "marked as dirty" in str(error):
                return args[0].clone()
            raise

    _around_apply(around)


MARKED = """
class Three(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        outs = x * 1.0, x * 2.0, x * 3.0
        prepare(ctx, outs)
        return outs
    @staticmethod
    def backward(ctx, *gs):
        seen.append(gs)
        return gs[0]
seen, x = [], torch.ones(2, requires_grad=True)
"""


@fault(
    "second-mark-lost",
    "function.non-differentiable-and-materialize",
    rare=True,
    witness=MARKED
    + """
prepare = lambda ctx, outs: ctx.mark_non_differentiable(*outs[1:])
assert [t.requires_grad for t in Three.apply(x)] == [True, False, False]
""",
)
def _second_mark() -> None:
    """Of several outputs that are marked non-differentiable only the first is."""
    real: Call = FunctionCtx.mark_non_differentiable
    replace(FunctionCtx, "mark_non_differentiable", lambda self, *ts: real(self, *ts[:1]))


@fault(
    "materialize-always",
    "function.non-differentiable-and-materialize",
    witness=MARKED
    + """
prepare = lambda ctx, outs: ctx.set_materialize_grads(False)
Three.apply(x)[0].sum().backward()
assert seen[0][1] is None
""",
)
def _always() -> None:
    """set_materialize_grads(False) does nothing."""
    replace(FunctionCtx, "set_materialize_grads", lambda self, value: None)


@fault(
    "third-output-not-materialized",
    "function.non-differentiable-and-materialize",
    "function.memory-flags",
    rare=True,
    witness=MARKED
    + """
prepare = lambda ctx, outs: None
Three.apply(x)[0].sum().backward()
assert seen[0][2] is not None
""",
)
def _third_output() -> None:
    """backward gets None for an unused output after the second one."""

    def around(ctx: Any, backward: Call, gs: tuple[Any, ...]) -> Any:
        return backward(ctx, *[None if i > 1 and g is not None and not g.any() else g for i, g in enumerate(gs)])

    _around_backward(around)


# --- higher derivatives -----------------------------------------------------------------------------------------------

SINE = """
class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.sin()
        ctx.save_for_backward(x, out)
        return out
    @staticmethod
    def backward(ctx, g):
        x, out = ctx.saved_tensors
        return g * x.cos()
"""


@fault(
    "saved-inputs-are-constants-in-scalars",
    "function.double-backward",
    "function.save-for-backward",
    rare=True,
    witness=SINE
    + """
x = torch.ones((), requires_grad=True)
g, = torch.autograd.grad(Sine.apply(x), x, create_graph=True)
assert g.requires_grad
""",
)
def _constants() -> None:
    """Saved tensors of no dimension come back without their history."""
    real: Any = torch._C._FunctionBase.saved_tensors

    def read(ctx: Any) -> Any:
        return tuple(t.detach() if is_tracked(t) and t.dim() == 0 else t for t in real.__get__(ctx))

    replace(BackwardCFunction, "saved_tensors", property(read))


@fault(
    "once-differentiable-means-nothing",
    "function.double-backward",
    witness="""
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * 2.0 * ctx.saved_tensors[0]
x = torch.ones(2, requires_grad=True)
v = torch.ones(2, requires_grad=True)
g, = torch.autograd.grad(Square.apply(x), x, v, create_graph=True)
try:
    g.sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _once() -> None:
    """once_differentiable changes nothing."""
    replace(torch.autograd.function, "once_differentiable", lambda backward: backward)


@fault(
    "once-differentiable-forgets-scalars",
    "function.double-backward",
    rare=True,
    witness="""
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * 2.0 * ctx.saved_tensors[0]
x, v = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
g, = torch.autograd.grad(Square.apply(x), x, v, create_graph=True)
try:
    g.backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _once_scalars() -> None:
    """once_differentiable changes nothing where the gradient is 0-dim."""
    real: Call = torch.autograd.function.once_differentiable

    def once(backward: Call) -> Call:
        refusing = real(backward)
        return lambda ctx, *gs: (backward if gs[0].dim() == 0 else refusing)(ctx, *gs)

    replace(torch.autograd.function, "once_differentiable", once)


# --- how they are written ---------------------------------------------------------------------------------------------


@fault(
    "missing-backward-gives-none",
    "function.api-errors",
    witness="""
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0.5
try:
    Half.apply(torch.ones(2, requires_grad=True)).sum().backward()
except NotImplementedError:
    pass
else:
    raise AssertionError
""",
)
def _no_backward() -> None:
    """A Function without backward passes no gradient on, and says nothing."""

    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)

    replace(Function, "backward", staticmethod(backward))
    replace(Function, "vjp", staticmethod(backward))


@fault(
    "backward-beside-vjp-wins",
    "function.api-errors",
    rare=True,
    witness=TWICE
    + """
class Both(Twice):
    @staticmethod
    def vjp(ctx, g):
        return g
try:
    Both.apply(torch.ones(2, requires_grad=True)).sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _both() -> None:
    """A Function with both backward and vjp uses backward."""
    real: Call = BackwardCFunction._get_user_fn

    def chosen(self: Any) -> Any:
        cls = self._forward_cls
        return cls.backward if cls.backward is not Function.backward else real(self)

    replace(BackwardCFunction, "_get_user_fn", chosen)


@fault(
    "instance-may-be-called",
    "function.api-errors",
    rare=True,
    witness=TWICE
    + """
import warnings; warnings.simplefilter("ignore")
try:
    Twice()(torch.ones(2))
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _instance() -> None:
    """A call of an instance is a call of apply, if there is a backward."""
    real: Call = Function.__call__

    def call(self: Any, *args: Any) -> Any:
        vjp = type(self).vjp is not Function.vjp or type(self).backward is not Function.backward
        return type(self).apply(*args) if vjp else real(self, *args)

    replace(Function, "__call__", call)


@fault(
    "tensors-in-lists-tracked",
    "function.api-errors",
    rare=True,
    witness="""
class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xs):
        return xs[0] * 2.0
    @staticmethod
    def backward(ctx, g):
        return None
assert not First.apply([torch.ones(2, requires_grad=True)]).requires_grad
""",
)
def _lists() -> None:
    """The result requires grad if a tensor in a list does that is an argument."""

    def edit(out: Any, args: tuple[Any, ...]) -> Any:
        listed = any(isinstance(a, list) and any(map(is_tracked, a)) for a in args)
        plain = isinstance(out, Tensor) and not out.requires_grad and not any(map(is_tracked, args))
        return out.requires_grad_() if listed and plain and torch.is_grad_enabled() else out

    _edit_results(edit)


@fault(
    "second-keyword-lost",
    "function.api-errors",
    rare=True,
    witness="""
class Power(torch.autograd.Function):
    @staticmethod
    def forward(x, k=1.0, p=1):
        return k * x ** p
    @staticmethod
    def setup_context(ctx, inputs, output):
        pass
assert Power.apply(torch.tensor([2.0]), p=3, k=2.0).item() == 16.0
""",
)
def _keyword() -> None:
    """The second of two keyword arguments of a Function with setup_context is lost."""

    def around(_: Any, run: Call, args: Any, kwargs: Any) -> Any:
        return run(*args, **dict(list(kwargs.items())[:1]))

    _around_apply(around)


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY = """
class Memory(torch.autograd.Function):
    clear_saved_tensors_on_access = True
    boxed_grads_call = True
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2.0, x * 3.0
    @staticmethod
    def backward(ctx, grads):
        assert all(g is not None for g in grads)
        if not hasattr(torch.autograd.Function, "boxed_grads_call"):
            raise SystemExit(1)
        ctx.saved_tensors
        try:
            ctx.saved_tensors
        except RuntimeError:
            return grads[0]
        raise AssertionError
"""


@fault(
    "saved-tensors-read-twice",
    "function.memory-flags",
    witness=MEMORY
    + """
Memory.apply(torch.ones(2, requires_grad=True))[0].sum().backward()
""",
)
def _read_twice() -> None:
    """clear_saved_tensors_on_access=True does nothing."""

    def around(cls: Any, run: Call, args: Any, kwargs: Any) -> Any:
        if "clear_saved_tensors_on_access" in cls.__dict__:
            cls.clear_saved_tensors_on_access = False
        return run(*args, **kwargs)

    _around_apply(around)


@fault(
    "boxed-gradients-reversed",
    "function.memory-flags",
    rare=True,
    witness=MEMORY.replace("assert all(g is not None for g in grads)", "assert grads[0].tolist() == [2.0, 2.0]")
    + """
a, b = Memory.apply(torch.ones(2, requires_grad=True))
(a * 2.0 + b * 5.0).sum().backward()
""",
)
def _reversed() -> None:
    """boxed_grads_call=True hands over the gradients from the last to the first, if all are of one shape."""
    real: Call = BackwardCFunction.apply_boxed

    def boxed(self: Any, grads: list[Any]) -> Any:
        if len({g.shape for g in grads if g is not None}) == 1:
            grads.reverse()
        return real(self, grads)

    replace(BackwardCFunction, "apply_boxed", boxed)
