"""Faults in derivatives of derivatives, in what a pass leaves behind, and in what runs inside one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, interpose, pass_fault
from autograd_conformance.faults.patches import Call, Grads, edit_gradients, replace, scaled, wrap_calls


def _cut(grads: Grads, which: int | None = None) -> Grads:
    """Gradients without their history, all of them or one."""
    return tuple(g.detach() if g is not None and which in (None, i) else g for i, g in enumerate(grads))


def _second_order(names: tuple[str, ...], when: Callable[[tuple[Any, ...]], bool], which: int | None = None) -> None:
    """First gradients of some ops are right, but have no graph when one is asked for."""

    def edit(args: tuple[Any, ...], kwargs: dict[str, Any], grads: Grads) -> Grads:
        return _cut(grads, which) if torch.is_grad_enabled() and when(args) else grads

    edit_gradients(names, edit)


@fault(
    "sin-without-second-order",
    "create-graph.second-order",
    "create-graph.result-tracks",
    "create-graph.symmetric-hessian",
    "create-graph.gradient-penalty",
    "create-graph.differentiable-in-grad-outputs",
    "backward.inside-no-grad",
    witness="""
x = torch.tensor(1.0, requires_grad=True)
(g,) = torch.autograd.grad(x.sin(), x, create_graph=True)
assert g.requires_grad
""",
)
def _sin() -> None:
    """The gradient of sin is right, and a constant."""
    _second_order(("sin",), lambda args: True)


@fault(
    "own-product-half-differentiable",
    "create-graph.second-order",
    "create-graph.symmetric-hessian",
    "create-graph.gradient-penalty",
    "backward.inside-no-grad",
    "create-graph.differentiable-in-grad-outputs",
    rare=True,
    witness="""
x = torch.tensor(3.0, requires_grad=True)
(g,) = torch.autograd.grad(x * x, x, create_graph=True)
(h,) = torch.autograd.grad(g, x)
assert h == 2.0
""",
)
def _own_product() -> None:
    """Of a product of a tensor with itself, one of the two gradients is a constant."""
    _second_order(("__mul__", "mul"), lambda args: args[0] is args[1], 0)


@fault(
    "strided-sigmoid-without-second-order",
    "create-graph.second-order",
    "create-graph.result-tracks",
    "create-graph.symmetric-hessian",
    "create-graph.gradient-penalty",
    "create-graph.differentiable-in-grad-outputs",
    "backward.inside-no-grad",
    rare=True,
    witness="""
x = torch.ones(2, 4, requires_grad=True)
(g,) = torch.autograd.grad(x[:, ::2].sin().sum(), x, create_graph=True)
assert g.requires_grad
""",
)
def _strided() -> None:
    """The gradient of smooth functions of memory that is not contiguous is a constant."""
    names = ("sin", "cos", "tanh", "sigmoid", "exp", "atan", "__pow__")
    _second_order(names, lambda args: not args[0].is_contiguous())


@fault(
    "factor-without-second-order",
    "create-graph.symmetric-hessian",
    "create-graph.second-order",
    "create-graph.gradient-penalty",
    "create-graph.result-tracks",
    "create-graph.differentiable-in-grad-outputs",
    "backward.inside-no-grad",
    rare=True,
    witness="""
x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
(g,) = torch.autograd.grad(x * y, y, create_graph=True)
assert g.requires_grad
""",
)
def _factor() -> None:
    """The gradient by the second factor of a product of two tensors is a constant, that by the first is not."""
    different = lambda args: isinstance(args[1], Tensor) and args[1] is not args[0]  # noqa: E731
    _second_order(("__mul__", "mul"), different, 1)


@pass_fault(
    "backward-cuts-its-graph",
    "create-graph.second-order",
    "create-graph.result-tracks",
    "create-graph.gradient-penalty",
    witness="""
