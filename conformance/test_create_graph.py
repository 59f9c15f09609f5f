"""Area create-graph: gradients that can be differentiated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograd_conformance.algebra import Differentiable, Traced
from autograd_conformance.oracle import executed_nodes
from autograd_conformance.paper import Array, Paper
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

BENDS = ("{0} * {0}", "{0}.sin()", "{0} ** 3")


@dataclass(frozen=True, slots=True)
class _Root:
    """What is differentiated: a tensor of the graph, or a nonlinear function of one."""

    name: str
    tensor: Paper
    traced: Traced


def _leaves(s: Stage) -> list[Paper]:
    """All leaves that require grad.

    Second derivatives are taken by these alone: which of the tensors between leaf and root a formula keeps is its own
    business, and so is how a first gradient depends on them.
    """
    return [t for t in s.tracked if t.is_leaf]


def _bent(s: Stage) -> _Root:
    """Play the graph and choose a root; most often a nonlinear function of it, lest there be no second derivative."""
    tensor = s.root(interior=False)
    how = s.choose(("", *BENDS) if tensor.node is not None else BENDS)
    s.play()
    traced = s.differentiable[tensor.name]
    if not how:
        return _Root(tensor.name, tensor, traced)
    y = s.name("y")
    s.do(f"{y} = {how.format(tensor.name)}")
    bent = {"{0} * {0}": lambda: traced * traced, "{0}.sin()": lambda: Differentiable.sin(traced)}
    return _Root(y, tensor, bent.get(how, lambda: traced**3)())


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def _names(tensors: Sequence[Paper]) -> str:
    return _listed([t.name for t in tensors])


def _weights(s: Stage, tensors: Sequence[Paper], numbers: Sequence[Array]) -> str:
    """The source of a list of gradients for gradients."""
    return _listed([s.tensor(n, t.dtype) for n, t in zip(numbers, tensors, strict=True)])


def _second(
    s: Stage, firsts: Sequence[Traced], weights: Sequence[Array], wrt: Sequence[Traced]
) -> tuple[list[int], list[Traced]]:
    """Which of some values depend on ``wrt`` in their numbers, and the derivative of their weighted sum."""
    useful: list[int] = []
    total: list[Traced] = []
    for i, (first, weight) in enumerate(zip(firsts, weights, strict=True)):
        parts = s.derivative(first, Traced(weight), wrt)
        if any(np.any(p.value) for p in parts):
            useful.append(i)
            total = [p + q for p, q in zip(total, parts, strict=True)] if total else parts
    s.require(useful)
    return useful, total


def _few(s: Stage, tensors: Sequence[Paper]) -> list[Paper]:
    """One or two of some tensors, in any order, one of them perhaps twice."""
    return [s.choose(tensors) for _ in range(s.number(1, 2))]


def _take(s: Stage, root: _Root, seed: str, inputs: Sequence[Paper], g: str) -> float:
    """Bind ``g`` to gradients that can be differentiated, in one of many ways; returns how many times they count."""
    arguments = f"{root.name}, {_names(inputs)}" + (f", {seed}" if seed else "")
    option = s.choose(("", "", ", allow_unused=True", ", materialize_grads=True"))
    once = f"torch.autograd.grad({arguments}, create_graph=True{option})"
    ways = ["grad", "twice"] + (["backward", "accumulated"] if all(t.is_leaf for t in inputs) else [])
    way = s.choose(ways + ["hooked"] * (len(inputs) == 1))
    if way == "hooked":  # by a hook that is a part of what is differentiated
        factor = s.factor()
        s.do(f"handle = {inputs[0].name}.register_hook(lambda g: g * {factor})\n{g} = {once}\nhandle.remove()")
        return factor
    if way == "grad":
        s.do(f"{g} = {once}")
        return 1.0
    if way == "twice":
        s.do(f"{g} = [p + q for p, q in zip({once}, {once})]")
        return 2.0
    times = 1 if way == "backward" else 2
    for _ in range(times):
        s.do(f"{root.name}.backward({seed}{', ' if seed else ''}create_graph=True)")
    s.do(f"{g} = [t.grad for t in {_names(inputs)}]")
    for t in _leaves(s):
        s.do(f"{t.name}.grad = None")  # which also breaks the cycle
    return float(times)


@scene("create-graph.second-order")
def test_second_order(s: Stage) -> None:
    """Gradients with a graph are differentiated again, and their gradients once more, by grad and by backward."""
    root = _bent(s)
    leaves = _leaves(s)
    reached = s.above(root.tensor, root_too=root.name != root.tensor.name)
    inputs = _few(s, reached)
    seed, v = s.seed(root.tensor)
    due = s.derivative(root.traced, Traced(v), [s.differentiable[t.name] for t in inputs])
    g = s.name("g")
    times = _take(s, root, seed, inputs, g)
    for i, t in enumerate(inputs):
        s.close(f"{g}[{i}]", times * due[i].value, f"the gradient of {root.name} by {t.name}")
    order, wrt, of = 1 + s.number(1, 2), [s.differentiable[t.name] for t in leaves], list(inputs)
    for now in range(2, order + 1):
        weights = [s.numbers(t.shape) for t in of]
        useful, due = _second(s, due, [times * w for w in weights], wrt)
        picked = _weights(s, [of[i] for i in useful], [weights[i] for i in useful])
        roots = _listed([f"{g}[{i}]" for i in useful])
        times, h = 1.0, s.name("h")
        why = f"the derivative of order {now} of {root.name}"
        if now == order and s.flip():
            s.do(f"torch.autograd.backward({roots}, {picked})")
            seen = [f"{t.name}.grad" for t in leaves]
            zero = [f"torch.zeros_like({t.name}) if {t.name}.grad is None else {t.name}.grad" for t in leaves]
            seen = [a if np.any(d.value) else b for a, b, d in zip(seen, zero, due, strict=True)]
        else:
            graph = "" if now == order else ", create_graph=True"
            s.do(f"{h} = torch.autograd.grad({roots}, {_names(leaves)}, {picked}{graph}, materialize_grads=True)")
            seen = [f"{h}[{i}]" for i in range(len(leaves))]
        for probe, d in zip(seen, due, strict=True):
            s.close(probe, d.value, why)
        g, of = h, leaves


# Ops whose derivative is constant, and operands of products whose derivative is the other operand.
SMOOTH = ("neg", "double", "shift", "rsub", "clone", "add", "sub", "lerp", "to_float32", "to_float64")
SUMS = ("sum", "mean", "sum_dim", "mean_dim", "cumsum", "cat", "stack", "where", "unbind", "split", "chunk")
LINEAR = frozenset(SMOOTH + SUMS)
PRODUCTS = frozenset(("mul", "div", "mm", "bmm", "mv", "dot", "outer"))


def _constant(root: Paper, x: Paper) -> bool:
    """Is the derivative of the root by ``x`` made of constants, as the formulas go?"""
    for node in executed_nodes([root], [x]):
        op = node.op
        if op.name in PRODUCTS:
            if all(t.requires_grad for t in node.inputs) or (op.name == "div" and node.inputs[1].requires_grad):
                return False
        elif op.name not in LINEAR and op.kind not in ("view", "index"):
            return False
    return True


@scene("create-graph.result-tracks")
def test_result_tracks(s: Stage) -> None:
    """A gradient with a graph requires grad where it depends on what does, and not where it is a constant."""
    root = s.root(interior=False)
    reached = [t for t in s.above(root, root_too=True) if np.size(t.value)]
    inputs, leaves = s.some(reached), _leaves(s)
    by_backward = all(t.is_leaf for t in inputs) and s.flip()
    s.play()
    seed, v = s.seed(root)
    traced = Traced(v)
    firsts = s.derivative(s.differentiable[root.name], traced, [s.differentiable[t.name] for t in inputs])
    tracked_seed = bool(seed) and s.flip()
    if tracked_seed:
        s.do(f"{seed}.requires_grad_()")
    g, given = s.name("g"), f"{seed}, " if seed else ""
    if by_backward:
        s.do(f"{root.name}.backward({given}create_graph=True)")
    else:
        s.do(f"{g} = torch.autograd.grad({root.name}, {_names(inputs)}, {given}create_graph=True)")
    wrt = [s.differentiable[t.name] for t in leaves] + ([traced] if tracked_seed else [])
    for i, (t, first) in enumerate(zip(inputs, firsts, strict=True)):
        probe = f"{t.name}.grad" if by_backward else f"{g}[{i}]"
        if not tracked_seed and _constant(root, t):
            s.false(f"{probe}.requires_grad", f"the derivative of {root.name} by {t.name} is made of constants")
        elif any(np.any(d.value) for d in s.derivative(first, Traced(s.numbers(t.shape)), wrt)):
            s.true(f"{probe}.requires_grad", f"the derivative of {root.name} by {t.name} changes with a leaf")


@scene("create-graph.same-values")
def test_same_values(s: Stage) -> None:
    """Passes with and without a graph of their own, in any order, give the same gradients and sums of them."""
    root = s.root()
    reached = s.above(root)
    leaves = [t for t in reached if t.is_leaf]
    s.play()
    seed, v = s.seed(root)
    given, grads = f"{seed}, " if seed else "", s.grads((root, v))
    flags = [True, False] if s.flip() else [False, True]
    for created in (*flags, *(s.flip() for _ in range(s.number(0, 2)))):
        options = f"{given}create_graph={created}" + ("" if created else ", retain_graph=True")
        if leaves and s.flip():
            s.do(f"{root.name}.backward({options})")
            for t in leaves:
                s.close(
                    f"{t.name}.grad", grads[t.name], f"the gradient of {root.name} by {t.name}, create_graph or not"
                )
            for t in leaves:  # what is added in place may lie in the memory of another gradient, which is another claim
                s.do(f"{t.name}.grad = None")
        else:
            inputs, g = s.some(reached), s.name("g")
            s.do(f"{g} = torch.autograd.grad({root.name}, {_names(inputs)}, {options})")
            for i, t in enumerate(inputs):
                s.close(f"{g}[{i}]", grads[t.name], f"the gradient of {root.name} by {t.name}, create_graph or not")


@scene("create-graph.symmetric-hessian")
def test_symmetric_hessian(s: Stage) -> None:
    """Mixed second derivatives of two leaves, or of one with itself, do not depend on the order."""
    root = _bent(s)
    leaves = [t for t in s.above(root.tensor, root_too=True) if t.is_leaf]
    x, z = s.choose([(x, z) for i, x in enumerate(leaves) for z in leaves[i:]][::-1])
    seed, v = s.seed(root.tensor)
    u, w = s.numbers(x.shape), s.numbers(z.shape)[::-1] if z.shape else s.numbers(z.shape)
    traced = [s.differentiable[t.name] for t in (x, z)]
    one, two = s.derivative(root.traced, Traced(v), traced)
    (by_z,), (by_x,) = s.derivative(one, Traced(u), traced[1:]), s.derivative(two, Traced(w), traced[:1])
    s.require(np.any(by_z.value) and np.any(by_x.value))
    given = f"{seed}, " if seed else ""
    s.do(f"u, w = {s.tensor(u, x.dtype)}, {s.tensor(w, z.dtype)}")
    if s.flip():
        for first, vector, other, h in ((x, "u", z, "h1"), (z, "w", x, "h2")):
            s.do(f"g, = torch.autograd.grad({root.name}, {first.name}, {given}create_graph=True)")
            s.do(f"{h}, = torch.autograd.grad(g, {other.name}, {vector}, retain_graph=True)")
    else:
        s.do(f"g = torch.autograd.grad({root.name}, [{x.name}, {z.name}], {given}create_graph=True)")
        s.do(f"h1, = torch.autograd.grad(g[0], {z.name}, u, retain_graph=True)")
        s.do(f"h2, = torch.autograd.grad(g[1], {x.name}, w)")
    why = f"the second derivative by {x.name} and {z.name}"
    s.close("h1", by_z.value, f"{why}, in this order")
    s.close("h2", by_x.value, f"{why}, in the other order")
    terms = by_z.value * w
    if abs(terms.sum()) > 0.01 * np.abs(terms).sum():  # else rounding is all that is left of it
        s.close("(h1 * w).sum()", np.asarray(terms.sum()), f"{why} is symmetric")
        s.close("(h2 * u).sum()", np.asarray(terms.sum()), f"{why} is symmetric")


_CAUGHT = """with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
"""
_CYCLE = (
    "[w.category.__name__ for w in caught if 'Using backward() with create_graph=True"
    " will create a reference cycle' in str(w.message)]"
)


@scene("create-graph.backward-warns-cycle")
def test_backward_warns_cycle(s: Stage) -> None:
    """Each backward with create_graph warns of the cycle; other passes do not."""
    root = s.root(interior=False)
    leaves = [t for t in s.above(root, root_too=True) if t.is_leaf]
    s.do("import warnings")
    s.play()
    seed, _ = s.seed(root)
    s.do("always = torch.is_warn_always_enabled()\ntorch.set_warn_always(True)")
    for _ in range(s.number(1, 3)):
        which = s.choose(("method", "function", "grad", "plain"))
        graph = "retain_graph=True" if which == "plain" else "create_graph=True"
        if s.flip() and which != "plain":
            graph += s.choose((", retain_graph=True", ", retain_graph=None"))
        if which == "grad":
            call = f"torch.autograd.grad({root.name}, {_names(leaves)}, {seed or None}, {graph})"
        elif which == "function":
            call = f"torch.autograd.backward({_names([root])}, [{seed or None}], {graph})"
        else:
            restricted = f", inputs={_names(leaves)}" if s.flip() else ""
            call = f"{root.name}.backward({seed or None}, {graph}{restricted})"
        s.do(f"{_CAUGHT}    {call}")
        warns = which in ("method", "function")
        why = "this makes parameter and gradient refer to each other" if warns else "this makes no cycle"
        s.equal(_CYCLE, ["UserWarning"] if warns else [], why)
    s.do("torch.set_warn_always(always)")
    for t in leaves:
        s.do(f"{t.name}.grad = None")


@scene("create-graph.differentiable-in-grad-outputs")
def test_differentiable_in_grad_outputs(s: Stage) -> None:
    """The gradient by a gradient argument is the product of Jacobian and weights, whatever the argument is made of."""
    root = s.root()
    inputs = _few(s, s.above(root))
    kind = s.choose(("leaf", "leaf", "made", "graph"))
    s.play()
    own = s.numbers(root.shape)
    p = Traced(own)
    if kind == "graph":  # the gradient argument is a tensor of the graph, of the same shape
        alike = [t for t in s.tracked if (t.shape, t.dtype) == (root.shape, root.dtype)]
        t = s.choose(alike)
        name, v = t.name, s.differentiable[t.name]
    else:
        name, v = "v", p
        s.do(f"v = {s.tensor(own, root.dtype, requires_grad=True)}")
        if kind == "made":
            name, v = "w", p * p * 0.5
            s.do("w = v * v * 0.5")
    leaves = _leaves(s)
    wrt = [s.differentiable[t.name] for t in leaves] + ([] if kind == "graph" else [p])
    targets = [t.name for t in leaves] + ([] if kind == "graph" else ["v"])
    firsts = s.derivative(s.differentiable[root.name], v, [s.differentiable[t.name] for t in inputs])
    weights = [s.numbers(t.shape) for t in inputs]
    s.do(f"g = torch.autograd.grad({root.name}, {_names(inputs)}, {name}, create_graph=True)")
    for i, (t, first) in enumerate(zip(inputs, firsts, strict=True)):
        s.close(f"g[{i}]", first.value, f"the gradient of {root.name} by {t.name}")
    useful, due = _second(s, firsts, weights, wrt)
    roots = _listed([f"g[{i}]" for i in useful])
    picked = _weights(s, [inputs[i] for i in useful], [weights[i] for i in useful])
    if kind != "graph" and s.flip():
        s.do(f"torch.autograd.backward({roots}, {picked})")
        s.close("v.grad", due[-1].value, f"the gradient is linear in {name}")
        return
    s.do(f"h = torch.autograd.grad({roots}, {_listed(targets)}, {picked}, materialize_grads=True)")
    for i, d in enumerate(due):
        s.close(f"h[{i}]", d.value, f"the gradient is linear in {name}; here it is differentiated by {targets[i]}")


@scene("create-graph.gradient-penalty")
def test_gradient_penalty(s: Stage) -> None:
    """A loss with a penalty on gradients fills the .grad of all leaves with its derivative."""
    root = _bent(s)
    reached = s.above(root.tensor, root_too=root.name != root.tensor.name)
    inputs, leaves = _few(s, reached), _leaves(s)
    seed, v = s.seed(root.tensor)
    g, k = s.name("g"), s.factor()
    times = _take(s, root, seed, inputs, g)
    firsts = s.derivative(root.traced, Traced(v), [s.differentiable[t.name] for t in inputs])
    total: Any = None
    for first in firsts:
        squares = Differentiable.sum_to(first * first * (times * times), ())
        total = squares if total is None else total + squares
    s.do(f"penalty = sum((x ** 2).sum() for x in {g})")
    if s.flip():
        s.do(f"penalty = ((penalty + 1.0).sqrt() - {k}) ** 2")
        total = _sqrt(total + 1.0) - k
        total = total * total
    if s.flip():
        s.do(f"penalty = penalty + {root.name}.sum()")
        total = total + Differentiable.sum_to(root.traced, ())
    due = s.derivative(total, Traced(np.ones(())), [s.differentiable[t.name] for t in leaves])
    s.require(any(np.any(d.value) for d in due))
    s.do("penalty.backward()")
    for t, d in zip(leaves, due, strict=True):
        zero = f"torch.zeros_like({t.name}) if {t.name}.grad is None else {t.name}.grad"
        s.close(f"{t.name}.grad" if np.any(d.value) else zero, d.value, f"the derivative of the penalty by {t.name}")


def _sqrt(x: Traced) -> Traced:
    return x**0.5
