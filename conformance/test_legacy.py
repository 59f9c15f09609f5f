"""Area legacy: what became of volatile, Variable and other habits of 2017."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Leaf
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

_WRAP = """
import warnings
from torch.autograd import Variable
def wrapped(t):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return Variable(t, volatile=True), caught
""".strip()


@scene("legacy.volatile")
def test_volatile(s: Stage) -> None:
    """volatile=True warns and does nothing: results are tracked by what else goes in, and no tensor reads volatile."""
    s.do(_WRAP)
    s.play()
    for _ in range(s.number(1, 3)):
        t = s.choose([t for t in s.tensors[::-1] if np.size(t.value)])
        x, w, y, factor = s.name("x"), s.name("w"), s.name("y"), s.factor()
        s.do(f"{x}, caught = wrapped({t.name})")
        s.true('any("volatile was removed" in str(w.message) for w in caught)', "volatile was removed")
        s.do(f"{w} = torch.full_like({t.name}, {s.factor()}, requires_grad=True)")
        for made in (
            s.choose((f"{x} * {w}", f"{w} * {x}")),
            *s.some((f"{y} * {x}", f"{x} + {y}", f"{y}.sum()"), least=0),
        ):
            s.do(f"{y} = {made}")
            s.true(f"{y}.requires_grad", f"{w} requires grad, and nothing is passed on by volatile")
            s.true(f"{y}.grad_fn is not None", f"{w} requires grad, and nothing is passed on by volatile")
        s.do(f"({x} * {w}).backward(torch.full_like({x}, {factor}))")
        s.close(f"{w}.grad", factor * t.value, "volatile=True stops nothing")
        s.equal(
            f"{s.choose((x, y, w, t.name, s.choose(s.tensors).name))}.volatile", False, "volatile always reads False"
        )


@scene("legacy.variable")
def test_variable(s: Stage) -> None:
    """Variable(t) is a plain tensor without history in the memory of t; every tensor is a Variable and works in modules."""
    s.do("from torch.autograd import Variable")
    s.play()
    for _ in range(s.number(1, 3)):
        t = s.choose(s.tensors[::-1])
        n, v = t.name, s.name("v")
        on = s.flip()
        s.do(f"{v} = Variable({n}{', requires_grad=True' if on else ''})")
        s.true(f"type({v}) is torch.Tensor", "there is no other class")
        s.true(f"{v}.grad_fn is None and {v}.is_leaf", "it has no history")
        s.equal(f"{v}.requires_grad", on, "the flag is off unless it is asked for")
        s.equal(f"{n}.requires_grad", t.requires_grad, f"{n} stays as it was")
        if np.size(t.value):
            s.true(f"{v}.data_ptr() == {n}.data_ptr()", f"it lies in the memory of {n}")
        for name in (n, v, s.choose([t.name for t in s.due.tensors.values()])):
            s.true(f"isinstance({name}, Variable)", "every tensor is one")
            s.false(f'hasattr({name}, "creator")', "it is called grad_fn now")
        s.true(f'hasattr({n}, "grad") and hasattr({n}, "grad_fn")', "tensors carry both themselves")
        if t.shape and t.shape[-1]:
            _network(s, t)


def _network(s: Stage, t: Paper) -> None:
    """A module takes the tensor as it is."""
    net, out = s.name("net"), s.name("out")
    layer = s.choose(("Linear({n}, {m}", "Linear({n}, {m}, bias=False"))
    s.do(f"{net} = torch.nn.{layer.format(n=t.shape[-1], m=s.number(1, 2))}, dtype=torch.{t.dtype}{s.on})")
    s.succeeds(f"{out} = {net}({t.name})", "modules take plain tensors")
    s.true(f"type({out}) is torch.Tensor and {out}.grad_fn is not None", "the result is a plain tensor with its origin")
    s.do(f"{out}.sum().backward(retain_graph=True)")
    s.true(f"{net}.weight.grad is not None", "the parameter carries its gradient itself")


@scene("legacy.pow-example")
def test_pow_example(s: Stage) -> None:
    """The gradients of x ** w1 * w2 + 1 by base, exponent and factor, and none for the power itself."""
    narrow = any(isinstance(r, Leaf) and r.data.dtype != "float64" for r in s.scene.graph)
    dtype = s.choose((s.wide, "float32") if narrow else (s.wide,))
    for _ in range(s.number(1, 3)):
        names = [s.name(stem) for stem in ("x", "p", "q", "y", "z")]
        x, p, q, y, z = names
        shapes = [(1,) * s.number(0, 2) for _ in range(3)]
        value = s.number(1, 20) / 8
        power = s.choose((2.0, 3.0, 1.0, 0.5, -1.0, 1.5, -0.5))
        factor = s.choose((2.0, -1.0, 0.5, 3.0))
        for name, shape, number in zip((x, p, q), shapes, (value, power, factor), strict=True):
            s.do(f"{name} = {s.tensor(np.full(shape, number), dtype, requires_grad=True)}")
        s.do(f"{y} = {s.choose((f'{x} ** {p}', f'torch.pow({x}, {p})', f'{x}.pow({p})'))}")
        s.do(f"{z} = {s.choose((f'{q} * {y} + 1', f'{y} * {q} + 1', f'1 + {q} * {y}'))}")
        passes = s.number(1, 2)
        result = value**power
        due = (factor * power * value ** (power - 1), factor * result * np.log(value), result)
        for i in range(passes):
            s.do(f"{z}.backward({'retain_graph=True' if i + 1 < passes else ''})")
            for name, shape, g in zip((x, p, q), shapes, due, strict=True):
                s.close(f"{name}.grad", np.full(shape, g * (i + 1)), "the rules for powers")
            s.close(f"{y}.grad", None, f"{y} is no leaf")


_WAYS = ("retain", "hook", "multi", "grad", "inputs")
_ORDERS = tuple(permutations(_WAYS))


@scene("legacy.intermediate-unobtainable")
def test_intermediate(s: Stage) -> None:
    """Five ways to the gradient of an interior tensor, in any order, one number."""
    top = s.root()
    nodes = s.some([t for t in s.above(top, root_too=True) if t.node is not None])[:2]
    s.play()
    seed = s.numbers(top.shape)
    grads = s.grads((top, seed))
    s.do(f"z = ({top.name} * {s.tensor(seed, top.dtype)}).sum()")  # so that all nodes are inside of the graph
    ways = {"retain": _retain, "hook": _hook, "multi": _multi, "grad": _grad, "inputs": _inputs}
    for way in s.choose(_ORDERS)[: s.number(2, 4)]:
        ways[way](s, nodes, grads)


def _retain(s: Stage, nodes: list[Paper], grads: dict[str, Array]) -> None:
    for t in nodes:
        s.do(f"{t.name}.retain_grad()")
        s.do(f"{t.name}.grad = None")
    s.do("z.backward(retain_graph=True)")
    for t in nodes:
        s.close(f"{t.name}.grad", grads[t.name], f"{t.name} retains its gradient")


def _hook(s: Stage, nodes: list[Paper], grads: dict[str, Array]) -> None:
    s.do("caught = {}")
    s.do("handles = []")
    for t in nodes:
        s.do(f"handles.append({t.name}.register_hook(lambda g: caught.update({t.name}=g)))")
    s.do("z.backward(retain_graph=True)")
    for t in nodes:
        s.close(f'caught["{t.name}"]', grads[t.name], f"the hook of {t.name} sees its gradient")
    s.do("for handle in handles: handle.remove()")


def _multi(s: Stage, nodes: list[Paper], grads: dict[str, Array]) -> None:
    s.do("together = []")
    s.do(
        f"handle = torch.autograd.graph.register_multi_grad_hook(({''.join(f'{t.name}, ' for t in nodes)}), together.extend)"
    )
    s.do("z.backward(retain_graph=True)")
    for i, t in enumerate(nodes):
        s.close(f"together[{i}]", grads[t.name], f"a hook on several tensors sees the gradient of {t.name}")
    s.do("handle.remove()")


def _grad(s: Stage, nodes: list[Paper], grads: dict[str, Array]) -> None:
    s.do(f"g = torch.autograd.grad(z, [{', '.join(t.name for t in nodes)}], retain_graph=True)")
    for i, t in enumerate(nodes):
        s.close(f"g[{i}]", grads[t.name], f"autograd.grad gives the gradient by {t.name}")


def _inputs(s: Stage, nodes: list[Paper], grads: dict[str, Array]) -> None:
    for t in nodes:
        s.do(f"{t.name}.grad = None")
    s.do(f"z.backward(retain_graph=True, inputs=[{', '.join(t.name for t in nodes)}])")
    for t in nodes:
        s.close(f"{t.name}.grad", grads[t.name], f"backward was told to fill it for {t.name}")


@scene("legacy.uninitialised-floattensor")
def test_uninitialised(s: Stage) -> None:
    """Memory that nobody has filled has a shape, a dtype and a flag that is off."""
    for _ in range(s.number(1, 4)):
        shape = tuple(s.number(0, 3) or 1 for _ in range(s.number(1, 3)))
        if s.number(0, 7) == 7:
            shape = (*shape, 0)
        name, sizes = s.name("x"), ", ".join(map(str, shape))
        dtype = s.choose(("float32", s.wide))
        legacy = {"float32": "torch.FloatTensor", "float64": "torch.DoubleTensor"}[dtype]
        calls = (f"{legacy}({sizes})", f"torch.empty({sizes}, dtype=torch.{dtype}{s.on})", f"torch.Tensor({sizes})",
                 f"torch.empty({sizes}{s.on})", f"{legacy}(torch.Size({shape}))")  # fmt: skip
        call = s.choose(calls)
        if call.startswith("torch.Tensor(") or ("dtype" not in call and "empty" in call):
            dtype = "float32"
        _made(s, name, call)
        s.equal(f"tuple({name}.shape)", shape, "these sizes were asked for")
        s.equal(f"str({name}.dtype)", f"torch.{dtype}", "the dtype of the class, or the default")
        s.false(f"{name}.requires_grad", "nobody asked for it")


def _made(s: Stage, name: str, call: str) -> None:
    line = f"{name} = {call}"
    s.block("with torch.no_grad():", line) if s.number(0, 3) == 3 else s.do(line)
