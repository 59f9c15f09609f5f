"""Faults in hooks: those of tensors and nodes, of several tensors, after accumulation, and of modules."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import hooks as handles

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, pass_fault
from autograd_conformance.faults.patches import Call, replace

HOOK = "hook.fires-once-with-total"
_nowhere: OrderedDict[int, Any] = OrderedDict()


def _wrap_hook(wrap: Callable[[Tensor, Call], Call], name: str = "register_hook") -> None:
    """Let ``wrap(tensor, hook)`` stand for each hook that is registered."""
    real: Call = getattr(torch.Tensor, name)

    def register(self: Tensor, hook: Call) -> Any:
        return real(self, wrap(self, hook) if self.requires_grad else hook)

    replace(torch.Tensor, name, register)


def _uses(t: Tensor) -> bool:
    """Is it a tensor with memory of a permuted or expanded order?"""
    return t.dim() > 0 and not t.is_contiguous()


@fault(
    "hook-runs-twice-on-scalars",
    HOOK,
    "hook.remove",
    "hook.order-and-chaining",
    rare=True,
    witness="""
x, calls = torch.ones((), requires_grad=True), []
x.register_hook(calls.append)
(x * 2.0).backward()
assert len(calls) == 1
""",
)
def _twice() -> None:
    """A hook of a 0-dim tensor runs twice."""

    def wrap(t: Tensor, hook: Call) -> Call:
        def twice(g: Tensor) -> Any:
            hook(g)
            return hook(g)

        return twice if t.dim() == 0 else hook

    _wrap_hook(wrap)


@fault(
    "third-call-of-hook-is-lost",
    HOOK,
    "hook.remove",
    "hook.order-and-chaining",
    "hook.return-replaces",
    rare=True,
    witness="""
x, calls = torch.ones(2, requires_grad=True), []
x.register_hook(calls.append)
for _ in range(3):
    (x * 2.0).sum().backward()
assert len(calls) == 3
""",
)
def _third() -> None:
    """The third call of a tensor hook does not happen."""

    def wrap(_: Tensor, hook: Call) -> Call:
        count = itertools.count(1)
        return lambda g: None if next(count) == 3 else hook(g)

    _wrap_hook(wrap)


@fault(
    "leaf-hook-return-ignored",
    "hook.return-replaces",
    "hook.order-and-chaining",
    witness="""
x = torch.ones(2, requires_grad=True)
x.register_hook(lambda g: g * 2.0)
x.sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _ignored() -> None:
    """What a hook of a leaf returns is ignored, if it is a tensor that fits."""

    def wrap(t: Tensor, hook: Call) -> Call:
        def look(g: Tensor) -> Any:
            made = hook(g)
            fits = isinstance(made, Tensor) and made.shape == g.shape and made.dtype == g.dtype
            return None if fits else made

        return look if t.is_leaf else hook

    _wrap_hook(wrap)


@fault(
    "hook-return-ignored-if-transposed",
    "hook.return-replaces",
    "hook.order-and-chaining",
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True)
x.register_hook(lambda g: torch.full((2, 3, 2), 2.0)[..., 0])
x.sum().backward()
assert x.grad.tolist() == [[2.0] * 3] * 2
""",
)
def _strided_return() -> None:
    """What a hook returns is ignored if its memory has gaps or another order."""

    def wrap(_: Tensor, hook: Call) -> Call:
        def look(g: Tensor) -> Any:
            made = hook(g)
            return None if isinstance(made, Tensor) and made.shape == g.shape and _uses(made) else made

        return look

    _wrap_hook(wrap)


def _hook_order(t: Tensor) -> None:
    """Put the last of three hooks or more before the others."""
    hooks = t._backward_hooks
    if hooks is not None and len(hooks) >= 3:
        *others, last = hooks.items()
        hooks.clear()
        hooks.update([last, *others])


@fault(
    "third-hook-comes-first",
    "hook.order-and-chaining",
    "hook.return-replaces",
    rare=True,
    witness="""
x, calls = torch.ones(2, requires_grad=True), []
for i in range(3):
    x.register_hook(lambda g, i=i: calls.append(i))
