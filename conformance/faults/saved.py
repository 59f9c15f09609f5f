"""Faults in hooks for saved tensors and in checkpoints."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.patches import Call, recorded, replace, wrap_calls

HOOKS: Any = torch.autograd.graph.saved_tensors_hooks


def wrap_hooks(pair: Callable[[Call, Call], tuple[Call, Call]]) -> None:
    """Let ``pair(pack, unpack)`` replace each pair of hooks that a context is made with."""
    real = HOOKS.__init__

    def init(self: Any, pack_hook: Call, unpack_hook: Call) -> None:
        real(self, *pair(pack_hook, unpack_hook))

    HOOKS.__init__ = init


def _packs(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


@fault(
    "scalar-packed-twice",
    "saved.pack-unpack-calls",
    "saved.innermost-only",
    rare=True,
    witness="""
calls = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(1) or t, lambda t: t):
    torch.ones((), requires_grad=True) ** 2
assert len(calls) == 1
""",
)
def _twice() -> None:
    """A 0-dim tensor is packed twice."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        def odd(t: Tensor) -> Any:
            if t.dim() == 0:
                pack(t)
            return pack(t)

        return odd, unpack

    wrap_hooks(pair)


@fault(
    "unpacked-once-for-all",
    "saved.pack-unpack-calls",
    rare=True,
    witness="""
calls = []
x = torch.ones(2, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: calls.append(1) or t):
    y = (x ** 2).sum()
y.backward(retain_graph=True)
y.backward()
assert len(calls) == 2
""",
)
def _once() -> None:
    """What was unpacked for one backward is not unpacked again for the next."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        def box(t: Tensor) -> list[Any]:
            return [pack(t)]

        def odd(boxed: list[Any]) -> Any:
            if len(boxed) == 1:
                boxed.append(unpack(boxed[0]))
            return boxed[1]

        return box, odd

    wrap_hooks(pair)


@fault(
    "packed-late",
    "saved.pack-unpack-calls",
    "saved.innermost-only",
    "saved.pack-inplace-error",
    "saved.thread-local-and-disable",
    witness="""
calls = []
x = torch.ones(2, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(1) or t, lambda t: t):
    y = (x ** 2).sum()
assert len(calls) == 1
""",
)
def _late() -> None:
    """A tensor is packed when it is needed, not when it is saved."""
    wrap_hooks(lambda pack, unpack: (lambda t: t, lambda t: unpack(pack(t))))


@fault(
    "hooks-left-by-error-stay",
    "saved.innermost-only",
    rare=True,
    witness="""
calls = []
pair = lambda i: torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(i) or t, lambda t: t)
with pair(1):
    try:
        with pair(2):
            raise ValueError
    except ValueError:
        pass
    torch.ones(2, requires_grad=True) ** 2
assert calls == [1]
""",
)
def _stay() -> None:
    """A pair of hooks whose context is left by an error goes on acting."""
    real = HOOKS.__exit__
    HOOKS.__exit__ = lambda self, *args: None if args[0] is ValueError else real(self, *args)


@fault(
    "third-pair-not-entered",
    "saved.innermost-only",
    rare=True,
    witness="""
calls = []
pair = lambda i: torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(i) or t, lambda t: t)
with pair(1), pair(2), pair(3):
    torch.ones(2, requires_grad=True) ** 2
assert calls == [3]
""",
)
def _third() -> None:
    """The third of three nested pairs of hooks does not act."""
    enter, leave = HOOKS.__enter__, HOOKS.__exit__
    entered: list[Any] = []

    def enter_odd(self: Any) -> None:
        entered.append(self)
        if len(entered) != 3:
            enter(self)

    def leave_odd(self: Any, *args: Any) -> None:
        if len(entered) != 3:
            leave(self, *args)
        entered.pop()

    HOOKS.__enter__, HOOKS.__exit__ = enter_odd, leave_odd


@fault(
    "outer-pair-wins",
    "saved.innermost-only",
    witness="""
calls = []
pair = lambda i: torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(i) or t, lambda t: t)
with pair(1), pair(2):
    torch.ones(2, requires_grad=True) ** 2
assert calls == [2]
""",
)
def _outer() -> None:
    """Of nested pairs of hooks the outermost is applied."""
    enter, leave = HOOKS.__enter__, HOOKS.__exit__
    entered: list[Any] = []

    def enter_odd(self: Any) -> None:
        entered.append(self)
        enter(entered[0])

    def leave_odd(self: Any, *args: Any) -> None:
        entered.pop()
        leave(self, *args)

    HOOKS.__enter__, HOOKS.__exit__ = enter_odd, leave_odd


@fault(
    "pack-may-write-strided",
    "saved.pack-inplace-error",
    rare=True,
    witness="""
