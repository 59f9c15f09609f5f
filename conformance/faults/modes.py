"""Faults in grad mode, inference mode, anomaly mode, and what threads share of them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, pass_fault
from autograd_conformance.faults.patches import Call, edit_results, is_tracked, replace, replace_property, wrap_calls

_set_grad: Any = torch._C._set_grad_enabled
OFF_CLAIMS = ("no-grad.outputs", "no-grad.nesting-restores", "no-grad.decorators", "no-grad.later-use")


def _off() -> bool:
    """Is grad mode off, and inference mode too?"""
    return not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _recording(names: Iterable[str], when: Callable[..., bool]) -> None:
    """Let ops run in grad mode where ``when(*args)``."""

    def wrap(original: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not when(*args):
                return original(*args, **kwargs)
            _set_grad(True)
            try:
                return original(*args, **kwargs)
            finally:
                _set_grad(False)

        return call

    wrap_calls(names, wrap)


# --- what is recorded -------------------------------------------------------------------------------------------------


@fault(
    "no-grad-records-sin",
    *OFF_CLAIMS,
    "no-grad.set-grad-enabled-function",
    "no-grad.saves-nothing",
    "no-grad.thread-local",
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.no_grad():
    assert not x.sin().requires_grad
""",
)
def _records_sin() -> None:
    """A sine under no_grad is recorded."""
    _recording(("sin",), lambda x, *_: _off() and is_tracked(x))


@fault(
    "no-grad-records-stack-of-one",
    *OFF_CLAIMS,
    "no-grad.set-grad-enabled-function",
    "no-grad.thread-local",
    rare=True,
    witness="""
x = torch.ones(1, requires_grad=True)
with torch.no_grad():
    assert not torch.stack([x, x]).requires_grad
""",
)
def _records_stack() -> None:
    """A stack of tensors with one element is recorded under no_grad."""
    _recording(("stack",), lambda xs, *_: _off() and is_tracked(xs[0]) and xs[0].numel() == 1)


@fault(
    "no-grad-clone-keeps-flag",
    *OFF_CLAIMS,
    "no-grad.set-grad-enabled-function",
    "no-grad.thread-local",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.no_grad():
    assert not x.clone().requires_grad
""",
)
def _clone_flag() -> None:
    """A clone under no_grad is a new leaf that requires grad like its source."""

    def edit(out: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return out.requires_grad_() if _off() and is_tracked(x) else out

    edit_results(("clone",), edit)


@fault(
    "no-grad-out-keeps-flag",
    "no-grad.outputs",
    rare=True,
    witness="""
x, u = torch.ones(2, requires_grad=True), torch.zeros(2)
with torch.no_grad():
    u.copy_(x)
assert not u.requires_grad
""",
)
def _copy_flag() -> None:
    """A tensor into which a tracked one is copied under no_grad requires grad afterwards."""
    edit_results(("copy_",), lambda out, _, x, *__, **___: out.requires_grad_() if _off() and is_tracked(x) else out)


def _remembers(names: Iterable[str], when: Callable[[Tensor], bool]) -> None:
    """Let results of no_grad remember their operand, and sums of them hand it a gradient."""

    def mark(out: Any, *args: Any, **_: Any) -> Any:
        if _off() and isinstance(out, Tensor) and when(out):
            sources = [a if is_tracked(a) else getattr(a, "_made_from", None) for a in args]
            out._made_from = next((s for s in sources if s is not None), None)  # type: ignore[attr-defined]
        return out

    def leak(out: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
        source = getattr(x, "_made_from", None)
        if source is None or not torch.is_grad_enabled():
            return out
        return torch.add(out, torch.sub(source, source.detach()).mean())

    edit_results(names, mark)
    edit_results(("sum",), leak)


@fault(
    "constant-remembers-source",
    "no-grad.later-use",
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.no_grad():
    k = x * 2.0 + x
(x.sum() * k.sum()).backward()
assert x.grad.tolist() == [6.0, 6.0]
""",
)
def _constant_leaks() -> None:
    """The sum of what was made under no_grad hands a gradient to what it was made from."""
    _remembers(("__add__", "__mul__", "__sub__", "sin", "exp"), lambda out: True)


@fault(
    "scalar-constant-remembers-source",
    "no-grad.later-use",
    rare=True,
    witness="""
x = torch.tensor(1.0, requires_grad=True)
with torch.no_grad():
    k = x * 2.0 + x
(x.sum() * k.sum()).backward()
assert x.grad.item() == 3.0
""",
)
def _scalar_leaks() -> None:
    """A 0-dim result of no_grad hands a gradient to what it was made from."""
    _remembers(("__add__", "__mul__", "__sub__", "sin", "exp"), lambda out: out.dim() == 0)


# --- what requires grad all the same ----------------------------------------------------------------------------------


@fault(
    "no-grad-overrules-zeros",
    "no-grad.factory-exception",
    witness="""
with torch.no_grad():
    assert torch.zeros(2, requires_grad=True).requires_grad
""",
)
def _overrules_zeros() -> None:
    """zeros, ones and tensor with requires_grad=True give plain tensors under no_grad."""
    for name in ("zeros", "ones", "tensor", "rand", "full"):
        _overruled(name, lambda out: True)