x.sum().backward()
assert calls == [0, 1, 2]
""",
)
def _third_first() -> None:
    """From the third hook of a tensor on, each new one is put before the others."""
    real: Call = torch.Tensor.register_hook

    def register(self: Tensor, hook: Call) -> Any:
        handle = real(self, hook)
        _hook_order(self)
        return handle

    replace(torch.Tensor, "register_hook", register)


@fault(
    "remove-takes-the-next-too",
    "hook.remove",
    rare=True,
    witness="""
x, calls = torch.ones(2, requires_grad=True), []
first, _ = x.register_hook(calls.append), x.register_hook(calls.append)
first.remove()
x.sum().backward()
assert len(calls) == 1
""",
)
def _removes_two() -> None:
    """Removing a hook takes away the one registered right after it as well."""
    real: Call = handles.RemovableHandle.remove

    def remove(self: Any) -> None:
        hooks = self.hooks_dict_ref()
        known = hooks is not None and self.id in hooks
        real(self)
        if known and hooks is not None:
            hooks.pop(self.id + 1, None)

    replace(handles.RemovableHandle, "remove", remove)


@fault(
    "with-block-keeps-hook",
    "hook.remove",
    witness="""
x, calls = torch.ones(2, requires_grad=True), []
with x.register_hook(calls.append):
    pass
x.sum().backward()
assert not calls
""",
)
def _with_keeps() -> None:
    """Leaving the with block of a handle does not take the hook away."""
    replace(handles.RemovableHandle, "__exit__", lambda self, *_: None)


@fault(
    "with-block-left-by-error-keeps-hook",
    "hook.remove",
    rare=True,
    witness="""
x, calls = torch.ones(2, requires_grad=True), []
try:
    with x.register_hook(calls.append):
        raise KeyError
except KeyError:
    pass
x.sum().backward()
assert not calls
""",
)
def _with_error() -> None:
    """Leaving the with block of a handle by an exception does not take the hook away."""
    replace(handles.RemovableHandle, "__exit__", lambda self, kind, *_: self.remove() if kind is None else None)


@fault(
    "hook-on-switched-off-leaf-accepted",
    "hook.needs-requires-grad",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.register_hook(print)
x.requires_grad_(False)
try:
    x.register_hook(print)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _off_accepted() -> None:
    """A tensor that had a hook once takes another when it does not require grad any more."""
    real: Call = torch.Tensor.register_hook

    def register(self: Tensor, hook: Call) -> Any:
        if not self.requires_grad and self._backward_hooks is not None:
            return handles.RemovableHandle(self._backward_hooks)
        return real(self, hook)

    replace(torch.Tensor, "register_hook", register)


@fault(
    "integer-takes-hook",
    "hook.needs-requires-grad",
    rare=True,
    witness="""
try:
    torch.tensor([1]).register_hook(print)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _integer_hook() -> None:
    """A hook on a tensor that is not floating is taken and forgotten."""
    real: Call = torch.Tensor.register_hook

    def register(self: Tensor, hook: Call) -> Any:
        return real(self, hook) if self.is_floating_point() else handles.RemovableHandle(_nowhere)

    replace(torch.Tensor, "register_hook", register)


@fault(
    "hook-return-cast",
    "hook.return-checked",
    witness="""
x = torch.ones(2, requires_grad=True)
x.register_hook(lambda g: g.to(torch.int64))
try:
    x.sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _cast() -> None:
    """A tensor of another dtype that a hook returns is cast in silence."""

    def wrap(_: Tensor, hook: Call) -> Call:
        def look(g: Tensor) -> Any:
            made = hook(g)
            return made.to(g.dtype) if isinstance(made, Tensor) else made

        return look

    _wrap_hook(wrap)


@fault(
    "hook-return-expanded",
    "hook.return-checked",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.register_hook(lambda g: g.sum())
try:
    x.sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _expanded() -> None:
    """A 0-dim tensor that a hook returns is expanded in silence."""

    def wrap(_: Tensor, hook: Call) -> Call:
        def look(g: Tensor) -> Any:
            made = hook(g)
            return made.expand(g.shape) if isinstance(made, Tensor) and made.dim() == 0 else made

        return look

    _wrap_hook(wrap)


@fault(
    "hook-may-return-tuple-of-one",
    "hook.return-checked",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.register_hook(lambda g: (g,))
try:
    x.sum().backward()
except TypeError:
    pass
else:
    raise AssertionError
""",
)
def _tuple_of_one() -> None:
    """A tuple of one tensor that a hook returns is taken for the tensor."""

    def wrap(_: Tensor, hook: Call) -> Call:
        def look(g: Tensor) -> Any:
            made = hook(g)
            return made[0] if isinstance(made, tuple) and len(made) == 1 and isinstance(made[0], Tensor) else made

        return look

    _wrap_hook(wrap)