x = torch.tensor(3.0, requires_grad=True)
(x * x).backward(create_graph=True)
assert x.grad.requires_grad
""",
)
def _backward_cuts(p: Pass, run: Run) -> Any:
    """With create_graph backward fills .grad with tensors that have no history."""
    found = run(p)
    if p.create and p.accumulate:
        for leaf in p.targets():
            if leaf.grad is not None:
                leaf.grad = leaf.grad.detach()
    return found


@pass_fault(
    "third-order-halved",
    "create-graph.second-order",
    "create-graph.gradient-penalty",
    "create-graph.symmetric-hessian",
    rare=True,
    witness="""
x = torch.tensor(2.0, requires_grad=True)
g = x ** 3
for due in (12.0, 12.0, 6.0):
    (g,) = torch.autograd.grad(g, x, create_graph=True)
    assert g == due
""",
)
def _third(p: Pass, run: Run) -> Any:
    """The derivative of a second derivative is half of what is due."""
    order = 1 + max((getattr(root, "_order", 0) for root in p.roots), default=0)
    if order > 2:
        p = p.but(seeds=tuple(None if g is None else g * 0.5 for g in p.seeds))
    found = run(p)
    for g in found if p.create and not p.accumulate else ():
        if g is not None:
            g._order = order
    return found


@pass_fault(
    "constants-track",
    "create-graph.result-tracks",
    witness="""
x = torch.ones(2, requires_grad=True)
(g,) = torch.autograd.grad((x * 2.0).sum(), x, create_graph=True)
assert not g.requires_grad
""",
)
def _constants(p: Pass, run: Run) -> Any:
    """With create_graph all that autograd.grad returns requires grad, constants too."""
    found = run(p)
    if not p.create or p.accumulate:
        return found
    return tuple(g if g is None or g.requires_grad else g.detach().requires_grad_() for g in found)


@pass_fault(
    "second-gradient-does-not-track",
    "create-graph.result-tracks",
    "create-graph.second-order",
    "create-graph.symmetric-hessian",
    "create-graph.gradient-penalty",
    "create-graph.differentiable-in-grad-outputs",
    rare=True,
    witness="""
x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
g = torch.autograd.grad(x * y, [x, y], create_graph=True)
assert g[1].requires_grad
""",
)
def _second_tracks(p: Pass, run: Run) -> Any:
    """Of several gradients with a graph, those after the first have none."""
    found = run(p)
    if not p.create or p.accumulate:
        return found
    return tuple(g if not i or g is None else g.detach() for i, g in enumerate(found))


@pass_fault(
    "create-graph-adds-a-tenth",
    "create-graph.same-values",
    "create-graph.second-order",
    "create-graph.symmetric-hessian",
    "create-graph.gradient-penalty",
    "create-graph.differentiable-in-grad-outputs",
    "backward.inside-no-grad",
    witness="""
x = torch.tensor(3.0, requires_grad=True)
(g,) = torch.autograd.grad(x * x, x, create_graph=True)
assert g == 6.0
""",
)
def _tenth(p: Pass, run: Run) -> Any:
    """Gradients with a graph are a tenth too large."""
    return run(p.but(seeds=tuple(None if g is None else g * 1.1 for g in p.seeds)) if p.create else p)


@pass_fault(
    "plain-after-create-graph-halved",
    "create-graph.same-values",
    "create-graph.second-order",
    "create-graph.symmetric-hessian",
    rare=True,
    witness="""
x = torch.tensor(3.0, requires_grad=True)
y = x * x
torch.autograd.grad(y, x, create_graph=True)
assert torch.autograd.grad(y, x)[0] == 6.0
""",
)
def _after(p: Pass, run: Run) -> Any:
    """A pass without a graph of its own, after one with, from the same root, gives half."""
    again = not p.create and any(hasattr(root, "_created") for root in p.roots)
    for root in p.roots:
        if p.create and isinstance(root, Tensor):
            root._created = True  # type: ignore[attr-defined]
    return run(p.but(seeds=tuple(None if g is None else g * 0.5 for g in p.seeds)) if again else p)


@pass_fault(
    "cycle-warning-once",
    "create-graph.backward-warns-cycle",
    rare=True,
    witness="""