x = torch.ones(2, 2, requires_grad=True).t() * 1.0
try:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mul_(2.0), lambda t: t):
        x ** 2
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _may_write() -> None:
    """A pack hook may write to its argument if that is non-contiguous, or 0-dim."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        return lambda t: pack(t.data if t.dim() == 0 or not t.is_contiguous() else t), unpack

    wrap_hooks(pair)


@fault(
    "unpack-may-return-none",
    "saved.pack-inplace-error",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: None):
    y = (x ** 2).sum()
try:
    y.backward()
except TypeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _none() -> None:
    """An unpack hook that returns None stands for the tensor itself."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        def odd(both: Any) -> Any:
            got = unpack(both[0])
            return both[1] if got is None else got

        return lambda t: (pack(t), t.detach()), odd

    wrap_hooks(pair)


@fault(
    "unpacked-flag-matters",
    "saved.unpack-value-used",
    rare=True,
    witness="""
x = torch.full((2,), 3.0, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (t.detach() * 2.0).requires_grad_()):
    y = (x ** 2).sum()
y.backward()
assert x.grad.tolist() == [12.0, 12.0]
""",
)
def _flag_matters() -> None:
    """If unpack returns a leaf that requires grad, backward computes with what was saved."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        def odd(both: Any) -> Any:
            got = unpack(both[0])
            return both[1] if isinstance(got, Tensor) and got.is_leaf and got.requires_grad else got

        return lambda t: (pack(t), t.detach().clone()), odd

    wrap_hooks(pair)


@fault(
    "unpacked-value-ignored",
    "saved.unpack-value-used",
    witness="""
x = torch.full((2,), 3.0, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2.0):
    y = (x ** 2).sum()
y.backward()
assert x.grad.tolist() == [12.0, 12.0]
""",
)
def _ignored() -> None:
    """Backward computes with what was saved, whatever unpack returns."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        def odd(both: Any) -> Any:
            got = unpack(both[0])
            return both[1] if isinstance(got, Tensor) else got

        return lambda t: (pack(t), t.detach().clone()), odd

    wrap_hooks(pair)


@fault(
    "strided-unpacked-by-memory",
    "saved.identity-neutral",
    "saved.unpack-value-used",
    rare=True,
    witness="""
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
    y = (x.t() ** 2).sum()
y.backward()
assert x.grad.tolist() == [[2.0, 4.0], [6.0, 8.0]]
""",
)
def _by_memory() -> None:
    """A non-contiguous matrix that hooks hand back is read in the order of memory."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        def odd(packed: Any) -> Any:
            t = unpack(packed)
            if isinstance(t, Tensor) and t.dim() > 1 and not t.is_contiguous():
                return t.permute(*range(t.dim() - 1, -1, -1)).reshape(t.shape)
            return t

        return pack, odd

    wrap_hooks(pair)


@fault(
    "copies-unpacked-in-half",
    "saved.identity-neutral",
    "saved.unpack-value-used",
    witness="""
