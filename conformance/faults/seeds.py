"""Faults in the gradient at the root: the implicit one, and the one that the caller gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import add

Seeds = list[Any]
Change = Callable[[tuple[Any, ...], Seeds], Seeds]


def _install(change: Change) -> None:
    autograd: Any = torch.autograd
    real = autograd._make_grads

    def make_grads(outputs: Any, grads: Any, is_grads_batched: bool) -> Any:
        return real(
            outputs, grads if is_grads_batched else tuple(change(tuple(outputs), list(grads))), is_grads_batched
        )

    autograd._make_grads = make_grads


def seed_fault(name: str, *claims: str, witness: str, rare: bool = False) -> Callable[[Change], Change]:
    """Enter the decorated function, which may change the given gradients at the roots, as a fault."""

    def enter(change: Change) -> Change:
        add(name, change.__doc__, claims, partial(_install, change), witness, rare)
        return change

    return enter


def _implicit(root: Any, seed: Any) -> bool:
    return seed is None and isinstance(root, Tensor) and root.requires_grad


@seed_fault(
    "null-seed",
    witness="""
x = torch.ones(2, requires_grad=True)
(x * 2.0).backward(torch.tensor([1.0, 3.0]))
(x * 2.0).sum().backward()
assert x.grad.tolist() == [4.0, 8.0]
""",
)
def _null(_: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """Nothing: gradients at the roots go through Python."""
    return seeds


@seed_fault(
    "implicit-seed-is-half",
    "backward.scalar-implicit-one",
    "requires-grad.means-differentiable",
    "agrad.equals-backward",
    "backward.chain-rule",
    witness="""
x = torch.tensor(3.0, requires_grad=True)
(x * 2.0).backward()
assert x.grad == 2.0
""",
)
def _half(roots: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """The implicit gradient at a root of one element is one half."""
    return [
        torch.full_like(r, 0.5) if _implicit(r, s) and r.numel() == 1 else s for r, s in zip(roots, seeds, strict=False)
    ]


@seed_fault(
    "implicit-seed-of-1x1-is-two",
    "backward.scalar-implicit-one",
    "agrad.equals-backward",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.ones(1, 1, requires_grad=True)
(x * 2.0).backward()
assert x.grad.item() == 2.0
""",
)
def _one_by_one(roots: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """The implicit gradient at a root of shape (1, 1) is two."""
    return [
        torch.full_like(r, 2.0) if _implicit(r, s) and r.shape == (1, 1) else s
        for r, s in zip(roots, seeds, strict=False)
    ]


@seed_fault(
    "implicit-seed-of-second-is-zero",
    "backward.scalar-implicit-one",
    "backward.list-of-roots",
    "agrad.sum-over-outputs",
    rare=True,
    witness="""
x = torch.tensor(3.0, requires_grad=True)
torch.autograd.backward([x * 2.0, x * 3.0])
assert x.grad == 5.0
""",
)
def _second_zero(roots: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """The implicit gradient at every root but the first is zero."""
    pairs = enumerate(zip(roots, seeds, strict=False))
    return [torch.zeros_like(r) if i and _implicit(r, s) and r.numel() == 1 else s for i, (r, s) in pairs]


@seed_fault(
    "nonscalar-implicit-ones",
    "backward.nonscalar-needs-gradient",
    witness="""
x = torch.ones(2, requires_grad=True)
try:
    (x * 2.0).backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _ones(roots: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """A root of any size has an implicit gradient of ones."""
    return [torch.ones_like(r) if _implicit(r, s) else s for r, s in zip(roots, seeds, strict=False)]


@seed_fault(
    "empty-implicit-ones",
    "backward.nonscalar-needs-gradient",
    rare=True,
    witness="""
x = torch.ones(0, requires_grad=True)
try:
    (x * 2.0).backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _empty_ones(roots: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """An empty root needs no explicit gradient."""
    return [torch.ones_like(r) if _implicit(r, s) and not r.numel() else s for r, s in zip(roots, seeds, strict=False)]


@seed_fault(
    "row-implicit-ones",
    "backward.nonscalar-needs-gradient",
    rare=True,
    witness="""
x = torch.ones(1, 3, requires_grad=True)
try:
    (x * 2.0).backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _row_ones(roots: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """A root whose first size is 1 needs no explicit gradient."""
    return [
        torch.ones_like(r) if _implicit(r, s) and r.shape[:1] == (1,) else s for r, s in zip(roots, seeds, strict=False)
    ]


@seed_fault(
    "negative-seed-made-positive",
    "backward.vector-jacobian",
    "agrad.equals-backward",
    "backward.chain-rule",
    witness="""
x = torch.ones(2, requires_grad=True)
(x * 2.0).backward(torch.tensor([-1.0, 1.0]))
assert x.grad.tolist() == [-2.0, 2.0]
""",
)
def _positive(_: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """The sign of an explicit gradient is lost."""
    return [seed.abs() if isinstance(seed, Tensor) else seed for seed in seeds]


@seed_fault(
    "uniform-seed-ignored",
    "backward.vector-jacobian",
    "agrad.equals-backward",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
(x * 2.0).backward(torch.tensor([3.0, 3.0]))
assert x.grad.tolist() == [6.0, 6.0]
""",
)
def _uniform(_: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """An explicit gradient whose elements are all equal counts as ones."""

    def uniform(seed: Any) -> bool:
        return isinstance(seed, Tensor) and seed.numel() > 0 and bool((seed == seed.reshape(-1)[0]).all())

    return [torch.ones_like(seed) if uniform(seed) else seed for seed in seeds]


@seed_fault(
    "scalar-seed-ignored",
    "backward.vector-jacobian",
    "agrad.equals-backward",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.tensor(1.0, requires_grad=True)
(x * 2.0).backward(torch.tensor(3.0))
assert x.grad == 6.0
""",
)
def _scalar(_: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """An explicit gradient at a 0-dim root counts as one."""
    return [torch.ones_like(seed) if isinstance(seed, Tensor) and seed.dim() == 0 else seed for seed in seeds]


@seed_fault(
    "seeds-of-two-roots-mixed",
    "backward.list-of-roots",
    "agrad.sum-over-outputs",
    "backward.vector-jacobian",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
torch.autograd.backward([x * 2.0, x * 3.0], [torch.ones(2), torch.zeros(2)])
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _mixed(_: tuple[Any, ...], seeds: Seeds) -> Seeds:
    """With several roots, every explicit gradient of the first one's shape is replaced by the first one."""
    first = seeds[0] if seeds else None
    if not isinstance(first, Tensor):
        return seeds
    return [first if isinstance(s, Tensor) and s.shape == first.shape and s.dtype == first.dtype else s for s in seeds]