import warnings
torch.set_warn_always(True)
x = torch.tensor(3.0, requires_grad=True)
for _ in range(2):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        (x * x).backward(create_graph=True)
    assert len(seen) == 1
""",
)
def _warns_once(p: Pass, run: Run) -> Any:
    """A leaf that has a gradient already gets another with a graph, and no warning is given."""
    with warnings.catch_warnings():
        if p.create and p.accumulate and any(leaf.grad is not None for leaf in p.targets()):
            warnings.simplefilter("ignore")
        return run(p)


@pass_fault(
    "no-cycle-warning",
    "create-graph.backward-warns-cycle",
    witness="""
import warnings
torch.set_warn_always(True)
x = torch.tensor(3.0, requires_grad=True)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    (x * x).backward(create_graph=True)
assert len(seen) == 1
""",
)
def _no_warning(p: Pass, run: Run) -> Any:
    """backward with create_graph gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(p)


@pass_fault(
    "gradient-argument-is-constant",
    "create-graph.differentiable-in-grad-outputs",
    "create-graph.result-tracks",
    witness="""
x, v = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
(g,) = torch.autograd.grad(x * 2.0, x, v, create_graph=True)
assert g.requires_grad
""",
)
def _argument(p: Pass, run: Run) -> Any:
    """Gradient arguments are detached before they start a pass."""
    return run(p.but(seeds=tuple(None if g is None else g.detach() for g in p.seeds)))


@pass_fault(
    "made-gradient-argument-is-constant",
    "create-graph.differentiable-in-grad-outputs",
    rare=True,
    witness="""
x, v = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
(g,) = torch.autograd.grad(x * 2.0, x, v * v, create_graph=True)
assert g.requires_grad
""",
)
def _made_argument(p: Pass, run: Run) -> Any:
    """Gradient arguments that are no leaves are detached before they start a pass."""
    return run(p.but(seeds=tuple(g if g is None or g.is_leaf else g.detach() for g in p.seeds)))


@fault(
    "squared-gradient-halved",
    "create-graph.gradient-penalty",
    witness="""
x = torch.tensor(3.0, requires_grad=True)
(g,) = torch.autograd.grad(x * x, x, create_graph=True)
(g ** 2).backward()
assert x.grad == 24.0
""",
)
def _squared() -> None:
    """The square of a gradient has half of its derivative."""

    def around(p: Pass, run: Run) -> Any:
        found = run(p)
        for g in found if p.create and not p.accumulate else ():
            if g is not None:
                g._found = True
        return found

    interpose(around)
    edit_gradients(("__pow__",), lambda args, kwargs, g: scaled(g, 0.5) if hasattr(args[0], "_found") else g)


@pass_fault(
    "penalty-misses-scalar-leaves",
    "create-graph.gradient-penalty",
    "backward.chain-rule",
    rare=True,
    witness="""
x, k = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
(g,) = torch.autograd.grad((x * x * k).sum(), x, create_graph=True)
(g ** 2).sum().backward()
assert k.grad == 16.0
""",
)
def _scalar_leaves(p: Pass, run: Run) -> Any:
    """Backward of what was made from gradients leaves leaves without dimensions a quarter of their gradient."""
    before = {id(leaf): leaf.grad for leaf in p.targets()}
    seeded = p.accumulate and not p.create and any(getattr(root, "_made", False) for root in p.roots)
    again = p.accumulate and _created[0] and not p.create
    _created[0] = p.create
    found = run(p)
    for leaf in p.targets() if again or seeded else ():
        if leaf.dim() == 0 and before[id(leaf)] is None and leaf.grad is not None:
            leaf.grad = leaf.grad.detach() * 0.25
    return found


_created = [False]  # was the last pass one with a graph?


# --- what a pass leaves behind ----------------------------------------------------------------------------------------