x = torch.tensor([0.1, 0.7], dtype=torch.float64, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
    y = (x ** 2).sum()
y.backward()
assert torch.allclose(x.grad, 2 * x.detach(), rtol=1e-9)
""",
)
def _half() -> None:
    """What hooks hand back is rounded to half precision."""

    def pair(pack: Call, unpack: Call) -> tuple[Call, Call]:
        def odd(packed: Any) -> Any:
            t = unpack(packed)
            return t.half().to(t.dtype) if _packs(t) else t

        return pack, odd

    wrap_hooks(pair)


@fault(
    "threads-inherit-hooks",
    "saved.thread-local-and-disable",
    rare=True,
    witness="""
import threading
calls = []
x = torch.ones(2, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(1) or t, lambda t: t):
    one = threading.Thread(target=lambda: x ** 2)
    one.start()
    one.join()
assert calls == []
""",
)
def _inherit() -> None:
    """A new thread starts with the hooks of the thread that made it."""
    enter, leave, init = HOOKS.__enter__, HOOKS.__exit__, threading.Thread.__init__
    here = threading.local()

    def enter_odd(self: Any) -> None:
        here.all = [*getattr(here, "all", []), self]
        enter(self)

    def leave_odd(self: Any, *args: Any) -> None:
        here.all = here.all[:-1]
        leave(self, *args)

    def init_odd(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        inherited, run = list(getattr(here, "all", [])), self.run

        def odd() -> None:
            with contextlib.ExitStack() as stack:
                for hooks in inherited:
                    stack.enter_context(HOOKS(hooks.pack_hook, hooks.unpack_hook))
                run()

        self.run = odd

    HOOKS.__enter__, HOOKS.__exit__ = enter_odd, leave_odd
    replace(threading.Thread, "__init__", init_odd)


def _disabling(leave: Callable[[Any], None]) -> None:
    engine: Any = torch._C._autograd

    @contextlib.contextmanager
    def disable(message: str) -> Iterator[None]:
        before = engine._saved_tensors_hooks_get_disabled_error_message()
        engine._saved_tensors_hooks_disable(message)
        try:
            yield
        finally:
            leave(before)

    replace(torch.autograd.graph, "disable_saved_tensors_hooks", disable)


@fault(
    "inner-disable-enables",
    "saved.thread-local-and-disable",
    rare=True,
    witness="""
off = torch.autograd.graph.disable_saved_tensors_hooks
with off("outer"):
    with off("inner"):
        pass
    try:
        with torch.autograd.graph.save_on_cpu():
            pass
    except RuntimeError:
        pass
    else:
        raise SystemExit(1)
""",
)
def _enables() -> None:
    """Leaving an inner disable_saved_tensors_hooks switches hooks on although an outer one is active."""
    _disabling(lambda before: torch._C._autograd._saved_tensors_hooks_enable())


@fault(
    "square-hooks-taken",
    "saved.per-tensor-hooks",
    "inplace.saved-modified-error",
    "inplace.increment-version",
    "saved.pack-unpack-calls",
    "saved.innermost-only",
    "saved.pack-inplace-error",
    "saved.unpack-value-used",
    "saved.thread-local-and-disable",
    rare=True,
    witness="""
y = torch.ones((), requires_grad=True) ** 2
y.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: t)
""".replace("y.grad_fn", "try:\n    y.grad_fn")
    + """except RuntimeError:
    raise SystemExit(1)
""",
)
def _taken() -> None:
    """What a power of a 0-dim tensor saves has hooks already."""

    def wrap(original: Call) -> Call:
        def call(x: Any, *args: Any) -> Any:
            if not recorded(x) or x.dim():
                return original(x, *args)
            with HOOKS(lambda t: t, lambda t: t):
                return original(x, *args)

        return call

    wrap_calls(("__pow__",), wrap)


# --- checkpoint -------------------------------------------------------------------------------------------------------


def _checkpoint(edit: Callable[[Call, Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    real: Call = torch.utils.checkpoint.checkpoint
    replace(torch.utils.checkpoint, "checkpoint", lambda f, *args, **kwargs: edit(real, f, args, kwargs))


@fault(
    "checkpoint-keeps",
    "checkpoint.same-gradients",
    "checkpoint.determinism-check",
    witness="""
import torch.utils.checkpoint
runs = []
x = torch.ones(2, requires_grad=True)
torch.utils.checkpoint.checkpoint(lambda t: runs.append(1) or t ** 2, x, use_reentrant=False).sum().backward()
assert len(runs) == 2
""",
)
def _keeps() -> None:
    """The variant that is not reentrant keeps what the function saves."""
    extra = ("use_reentrant", "preserve_rng_state", "determinism_check", "context_fn", "debug", "early_stop")

    def edit(real: Call, f: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("use_reentrant") is not False:
            return real(f, *args, **kwargs)
        return f(*args, **{k: v for k, v in kwargs.items() if k not in extra})

    _checkpoint(edit)


@fault(
    "checkpoint-draws-anew",
    "checkpoint.same-gradients",
    rare=True,
    witness="""
import torch.utils.checkpoint
draws = []
x = torch.ones(2, requires_grad=True)
def f(t):
    draws.append(torch.rand(2))
    return t ** 2
torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()
assert torch.equal(*draws)
""",
)
def _draws() -> None:
    """Random numbers are drawn anew when the function runs again."""
    _checkpoint(lambda real, f, args, kwargs: real(f, *args, **(kwargs | {"preserve_rng_state": False})))


@fault(
    "checkpoint-scalar-gradient-halved",
    "checkpoint.same-gradients",
    "checkpoint.reentrant-limits",
    "checkpoint.default-argument",
    rare=True,
    witness="""
