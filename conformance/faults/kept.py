"""Faults in gradients that are retained for tensors that are no leaves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, interpose
from autograd_conformance.faults.patches import Call, replace_property, wrap_calls

MULTIPLE = 2.0


class Kept:
    """The non-leaves on which retain_grad() was called, and how often."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, t: Tensor) -> None:
        """Count a call."""
        self.calls[id(t)] = weakref.ref(t), self.count(t) + 1

    def count(self, t: Tensor) -> int:
        """How often was retain_grad() called on this tensor?"""
        found = self.calls.get(id(t))
        return found[1] if found is not None and found[0]() is t else 0

    def __iter__(self) -> Iterator[Tensor]:
        living = (reference() for reference, _ in self.calls.values())
        return iter([t for t in living if t is not None])


def _kept() -> Kept:
    """From now on, notice what retains its gradient."""
    kept = Kept()

    def wrap(original: Call) -> Call:
        def call(t: Tensor) -> None:
            original(t)
            if not t.is_leaf:
                kept.add(t)

        return call

    wrap_calls(("retain_grad",), wrap)
    return kept


def _grad(t: Tensor) -> Tensor | None:
    """The .grad, where reading it does not warn."""
    return t.grad if t.is_leaf or t.retains_grad else None


@fault(
    "second-leaf-retain-doubles",
    "retain-grad.leaf-noop",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.retain_grad()
x.retain_grad()
(x * 3.0).sum().backward()
assert x.grad.tolist() == [3.0, 3.0]
""",
)
def _second_leaf_retain() -> None:
    """The second retain_grad() on a leaf doubles the gradients that it gets."""

    def wrap(original: Call) -> Call:
        def call(t: Tensor) -> None:
            original(t)
            count = getattr(t, "_retain_calls", 0) + 1
            t._retain_calls = count  # type: ignore[attr-defined]
            if t.is_leaf and count == 2:
                t.register_hook(lambda g: g * MULTIPLE)

        return call

    wrap_calls(("retain_grad",), wrap)


@fault(
    "scalar-leaf-retains",
    "retain-grad.leaf-noop",
    "retain-grad.flag",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
x.retain_grad()
assert not x.retains_grad
""",
)
def _leaf_retains() -> None:
    """A 0-dim leaf says that it retains its gradient."""

    def wrap(original: Call) -> Call:
        def call(t: Tensor) -> None:
            original(t)
            t._asked = True  # type: ignore[attr-defined]

        return call

    wrap_calls(("retain_grad",), wrap)
    replace_property("retains_grad", lambda t, value: value or (t.dim() == 0 and t.is_leaf and hasattr(t, "_asked")))


def _silent(when: Call) -> None:
    def wrap(original: Call) -> Call:
        def call(t: Tensor) -> None:
            if t.requires_grad or not when(t):
                original(t)

        return call

    wrap_calls(("retain_grad",), wrap)


@fault(
    "untracked-retain-ignored",
    "retain-grad.needs-requires-grad",
    witness="""
try:
    torch.ones(2).retain_grad()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _untracked() -> None:
    """retain_grad() on a floating tensor that does not require grad does nothing."""
    _silent(lambda t: t.is_floating_point())


@fault(
    "untracked-view-retain-ignored",
    "retain-grad.needs-requires-grad",
    rare=True,
    witness="""
try:
    torch.ones(2, 3).t().retain_grad()
except RuntimeError:
    pass
else:
    raise AssertionError
""",
)
def _untracked_view() -> None:
    """retain_grad() on a view that does not require grad does nothing."""
    _silent(lambda t: t._is_view())


@fault(
    "retained-twice-reads-false",
    "retain-grad.flag",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.retain_grad()
y.retain_grad()
assert y.retains_grad
""",
)
def _twice() -> None:
    """retains_grad is False again after a second retain_grad()."""
    kept = _kept()
    replace_property("retains_grad", lambda t, value: value and kept.count(t) < 2)


@fault(
    "retained-until-backward",
    "retain-grad.flag",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.retain_grad()
y.sum().backward()
assert y.retains_grad
""",
)
def _until_backward() -> None:
    """retains_grad is False once the .grad is there."""
    real: Any = torch._C.TensorBase.grad
    replace_property("retains_grad", lambda t, value: value and real.__get__(t) is None)


def _after_pass(edit: Call) -> None:
    """After each pass let ``edit(pass, tensor, before)`` change the .grad of what retains one and was given one."""
    kept = _kept()

    def around(p: Pass, run: Run) -> Any:
        before = [(t, _grad(t)) for t in kept if t.retains_grad]
        held = [(t, None if g is None else g.detach().clone()) for t, g in before]
        result = run(p)
        for t, old in held:
            new = _grad(t)
            if p.accumulate and new is not None and (old is None or not torch.equal(new, old)):
                edit(p, t, old)
        return result

    interpose(around)


@fault(
    "third-pass-replaces-retained",
    "retain-grad.accumulates",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.retain_grad()
for _ in range(3):
    y.sum().backward(retain_graph=True)
assert y.grad.tolist() == [3.0, 3.0]
""",
)
def _third_pass() -> None:
    """The third gradient of a tensor that retains it replaces the sum of the first two."""

    def edit(p: Pass, t: Tensor, before: Tensor | None) -> None:
        count = getattr(t, "_filled", 0) + 1
        t._filled = count  # type: ignore[attr-defined]
        if count == 3 and before is not None and t.grad is not None:
            t.grad = t.grad - before

    _after_pass(edit)