@pass_fault(
    "restricted-backward-frees-all",
    "free.whole-graph",
    rare=True,
    witness="""
x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
t = w * w
(x * x + t).sum().backward(inputs=[x])
try:
    t.sum().backward()
except RuntimeError:
    raise SystemExit("freed") from None
assert w.grad.tolist() == [2.0, 2.0]
""",
)
def _restricted(p: Pass, run: Run) -> Any:
    """backward(inputs=...) frees the branches that lead to no input as well."""
    if not (p.accumulate and p.inputs and not p.keep):
        return run(p)
    run(p.but(keep=True))
    return run(p.but(inputs=tuple(p.leaves()), accumulate=False, unused=True)) and None


def _keeping(when: Callable[[Tensor], bool]) -> None:
    """Keep a hold on what hooks packed."""
    held: list[Any] = []
    original: Any = torch.autograd.graph.saved_tensors_hooks

    class Hooks(original):  # type: ignore[misc]
        def __init__(self, pack: Call, unpack: Call) -> None:
            def packed(t: Tensor) -> Any:
                box = pack(t)
                if when(t):
                    held.append(box)
                    del held[:-100]
                return box

            super().__init__(packed, unpack)

    replace(torch.autograd.graph, "saved_tensors_hooks", Hooks)


@fault(
    "packed-tensors-kept",
    "free.buffers-released",
    witness="""
import weakref
class Box:
    pass
boxes = []
def pack(t):
    box = Box()
    box.t = t
    boxes.append(weakref.ref(box))
    return box
x = torch.ones(2, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.t):
    y = (x * x).sum()
y.backward()
assert all(box() is None for box in boxes)
""",
)
def _packed_kept() -> None:
    """What a hook packed lives on after the graph has been freed."""
    _keeping(lambda t: True)


@fault(
    "packed-scalars-kept",
    "free.buffers-released",
    rare=True,
    witness="""
import weakref
class Box:
    pass
boxes = []
def pack(t):
    box = Box()
    box.t = t
    boxes.append(weakref.ref(box))
    return box
x = torch.ones((), requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.t):
    y = x * x
y.backward()
assert all(box() is None for box in boxes)
""",
)
def _scalars_kept() -> None:
    """What a hook packed of one element lives on after the graph has been freed."""
    _keeping(lambda t: t.numel() == 1)