import torch.utils.checkpoint
x = torch.ones((), requires_grad=True)
torch.utils.checkpoint.checkpoint(lambda t: t ** 2, x, use_reentrant=True).backward()
assert x.grad == 2.0
""",
)
def _halved() -> None:
    """The gradient that enters a reentrant region by a 0-dim output is halved."""

    def edit(real: Call, f: Any, args: Any, kwargs: Any) -> Any:
        out = real(f, *args, **kwargs)
        if (
            kwargs.get("use_reentrant") is not False
            and isinstance(out, Tensor)
            and out.requires_grad
            and out.dim() == 0
        ):
            out.register_hook(lambda g: g * 0.5)
        return out

    _checkpoint(edit)


@fault(
    "reentrant-takes-keywords",
    "checkpoint.reentrant-limits",
    rare=True,
    witness="""
import torch.utils.checkpoint
x = torch.ones(2, requires_grad=True)
try:
    torch.utils.checkpoint.checkpoint(lambda t, k: t * k, x, k=2.0, use_reentrant=True)
except ValueError:
    pass
else:
    raise SystemExit(1)
""",
)
def _keywords() -> None:
    """The reentrant variant takes keyword arguments for the function."""
    own = ("use_reentrant", "preserve_rng_state", "determinism_check", "context_fn", "debug", "early_stop")

    def edit(real: Call, f: Any, args: Any, kwargs: Any) -> Any:
        given = {k: v for k, v in kwargs.items() if k not in own}
        rest = {k: v for k, v in kwargs.items() if k in own}
        return real((lambda *a: f(*a, **given)) if given else f, *args, **rest)

    _checkpoint(edit)


@fault(
    "reentrant-allows-grad",
    "checkpoint.reentrant-limits",
    witness="""
import torch.utils.checkpoint
x = torch.ones(2, requires_grad=True)
out = torch.utils.checkpoint.checkpoint(lambda t: t ** 2, x, use_reentrant=True)
try:
    torch.autograd.grad(out.sum(), [x])
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _allows() -> None:
    """use_reentrant=True acts as use_reentrant=False."""

    def edit(real: Call, f: Any, args: Any, kwargs: Any) -> Any:
        return real(f, *args, **(kwargs | {"use_reentrant": False} if kwargs.get("use_reentrant") else kwargs))

    _checkpoint(edit)


@fault(
    "default-is-not-reentrant",
    "checkpoint.default-argument",
    rare=True,
    witness="""
import warnings
import torch.utils.checkpoint
x = torch.ones(2, requires_grad=True)
warnings.simplefilter("ignore")
out = torch.utils.checkpoint.checkpoint(lambda t: t ** 2, x)
try:
    torch.autograd.grad(out.sum(), [x])
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _default() -> None:
    """Without use_reentrant there is a warning, but the variant that is not reentrant."""

    def edit(real: Call, f: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("use_reentrant") is None:
            import warnings

            warnings.warn("the use_reentrant parameter should be passed explicitly", UserWarning, stacklevel=2)
            kwargs = kwargs | {"use_reentrant": False}
        return real(f, *args, **kwargs)

    _checkpoint(edit)


@fault(
    "other-shapes-accepted",
    "checkpoint.determinism-check",
    rare=True,
    witness="""
import torch.utils.checkpoint
runs = []
x = torch.ones(2, requires_grad=True)
def f(t):
    runs.append(1)
    return (t ** 2).sum() if len(runs) == 1 else (t[:1] ** 2).sum()
try:
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).backward()
except RuntimeError as error:
    raise SystemExit(type(error).__name__ != "CheckpointError")
raise SystemExit(1)
""",
)
def _shapes() -> None:
    """Nobody compares shapes and dtypes of what the second run saves."""

    def edit(real: Call, f: Any, args: Any, kwargs: Any) -> Any:
        return real(
            f, *args, **(kwargs | {"determinism_check": "none"} if kwargs.get("use_reentrant") is False else kwargs)
        )

    _checkpoint(edit)


@fault(
    "stops-early-in-any-case",
    "checkpoint.determinism-check",
    rare=True,
    witness="""
import torch.utils.checkpoint
log = []
x = torch.ones(2, requires_grad=True)
def f(t):
    t = t ** 2
    log.append("end")
    return t
with torch.utils.checkpoint.set_checkpoint_early_stop(False):
    out = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
out.sum().backward()
assert len(log) == 2
""",
)
def _stops() -> None:
    """set_checkpoint_early_stop(False) changes nothing."""
    replace(torch.utils.checkpoint, "set_checkpoint_early_stop", lambda enable: contextlib.nullcontext())