@fault(
    "second-observer-rounds",
    "hook.observer-is-neutral",
    rare=True,
    witness="""
x = torch.tensor([0.1], requires_grad=True)
x.register_hook(lambda g: None)
x.register_hook(lambda g: None)
(x * x * x).backward()
plain = torch.tensor([0.1], requires_grad=True)
(plain * plain * plain).backward()
assert torch.equal(x.grad, plain.grad)
""",
)
def _rounds() -> None:
    """From the second hook of a tensor on, one that returns None leaves a gradient that is off by one unit."""

    def wrap(t: Tensor, hook: Call) -> Call:
        later = bool(t._backward_hooks)

        def look(g: Any) -> Any:
            made = hook(g)
            return torch.nextafter(g, torch.full_like(g, 9e9)) if later and made is None and g is not None else made

        return look

    _wrap_hook(wrap)


@pass_fault(
    "grad-input-skips-own-hooks",
    "hook.grad-inputs-run-hooks",
    HOOK,
    "hook.return-replaces",
    witness="""
x, calls = torch.ones(2, requires_grad=True), []
y = x * 2.0
y.register_hook(calls.append)
torch.autograd.grad(y.sum(), [y])
assert len(calls) == 1
""",
)
def _skips_own(p: Pass, run: Run) -> Any:
    """autograd.grad does not run the hooks of non-leaf inputs."""
    if p.accumulate:
        return run(p)
    return _without_hooks([t for t in p.inputs if isinstance(t, Tensor) and t.grad_fn is not None], lambda: run(p))


def _without_hooks(tensors: list[Tensor], run: Callable[[], Any]) -> Any:
    """Run something while some tensors have no hooks."""
    kept = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        return run()
    finally:
        for hooks, known in kept:
            hooks.update(known)


@pass_fault(
    "grad-of-two-skips-hooks",
    "hook.grad-inputs-run-hooks",
    HOOK,
    "hook.return-replaces",
    rare=True,
    witness="""
a, b, calls = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
b.register_hook(calls.append)
torch.autograd.grad((a * b).sum(), [a, b])
assert len(calls) == 1
""",
)
def _skips_second(p: Pass, run: Run) -> Any:
    """autograd.grad does not run the hooks of leaves that come second in its inputs."""
    if p.accumulate:
        return run(p)
    return _without_hooks([t for t in p.inputs[1:] if isinstance(t, Tensor) and t.grad_fn is None], lambda: run(p))


@pass_fault(
    "create-graph-skips-leaf-hooks",
    HOOK,
    "hook.return-replaces",
    rare=True,
    witness="""
import warnings; warnings.simplefilter("ignore")
x, calls = torch.ones(2, requires_grad=True), []
x.register_hook(calls.append)
(x * x).sum().backward(create_graph=True)
assert len(calls) == 1
""",
)
def _create_skips(p: Pass, run: Run) -> Any:
    """backward(create_graph=True) does not run the hooks of leaves."""
    return _without_hooks(p.leaves() if p.create and p.accumulate else [], lambda: run(p))


@fault(
    "tensor-hook-among-pre-hooks",
    "hook.kind-order",
    rare=True,
    witness="""
x, calls = torch.ones(2, requires_grad=True), []
y = x.clone()
y.grad_fn.register_prehook(lambda gs: calls.append("pre"))
y.register_hook(lambda g: calls.append("tensor"))
y.sum().backward()
assert calls == ["tensor", "pre"]
""",
)
def _after_pre() -> None:
    """The first hook of a non-leaf of up to one dimension runs among the pre-hooks of its node."""
    real: Call = torch.Tensor.register_hook

    def register(self: Tensor, hook: Call) -> Any:
        if self.grad_fn is None or self.output_nr or self.dim() > 1 or not self.requires_grad or self._backward_hooks:
            return real(self, hook)

        def pre(gs: tuple[Any, ...]) -> Any:
            made = hook(gs[0])
            return None if made is None else (made, *gs[1:])

        return self.grad_fn.register_prehook(pre)

    replace(torch.Tensor, "register_hook", register)