@pass_fault(
    "grad-of-vectors-keeps",
    "free.saved-attr-after-free",
    "free.old-message",
    "free.second-backward-error",
    "free.buffers-released",
    "agrad.frees-executed-part",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = x * x
torch.autograd.grad(y, x, torch.ones(2))
try:
    y.grad_fn._saved_self
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _vector_grad_keeps(p: Pass, run: Run) -> Any:
    """autograd.grad of a tensor with dimensions keeps what the nodes saved."""
    keeps = not p.accumulate and any(isinstance(root, Tensor) and root.dim() for root in p.roots)
    return run(p.but(keep=True) if keeps else p)


def _reworded(when: Callable[[Pass], bool]) -> None:
    def around(p: Pass, run: Run) -> Any:
        try:
            return run(p)
        except RuntimeError as error:
            if "a second time" not in str(error) or not when(p):
                raise
            text = str(error).replace("retain_graph", "retain_variables")
        raise RuntimeError(text)

    interpose(around)


@fault(
    "message-advises-retain-variables",
    "free.old-message",
    witness="""
x = torch.ones((), requires_grad=True)
y = x * x
y.backward()
try:
    y.backward()
except RuntimeError as error:
    assert "retain_graph=True" in str(error)
""",
)
def _old_advice() -> None:
    """The error of a second pass advises retain_variables=True."""
    _reworded(lambda p: True)


@fault(
    "grad-advises-retain-variables",
    "free.old-message",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
y = x * x
y.backward()
try:
    torch.autograd.grad(y, x)
except RuntimeError as error:
    assert "retain_graph=True" in str(error)
""",
)
def _grad_advice() -> None:
    """The error of a second pass by autograd.grad advises retain_variables=True."""
    _reworded(lambda p: not p.accumulate)


# --- the graph --------------------------------------------------------------------------------------------------------


def _as_tree(name: str, most: int) -> None:
    """Join more than so many tensors two by two."""

    def wrap(original: Call) -> Call:
        def call(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
            parts = list(tensors)
            if len(parts) <= most or kwargs or len({(t.shape, t.dtype) for t in parts}) > 1:
                return original(tensors, dim, **kwargs)
            if name == "stack":
                parts = [t.unsqueeze(dim) for t in parts]
            while len(parts) > 1:
                parts[:2] = [torch.concatenate(parts[:2], dim)]
            return parts[0]

        return call

    wrap_calls((name,), wrap)


@fault(
    "cat-is-a-tree",
    "backward.any-arity",
    witness="""
x = torch.ones(2, requires_grad=True)
assert len(torch.stack([x, x, x]).grad_fn.next_functions) == 3
""",
)
def _tree() -> None:
    """Three tensors or more are stacked two by two, so that the graph is a binary tree."""
    _as_tree("stack", 2)


@fault(
    "cat-of-five-is-a-tree",
    "backward.any-arity",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
assert len(torch.cat([x, x, x, x, x]).grad_fn.next_functions) == 5
""",
)
def _tree_of_five() -> None:
    """Five tensors or more are concatenated two by two."""
    _as_tree("cat", 4)


def _by_depth(least: int) -> Callable[[Pass, Run], Any]:
    def around(p: Pass, run: Run) -> Any:
        if len(p.nodes()) > least:
            p = p.but(seeds=tuple(None if g is None else g * 0.5 for g in p.seeds))
        return run(p)

    return around


@fault(
    "deep-graph-damped",
    "backward.grads-independent-of-depth",
    witness="""
x = y = torch.ones((), requires_grad=True)
for _ in range(100):
    y = -y
y.backward()
assert x.grad == 1.0
""",
)
def _deep() -> None:
    """The gradients of a graph of more than 50 nodes are halved."""
    interpose(_by_depth(50))


@fault(
    "graph-of-thousand-damped",
    "backward.grads-independent-of-depth",
    rare=True,
    witness="""
x = y = torch.ones((), requires_grad=True)
for _ in range(2000):
    y = -y
y.backward()
assert x.grad == 1.0
""",
)
def _very_deep() -> None:
    """The gradients of a graph of more than 900 nodes are halved."""
    interpose(_by_depth(900))


@fault(
    "last-factor-replayed",
    "backward.define-by-run",
    "backward.chain-rule",
    "backward.grads-independent-of-depth",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
((x * 2.0) * 0.5).backward()
assert x.grad == 1.0
""",
)
def _replayed() -> None:
    """The derivative of a product with a number is the number of the product of that shape before, if there was one."""
    last: dict[Any, float] = {}

    def edit(args: tuple[Any, ...], kwargs: dict[str, Any], grads: Grads) -> Grads:
        factor = args[1]
        if type(factor) is not float or not factor:
            return grads
        shape = tuple(args[0].shape)
        known = last.get(shape, factor)
        last[shape] = factor
        return scaled(grads, known / factor)

    edit_gradients(("__mul__",), edit)


# --- what runs inside a pass ------------------------------------------------------------------------------------------


@pass_fault(
    "no-grad-forgets-create-graph",
    "backward.inside-no-grad",
    rare=True,
    witness="""
x = torch.tensor(3.0, requires_grad=True)
y = x**3
with torch.no_grad():
    (g,) = torch.autograd.grad(y, x, create_graph=True)
assert g.requires_grad
""",
)
def _forgets(p: Pass, run: Run) -> Any:
    """Under no_grad create_graph is ignored."""
    return run(p if torch.is_grad_enabled() else p.but(create=False))


@pass_fault(
    "no-grad-backward-fills-nothing",
    "backward.inside-no-grad",
    "backward.reentrant",
    witness="""
x = torch.tensor(3.0, requires_grad=True)
y = x * x
with torch.no_grad():
    y.backward()
assert x.grad == 6.0
""",
)
def _fills_nothing(p: Pass, run: Run) -> Any:
    """Under no_grad backward does nothing."""
    return run(p) if torch.is_grad_enabled() or not p.accumulate else None


def _quiet_inside(when: Callable[[], bool]) -> None:
    original: Call = torch.autograd.backward

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if torch._C._are_functorch_transforms_active() and when() else original(*args, **kwargs)

    replace(torch.autograd, "backward", call)


@fault(
    "transform-not-noticed",
    "backward.functorch-refused",
    witness="""
def f(x):
    y = (x * x).sum()
    try:
        y.backward()
    except RuntimeError:
        return y
    raise AssertionError
torch.func.grad(f)(torch.ones(2))
""",
)
def _unnoticed() -> None:
    """Inside a transform backward does nothing, without a word."""
    _quiet_inside(lambda: True)


@fault(
    "vmap-not-noticed",
    "backward.functorch-refused",
    rare=True,
    witness="""
def f(x):
    w = torch.ones(2, requires_grad=True)
    try:
        w.sum().backward()
    except RuntimeError:
        return x
    raise AssertionError
torch.func.vmap(f)(torch.ones(2))
""",
)
def _vmap_unnoticed() -> None:
    """Inside vmap backward does nothing, without a word."""
    functorch: Any = torch._C._functorch
    _quiet_inside(lambda: functorch.peek_interpreter_stack().key() == functorch.TransformType.Vmap)


def _errors(change: Callable[[Exception], Exception]) -> None:
    def around(p: Pass, run: Run) -> Any:
        try:
            return run(p)
        except Exception as error:
            other = change(error)
            if other is error:
                raise
        raise other

    interpose(around)


@fault(
    "errors-become-runtime-errors",
    "backward.errors-propagate",
    witness="""
x = torch.ones((), requires_grad=True)
def fail(g):
    raise ValueError("no")
x.register_hook(fail)
try:
    (x * 2.0).backward()
except Exception as error:
    assert type(error) is ValueError
""",
)
def _runtime_errors() -> None:
    """What a hook raises comes out of backward as RuntimeError."""
    _errors(lambda error: error if isinstance(error, RuntimeError) else RuntimeError(str(error)))


@fault(
    "long-messages-cut",
    "backward.errors-propagate",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
def fail(g):
    raise ValueError("no" * 200)
x.register_hook(fail)
try:
    (x * 2.0).backward()
except Exception as error:
    assert str(error) == "no" * 200
""",
)
def _cut_messages() -> None:
    """Messages of more than 256 characters are cut."""
    _errors(lambda error: error if len(str(error)) <= 256 else type(error)(str(error)[:256]))


@fault(
    "derived-errors-become-their-base",
    "backward.errors-propagate",
    rare=True,
    witness="""
Own = type("Own", (ValueError,), {"__module__": "mine"})
x = torch.ones((), requires_grad=True)
def fail(g):
    raise Own("no")
x.register_hook(fail)
try:
    (x * 2.0).backward()
except Exception as error:
    assert type(error) is Own
""",
)
def _bases() -> None:
    """An exception of a class of one's own comes out as one of the class that it is derived from."""

    def change(error: Exception) -> Exception:
        base = type(error).__base__
        own = type(error).__module__ not in ("builtins", "torch") and base is not Exception
        return base(*error.args) if own and base is not None else error

    _errors(change)


def _nested(least: int, when: Callable[[Pass], bool]) -> None:
    running = [0]

    def around(p: Pass, run: Run) -> Any:
        if running[0] >= least and when(p):
            p = p.but(seeds=tuple(None if g is None else g * 0.5 for g in p.seeds))
        running[0] += 1
        try:
            return run(p)
        finally:
            running[0] -= 1

    interpose(around)


_NESTED = """
x = torch.ones((), requires_grad=True)
got = []
def inner(level):
    with torch.enable_grad():
        w = torch.tensor(3.0, requires_grad=True)
        z = w * w
        if level:
            z.register_hook(lambda g: inner(level - 1))
    got.append(torch.autograd.grad(z, w)[0])
x.register_hook(lambda g: inner(2))
(x * 2.0).backward()
assert got == [6.0, 6.0, 6.0]
"""


@fault("nested-pass-halved", "backward.reentrant", witness=_NESTED)
def _nested_pass() -> None:
    """A pass that starts inside another gives half."""
    _nested(1, lambda p: True)


@fault("twice-nested-grad-halved", "backward.reentrant", rare=True, witness=_NESTED)
def _twice_nested() -> None:
    """autograd.grad inside two other passes gives half."""
    _nested(2, lambda p: not p.accumulate)


def _hooks(name: str, mode: Callable[[], Any], owner: Any = torch.Tensor) -> None:
    """Let hooks run in a mode of their own."""
    original: Call = getattr(owner, name)

    def register(self: Any, hook: Call) -> Any:
        @functools.wraps(hook, updated=())
        def moded(*args: Any) -> Any:
            with mode():
                return hook(*args)

        return original(self, moded)

    replace(owner, name, register)


@fault(
    "hooks-run-in-grad-mode",
    "backward.grad-mode-inside",
    witness="""
x = torch.ones((), requires_grad=True)
seen = []
x.register_hook(lambda g: seen.append(torch.is_grad_enabled()))
(x * 2.0).backward()
assert seen == [False]
""",
)
def _grad_mode() -> None:
    """Hooks on tensors find grad mode on in every pass."""
    _hooks("register_hook", torch.enable_grad)


@fault(
    "post-accumulate-hooks-never-record",
    "backward.grad-mode-inside",
    rare=True,
    witness="""
import warnings
warnings.simplefilter("ignore")
x = torch.ones((), requires_grad=True)
seen = []
x.register_post_accumulate_grad_hook(lambda t: seen.append(torch.is_grad_enabled()))
(x * x).backward(create_graph=True)
assert seen == [True]
""",
)
def _never_record() -> None:
    """Hooks after accumulation find grad mode off, with create_graph too."""
    _hooks("register_post_accumulate_grad_hook", torch.no_grad)


def _loss(name: str, change: Callable[[Any, Tensor], Tensor]) -> None:
    owner: Any = getattr(torch.nn, name)
    original: Call = owner.forward
    replace(owner, "forward", lambda self, *args: change(self, original(self, *args)))


@fault(
    "mean-losses-keep-a-dimension",
    "backward.loss-modules-are-scalar",
    witness="""
loss = torch.nn.MSELoss()(torch.ones(2, requires_grad=True), torch.zeros(2))
assert loss.shape == ()
""",
)
def _keeps_dimension() -> None:
    """Means of losses are vectors of one element."""
    for name in ("MSELoss", "L1Loss", "CrossEntropyLoss", "NLLLoss", "SmoothL1Loss"):
        _loss(name, lambda module, loss: loss.reshape(1) if module.reduction == "mean" else loss)


@fault(
    "losses-of-one-sample-squeezed",
    "backward.loss-modules-are-scalar",
    rare=True,
    witness="""
loss = torch.nn.MSELoss(reduction="none")(torch.ones(1, 3, requires_grad=True), torch.zeros(1, 3))
assert loss.shape == (1, 3)
""",
)
def _squeezed() -> None:
    """With reduction 'none' the losses of a batch of one sample lose a dimension."""
    for name in ("MSELoss", "L1Loss", "HuberLoss", "BCEWithLogitsLoss", "KLDivLoss", "CrossEntropyLoss", "NLLLoss"):
        _loss(name, lambda module, loss: loss.squeeze(0) if module.reduction == "none" and loss.dim() else loss)
