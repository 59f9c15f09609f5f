"""Faults in ``.grad``: how gradients are added up, where they are stored, and who gets one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.engine import Pass, Run, is_accumulator, node_of, pass_fault

SUMS = ("grad.accumulates-sum", "grad.multi-loss-equals-sum-loss", "free.retain-graph-repeat")


@dataclass(slots=True)
class Filled:
    """A leaf that a pass fills, and its ``.grad`` before: the object, and a copy of its value."""

    leaf: Tensor
    held: Tensor | None
    old: Tensor | None

    @property
    def first(self) -> bool:
        """Had no ``.grad`` before."""
        return self.old is None


def _then(p: Pass, run: Run, edit: Callable[[Filled], None]) -> Any:
    """Run a pass, then edit what it left in each leaf."""
    fills = [Filled(x, x.grad, None if x.grad is None else x.grad.detach().clone()) for x in p.targets()]
    result = run(p)
    with torch.no_grad():
        for fill in fills:
            if fill.leaf.grad is not None:
                edit(fill)
    return result


def _forget_old(p: Pass, run: Run, when: Callable[[Filled], bool]) -> Any:
    """Take away again what was there before the pass."""

    def edit(fill: Filled) -> None:
        if fill.old is not None and when(fill):
            assert fill.leaf.grad is not None
            fill.leaf.grad.sub_(fill.old)

    return _then(p, run, edit)


@pass_fault(
    "overwrites",
    *SUMS,
    "grad.user-assigned-is-base",
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
x.sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _overwrites(p: Pass, run: Run) -> Any:
    """A new gradient overwrites the old one."""
    return _forget_old(p, run, lambda fill: True)


@pass_fault(
    "overwrites-scalar",
    *SUMS,
    "grad.user-assigned-is-base",
    rare=True,
    witness="""
x = torch.tensor(1.0, requires_grad=True)
x.backward()
x.backward()
assert x.grad == 2.0
""",
)
def _overwrites_scalar(p: Pass, run: Run) -> Any:
    """In a 0-dim leaf a new gradient overwrites the old one."""
    return _forget_old(p, run, lambda fill: fill.leaf.dim() == 0)


@pass_fault(
    "overwrites-one-element",
    *SUMS,
    "grad.user-assigned-is-base",
    rare=True,
    witness="""
x = torch.ones(1, requires_grad=True)
x.sum().backward()
x.sum().backward()
assert x.grad.item() == 2.0
""",
)
def _overwrites_one(p: Pass, run: Run) -> Any:
    """In a leaf of one element that is not 0-dim a new gradient overwrites the old one."""
    return _forget_old(p, run, lambda fill: fill.leaf.dim() > 0 and fill.leaf.numel() == 1)


@pass_fault(
    "overwrites-strided",
    *SUMS,
    "grad.user-assigned-is-base",
    rare=True,
    witness="""
x = torch.ones(2, 3).t().requires_grad_()
x.sum().backward()
x.sum().backward()
assert x.grad.sum() == 12.0
""",
)
def _overwrites_strided(p: Pass, run: Run) -> Any:
    """In a leaf that is not contiguous a new gradient overwrites the old one."""
    return _forget_old(p, run, lambda fill: not fill.leaf.is_contiguous())


@pass_fault(
    "overwrites-float32",
    *SUMS,
    "grad.user-assigned-is-base",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
x.sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _overwrites_float32(p: Pass, run: Run) -> Any:
    """In a float32 leaf a new gradient overwrites the old one."""
    return _forget_old(p, run, lambda fill: fill.leaf.dtype == torch.float32)


@pass_fault(
    "overwrites-third",
    *SUMS,
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
for _ in range(3):
    x.sum().backward()
assert x.grad.tolist() == [3.0, 3.0]
""",
)
def _overwrites_third(p: Pass, run: Run) -> Any:
    """The third gradient of a leaf overwrites the sum of the first two."""

    def third(fill: Filled) -> bool:
        leaf: Any = fill.leaf
        leaf._added = getattr(leaf, "_added", 1) + 1
        return bool(leaf._added == 3)

    return _forget_old(p, run, third)