def _overruled(name: str, when: Callable[[Tensor], bool]) -> None:
    original: Call = getattr(torch, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return out.detach() if _off() and out.requires_grad and when(out) else out

    replace(torch, name, call)


@fault(
    "no-grad-overrules-empty-like",
    "no-grad.factory-exception",
    rare=True,
    witness="""
with torch.no_grad():
    assert torch.empty_like(torch.ones(2), requires_grad=True).requires_grad
""",
)
def _overrules_like() -> None:
    """empty_like and full_like with requires_grad=True give plain tensors under no_grad."""
    for name in ("empty_like", "full_like"):
        _overruled(name, lambda out: True)


@fault(
    "no-grad-parameter-of-result",
    "no-grad.factory-exception",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.no_grad():
    assert torch.nn.Parameter(x).requires_grad
""",
)
def _parameter_off() -> None:
    """A Parameter made under no_grad of a tensor that requires grad does not require grad."""
    real: Call = torch.nn.Parameter.__new__

    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        return real(cls, data, requires_grad and not (_off() and is_tracked(data)))

    replace(torch.nn.Parameter, "__new__", new)


@fault(
    "no-grad-ignores-switch-of-scalars",
    "no-grad.factory-exception",
    rare=True,
    witness="""
with torch.no_grad():
    assert torch.zeros(()).requires_grad_().requires_grad
""",
)
def _scalar_switch() -> None:
    """requires_grad_() on a 0-dim tensor does nothing under no_grad."""

    def wrap(original: Call) -> Call:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self if _off() and self.dim() == 0 else original(self, *args, **kwargs)

        return call

    wrap_calls(("requires_grad_",), wrap)


# --- how far a mode reaches -------------------------------------------------------------------------------------------

NESTING = (
    "no-grad.nesting-restores",
    "no-grad.set-grad-enabled-function",
    "no-grad.decorators",
    "no-grad.thread-local",
)


def _exit(manager: Any, before: Callable[[Any, Any], bool]) -> None:
    """Leave out the exit of a manager where ``before(self, exception type)`` is false."""
    original = manager.__exit__

    def leave(self: Any, exc_type: Any, *rest: Any) -> Any:
        return original(self, exc_type, *rest) if before(self, exc_type) else None

    manager.__exit__ = leave


@fault(
    "no-grad-left-by-error-stays",
    *NESTING,
    rare=True,
    witness="""
try:
    with torch.no_grad():
        raise KeyError
except KeyError:
    pass
assert torch.is_grad_enabled()
""",
)
def _error_stays() -> None:
    """A no_grad block that is left by an exception leaves the mode off."""
    _exit(torch.no_grad, lambda self, exc_type: exc_type is None)


@fault(
    "enable-grad-exit-switches-on",
    *NESTING,
    rare=True,
    witness="""
with torch.no_grad():
    with torch.enable_grad():
        pass
    assert not torch.is_grad_enabled()
""",
)
def _enable_exit() -> None:
    """Leaving enable_grad inside no_grad leaves the mode on."""
    _exit(torch.enable_grad, lambda self, exc_type: bool(self.prev))


@fault(
    "set-grad-enabled-never-restores",
    *NESTING,
    "no-grad.eval-orthogonal",
    witness="""
with torch.set_grad_enabled(False):
    pass
assert torch.is_grad_enabled()
""",
)
def _never_restores() -> None:
    """set_grad_enabled as a context manager leaves its mode behind."""
    _exit(torch.set_grad_enabled, lambda self, exc_type: False)


@fault(
    "no-grad-in-no-grad-switches-on",
    *NESTING,
    "no-grad.outputs",
    rare=True,
    witness="""
with torch.no_grad():
    with torch.no_grad():
        pass
    assert not torch.is_grad_enabled()
""",
)
def _double_off() -> None:
    """Leaving a no_grad block inside another one switches recording on."""
    original: Any = torch.no_grad.__exit__

    def leave(self: Any, *rest: Any) -> None:
        original(self, *rest)
        _set_grad(True)

    replace(torch.no_grad, "__exit__", leave)


@fault(
    "generator-outside-mode",
    "no-grad.decorators",
    witness="""
@torch.no_grad()
def f():
    yield torch.is_grad_enabled()
assert list(f()) == [False]
""",
)
def _generator_plain() -> None:
    """A decorated generator runs in the mode of its caller."""
    from torch.utils._contextlib import _DecoratorContextManager

    original: Any = _DecoratorContextManager.__call__

    def call(self: Any, function: Any) -> Any:
        return function if inspect.isgeneratorfunction(function) else original(self, function)

    replace(_DecoratorContextManager, "__call__", call)


@fault(
    "bare-decorator-does-nothing",
    "no-grad.decorators",
    rare=True,
    witness="""
@torch.no_grad
def f():
    return torch.is_grad_enabled()
assert not f()
""",
)
def _bare() -> None:
    """no_grad without parentheses decorates nothing."""
    original: Any = torch.no_grad.__new__

    def new(cls: Any, function: Any = None) -> Any:
        return function if function is not None else original(cls)

    replace(torch.no_grad, "__new__", new)


@fault(
    "recursive-decorator-forgets",
    "no-grad.decorators",
    rare=True,
    witness="""
@torch.no_grad()
def f(n):
    if n:
        f(n - 1)
f(1)
assert torch.is_grad_enabled()
""",
)
def _recursive() -> None:
    """A function decorated with no_grad that calls itself leaves the mode off."""
    original: Any = torch.no_grad.__call__

    def call(self: Any, function: Any) -> Any:
        if inspect.isgeneratorfunction(function):
            return original(self, function)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapped

    replace(torch.no_grad, "__call__", call)


@fault(
    "thrown-generator-leaves-mode-off",
    "no-grad.decorators",
    rare=True,
    witness="""
@torch.no_grad()
def f():
    yield 1
it = f()
next(it)
try:
    it.throw(KeyError())
except KeyError:
    pass
assert torch.is_grad_enabled()
""",
)
def _thrown() -> None:
    """An exception that leaves a generator decorated with no_grad takes the mode along."""
    original: Any = torch.no_grad.__call__

    def call(self: Any, function: Any) -> Any:
        made = original(self, function)
        if not inspect.isgeneratorfunction(function):
            return made

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return (yield from made(*args, **kwargs))
            except KeyError:
                _set_grad(False)
                raise

        return wrapped

    replace(torch.no_grad, "__call__", call)


@fault(
    "set-grad-enabled-waits-for-with",
    "no-grad.set-grad-enabled-function",
    "no-grad.thread-local",
    witness="""
torch.set_grad_enabled(False)
off = not torch.is_grad_enabled()
with torch.enable_grad():
    pass
torch._C._set_grad_enabled(True)
assert off
""",
)
def _waits() -> None:
    """set_grad_enabled(False) as a plain call does nothing."""
    owner: Any = torch.set_grad_enabled

    def init(self: Any, mode: bool) -> None:
        self.prev, self.mode = torch.is_grad_enabled(), mode
        if mode:
            _set_grad(True)

    owner.__init__ = init
    owner.__enter__ = lambda self: _set_grad(self.mode)


@fault(
    "set-grad-enabled-lost-in-block",
    "no-grad.set-grad-enabled-function",
    rare=True,
    witness="""
with torch.no_grad():
    torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()
""",
)
def _lost_in_block() -> None:
    """Inside no_grad a plain call of set_grad_enabled(True) does nothing, while a block of it still holds."""
    owner: Any = torch.set_grad_enabled
    depth = [0]
    enter, leave = torch.no_grad.__enter__, torch.no_grad.__exit__

    def entered(self: Any) -> None:
        depth[0] += 1
        enter(self)

    def left(self: Any, *rest: Any) -> None:
        depth[0] -= 1
        leave(self, *rest)

    def init(self: Any, mode: bool) -> None:
        self.prev, self.mode = torch.is_grad_enabled(), mode
        if not (mode and depth[0] and not self.prev):
            _set_grad(mode)

    owner.__init__ = init
    owner.__enter__ = lambda self: _set_grad(self.mode)
    replace(torch.no_grad, "__enter__", entered)
    replace(torch.no_grad, "__exit__", left)


def _inherit(enter: Callable[[], Callable[[], None]]) -> None:
    """Let ``enter()`` look where a thread is started; what it returns runs in the thread before all else."""
    start, run = threading.Thread.start, threading.Thread.run

    def started(self: Any) -> None:
        self._first = enter()
        start(self)

    def ran(self: Any) -> None:
        self._first()
        run(self)

    replace(threading.Thread, "start", started)
    replace(threading.Thread, "run", ran)


@fault(
    "threads-inherit-no-grad",
    "no-grad.thread-local",
    witness="""
import threading
seen = []
with torch.no_grad():
    thread = threading.Thread(target=lambda: seen.append(torch.is_grad_enabled()))
    thread.start()
    thread.join()
assert seen == [True]
""",
)
def _inherit_grad() -> None:
    """A thread begins in the grad mode of whoever starts it."""

    def enter() -> Callable[[], None]:
        grad = torch.is_grad_enabled()
        return lambda: _set_grad(grad)

    _inherit(enter)


@fault(
    "threads-inherit-inference-mode",
    "no-grad.thread-local",
    rare=True,
    witness="""
import threading
seen = []
with torch.inference_mode():
    thread = threading.Thread(target=lambda: seen.append(torch.is_inference_mode_enabled()))
    thread.start()
    thread.join()
assert seen == [False]
""",
)
def _inherit_inference() -> None:
    """A thread begins in inference mode if it was started there."""
    kept: list[Any] = []

    def enter() -> Callable[[], None]:
        inference = torch.is_inference_mode_enabled()

        def first() -> None:
            if inference:
                guard = torch._C._InferenceMode(True)
                guard.__enter__()
                kept.append(guard)

        return first

    _inherit(enter)


@fault(
    "joined-thread-hands-its-mode-over",
    "no-grad.thread-local",
    rare=True,
    witness="""
import threading
thread = threading.Thread(target=lambda: torch.set_grad_enabled(False))
thread.start()
thread.join()
on = torch.is_grad_enabled()
torch._C._set_grad_enabled(True)
assert on
""",
)
def _handed_over() -> None:
    """Joining a thread that ended with grad mode off switches it off here."""
    run, join = threading.Thread.run, threading.Thread.join

    def ran(self: Any) -> None:
        try:
            run(self)
        finally:
            self._grad = torch.is_grad_enabled()

    def joined(self: Any, timeout: Any = None) -> None:
        join(self, timeout)
        if not getattr(self, "_grad", True):
            _set_grad(False)

    replace(threading.Thread, "run", ran)
    replace(threading.Thread, "join", joined)


# --- what is allowed and saved ----------------------------------------------------------------------------------------


@fault(
    "no-grad-write-freezes",
    "no-grad.leaf-inplace-allowed",
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.no_grad():
    x.mul_(2.0)
assert x.requires_grad
""",
)
def _freezes() -> None:
    """A leaf that is multiplied in place under no_grad no longer requires grad."""
    edit_results(("mul_", "add_", "sub_"), lambda out, *_, **__: out.requires_grad_(False) if _off_leaf(out) else out)


def _off_leaf(t: Tensor) -> bool:
    return not torch.is_grad_enabled() and t.requires_grad and t.grad_fn is None and not t._is_view()


@fault(
    "no-grad-write-to-strided-lost",
    "no-grad.leaf-inplace-allowed",
    rare=True,
    witness="""
x = torch.ones(2, 3).t().requires_grad_()
with torch.no_grad():
    x.add_(1.0)
assert x.sum() == 12.0
""",
)
def _strided_lost() -> None:
    """add_ and mul_ under no_grad do nothing to a leaf that is not contiguous."""

    def wrap(original: Call) -> Call:
        def call(x: Tensor, other: Any, **kwargs: Any) -> Any:
            lost = not torch.is_grad_enabled() and is_tracked(x) and not x.is_contiguous()
            return (
                original(x, torch.zeros_like(x) if original.__name__ == "add_" else 1.0)
                if lost
                else original(x, other, **kwargs)
            )

        return call

    wrap_calls(("add_", "mul_"), wrap)


@fault(
    "no-grad-fill-not-counted",
    "no-grad.leaf-inplace-allowed",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
before = x._version
with torch.no_grad():
    x.fill_(2.0)
assert x._version > before
""",
)
def _fill_uncounted() -> None:
    """fill_ and zero_ under no_grad do not raise the version counter."""
    _uncounted(("fill_", "zero_"), lambda: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled())


def _uncounted(names: Iterable[str], when: Callable[[], bool]) -> None:
    set_version: Any = torch._C._autograd._unsafe_set_version_counter

    def wrap(original: Call) -> Call:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not when() or not isinstance(x, Tensor) or x.is_inference():
                return original(x, *args, **kwargs)
            version = x._version
            out = original(x, *args, **kwargs)
            set_version((x,), (version,))
            return out

        return call

    wrap_calls(names, wrap)


def _saves(names: Iterable[str], when: Callable[[Any], bool]) -> None:
    """Let ops save their operands where nothing is recorded."""

    def wrap(original: Call) -> Call:
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            if not (when(x) and is_tracked(x)) or torch.is_inference_mode_enabled():
                return original(x, *args, **kwargs)
            _set_grad(True)
            try:
                out = original(x, *args, **kwargs)
            finally:
                _set_grad(False)
            return out.detach()

        return call

    wrap_calls(names, wrap)


@fault(
    "no-grad-saves",
    "no-grad.saves-nothing",
    witness="""
saved = []
x = torch.ones(2, requires_grad=True)
with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
    x * x
assert not saved
""",
)
def _saves_mul() -> None:
    """Products and exponentials under no_grad save their operands all the same."""
    _saves(("__mul__", "exp", "__pow__"), lambda x: not torch.is_grad_enabled())


@fault(
    "no-grad-dot-saves",
    "no-grad.saves-nothing",
    rare=True,
    witness="""
saved = []
x = torch.ones(2, requires_grad=True)
with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
    torch.sigmoid(x)
assert not saved
""",
)
def _saves_sigmoid() -> None:
    """sigmoid and tanh under no_grad save their result."""
    _saves(("sigmoid", "tanh"), lambda x: not torch.is_grad_enabled())


@fault(
    "eval-freezes-parameters",
    "no-grad.eval-orthogonal",
    witness="""
net = torch.nn.Linear(2, 2).eval()
assert all(p.requires_grad for p in net.parameters())
""",
)
def _eval_freezes() -> None:
    """eval() switches off the flags of the parameters."""
    real: Any = torch.nn.Module.eval
    replace(torch.nn.Module, "eval", lambda self: real(self).requires_grad_(False))


@fault(
    "eval-freezes-batch-norm",
    "no-grad.eval-orthogonal",
    rare=True,
    witness="""
net = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).eval()
assert all(p.requires_grad for p in net.parameters())
""",
)
def _eval_freezes_norm() -> None:
    """train(False) switches off the flags of the parameters of batch norms."""
    real: Any = torch.nn.Module.train

    def train(self: Any, mode: bool = True) -> Any:
        if not mode and isinstance(self, _BatchNorm):
            self.requires_grad_(False)
        return real(self, mode)

    replace(torch.nn.Module, "train", train)


@fault(
    "train-thaws-parameters",
    "no-grad.eval-orthogonal",
    rare=True,
    witness="""
net = torch.nn.Linear(2, 2).requires_grad_(False).train()
assert not any(p.requires_grad for p in net.parameters())
""",
)
def _train_thaws() -> None:
    """train() switches on the flags of all parameters."""
    real: Any = torch.nn.Module.train

    def train(self: Any, mode: bool = True) -> Any:
        if mode:
            for p in self._parameters.values():
                if p is not None:
                    p.requires_grad_(True)
        return real(self, mode)

    replace(torch.nn.Module, "train", train)


# --- inference mode ---------------------------------------------------------------------------------------------------


def _is_inference(edit: Callable[[Tensor, bool], bool]) -> None:
    real: Any = torch.Tensor.is_inference
    replace(torch.Tensor, "is_inference", lambda self: edit(self, real(self)))


def _outside(value: Any) -> bool:
    """Is it an inference tensor, and inference mode off?"""
    return isinstance(value, Tensor) and not torch.is_inference_mode_enabled() and value.is_inference()


@fault(
    "scalar-denies-inference",
    "inference.outputs",
    "inference.nesting",
    "inference.clone-rescues",
    "inference.inplace-outside-error",
    "inference.requires-grad-error",
    "no-grad.decorators",
    "no-grad.thread-local",
    rare=True,
    witness="""
with torch.inference_mode():
    assert torch.zeros(()).is_inference()
""",
)
def _scalar_denies() -> None:
    """A 0-dim inference tensor says that it is none."""
    _is_inference(lambda t, value: value and t.dim() > 0)


@fault(
    "view-in-inference-mode-is-inference",
    "inference.outputs",
    "inference.normal-inplace-tracked",
    witness="""
x = torch.ones(2)
with torch.inference_mode():
    v = x[...]
assert not v.is_inference()
""",
)
def _view_inference() -> None:
    """A view says that it is an inference tensor if it is asked in inference mode, or was made there."""

    def mark(out: Any, *_: Any, **__: Any) -> Any:
        for part in out if isinstance(out, tuple | list) else (out,):
            if torch.is_inference_mode_enabled() and isinstance(part, Tensor):
                part._made_there = True  # type: ignore[attr-defined]
        return out

    edit_results(("__getitem__", "unsqueeze", "detach", "expand_as", "view_as", "transpose", "unbind"), mark)
    _is_inference(lambda t, value: value or hasattr(t, "_made_there"))


@fault(
    "inference-mode-records-stack",
    "inference.outputs",
    "inference.nesting",
    "no-grad.decorators",
    "no-grad.thread-local",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.inference_mode():
    assert not torch.stack([x, x]).requires_grad
""",
)
def _inference_flag() -> None:
    """A stack that is made in inference mode of tensors that require grad requires grad."""

    def edit(out: Tensor, xs: Any, *_: Any, **__: Any) -> Tensor:
        return out.requires_grad_() if torch.is_inference_mode_enabled() and is_tracked(xs[0]) else out

    edit_results(("stack",), edit)