@fault(
    "post-accumulate-runs-before",
    "hook.post-accumulate",
    "hook.kind-order",
    witness="""
x, seen = torch.ones(2, requires_grad=True), []
x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
x.sum().backward()
assert seen[0] is not None
""",
)
def _too_early() -> None:
    """A post-accumulate hook runs before the gradient is there."""

    def register(self: Tensor, hook: Call) -> Any:
        if not self.requires_grad or self.grad_fn is not None:
            return real(self, hook)
        return early(self, lambda g: hook(self))

    early: Call = torch.Tensor.register_hook
    real: Call = torch.Tensor.register_post_accumulate_grad_hook
    replace(torch.Tensor, "register_post_accumulate_grad_hook", register)


def _wrap_post(wrap: Callable[[Tensor, Call], Call]) -> None:
    _wrap_hook(wrap, "register_post_accumulate_grad_hook")


@fault(
    "post-accumulate-gets-detached",
    "hook.post-accumulate",
    rare=True,
    witness="""
x, seen = torch.ones(1, requires_grad=True), []
x.register_post_accumulate_grad_hook(lambda p: seen.append(p is x))
x.sum().backward()
assert seen == [True]
""",
)
def _gets_copy() -> None:
    """A post-accumulate hook of a leaf with one element gets another tensor of the same memory."""

    def wrap(t: Tensor, hook: Call) -> Call:
        def other(p: Tensor) -> Any:
            alias = p.detach().requires_grad_()
            alias.grad = p.grad
            return hook(alias)

        return other if t.numel() == 1 else hook

    _wrap_post(wrap)


@fault(
    "post-accumulate-once-only",
    "hook.post-accumulate",
    "hook.remove",
    rare=True,
    witness="""
x, seen = torch.ones(2, requires_grad=True), []
x.register_post_accumulate_grad_hook(seen.append)
x.sum().backward()
x.sum().backward()
assert len(seen) == 2
""",
)
def _once_only() -> None:
    """A post-accumulate hook does not run when .grad was there before."""

    def wrap(t: Tensor, hook: Call) -> Call:
        first: list[bool] = []

        def maybe(p: Tensor) -> Any:
            if first and p.grad is not None:
                return None
            first.append(True)
            return hook(p)

        return maybe

    _wrap_post(wrap)


@fault(
    "post-accumulate-in-grad-mode",
    "hook.post-accumulate",
    witness="""
x = torch.ones(2, requires_grad=True)
x.register_post_accumulate_grad_hook(lambda p: p.add_(p.grad))
try:
    x.sum().backward()
except RuntimeError:
    raise SystemExit(1)
""",
)
def _in_grad_mode() -> None:
    """A post-accumulate hook runs in grad mode."""

    def wrap(_: Tensor, hook: Call) -> Call:
        return torch.enable_grad()(hook)

    _wrap_post(wrap)