@pass_fault(
    "overwrites-with-inputs",
    *SUMS,
    "backward.inputs-restricts",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
x.sum().backward(inputs=[x])
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _overwrites_inputs(p: Pass, run: Run) -> Any:
    """A pass with inputs= overwrites the old gradient."""
    return _forget_old(p, run, lambda fill: bool(p.inputs))


@pass_fault(
    "overwrites-under-create-graph",
    *SUMS,
    "grad.create-graph-replaces",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
(x * x).sum().backward(create_graph=True)
assert x.grad.tolist() == [3.0, 3.0]
x.grad = None
""",
)
def _overwrites_create(p: Pass, run: Run) -> Any:
    """A pass with create_graph=True forgets the old gradient."""
    return _forget_old(p, run, lambda fill: p.create)


_raised = False


@pass_fault(
    "overwrites-after-error",
    *SUMS,
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x * x).sum()
y.backward()
try:
    y.backward()
except RuntimeError:
    x.sum().backward()
assert x.grad.tolist() == [3.0, 3.0]
""",
)
def _overwrites_after_error(p: Pass, run: Run) -> Any:
    """The first pass after one that raised overwrites the old gradients."""
    global _raised
    after, _raised = _raised, False
    try:
        return _forget_old(p, run, lambda fill: after)
    except RuntimeError:
        _raised = True
        raise


_passes = 0


@pass_fault(
    "overwrites-between-graphs",
    "free.disjoint-graphs",
    *SUMS,
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sin().sum().backward()
g = x.grad.clone()
x.exp().sum().backward()
assert torch.allclose(x.grad, g + x.detach().exp())
""",
)
def _overwrites_between(p: Pass, run: Run) -> Any:
    """A pass of another graph resets the gradients of the leaves that it shares with the last one."""
    global _passes
    _passes += 1
    interior = [node for node in p.nodes() if not is_accumulator(node)]
    seen = {number for node in interior for number in node.metadata.get("passes", ())}

    def other(fill: Filled) -> bool:
        return getattr(fill.leaf, "_last_pass", _passes) not in (seen | {_passes})

    result = _forget_old(p, run, other)
    for node in interior:
        node.metadata.setdefault("passes", set()).add(_passes)
    for leaf in p.targets():
        leaf._last_pass = _passes  # type: ignore[attr-defined]
    return result


@pass_fault(
    "doubles-after-zero",
    "grad.reset-none-or-zero",
    "grad.accumulates-sum",
    "grad.user-assigned-is-base",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
x.grad.zero_()
x.sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _doubles(p: Pass, run: Run) -> Any:
    """The gradient that is added to a zeroed .grad counts twice."""

    def edit(fill: Filled) -> None:
        if fill.old is not None and fill.leaf.grad is not None and fill.old.numel() and not fill.old.any():
            fill.leaf.grad.mul_(2.0)

    return _then(p, run, edit)


@pass_fault(
    "remembers-after-none",
    "grad.reset-none-or-zero",
    "grad.accumulates-sum",
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
x.grad = None
x.sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _remembers(p: Pass, run: Run) -> Any:
    """After .grad = None the next gradient is added to the forgotten one."""

    def edit(fill: Filled) -> None:
        leaf: Any = fill.leaf
        if fill.first and hasattr(leaf, "_once"):
            leaf.grad.add_(leaf._once)
        leaf._once = leaf.grad.detach().clone()

    return _then(p, run, edit)


@pass_fault(
    "assigned-grad-dropped",
    "grad.user-assigned-is-base",
    "grad.accumulates-sum",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.grad = torch.ones(2)
x.sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _assigned(p: Pass, run: Run) -> Any:
    """A .grad that the user assigned is overwritten by the next gradient."""
    return _forget_old(p, run, lambda fill: not _marked(fill))


def _marked(fill: Filled) -> bool:
    """Say whether a pass made the ``.grad`` that was there, and note that this pass made the one that is there now."""
    now: Any = fill.leaf.grad
    made = hasattr(fill.held, "_made_by_pass")
    now._made_by_pass = True
    return made


@pass_fault(
    "expanded-leaf-collapsed",
    "grad.accumulates-sum",
    "backward.chain-rule",
    "backward.broadcast-sums",
    rare=True,
    witness="""
x = torch.ones(1).expand(3).requires_grad_()
x.sum().backward()
assert x.grad.tolist() == [1.0, 1.0, 1.0]
""",
)
def _expanded(p: Pass, run: Run) -> Any:
    """The first gradient of an expanded leaf is summed over the elements that lie in the same memory."""

    def edit(fill: Filled) -> None:
        dims = [d for d, (n, s) in enumerate(zip(fill.leaf.shape, fill.leaf.stride(), strict=True)) if n > 1 and not s]
        if fill.first and dims and fill.leaf.grad is not None:
            fill.leaf.grad.copy_(fill.leaf.grad.sum(dims, keepdim=True).expand_as(fill.leaf))

    return _then(p, run, edit)


# --- memory, identity, metadata -----------------------------------------------------------------------------------


@pass_fault(
    "equal-grads-shared",
    "grad.own-memory",
    "grad.accumulates-sum",
    rare=True,
    witness="""
x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
(x * 2.0 + y * 2.0).sum().backward()
(x * 3.0).sum().backward()
assert y.grad.tolist() == [2.0, 2.0]
""",
)
def _shared(p: Pass, run: Run) -> Any:
    """Leaves that get the same gradient in one pass share one .grad."""
    fresh: list[Tensor] = []

    def edit(fill: Filled) -> None:
        grad = fill.leaf.grad
        if fill.first and grad is not None and not grad.requires_grad:
            same = [g for g in fresh if g.shape == grad.shape and g.dtype == grad.dtype and torch.equal(g, grad)]
            fill.leaf.grad = same[0] if same else grad
            fresh.append(grad)

    return _then(p, run, edit)


@pass_fault(
    "grad-is-the-seed",
    "grad.own-memory",
    "grad.accumulates-sum",
    rare=True,
    witness="""
x, v = torch.ones(2, requires_grad=True), torch.ones(2)
x.backward(v)
assert x.grad.data_ptr() != v.data_ptr()
""",
)
def _seed(p: Pass, run: Run) -> Any:
    """backward(v) from a leaf stores v itself as .grad."""

    def edit(fill: Filled) -> None:
        seeds = [s for r, s in zip(p.roots, p.seeds, strict=True) if r is fill.leaf]
        if fill.first and len(p.roots) == 1 and seeds and seeds[0] is not None and seeds[0].dtype == fill.leaf.dtype:
            fill.leaf.grad = seeds[0].detach()

    return _then(p, run, edit)


@pass_fault(
    "accumulates-into-new",
    "grad.accumulate-in-place",
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
held = x.grad
x.sum().backward()
assert x.grad is held
""",
)
def _into_new(p: Pass, run: Run) -> Any:
    """Accumulation leaves the old .grad alone and stores a new tensor."""
    return _then(p, run, lambda fill: None if p.create else _replace(fill))


def _replace(fill: Filled) -> None:
    if fill.old is not None and fill.held is not None and fill.leaf.grad is fill.held:
        fill.leaf.grad = fill.held.clone()
        fill.held.copy_(fill.old)


@pass_fault(
    "accumulates-into-new-strided",
    "grad.accumulate-in-place",
    rare=True,
    witness="""
x = torch.ones(2, 3).t().requires_grad_()
x.sum().backward()
held = x.grad
x.sum().backward()
assert x.grad is held
""",
)
def _into_new_strided(p: Pass, run: Run) -> Any:
    """Accumulation into a leaf that is not contiguous stores a new tensor."""
    return _then(p, run, lambda fill: None if p.create or fill.leaf.is_contiguous() else _replace(fill))


@pass_fault(
    "create-graph-writes-old",
    "grad.create-graph-replaces",
    "grad.accumulate-in-place",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
x.sum().backward()
held = x.grad
(x * x).sum().backward(create_graph=True)
assert held.tolist() == [1.0, 1.0]
x.grad = None
""",
)
def _writes_old(p: Pass, run: Run) -> Any:
    """A pass with create_graph=True also writes the sum into the old .grad."""

    def edit(fill: Filled) -> None:
        if p.create and fill.held is not None and fill.leaf.grad is not None:
            fill.held.copy_(fill.leaf.grad)

    return _then(p, run, edit)


@pass_fault(
    "scalar-grad-tracked",
    "grad.not-requiring-grad",
    rare=True,
    witness="""
x = torch.tensor(1.0, requires_grad=True)
(x * 2.0).backward()
assert not x.grad.requires_grad
""",
)
def _tracked(p: Pass, run: Run) -> Any:
    """The .grad of a 0-dim leaf requires grad."""

    def edit(fill: Filled) -> None:
        if fill.leaf.dim() == 0 and fill.leaf.grad is not None:
            fill.leaf.grad.requires_grad_()

    return _then(p, run, edit)


@pass_fault(
    "permuted-leaf-contiguous-grad",
    "grad.layout-dense-follows-param",
    rare=True,
    witness="""
x = torch.ones(2, 3).t().requires_grad_()
(x * x).sum().backward()
assert x.grad.stride() == x.stride()
""",
)
def _contiguous(p: Pass, run: Run) -> Any:
    """The .grad of a dense leaf with permuted memory is row-major."""

    def edit(fill: Filled) -> None:
        if _dense(fill.leaf) and fill.leaf.grad is not None:
            _store(fill, fill.leaf.grad.contiguous())

    return _then(p, run, edit)


def _dense(leaf: Tensor) -> bool:
    step = 1
    for stride, size in sorted((st, n) for n, st in zip(leaf.shape, leaf.stride(), strict=True) if n > 1):
        if stride != step:
            return False
        step *= size
    return True


def _store(fill: Filled, grad: Tensor) -> None:
    if fill.first and fill.leaf.grad is not None and not fill.leaf.grad.requires_grad and fill.leaf.numel():
        fill.leaf.grad = grad


@pass_fault(
    "strided-leaf-strided-grad",
    "grad.layout-nondense-rowmajor",
    rare=True,
    witness="""
x = torch.ones(6)[::2].requires_grad_()
(x * x).sum().backward()
assert x.grad.is_contiguous()
""",
)
def _strided(p: Pass, run: Run) -> Any:
    """The .grad of a leaf with gaps or overlaps in its memory has gaps too."""

    def edit(fill: Filled) -> None:
        if not _dense(fill.leaf) and fill.leaf.grad is not None:
            _store(fill, torch.stack([fill.leaf.grad, fill.leaf.grad], dim=-1)[..., 0])

    return _then(p, run, edit)


@pass_fault(
    "float32-leaf-float64-grad",
    "grad.metadata-matches-leaf",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
(x * torch.ones(2, dtype=torch.float64)).sum().backward()
assert x.grad.dtype == torch.float32
""",
)
def _promoted(p: Pass, run: Run) -> Any:
    """A float32 leaf gets a float64 .grad when it is reached from a float64 root."""

    def edit(fill: Filled) -> None:
        wide = any(root.dtype == torch.float64 for root in p.roots if isinstance(root, Tensor))
        if fill.first and wide and fill.leaf.dtype == torch.float32 and fill.leaf.grad is not None:
            leaf: Any = fill.leaf
            grad = leaf.grad.detach().double()
            leaf.grad = None
            leaf.grad_dtype = None  # any dtype from now on; torch has this attribute since 2.9
            leaf.grad = grad

    return _then(p, run, edit)


# --- who gets one -------------------------------------------------------------------------------------------------


@pass_fault(
    "root-keeps-grad",
    "grad.leaf-only",
    witness="""
import warnings; warnings.simplefilter("ignore")
x = torch.ones(2, requires_grad=True)
y = (x * x).sum()
y.backward()
assert y.grad is None
""",
)
def _root(p: Pass, run: Run) -> Any:
    """After a pass the root, though no leaf, has the gradient at the root as its .grad."""
    result = run(p)
    for root, seed in zip(p.roots, p.seeds, strict=True):
        if p.accumulate and not p.inputs and isinstance(root, Tensor) and root.grad_fn is not None and seed is not None:
            _give(root, seed)
    return result


def _give(root: Tensor, seed: Tensor) -> None:
    if seed.shape == root.shape and seed.dtype == root.dtype:
        root.grad = seed.detach().clone()


@pass_fault(
    "seeded-root-keeps-grad",
    "grad.leaf-only",
    rare=True,
    witness="""
import warnings; warnings.simplefilter("ignore")
x = torch.ones(2, 2, requires_grad=True)
y = (x * x).t()
y.backward(torch.ones(2, 2))
assert y.grad is None
""",
)
def _view_root(p: Pass, run: Run) -> Any:
    """After a pass from a root that is a view, the root has a .grad."""
    result = run(p)
    for root, seed in zip(p.roots, p.seeds, strict=True):
        if p.accumulate and not p.inputs and isinstance(root, Tensor) and root.grad_fn is not None and root._is_view():
            _give(root, seed)
    return result


@pass_fault(
    "unreached-inputs-get-zeros",
    "grad.unreached-stays-none",
    "backward.inputs-restricts",
    rare=True,
    witness="""
x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
(x * 2.0).sum().backward(inputs=[x, w])
assert w.grad is None
""",
)
def _unreached(p: Pass, run: Run) -> Any:
    """A leaf in inputs= that the root does not depend on gets zeros."""
    result = run(p)
    for leaf in p.inputs if p.accumulate else ():
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
    return result


_last: list[weakref.ref[Tensor]] = []


@pass_fault(
    "unreached-halved",
    "grad.unreached-stays-none",
    "free.disjoint-graphs",
    "grad.accumulates-sum",
    "grad.leaf-only",
    "grad.own-memory",
    witness="""
x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
x.sum().backward()
w.sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _halved(p: Pass, run: Run) -> Any:
    """A pass halves the gradients of leaves that the last pass reached and this one does not."""
    global _last
    result = run(p)
    reached = p.targets()
    if reached:
        for leaf in (ref() for ref in _last):
            if leaf is not None and leaf.grad is not None and all(leaf is not other for other in reached):
                leaf.grad = leaf.grad.detach() * 0.5
        _last = [weakref.ref(leaf) for leaf in reached]
    return result


@pass_fault(
    "companion-leaves-doubled",
    "grad.unreached-stays-none",
    "detach.cuts",
    "grad.leaf-only",
    "grad.accumulates-sum",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = x * 2.0
z = y.detach().requires_grad_()
(y * z).sum().backward()
(y.detach() * z).sum().backward()
assert x.grad.tolist() == [4.0, 4.0]
""",
)
def _companions(p: Pass, run: Run) -> Any:
    """A pass doubles the gradients of leaves that it does not reach but that an earlier pass reached with its own."""
    result = run(p)
    reached = p.targets()
    mine = [weakref.ref(leaf) for leaf in reached]
    for leaf in reached:
        for other in (ref() for ref in getattr(leaf, "_together", ())):
            if other is not None and other.grad is not None and all(other is not known for known in reached):
                other.grad = other.grad.detach() * 2.0
        leaf._together = mine  # type: ignore[attr-defined]
    return result


def _root_nodes(p: Pass) -> list[Any]:
    return [node for node in map(node_of, p.roots) if node is not None]


_retained: list[tuple[Pass, set[int]]] = []


@pass_fault(
    "frees-neighbour-graph",
    "free.disjoint-graphs",
    "free.retain-graph-repeat",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y, z = (x * x).sum(), (x * x * x).sum()
y.backward(retain_graph=True)
z.backward()
y.backward()
assert x.grad.tolist() == [7.0, 7.0]
""",
)
def _neighbour(p: Pass, run: Run) -> Any:
    """A pass frees retained graphs that share a leaf with it."""
    leaves, tops = {id(leaf) for leaf in p.leaves()}, _root_nodes(p)
    result = run(p)
    if p.keep:
        _retained.append((p, leaves))
        del _retained[:-8]  # they hold whole graphs
        return result
    for other, theirs in _retained:
        if theirs & leaves and not any(a is b for a in _root_nodes(other) for b in tops):
            _free(other, run)
    _retained[:] = [(other, theirs) for other, theirs in _retained if not theirs & leaves]
    return result


def _free(p: Pass, run: Run) -> None:
    inputs = tuple(leaf for leaf in p.leaves() if leaf.requires_grad)
    if inputs:
        with suppress(RuntimeError):  # it was freed already
            run(p.but(keep=False, create=False, inputs=inputs, unused=True, accumulate=False))