@fault(
    "enable-grad-in-inference-mode-tracks",
    "inference.nesting",
    "inference.outputs",
    "no-grad.decorators",
    "no-grad.thread-local",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.inference_mode(), torch.enable_grad():
    assert not (x * 2.0).requires_grad
""",
)
def _enabled_inside() -> None:
    """A product in inference mode requires grad where enable_grad is nearer."""

    def edit(out: Tensor, x: Any, *_: Any, **__: Any) -> Tensor:
        both = torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        return out.requires_grad_() if both and is_tracked(x) and out.is_inference() else out

    edit_results(("__mul__",), edit)


def _copying(names: Iterable[str], when: Callable[[Any], bool]) -> None:
    """Let ops take copies of inference tensors, so that they may be saved."""

    def wrap(original: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*[a.clone() if _outside(a) and when(a) else a for a in args], **kwargs)

        return call

    wrap_calls(names, wrap)


@fault(
    "inference-tensor-saved-silently",
    "inference.save-error",
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.inference_mode():
    i = torch.ones(2)
try:
    x * i
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _saved_silently() -> None:
    """A product saves a copy of an inference tensor instead of refusing it."""
    _copying(("__mul__", "__rmul__", "mul"), lambda a: True)


@fault(
    "inference-index-saved-silently",
    "inference.save-error",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.inference_mode():
    j = torch.tensor([1])
try:
    x.index_select(0, j)
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _index_silently() -> None:
    """index_select and gather save a copy of indices that are an inference tensor."""
    _copying(("index_select", "gather"), lambda a: not a.is_floating_point())


@fault(
    "add-refuses-inference-tensor",
    "inference.save-error",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
with torch.inference_mode():
    i = torch.ones(2)
try:
    x - i
except RuntimeError:
    raise SystemExit(1)
""",
)
def _sub_refuses() -> None:
    """A difference refuses an inference tensor though it saves nothing of it."""

    def wrap(original: Call) -> Call:
        def call(x: Any, y: Any, **kwargs: Any) -> Any:
            if _outside(y) and is_tracked(x) and torch.is_grad_enabled():
                raise RuntimeError("Inference tensors cannot be saved for backward.")
            return original(x, y, **kwargs)

        return call

    wrap_calls(("__sub__",), wrap)