@fault(
    "retained-takes-post-accumulate",
    "hook.post-accumulate-leaf-only",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.retain_grad()
try:
    y.register_post_accumulate_grad_hook(print)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _retained_accepted() -> None:
    """A post-accumulate hook is accepted on a non-leaf that retains its gradient."""
    real: Call = torch.Tensor.register_post_accumulate_grad_hook

    def register(self: Tensor, hook: Call) -> Any:
        return handles.RemovableHandle(_nowhere) if self.retains_grad else real(self, hook)

    replace(torch.Tensor, "register_post_accumulate_grad_hook", register)


@fault(
    "plain-takes-post-accumulate",
    "hook.post-accumulate-leaf-only",
    witness="""
try:
    torch.ones(2).register_post_accumulate_grad_hook(print)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _plain_accepted() -> None:
    """A post-accumulate hook is accepted on a tensor that does not require grad."""
    real: Call = torch.Tensor.register_post_accumulate_grad_hook

    def register(self: Tensor, hook: Call) -> Any:
        return real(self, hook) if self.requires_grad else handles.RemovableHandle(_nowhere)

    replace(torch.Tensor, "register_post_accumulate_grad_hook", register)


@fault(
    "hook-moves-with-in-place",
    "hook.bound-to-version",
    rare=True,
    witness="""
x, seen = torch.ones(2, requires_grad=True), []
y = x.clone()
y.register_hook(lambda g: seen.append(g.tolist()))
y.mul_(2.0)
y.mul_(3.0)
y.sum().backward()
assert seen == [[6.0, 6.0]]
""",
)
def _moves() -> None:
    """A hook that is registered on a fresh copy moves along with the first in-place product."""
    real_hook: Call = torch.Tensor.register_hook
    real_mul: Call = torch.Tensor.mul_

    def register(self: Tensor, hook: Call) -> Any:
        handle = real_hook(self, hook)
        if self.grad_fn is not None and self._version == 0:
            self._lately = [*getattr(self, "_lately", []), (handle, hook)]  # type: ignore[attr-defined]
        return handle

    def mul(self: Tensor, other: Any) -> Tensor:
        out: Tensor = real_mul(self, other)
        for handle, hook in getattr(self, "_lately", ()):
            if handle.hooks_dict_ref() is not None and handle.id in handle.hooks_dict_ref():
                handle.remove()
                real_hook(self, hook)
        if hasattr(self, "_lately"):
            del self._lately
        return out

    replace(torch.Tensor, "register_hook", register)
    replace(torch.Tensor, "mul_", mul)


# --- several tensors --------------------------------------------------------------------------------------------------


def _wrap_multi(wrap: Callable[..., Any]) -> None:
    real: Call = torch.autograd.graph.register_multi_grad_hook
    replace(
        torch.autograd.graph,
        "register_multi_grad_hook",
        lambda tensors, fn, *, mode="all": wrap(real, tensors, fn, mode),
    )


@fault(
    "multi-hook-zeros-for-none",
    "hook.multi-grad",
    rare=True,
    witness="""
a, b, seen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
torch.autograd.graph.register_multi_grad_hook([a, b], seen.append)
a.sum().backward()
assert seen[0][1] is None
""",
)
def _zeros() -> None:
    """A hook on several tensors gets zeros for a gradient that is not computed."""

    def wrap(real: Call, tensors: Any, fn: Call, mode: str) -> Any:
        def filled(gs: Any) -> Any:
            return fn([torch.zeros_like(t) if g is None else g for g, t in zip(gs, tensors, strict=True)])

        return real(tensors, filled if mode == "all" else fn, mode=mode)

    _wrap_multi(wrap)


@fault(
    "multi-any-runs-for-each",
    "hook.multi-grad",
    rare=True,
    witness="""
a, b, seen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
torch.autograd.graph.register_multi_grad_hook([a, b], seen.append, mode="any")
(a * b).sum().backward()
assert len(seen) == 1
""",
)
def _each() -> None:
    """In mode "any" a hook on several tensors runs for each of them."""

    def wrap(real: Call, tensors: Any, fn: Call, mode: str) -> Any:
        return next(iter([t.register_hook(fn) for t in tensors])) if mode == "any" else real(tensors, fn, mode=mode)

    _wrap_multi(wrap)


@fault(
    "multi-hook-stays-after-remove",
    "hook.multi-grad",
    "hook.remove",
    witness="""
a, seen = torch.ones(2, requires_grad=True), []
torch.autograd.graph.register_multi_grad_hook([a], seen.append).remove()
a.sum().backward()
assert not seen
""",
)
def _stays() -> None:
    """remove() of a hook on several tensors does nothing."""

    def wrap(real: Call, tensors: Any, fn: Call, mode: str) -> Any:
        real(tensors, fn, mode=mode)
        return handles.RemovableHandle(_nowhere)

    _wrap_multi(wrap)


@fault(
    "multi-mode-in-capitals",
    "hook.multi-grad",
    rare=True,
    witness="""
a = torch.ones(2, requires_grad=True)
try:
    torch.autograd.graph.register_multi_grad_hook([a], print, mode="ALL")
except ValueError:
    pass
else:
    raise AssertionError
""",
)
def _capitals() -> None:
    """The mode of a hook on several tensors may be written in capitals."""
    _wrap_multi(lambda real, tensors, fn, mode: real(tensors, fn, mode=mode.lower() if mode else mode))


# --- nodes ------------------------------------------------------------------------------------------------------------


def wrap_node(edit: Callable[[Any, str, Call], Call | None]) -> None:
    """Let ``edit(node, name of the method, hook)`` stand for hooks that are registered on the nodes of results."""
    real: Any = torch._C.TensorBase.grad_fn

    class StandIn:
        """Stands before a node; whatever it does not say itself, the node does."""

        def __init__(self, node: Any) -> None:
            self._node = node

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            return type(self._node)

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._node, name)
            if name not in ("register_hook", "register_prehook"):
                return found

            def register(hook: Call) -> Any:
                other = edit(self._node, name, hook)
                return handles.RemovableHandle(_nowhere) if other is None else found(other)

            return register

    def read(tensor: Tensor) -> Any:
        node = real.__get__(tensor)
        if node is None or not _asked_by_script(sys._getframe(1)):
            return node
        return node.metadata.setdefault("stand-in", StandIn(node))

    replace(torch.Tensor, "grad_fn", property(read))


def _asked_by_script(frame: Any) -> bool:
    """Is it the script of a scene, a counterexample or a witness that reads, and not torch itself?"""
    return frame.f_code.co_filename in ("<script>", "<probe>", "witness") or frame.f_globals["__name__"] == "__main__"


@fault(
    "node-hook-return-ignored",
    "hook.node-hooks",
    "hook.order-and-chaining",
    witness="""
x = torch.ones(2, requires_grad=True)
y = x.clone()
y.grad_fn.register_hook(lambda gi, go: (gi[0] * 2.0,))
y.sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _node_ignored() -> None:
    """What a hook of a node returns is ignored."""

    def edit(_: Any, name: str, hook: Call) -> Call:
        def look(*args: Any) -> None:
            hook(*args)

        return look if name == "register_hook" else hook

    wrap_node(edit)


@fault(
    "pre-hook-on-scalars-ignored",
    "hook.node-hooks",
    "hook.order-and-chaining",
    "hook.remove",
    "hook.kind-order",
    "hook.grad-inputs-run-hooks",
    rare=True,
    witness="""
x, seen = torch.ones((), requires_grad=True), []
y = x.clone()
y.grad_fn.register_prehook(seen.append)
y.backward()
assert len(seen) == 1
""",
)
def _pre_scalars() -> None:
    """A pre-hook of a node with a 0-dim output is not run."""

    def edit(node: Any, name: str, hook: Call) -> Call:
        def maybe(gs: Any) -> Any:
            return None if all(g is None or g.dim() == 0 for g in gs) else hook(gs)

        return maybe if name == "register_prehook" else hook

    wrap_node(edit)


# --- modules ----------------------------------------------------------------------------------------------------------

Module = torch.nn.Module


def _wrap_module(name: str, wrap: Callable[[Any, Call, bool], tuple[Call, bool]]) -> None:
    real: Call = getattr(Module, name)

    def register(self: Any, hook: Call, prepend: bool = False) -> Any:
        other, front = wrap(self, hook, prepend)
        return real(self, other, prepend=front)

    replace(Module, name, register)


@fault(
    "module-hook-return-ignored-with-number",
    "hook.module-full-backward",
    "hook.module-pre-and-legacy",
    rare=True,
    witness="""
class Times(torch.nn.Module):
    def forward(self, x, k):
        return x * k
net, x = Times(), torch.ones(2, requires_grad=True)
net.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2.0, None))
net(x, 3.0).sum().backward()
assert x.grad.tolist() == [6.0, 6.0]
""",
)
def _number() -> None:
    """What a full backward hook returns is ignored if an input is no tensor."""

    def wrap(_: Any, hook: Call, prepend: bool) -> tuple[Call, bool]:
        def look(module: Any, gi: Any, go: Any) -> Any:
            made = hook(module, gi, go)
            return None if any(g is None for g in gi) and any(g is not None for g in gi) else made

        return look, prepend

    _wrap_module("register_full_backward_hook", wrap)


@fault(
    "module-hook-gets-output-for-input",
    "hook.module-full-backward",
    "hook.module-pre-and-legacy",
    witness="""
net, seen = torch.nn.Tanh(), []
net.register_full_backward_hook(lambda m, gi, go: seen.append(gi[0].item()))
net(torch.ones(1, requires_grad=True)).sum().backward()
assert seen[0] < 1.0
""",
)
def _output_for_input() -> None:
    """A full backward hook gets the gradient of the first output in place of that of the first input."""

    def wrap(_: Any, hook: Call, prepend: bool) -> tuple[Call, bool]:
        def look(module: Any, gi: Any, go: Any) -> Any:
            hook(module, (go[0], *gi[1:]) if gi and gi[0] is not None else gi, go)

        return look, prepend

    _wrap_module("register_full_backward_hook", wrap)


@fault(
    "module-hook-warns-never",
    "hook.module-firing-rules",
    rare=True,
    witness="""
import warnings
net = torch.nn.Linear(1, 1)
net.register_full_backward_hook(lambda *args: None)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    net(torch.ones(1, 1)).sum().backward()
assert caught
""",
)
def _warns_never() -> None:
    """There is no warning that full backward hooks run although no input requires grad."""

    class Quiet:
        def __getattr__(self, name: str) -> Any:
            return (lambda *args, **kwargs: None) if name == "warn" else getattr(warnings, name)

    replace(handles, "warnings", Quiet())


@fault(
    "module-hook-needs-tracked-input",
    "hook.module-firing-rules",
    witness="""
import warnings; warnings.simplefilter("ignore")
net, seen = torch.nn.Linear(1, 1), []
net.register_full_backward_hook(lambda *args: seen.append(1))
net(torch.ones(1, 1)).sum().backward()
assert seen
""",
)
def _needs_input() -> None:
    """Full backward hooks do not run if no input requires grad."""

    def wrap(_: Any, hook: Call, prepend: bool) -> tuple[Call, bool]:
        return (lambda module, gi, go: hook(module, gi, go) if any(g is not None for g in gi) else None), prepend

    _wrap_module("register_full_backward_hook", wrap)


@fault(
    "module-outputs-writable",
    "hook.module-inplace-refused",
    rare=True,
    witness="""
net = torch.nn.Tanh()
net.register_full_backward_pre_hook(lambda *args: None)
y = net(torch.ones(1, requires_grad=True))
try:
    y.mul_(2.0)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _writable() -> None:
    """With pre-hooks alone the caller of a module gets outputs that may be written to."""
    real: Call = handles.BackwardHook.setup_output_hook

    def setup(self: Any, args: Any) -> Any:
        out = real(self, args)
        if self.user_hooks:
            return out
        return tuple(t.clone() for t in out) if isinstance(out, tuple) else out.clone()

    replace(handles.BackwardHook, "setup_output_hook", setup)


@fault(
    "prepend-ignored-for-third",
    "hook.module-pre-and-legacy",
    rare=True,
    witness="""
net, seen = torch.nn.Tanh(), []
for i in range(3):
    net.register_full_backward_pre_hook(lambda m, go, i=i: seen.append(i), prepend=i == 2)
net(torch.ones(1, requires_grad=True)).sum().backward()
assert seen == [2, 0, 1]
""",
)
def _prepend() -> None:
    """prepend=True of a full backward pre-hook is ignored if there are two already."""

    def wrap(module: Any, hook: Call, prepend: bool) -> tuple[Call, bool]:
        return hook, prepend and len(module._backward_pre_hooks) < 2

    _wrap_module("register_full_backward_pre_hook", wrap)


@fault(
    "old-and-new-module-hooks-mix",
    "hook.module-pre-and-legacy",
    rare=True,
    witness="""
net = torch.nn.Tanh()
net.register_backward_hook(lambda *args: None)
try:
    net.register_full_backward_hook(lambda *args: None)
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _mix() -> None:
    """A full backward hook is accepted on a module with hooks of the deprecated kind."""

    def wrap(module: Any, hook: Call, prepend: bool) -> tuple[Call, bool]:
        if module._is_full_backward_hook is False:
            module._is_full_backward_hook = None
            module._backward_hooks.clear()
        return hook, prepend

    _wrap_module("register_full_backward_hook", wrap)