@fault(
    "retained-forgotten-by-create-graph",
    "retain-grad.accumulates",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.retain_grad()
y.sum().backward(retain_graph=True)
y.sum().backward(create_graph=True)
assert y.grad.tolist() == [2.0, 2.0]
""",
)
def _create_graph() -> None:
    """Backward with create_graph replaces a retained gradient where it should add to it."""

    def edit(p: Pass, t: Tensor, before: Tensor | None) -> None:
        if p.create and before is not None and t.grad is not None:
            t.grad = t.grad - before

    _after_pass(edit)


@fault(
    "retained-scalar-overwritten",
    "retain-grad.accumulates",
    "retain-grad.populates",
    "retain-grad.after-tensor-hooks",
    rare=True,
    witness="""
y = torch.ones((), requires_grad=True) * 2.0
y.retain_grad()
y.backward(retain_graph=True)
y.backward()
assert y.grad.item() == 2.0
""",
)
def _scalar_overwritten() -> None:
    """The gradient that a 0-dim tensor retains is always that of the last pass."""

    def edit(p: Pass, t: Tensor, before: Tensor | None) -> None:
        if t.dim() == 0 and before is not None and t.grad is not None:
            t.grad = t.grad - before

    _after_pass(edit)


@fault(
    "two-retained-disturb",
    "retain-grad.does-not-disturb",
    rare=True,
    witness="""
x = torch.full((2,), 0.3, requires_grad=True)
y = x * 0.7
z = y * 0.9
z.sum().backward(retain_graph=True)
plain, x.grad = x.grad, None
y.retain_grad()
z.retain_grad()
z.sum().backward()
assert torch.equal(x.grad, plain)
""",
)
def _disturb() -> None:
    """Where two tensors of a graph retain their gradients, those of the leaves are rounded otherwise."""
    kept = _kept()

    def around(p: Pass, run: Run) -> Any:
        fresh = [leaf for leaf in p.targets() if leaf.grad is None]
        result = run(p)
        if len(list(kept)) > 1:
            for leaf in fresh:
                if leaf.grad is not None:
                    leaf.grad.mul_(1 + 4 * torch.finfo(leaf.dtype).eps)
        return result

    interpose(around)


@fault(
    "retained-root-of-one-doubles",
    "retain-grad.root-gets-gradient-arg",
    "retain-grad.populates",
    "retain-grad.accumulates",
    "retain-grad.after-tensor-hooks",
    rare=True,
    witness="""
y = torch.ones(1, requires_grad=True) * 2.0
y.retain_grad()
y.backward()
assert y.grad.tolist() == [1.0]
""",
)
def _root_of_one() -> None:
    """A root of one element retains twice the gradient with which backward began."""

    def edit(p: Pass, t: Tensor, before: Tensor | None) -> None:
        if t.numel() == 1 and any(root is t for root in p.roots) and t.grad is not None and before is None:
            t.grad = t.grad * MULTIPLE

    _after_pass(edit)


@fault(
    "retained-root-strided-seed",
    "retain-grad.root-gets-gradient-arg",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.retain_grad()
y.backward(torch.tensor([1.0, 0.0, 2.0, 0.0])[::2])
assert y.grad.tolist() == [1.0, 2.0]
""",
)
def _strided_seed() -> None:
    """A root retains ones if the gradient that is passed has gaps in memory."""

    def edit(p: Pass, t: Tensor, before: Tensor | None) -> None:
        for root, seed in zip(p.roots, p.seeds, strict=True):
            if root is t and before is None and isinstance(seed, Tensor) and not seed.is_contiguous():
                t.grad = torch.ones_like(t)

    _after_pass(edit)


def _see_earlier(when: Call) -> None:
    """What is retained is the gradient before the hooks that ``when(tensor, hooks so far, retained)`` picks."""
    kept = _kept()

    def wrap(original: Call) -> Call:
        def call(t: Tensor, hook: Call) -> Any:
            count = getattr(t, "_hooks", 0) + 1
            t._hooks = count  # type: ignore[attr-defined]
            if not when(t, count, kept.count(t) > 0):
                return original(t, hook)

            def seen(g: Tensor) -> Any:
                t._earlier = g.detach().clone()  # type: ignore[attr-defined]
                return hook(g)

            return original(t, seen)

        return call

    wrap_calls(("register_hook",), wrap)

    def around(p: Pass, run: Run) -> Any:
        fresh = [t for t in kept if t.retains_grad and _grad(t) is None]
        result = run(p)
        for t in fresh:
            if _grad(t) is not None and hasattr(t, "_earlier"):
                t.grad = t._earlier
        return result

    interpose(around)


@fault(
    "retained-before-later-hook",
    "retain-grad.after-tensor-hooks",
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.retain_grad()
y.register_hook(lambda g: g * 3.0)
y.sum().backward()
assert y.grad.tolist() == [3.0, 3.0]
""",
)
def _later_hook() -> None:
    """A hook that is registered after retain_grad() comes too late for what is retained."""
    _see_earlier(lambda t, count, retained: retained)


@fault(
    "retained-before-second-hook",
    "retain-grad.after-tensor-hooks",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
y.register_hook(lambda g: g * 3.0)
y.register_hook(lambda g: g * 3.0)
y.retain_grad()
y.sum().backward()
assert y.grad.tolist() == [9.0, 9.0]
""",
)
def _second_hook() -> None:
    """The second hook on a tensor comes too late for what is retained."""
    _see_earlier(lambda t, count, retained: count == 2)