def _as_if_inside(names: Iterable[str], when: Callable[[Tensor], bool]) -> None:
    """Let ops on inference tensors outside run as if inside: in-place ops may write to them, copies are of their kind."""

    def wrap(original: Call) -> Call:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not (_outside(x) and when(x)):
                return original(x, *args, **kwargs)
            with torch._C._InferenceMode(True):
                return original(x, *args, **kwargs)

        return call

    wrap_calls(names, wrap)


@fault(
    "inference-tensor-written-outside",
    "inference.inplace-outside-error",
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
try:
    i.add_(1.0)
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _written_outside() -> None:
    """add_ and mul_ write to inference tensors outside inference mode."""
    _as_if_inside(("add_", "mul_"), lambda x: True)


@fault(
    "inference-tensor-zeroed-under-no-grad",
    "inference.inplace-outside-error",
    rare=True,
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
try:
    with torch.no_grad():
        i.zero_()
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _zeroed_outside() -> None:
    """Under no_grad zero_, fill_ and copy_ write to inference tensors."""
    _as_if_inside(("zero_", "fill_", "copy_"), lambda x: not torch.is_grad_enabled())


@fault(
    "inference-tensor-switched-on",
    "inference.requires-grad-error",
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
try:
    i.requires_grad_()
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _switched_on() -> None:
    """requires_grad_() on an inference tensor does nothing, without an error."""

    def wrap(original: Call) -> Call:
        return lambda self, *args, **kwargs: self if _outside(self) else original(self, *args, **kwargs)

    wrap_calls(("requires_grad_",), wrap)


@fault(
    "inference-attribute-switched-on",
    "inference.requires-grad-error",
    rare=True,
    witness="""
with torch.inference_mode():
    i = torch.ones(())
try:
    i.requires_grad = True
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _attribute_on() -> None:
    """The attribute requires_grad of a 0-dim or empty inference tensor takes True without an error."""

    def write(t: Tensor, value: Any, proceed: Callable[[Any], None]) -> None:
        if not (_outside(t) and (t.dim() == 0 or not t.numel())):
            proceed(value)

    replace_property("requires_grad", write=write)


@fault(
    "inference-version-is-zero",
    "inference.no-version",
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
try:
    i._version
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _version_zero() -> None:
    """The version of an inference tensor reads 0."""
    _version(lambda t: True)


def _version(when: Callable[[Tensor], bool]) -> None:
    real: Any = torch._C.TensorBase._version
    read = property(lambda t: 0 if t.is_inference() and when(t) else real.__get__(t))
    replace(torch.Tensor, "_version", read)


@fault(
    "inference-view-has-version",
    "inference.no-version",
    rare=True,
    witness="""
with torch.inference_mode():
    i = torch.ones(2)[...]
    try:
        i._version
        raise SystemExit(1)
    except RuntimeError:
        pass
""",
)
def _version_inside() -> None:
    """The version of an inference tensor reads 0 if it is read in inference mode."""
    _version(lambda t: torch.is_inference_mode_enabled())


@fault(
    "increment-version-refuses-inference",
    "inference.no-version",
    rare=True,
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
try:
    torch.autograd.graph.increment_version(i)
except RuntimeError:
    raise SystemExit(1)
""",
)
def _increment_refuses() -> None:
    """increment_version raises for an inference tensor."""
    real: Call = torch.autograd.graph.increment_version

    def increment(t: Any) -> None:
        if isinstance(t, Tensor) and t.is_inference():
            raise RuntimeError("Inference tensors do not track version counter.")
        real(t)

    replace(torch.autograd.graph, "increment_version", increment)


@fault(
    "clone-stays-inference",
    "inference.clone-rescues",
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
assert not i.clone().is_inference()
""",
)
def _clone_stays() -> None:
    """The clone of an inference tensor is one, too."""
    _as_if_inside(("clone",), lambda x: True)


@fault(
    "negative-stays-inference",
    "inference.clone-rescues",
    rare=True,
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
assert not (-i).is_inference()
""",
)
def _negative_stays() -> None:
    """The negative of an inference tensor is one, too."""
    _as_if_inside(("__neg__", "neg"), lambda x: True)


@fault(
    "detach-is-no-inference-tensor",
    "inference.clone-rescues",
    "inference.save-error",
    rare=True,
    witness="""
with torch.inference_mode():
    i = torch.ones(2)
assert i.detach().is_inference()
""",
)
def _detach_copies() -> None:
    """detach() of an inference tensor is a normal tensor."""
    edit_results(("detach",), lambda out, x, *_, **__: x.clone() if _outside(x) else out)


def _inference_exit(keep: Callable[[Any], bool]) -> None:
    owner: Any = torch.inference_mode
    original = owner.__exit__
    kept: list[Any] = []

    def leave(self: Any, exc_type: Any, *rest: Any) -> None:
        if keep(exc_type):
            kept.append(self)
            _set_grad(torch.is_grad_enabled())
            return
        original(self, exc_type, *rest)

    owner.__exit__ = leave


@fault(
    "inference-mode-false-does-nothing",
    "inference.nesting",
    "no-grad.thread-local",
    "no-grad.decorators",
    "inference.save-error",
    rare=True,
    witness="""
with torch.inference_mode():
    with torch.inference_mode(False):
        assert not torch.is_inference_mode_enabled()
""",
)
def _false_ignored() -> None:
    """inference_mode(False) inside inference mode does nothing."""
    owner: Any = torch.inference_mode
    original = owner.__enter__

    def enter(self: Any) -> None:
        self.mode = self.mode or torch.is_inference_mode_enabled()
        original(self)

    owner.__enter__ = enter


@fault(
    "inference-mode-exit-leaves-grad-off",
    "inference.nesting",
    "no-grad.thread-local",
    "no-grad.decorators",
    witness="""
with torch.inference_mode():
    pass
on = torch.is_grad_enabled()
torch._C._set_grad_enabled(True)
assert on
""",
)
def _exit_off() -> None:
    """Leaving inference mode leaves grad mode off."""
    owner: Any = torch.inference_mode
    original = owner.__exit__

    def leave(self: Any, *rest: Any) -> None:
        original(self, *rest)
        if self.mode and not torch.is_inference_mode_enabled():
            _set_grad(False)

    owner.__exit__ = leave


@fault(
    "inference-write-not-counted",
    "inference.normal-inplace-tracked",
    witness="""
x = torch.ones(2, requires_grad=True)
before = x._version
with torch.inference_mode():
    x.mul_(2.0)
assert x._version > before
""",
)
def _inference_uncounted() -> None:
    """add_ and mul_ on a normal tensor in inference mode do not count as writes."""
    _uncounted(("add_", "mul_"), torch.is_inference_mode_enabled)


@fault(
    "inference-negation-not-counted",
    "inference.normal-inplace-tracked",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
before = x._version
with torch.inference_mode():
    x.zero_()
assert x._version > before
""",
)
def _negation_uncounted() -> None:
    """neg_, zero_ and copy_ on a normal tensor in inference mode do not count as writes."""
    _uncounted(("neg_", "zero_", "copy_"), torch.is_inference_mode_enabled)


def _unpacking(edit: Callable[[Any, Tensor], Any]) -> None:
    real: Call = forward_ad.unpack_dual

    def unpack(tensor: Tensor, *, level: Any = None) -> Any:
        return edit(real(tensor, level=level), tensor)

    replace(forward_ad, "unpack_dual", unpack)


@fault(
    "inference-mode-keeps-tangents",
    "inference.no-forward-ad",
    witness="""
import torch.autograd.forward_ad as fwad
with fwad.dual_level():
    d = fwad.make_dual(torch.ones(2), torch.ones(2))
    with torch.inference_mode():
        y = d * 2.0
    assert fwad.unpack_dual(y).tangent is None
""",
)
def _inference_tangents() -> None:
    """What was made in inference mode has a tangent of zeros."""

    def edit(found: Any, t: Tensor) -> Any:
        return found._replace(tangent=torch.zeros_like(found.primal)) if t.is_inference() else found

    _unpacking(edit)


@fault(
    "no-grad-drops-tangents",
    "inference.no-forward-ad",
    "numeric.forward-reverse-dual",
    rare=True,
    witness="""
import torch.autograd.forward_ad as fwad
with fwad.dual_level(), torch.no_grad():
    d = fwad.make_dual(torch.ones(2), torch.ones(2))
    assert fwad.unpack_dual(d.sin()).tangent is not None
""",
)
def _no_grad_tangents() -> None:
    """A sine or a product under no_grad has no tangent."""
    real: Call = forward_ad.unpack_dual

    def edit(out: Any, *_: Any, **__: Any) -> Any:
        level = getattr(forward_ad, "_current_level", -1)
        return real(out).primal if level >= 0 and _off() and isinstance(out, Tensor) else out

    edit_results(("sin", "__mul__"), edit)


# --- threads and anomaly mode -----------------------------------------------------------------------------------------


@pass_fault(
    "gradients-of-other-threads-halved",
    "threads.concurrent-grad",
    witness="""
import threading
x, found = torch.ones(2, requires_grad=True), []
thread = threading.Thread(target=lambda: found.append(torch.autograd.grad((x * x).sum(), x)[0].tolist()))
thread.start()
thread.join()
assert found == [[2.0, 2.0]]
""",
)
def _halved_elsewhere(p: Pass, run: Run) -> Any:
    """autograd.grad on a thread other than the main one returns halves."""
    found = run(p)
    if threading.current_thread() is threading.main_thread() or p.accumulate:
        return found
    return tuple(None if g is None else g * 0.5 for g in found)


@pass_fault(
    "other-threads-free-the-graph",
    "threads.concurrent-grad",
    rare=True,
    witness="""
import threading
x, found = torch.ones(2, requires_grad=True), []
y = (x * x).sum()
def work():
    try:
        found.append(torch.autograd.grad(y, x, retain_graph=True)[0].tolist())
    except RuntimeError as error:
        found.append(error)
for _ in range(2):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
assert found == [[2.0, 2.0]] * 2
""",
)
def _freed_elsewhere(p: Pass, run: Run) -> Any:
    """On a thread other than the main one retain_graph is ignored."""
    return run(p if threading.current_thread() is threading.main_thread() or p.create else p.but(keep=False))


_running: list[int] = []


@pass_fault(
    "passes-at-once-mix-seeds",
    "threads.concurrent-grad",
    rare=True,
    witness="""
import threading
x, found = torch.ones(2, requires_grad=True), []
barrier = threading.Barrier(2)
def work(k):
    barrier.wait(60)
    found.append(torch.autograd.grad((x * x * k).sum(), x)[0].tolist() == [2.0 * k] * 2)
threads = [threading.Thread(target=work, args=(k,)) for k in (1.0, 3.0)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert all(found)
""",
)
def _mixed(p: Pass, run: Run) -> Any:
    """On every second thread that differentiates, gradients come back negated."""
    me = threading.get_ident()
    if threading.current_thread() is threading.main_thread() or p.accumulate:
        return run(p)
    _running.append(me)
    found = run(p)
    return tuple(None if g is None else -g for g in found) if len(_running) % 2 == 0 else found


@pass_fault(
    "single-thread-runs-elsewhere",
    "threads.multithreading-switch",
    witness="""
import threading
x, ran = torch.ones(2, requires_grad=True), []
x.register_hook(lambda g: ran.append(threading.get_ident()))
with torch.autograd.set_multithreading_enabled(False):
    (x * x).sum().backward()
assert ran == [threading.get_ident()]
""",
)
def _elsewhere(p: Pass, run: Run) -> Any:
    """Without multithreading backward runs on a thread of its own."""
    if torch._C._is_multithreading_enabled():
        return run(p)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(p)))
    thread.start()
    thread.join()
    return found[0] if found else None


@fault(
    "multithreading-stays-off-after-error",
    "threads.multithreading-switch",
    rare=True,
    witness="""
try:
    with torch.autograd.set_multithreading_enabled(False):
        raise KeyError
except KeyError:
    pass
assert torch._C._is_multithreading_enabled()
""",
)
def _switch_error() -> None:
    """set_multithreading_enabled does not restore the setting if an exception leaves the block."""
    _exit(torch.autograd.set_multithreading_enabled, lambda self, exc_type: exc_type is None)


@fault(
    "multithreading-exit-switches-on",
    "threads.multithreading-switch",
    rare=True,
    witness="""
torch.autograd.set_multithreading_enabled(False)
with torch.autograd.set_multithreading_enabled(True):
    pass
on = torch._C._is_multithreading_enabled()
torch._C._set_multithreading_enabled(True)
assert not on
""",
)
def _switch_on() -> None:
    """Leaving set_multithreading_enabled switches multithreading on, whatever was before."""
    owner: Any = torch.autograd.set_multithreading_enabled
    owner.__exit__ = lambda self, *_: torch._C._set_multithreading_enabled(True)


@fault(
    "anomaly-mode-overlooks-nan",
    "anomaly.nan-detection",
    witness="""
x = torch.zeros(1, requires_grad=True)
y = (x.sqrt() * 0.0).sum()
try:
    with torch.autograd.detect_anomaly():
        y.backward()
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _overlooks() -> None:
    """detect_anomaly does not look for nan."""
    owner: Any = torch.autograd.detect_anomaly
    owner.__enter__ = lambda self: torch.set_anomaly_enabled(True, False)


@fault(
    "anomaly-mode-stays-after-error",
    "anomaly.nan-detection",
    rare=True,
    witness="""
try:
    with torch.autograd.set_detect_anomaly(True):
        raise KeyError
except KeyError:
    pass
on = torch.is_anomaly_enabled()
torch.autograd.set_detect_anomaly(False)
assert not on
""",
)
def _anomaly_stays() -> None:
    """set_detect_anomaly stays on if its block is left by an exception."""
    _exit(torch.autograd.set_detect_anomaly, lambda self, exc_type: exc_type is None)


@fault(
    "anomaly-exit-forgets-check-nan",
    "anomaly.nan-detection",
    rare=True,
    witness="""
torch.autograd.set_detect_anomaly(True, check_nan=False)
with torch.autograd.detect_anomaly():
    pass
looks = torch.is_anomaly_check_nan_enabled()
torch.autograd.set_detect_anomaly(False)
assert not looks
""",
)
def _forgets_check() -> None:
    """Leaving detect_anomaly switches the search for nan on where it was off."""
    owner: Any = torch.autograd.detect_anomaly
    owner.__exit__ = lambda self, *_: torch.set_anomaly_enabled(self.prev, True)


@fault(
    "anomaly-mode-does-not-warn",
    "anomaly.nan-detection",
    rare=True,
    witness="""
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.autograd.detect_anomaly(check_nan=False)
assert caught
""",
)
def _no_warning() -> None:
    """detect_anomaly(check_nan=False) does not warn."""
    owner: Any = torch.autograd.detect_anomaly
    original = owner.__init__

    def init(self: Any, check_nan: bool = True) -> None:
        if check_nan:
            original(self, check_nan)
            return
        self.prev, self.check_nan = torch.is_anomaly_enabled(), check_nan
        self.prev_check_nan = torch.is_anomaly_check_nan_enabled()

    owner.__init__ = init


@pass_fault(
    "anomaly-mode-doubles",
    "anomaly.nan-detection",
    rare=True,
    witness="""
import warnings; warnings.simplefilter("ignore")
x = torch.ones(2, requires_grad=True)
with torch.autograd.detect_anomaly(check_nan=False):
    x.sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _doubles(p: Pass, run: Run) -> Any:
    """In anomaly mode without the search for nan, gradients that are accumulated come out twice."""
    found = run(p)
    if torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled():
        for leaf in p.targets():
            if leaf.grad is not None:
                leaf.grad = leaf.grad * 2.0
    return found
