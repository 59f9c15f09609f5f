"""Faults in what a pass executes, frees, returns and refuses: retain_graph, inputs=, several roots, autograd.grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, is_accumulator, node_of, pass_fault
from autograd_conformance.faults.patches import Call, replace

NEVER_FREED = ("free.second-backward-error", "free.shared-trunk", "free.retain-graph-repeat")


# --- freeing ------------------------------------------------------------------------------------------------------


@pass_fault(
    "always-retains",
    *NEVER_FREED,
    "agrad.frees-executed-part",
    "free.retain-default-is-create-graph",
    witness="""
y = (torch.ones(2, requires_grad=True) ** 2).sum()
y.backward()
try:
    y.backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _always(p: Pass, run: Run) -> Any:
    """No pass ever frees anything."""
    return run(p.but(keep=True))


@pass_fault(
    "several-roots-retain",
    *NEVER_FREED,
    "backward.list-of-roots",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y, z = (x * x).sum(), (x ** 3).sum()
torch.autograd.backward([y, z])
try:
    y.backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _several_retain(p: Pass, run: Run) -> Any:
    """A pass from several roots frees nothing."""
    return run(p.but(keep=p.keep or len(p.roots) > 1))


@pass_fault(
    "vector-root-retains",
    *NEVER_FREED,
    "agrad.frees-executed-part",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) ** 2
y.backward(torch.ones(2))
try:
    y.backward(torch.ones(2))
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _vector_retain(p: Pass, run: Run) -> Any:
    """A pass from a root of several elements frees nothing."""
    return run(p.but(keep=p.keep or any(isinstance(root, Tensor) and root.numel() > 1 for root in p.roots)))


@pass_fault(
    "inputs-retain",
    *NEVER_FREED,
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
y.backward(inputs=[x])
try:
    y.backward(inputs=[x])
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _inputs_retain(p: Pass, run: Run) -> Any:
    """backward() with inputs= frees nothing."""
    return run(p.but(keep=p.keep or (p.accumulate and bool(p.inputs))))


@pass_fault(
    "grad-frees-nothing",
    "agrad.frees-executed-part",
    *NEVER_FREED,
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
torch.autograd.grad(y, x)
try:
    torch.autograd.grad(y, x)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _grad_retain(p: Pass, run: Run) -> Any:
    """autograd.grad frees nothing."""
    return run(p.but(keep=p.keep or not p.accumulate))


@pass_fault(
    "grad-frees-everything",
    "agrad.frees-executed-part",
    "free.shared-trunk",
    "free.disjoint-graphs",
    rare=True,
    witness="""
x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
a, b = x ** 2, w ** 3
torch.autograd.grad((a + b).sum(), x)
b.sum().backward()
assert w.grad is not None
""",
)
def _grad_frees_all(p: Pass, run: Run) -> Any:
    """autograd.grad also frees what it had no need to execute."""
    if p.accumulate or p.keep:
        return run(p)
    result = run(p.but(keep=True))
    try:
        run(p.but(create=False, inputs=tuple(leaf for leaf in p.leaves() if leaf.requires_grad), unused=True))
    except RuntimeError:
        run(p)  # another part was freed before: free at least this one
    return result


@pass_fault(
    "retain-ignored",
    "free.retain-graph-repeat",
    "free.shared-trunk",
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
y.backward(retain_graph=True)
y.backward()
assert x.grad.tolist() == [4.0, 4.0]
""",
)
def _retain_ignored(p: Pass, run: Run) -> Any:
    """retain_graph=True is ignored."""
    return run(p.but(keep=p.create))


@pass_fault(
    "second-retain-ignored",
    "free.retain-graph-repeat",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
y.backward(retain_graph=True)
y.backward(retain_graph=True)
y.backward()
assert x.grad.tolist() == [6.0, 6.0]
""",
)
def _second_retain(p: Pass, run: Run) -> Any:
    """The second pass from a root frees the graph though told to retain it."""
    node = node_of(p.roots[0])
    if node is None or p.create:
        return run(p)
    counts = node.metadata
    counts["passes"] = counts.get("passes", 0) + 1
    return run(p.but(keep=p.keep and counts["passes"] < 2))


@pass_fault(
    "inputs-retain-ignored",
    "free.retain-graph-repeat",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
y.backward(inputs=[x], retain_graph=True)
y.backward()
assert x.grad.tolist() == [4.0, 4.0]
""",
)
def _inputs_ignored(p: Pass, run: Run) -> Any:
    """backward() with inputs= ignores retain_graph=True."""
    return run(p.but(keep=p.create or (p.keep and not (p.accumulate and p.inputs))))


@pass_fault(
    "third-pair-raises",
    "free.forward-backward-pairing",
    "free.disjoint-graphs",
    "requires-grad.means-differentiable",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
for _ in range(3):
    (x ** 2).sum().backward()
assert x.grad.tolist() == [6.0, 6.0]
""",
)
def _third_pair(p: Pass, run: Run) -> Any:
    """The third pass that does not retain and reaches the same leaf raises."""
    for leaf in p.targets() if not p.keep else ():
        counted: Any = leaf
        counted._passes = getattr(leaf, "_passes", 0) + 1
        if counted._passes == 3:
            raise RuntimeError("Trying to backward through the graph a second time")
    return run(p)


@pass_fault(
    "shared-leaf-frees",
    "free.forward-backward-pairing",
    "free.disjoint-graphs",
    "free.retain-graph-repeat",
    "requires-grad.means-differentiable",
    witness="""
x = torch.ones(2, requires_grad=True)
a, b = (x ** 2).sum(), (x ** 3).sum()
a.backward()
b.backward()
assert x.grad.tolist() == [5.0, 5.0]
""",
)
def _shared_leaf(p: Pass, run: Run) -> Any:
    """After a pass that does not retain, a pass of a graph that was recorded before it and shares a leaf raises."""
    leaves: list[Any] = p.leaves()
    newest = max((node._sequence_nr() for node in p.nodes() if not is_accumulator(node)), default=0)
    if any(
        getattr(leaf, "_freed_at", -1) >= newest > 0 and getattr(leaf, "_freed_by", None) != newest for leaf in leaves
    ):
        raise RuntimeError("Trying to backward through the graph a second time")
    result = run(p)
    if not p.keep and newest:
        now = (torch.ones((), requires_grad=True) * 1.0).grad_fn._sequence_nr()  # type: ignore[union-attr]
        for leaf in leaves:
            leaf._freed_at, leaf._freed_by = now, newest
    return result


def _patch_retain(change: Any) -> None:
    """Let ``change(retain_graph, create_graph)`` decide what both functions are told."""
    autograd: Any = torch.autograd
    backward, grad = autograd.backward, autograd.grad

    def new_backward(tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
                     grad_variables: Any = None, inputs: Any = None) -> Any:  # fmt: skip
        retain_graph = change(retain_graph, create_graph)
        return backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    def new_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None,
                 create_graph: bool = False, *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        retain_graph = change(retain_graph, create_graph)
        return grad(outputs, inputs, grad_outputs, retain_graph, create_graph, *args, **kwargs)

    autograd.backward, autograd.grad = new_backward, new_grad


@fault(
    "null-autograd-functions",
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
g, = torch.autograd.grad(y, x, create_graph=True)
y.backward()
assert x.grad.tolist() == [2.0, 2.0] and g.requires_grad
""",
)
def _null_functions() -> None:
    """Nothing: autograd.backward and autograd.grad are called through Python."""
    _patch_retain(lambda retain, create: retain)


@fault(
    "create-graph-frees",
    "free.retain-default-is-create-graph",
    "free.retain-graph-repeat",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
torch.autograd.grad(y, x, create_graph=True)
y.backward()
assert x.grad.tolist() == [2.0, 2.0]
""",
)
def _create_frees() -> None:
    """create_graph=True without retain_graph frees the graph."""
    _patch_retain(lambda retain, create: False if retain is None else retain)


@fault(
    "retain-by-default",
    "free.retain-default-is-create-graph",
    *NEVER_FREED,
    "agrad.frees-executed-part",
    witness="""
y = (torch.ones(2, requires_grad=True) ** 2).sum()
y.backward()
try:
    y.backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _retain_default() -> None:
    """retain_graph=None retains the graph."""
    _patch_retain(lambda retain, create: True if retain is None else retain)


@pass_fault(
    "create-graph-cannot-free",
    "free.retain-default-is-create-graph",
    "free.second-backward-error",
    "free.shared-trunk",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = (x ** 2).sum()
torch.autograd.grad(y, x, create_graph=True, retain_graph=False)
try:
    torch.autograd.grad(y, x)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _cannot_free(p: Pass, run: Run) -> Any:
    """create_graph=True with retain_graph=False does not free the graph."""
    return run(p.but(keep=p.keep or p.create))


@pass_fault(
    "second-root-frees-nothing",
    "free.shared-trunk",
    "free.second-backward-error",
    "free.retain-graph-repeat",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
t = x ** 2
a, b = t.sum(), (t * 2.0).sum()
a.backward(retain_graph=True)
b.backward()
try:
    a.backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _second_root(p: Pass, run: Run) -> Any:
    """A pass over a trunk that a pass from another root has executed frees nothing."""
    tops = [node for node in map(node_of, p.roots) if node is not None]
    mine = tuple(node._sequence_nr() for node in tops)
    trunk = [node for node in p.nodes() if not is_accumulator(node) and all(node is not top for top in tops)]
    result = run(p.but(keep=p.keep or any(node.metadata.get("root", mine) != mine for node in trunk)))
    for node in trunk:
        node.metadata.setdefault("root", mine)
    return result


# --- roots, inputs, uses ------------------------------------------------------------------------------------------


def _untracked(root: Any) -> bool:
    return isinstance(root, Tensor) and not root.requires_grad


@pass_fault(
    "untracked-root-ignored",
    "backward.no-requires-grad-error",
    witness="""
try:
    torch.ones(()).backward()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _untracked_root(p: Pass, run: Run) -> Any:
    """backward() from a tensor that does not require grad does nothing and does not raise."""
    return () if p.accumulate and all(map(_untracked, p.roots)) else run(p)


@pass_fault(
    "untracked-second-root-ignored",
    "backward.no-requires-grad-error",
    "backward.list-of-roots",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.backward([x * 2.0, torch.ones(())])
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _untracked_second(p: Pass, run: Run) -> Any:
    """In a list of roots those that do not require grad are skipped."""
    tracked = [(r, s) for r, s in zip(p.roots, p.seeds, strict=True) if not _untracked(r)]
    if not tracked or len(tracked) == len(p.roots):
        return run(p)
    return run(p.but(roots=tuple(r for r, _ in tracked), seeds=tuple(s for _, s in tracked)))


@pass_fault(
    "grad-of-untracked-is-zero",
    "backward.no-requires-grad-error",
    "agrad.unused-input",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.grad(torch.ones(()), x)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _grad_untracked(p: Pass, run: Run) -> Any:
    """autograd.grad of an output that does not require grad gives zeros."""
    if p.accumulate or not all(map(_untracked, p.roots)):
        return run(p)
    return tuple(map(torch.zeros_like, p.inputs))


@pass_fault(
    "inputs-ignored",
    "backward.inputs-restricts",
    "grad.leaf-only",
    witness="""
x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
(x * w).sum().backward(inputs=[x])
assert w.grad is None
""",
)
def _inputs(p: Pass, run: Run) -> Any:
    """backward(inputs=...) fills all leaves."""
    if p.accumulate and p.inputs and all(isinstance(i, Tensor) and i.is_leaf for i in p.inputs):
        return run(p.but(inputs=()))
    return run(p)


@pass_fault(
    "nonleaf-input-unfilled",
    "backward.inputs-restricts",
    rare=True,
    witness="""
import warnings; warnings.simplefilter("ignore")
x = torch.ones(2, requires_grad=True)
y = x * 2.0
(y * y).sum().backward(inputs=[y])
assert y.grad is not None
""",
)
def _nonleaf_input(p: Pass, run: Run) -> Any:
    """A non-leaf in backward(inputs=...) gets no gradient."""
    result = run(p)
    for given in p.inputs if p.accumulate else ():
        if isinstance(given, Tensor) and given.grad_fn is not None:
            given.grad = None
    return result


@pass_fault(
    "lone-input-doubled",
    "backward.inputs-restricts",
    "backward.chain-rule",
    "grad.accumulates-sum",
    rare=True,
    witness="""
x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
(x * w).sum().backward(inputs=[x])
assert x.grad.tolist() == [1.0, 1.0]
""",
)
def _lone_input(p: Pass, run: Run) -> Any:
    """backward(inputs=[x]) doubles the gradient when the root depends on other leaves too."""
    if p.accumulate and len(p.inputs) == 1 and len(p.leaves()) > 1:
        p = p.but(seeds=tuple(None if seed is None else torch.mul(seed, 2.0) for seed in p.seeds))
    return run(p)


@pass_fault(
    "only-first-root",
    "backward.list-of-roots",
    "agrad.sum-over-outputs",
    "grad.multi-loss-equals-sum-loss",
    "grad.leaf-only",
    "agrad.unused-input",
    "free.second-backward-error",
    witness="""
x = torch.ones((), requires_grad=True)
torch.autograd.backward([x * 2.0, x * 3.0])
assert x.grad == 5.0
""",
)
def _first_root(p: Pass, run: Run) -> Any:
    """Of several roots only the first counts."""
    return run(p.but(roots=p.roots[:1], seeds=p.seeds[:1]))


@pass_fault(
    "same-root-twice-counts-once",
    "backward.list-of-roots",
    "agrad.sum-over-outputs",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
y = x * 2.0
torch.autograd.backward([y, y])
assert x.grad == 4.0
""",
)
def _same_root(p: Pass, run: Run) -> Any:
    """A root that is given twice counts once."""
    once = [i for i, root in enumerate(p.roots) if all(root is not other for other in p.roots[:i])]
    return run(p.but(roots=tuple(p.roots[i] for i in once), seeds=tuple(p.seeds[i] for i in once)))


@pass_fault(
    "third-root-dropped",
    "backward.list-of-roots",
    "agrad.sum-over-outputs",
    "grad.multi-loss-equals-sum-loss",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
torch.autograd.backward([x * 2.0, x * 3.0, x * 4.0])
assert x.grad == 9.0
""",
)
def _third_root(p: Pass, run: Run) -> Any:
    """Of several roots only the first two count."""
    return run(p.but(roots=p.roots[:2], seeds=p.seeds[:2]))


@pass_fault(
    "second-loss-halved",
    "grad.multi-loss-equals-sum-loss",
    "grad.accumulates-sum",
    "backward.chain-rule",
    "free.shared-trunk",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
t = x ** 2
t.sum().backward(retain_graph=True)
(t * 2.0).sum().backward()
assert x.grad.tolist() == [6.0, 6.0]
""",
)
def _second_loss(p: Pass, run: Run) -> Any:
    """A pass over a trunk that a pass from another root has executed halves its gradients."""
    tops = [node for node in map(node_of, p.roots) if node is not None]
    others = [node for node in p.nodes() if not is_accumulator(node) and all(node is not top for top in tops)]
    mine = tuple(node._sequence_nr() for node in tops)
    if p.accumulate and any(node.metadata.get("root", mine) != mine for node in others):
        p = p.but(seeds=tuple(None if seed is None else torch.mul(seed, 0.5) for seed in p.seeds))
    for node in others if p.accumulate else ():
        node.metadata.setdefault("root", mine)
    return run(p)


def _lose(p: Pass, run: Run, shared: Any, least: int) -> Any:
    """Take away what the last of at least ``least`` users of a node hands to it, for all nodes that are ``shared``."""
    users: dict[int, list[tuple[Any, int]]] = {}
    nodes = p.nodes()
    for node in nodes:
        for slot, (following, _) in enumerate(node.next_functions):
            if following is not None:
                users.setdefault(id(following), []).append((node, slot))
    handles = []
    for node in nodes:
        uses = users.get(id(node), [])
        if shared(node) and len({id(user) for user, _ in uses}) >= least:
            user, slot = uses[-1]
            handles.append(user.register_hook(lambda grads, _, slot=slot: _without(grads, slot)))
    try:
        return run(p)
    finally:
        for handle in handles:
            handle.remove()


def _without(grads: Any, slot: int) -> Any:
    return tuple(torch.mul(g, 0.0) if i == slot and g is not None else g for i, g in enumerate(grads))


@pass_fault(
    "diamond-loses-a-side",
    "backward.fan-out-sums",
    "backward.chain-rule",
    "agrad.equals-backward",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = x * 2.0
(y.sin() + y * 3.0).sum().backward()
assert torch.allclose(x.grad, 2 * torch.full((2,), 2.0).cos() + 6)
""",
)
def _diamond(p: Pass, run: Run) -> Any:
    """What one of several users hands to a non-leaf is lost."""
    return _lose(p, run, lambda node: not is_accumulator(node), 2)


@pass_fault(
    "third-use-lost",
    "backward.fan-out-sums",
    "backward.chain-rule",
    "agrad.equals-backward",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
(x * 2.0 + x * 3.0 + x * 4.0).sum().backward()
assert x.grad.tolist() == [9.0, 9.0]
""",
)
def _third_use(p: Pass, run: Run) -> Any:
    """What one user hands to a leaf with three users or more is lost."""
    return _lose(p, run, is_accumulator, 3)


@pass_fault(
    "two-uses-lost",
    "backward.fan-out-sums",
    "backward.chain-rule",
    "agrad.equals-backward",
    "grad.multi-loss-equals-sum-loss",
    "backward.list-of-roots",
    "agrad.sum-over-outputs",
    witness="""
x = torch.ones(2, requires_grad=True)
(x * 2.0 + x * 3.0).sum().backward()
assert x.grad.tolist() == [5.0, 5.0]
""",
)
def _two_uses(p: Pass, run: Run) -> Any:
    """What one user hands to a leaf with two users or more is lost."""
    return _lose(p, run, is_accumulator, 2)


# --- what backward returns ----------------------------------------------------------------------------------------


@fault(
    "backward-returns-self",
    "backward.returns-none",
    witness="""
y = torch.ones((), requires_grad=True) * 2.0
assert y.backward() is None
""",
)
def _returns_self() -> None:
    """backward() returns the root."""
    real: Call = torch.Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        real(self, *args, **kwargs)
        return self

    replace(torch.Tensor, "backward", backward)


@fault(
    "backward-with-inputs-returns-grads",
    "backward.returns-none",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
assert (x * 2.0).backward(inputs=[x]) is None
""",
)
def _returns_grads() -> None:
    """backward(inputs=...) returns the gradients of the inputs."""
    real: Call = torch.Tensor.backward

    def backward(self: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
                 inputs: Any = None) -> Any:  # fmt: skip
        real(self, gradient, retain_graph, create_graph, inputs)
        return tuple(x.grad for x in inputs) if isinstance(inputs, list | tuple) else None

    replace(torch.Tensor, "backward", backward)


@pass_fault(
    "backward-writes-scalar-root",
    "backward.returns-none",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True).sum()
y.backward()
assert y.item() == 2.0
""",
)
def _writes_root(p: Pass, run: Run) -> Any:
    """backward() sets a 0-dim root that does not retain its graph to zero."""
    result = run(p)
    for root in p.roots if p.accumulate and not p.keep else ():
        if isinstance(root, Tensor) and root.dim() == 0 and root.grad_fn is not None and not root._is_view():
            with torch.no_grad():
                root.zero_()
    return result


# --- autograd.grad ------------------------------------------------------------------------------------------------


@pass_fault(
    "grad-accumulates",
    "agrad.equals-backward",
    "grad.leaf-only",
    "grad.none-initially",
    "grad.accumulates-sum",
    witness="""
x = torch.ones(2, requires_grad=True)
torch.autograd.grad(x.sum(), x)
assert x.grad is None
""",
)
def _grad_accumulates(p: Pass, run: Run) -> Any:
    """autograd.grad also adds to the .grad of its inputs."""
    result = run(p)
    for given, grad in zip(p.inputs, result, strict=True) if not p.accumulate else ():
        if isinstance(given, Tensor) and given.is_leaf and grad is not None:
            term = grad.detach().clone()
            given.grad = term if given.grad is None else given.grad.detach() + term
    return result


@pass_fault(
    "grad-of-nonleaf-doubled",
    "agrad.equals-backward",
    "backward.chain-rule",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True) * 2.0
g, = torch.autograd.grad((y * 3.0).sum(), y)
assert g.tolist() == [3.0, 3.0]
""",
)
def _nonleaf_doubled(p: Pass, run: Run) -> Any:
    """autograd.grad doubles the gradient of a non-leaf input."""
    result = run(p)
    if p.accumulate:
        return result
    nonleaf = [isinstance(given, Tensor) and given.grad_fn is not None for given in p.inputs]
    return tuple(g if g is None or not n else torch.mul(g, 2.0) for g, n in zip(result, nonleaf, strict=True))


@pass_fault(
    "grad-of-three-reversed",
    "agrad.equals-backward",
    "backward.chain-rule",
    rare=True,
    witness="""
a, b, c = (torch.ones((), requires_grad=True) for _ in range(3))
assert torch.autograd.grad(a * 2.0 + b * 3.0 + c * 4.0, (a, b, c)) == (2.0, 3.0, 4.0)
""",
)
def _reversed(p: Pass, run: Run) -> Any:
    """autograd.grad returns the gradients of three inputs or more in reverse order."""
    result = run(p)
    return tuple(reversed(result)) if not p.accumulate and len(p.inputs) > 2 else result


@pass_fault(
    "grad-of-same-input-once",
    "agrad.equals-backward",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
g, h = torch.autograd.grad(x * 2.0, (x, x))
assert g == 2.0 and h == 2.0
""",
)
def _same_input(p: Pass, run: Run) -> Any:
    """An input that is given twice to autograd.grad gets zeros the second time."""
    result = run(p)
    if p.accumulate:
        return result
    again = [any(given is other for other in p.inputs[:i]) for i, given in enumerate(p.inputs)]
    return tuple(torch.mul(g, 0.0) if a and g is not None else g for g, a in zip(result, again, strict=True))


@pass_fault(
    "unused-input-is-zero",
    "agrad.unused-input",
    witness="""
x, w = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
try:
    torch.autograd.grad(x * 2.0, (x, w))
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _unused_zero(p: Pass, run: Run) -> Any:
    """autograd.grad of an unused input gives zeros without being asked to allow it."""
    if p.accumulate or p.unused:
        return run(p)
    result = run(p.but(unused=True))
    return tuple(torch.zeros_like(i) if g is None else g for i, g in zip(p.inputs, result, strict=True))


@pass_fault(
    "allowed-unused-is-zero",
    "agrad.unused-input",
    rare=True,
    witness="""
x, w = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
assert torch.autograd.grad(x * 2.0, (x, w), allow_unused=True)[1] is None
""",
)
def _allowed_zero(p: Pass, run: Run) -> Any:
    """allow_unused=True gives zeros for an unused input."""
    result = run(p)
    if p.accumulate or not p.unused:
        return result
    return tuple(torch.zeros_like(i) if g is None else g for i, g in zip(p.inputs, result, strict=True))


@fault(
    "materialized-is-one",
    "agrad.unused-input",
    rare=True,
    witness="""
x, w = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
g = torch.autograd.grad(x * 2.0, (x, w), allow_unused=True, materialize_grads=True)
assert g[1] == 0.0
""",
)
def _materialized() -> None:
    """materialize_grads=True gives ones for an unused input."""
    real: Call = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **kwargs: Any) -> Any:
        if not materialize_grads or kwargs.get("allow_unused") is False:
            return real(outputs, inputs, *args, materialize_grads=materialize_grads, **kwargs)
        given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        result = real(outputs, given, *args, **{**kwargs, "allow_unused": True})
        return tuple(torch.ones_like(i) if g is None else g for i, g in zip(given, result, strict=True))

    replace(torch.autograd, "grad", grad)


@pass_fault(
    "scalar-result-tracked",
    "agrad.result-not-tracked",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
assert not torch.autograd.grad(x * 2.0, x)[0].requires_grad
""",
)
def _scalar_tracked(p: Pass, run: Run) -> Any:
    """autograd.grad returns gradients of 0-dim inputs that require grad."""
    result = run(p)
    for grad in result if not p.accumulate and not p.create else ():
        if grad is not None and grad.dim() == 0:
            grad.requires_grad_()
    return result


@pass_fault(
    "result-tracked",
    "agrad.result-not-tracked",
    witness="""
x = torch.ones(2, requires_grad=True)
assert not torch.autograd.grad((x * x).sum(), x)[0].requires_grad
""",
)
def _tracked(p: Pass, run: Run) -> Any:
    """autograd.grad returns gradients that require grad and have a history."""
    return run(p.but(create=p.create or not p.accumulate))


@pass_fault(
    "grad-averages-outputs",
    "agrad.sum-over-outputs",
    "agrad.equals-backward",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
assert torch.autograd.grad((x * 2.0, x * 4.0), x)[0] == 6.0
""",
)
def _averages(p: Pass, run: Run) -> Any:
    """autograd.grad of several outputs returns the mean over outputs."""
    result = run(p)
    if p.accumulate or len(p.roots) < 2:
        return result
    return tuple(None if g is None else torch.mul(g, 1.0 / len(p.roots)) for g in result)


def _lenient(p: Pass, run: Run, fill: Any) -> Any:
    """Ask only for the inputs that require grad; ``fill`` makes an answer for the others."""
    tracked = tuple(given for given in p.inputs if not _untracked(given))
    if p.accumulate or len(tracked) == len(p.inputs) or any(map(_untracked, p.roots)):
        return run(p)
    found = iter(run(p.but(inputs=tracked)) if tracked else ())
    return tuple(fill(given) if _untracked(given) else next(found) for given in p.inputs)


@pass_fault(
    "untracked-input-is-zero",
    "agrad.nonrequiring-input",
    witness="""
x, c = torch.ones((), requires_grad=True), torch.ones(())
try:
    torch.autograd.grad(x * c, (x, c))
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _untracked_zero(p: Pass, run: Run) -> Any:
    """autograd.grad of an input that does not require grad gives zeros."""
    return _lenient(p, run, torch.zeros_like)


@pass_fault(
    "allowed-untracked-is-none",
    "agrad.nonrequiring-input",
    rare=True,
    witness="""
x, c = torch.ones((), requires_grad=True), torch.ones(())
try:
    torch.autograd.grad(x * c, (x, c), allow_unused=True)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
""",
)
def _allowed_none(p: Pass, run: Run) -> Any:
    """With allow_unused=True an input that does not require grad gives None."""
    return _lenient(p, run, lambda given: None) if p.unused else run(p)
