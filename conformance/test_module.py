"""Area module: parameters, networks and what one backward does to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from autograd_conformance.algebra import Traced
from autograd_conformance.nets import (
    ACTIVATIONS,
    CLEAR,
    Input,
    Layer,
    Loss,
    Net,
    Parameter,
    activation,
    embedding,
    entry,
    linear,
    loss,
    network,
    slopes,
)
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

T = TypeVar("T")
OFF = ("{0}.requires_grad_(False)", "{0}.requires_grad = False")


@dataclass(slots=True)
class Pass:
    """A network between an input and a loss, on paper."""

    x: Input
    net: Net
    y: Traced
    of: Loss
    total: Traced

    def build(self, s: Stage) -> None:
        """Add the lines that make network and loss."""
        self.net.build(s)
        self.of.build(s)

    def backward(self, net: str = "") -> str:
        """One line: forward, loss and backward."""
        return f"{self.of.text.format(f'{net or self.net.name}({self.x.name})')}.backward()"


def prepare(s: Stage, *, nodes: bool = True, tracked: bool | None = None, least: int = 1, most: int = 3) -> Pass:
    """An input, whose lines are added, a network and a loss."""
    x = entry(s, nodes=nodes, tracked=tracked)
    net = network(s, s.name("net"), x.at, x.dtype, least=least, most=most)
    y = net(x.at)
    of = loss(s, y.shape, x.dtype)
    demand_clear(s, of, y, net)
    return Pass(x, net, y, of, of(y))


def demand_clear(s: Stage, of: Loss, y: Traced, *nets: Net) -> None:
    """Give up a scene whose numbers are close to a kink."""
    s.require(all(net.clear for net in nets) and (of.margin is None or of.margin(y.value) > CLEAR))


def part(s: Stage, options: Sequence[T], *, proper: bool = False) -> list[T]:
    """Any of the options, or none, by one dial; if ``proper`` not all."""
    bits = s.number(0, 2 ** len(options) - 1 - proper)
    return [option for i, option in enumerate(options) if bits >> i & 1]


def look_at_grads(
    s: Stage, parameters: Iterable[Parameter], root: Traced, *, frozen: Sequence[Parameter] = (), times: int = 1
) -> None:
    """Each ``.grad`` is the slope of the loss, or None where the flag is off."""
    wanted = list(parameters)
    for p, g in zip(wanted, slopes(root, wanted), strict=True):
        if p in frozen:
            s.equal(f"{p.path}.grad", None, f"{p.path} was switched off before the forward")
        else:
            s.close(f"{p.path}.grad", times * g, f"this is the derivative of the loss by {p.path}")


def look_at_input(s: Stage, x: Input, root: Traced, *, times: int = 1) -> None:
    """The gradients of the input, or of the leaves of the graph that it is made from."""
    if not x.requires_grad:
        if x.paper is None or x.paper.is_leaf:
            s.equal(f"{x.name}.grad", None, f"{x.name} does not require grad")
        return
    (g,) = slopes(root, [x.at])
    if x.paper is None:
        s.close(f"{x.name}.grad", times * g, f"this is the derivative of the loss by {x.name}")
        return
    found = s.grads((x.paper, times * g))
    for leaf in s.leaves:
        if leaf.requires_grad:
            s.close(f"{leaf.name}.grad", found.get(leaf.name), f"this is the derivative of the loss by {leaf.name}")


# --- networks in a row ------------------------------------------------------------------------------------------------


@scene("module.two-nets-chained")
def test_two_nets(s: Stage) -> None:
    """One backward of a loss behind two networks fills .grad of both; what passes between them has none."""
    x = entry(s)
    one = network(s, "net1", x.at, x.dtype, most=2)
    if s.flip():
        one, x = _words(s, one, x)
    y = one(x.at)
    two = network(s, "net2", y, x.dtype, most=2, start=len(one.parameters))
    z = two(y)
    of = loss(s, z.shape, x.dtype)
    demand_clear(s, of, z, one, two)
    off = [*part(s, one.parameters, proper=True), *part(s, two.parameters)]
    one.build(s)
    two.build(s)
    of.build(s)
    rounds = s.number(1, 2) if x.paper is None or x.paper.node is None else 1
    trained, how, everything = rounds > 1 and s.flip(), s.choose(OFF), [*one.parameters, *two.parameters]
    for p in off:
        s.do(how.format(p.path))
    if trained:
        both = "net1.parameters(), net2.parameters()"
        s.do(f"import itertools\noptimizer = torch.optim.SGD(itertools.chain({both}), lr=0.25, momentum=0.5)")
    for times in range(1, rounds + 1):
        s.do(f"y = net1({x.name})")
        s.true("y.requires_grad", "it was made with parameters that require grad")
        s.do(f"{of.text.format('net2(y)')}.backward()")
        s.equal("y.grad", None, "y is no leaf")
        look_at_grads(s, everything, of(z), frozen=off, times=1 if trained else times)
        if trained and times < rounds:
            s.do("optimizer.step()\noptimizer.zero_grad()")
            for p, g in zip(everything, slopes(of(z), everything), strict=True):
                p.set(p.at.value - (0.0 if p in off else 0.25 * g))
            z = two(one(x.at))
            demand_clear(s, of, z, one, two)
        if not trained:
            look_at_input(s, x, of(z), times=times)


def _words(s: Stage, net: Net, x: Input) -> tuple[Net, Input]:
    """An Embedding of whole numbers in place of the network; the graph, if it was played, stands by."""
    rows = s.choose(([0], [1, 1], [0, 2, 0], [[2, 1], [2, 2]]))
    size = s.number(1, 3)
    name = s.name("words")
    s.do(f"{name} = {s.tensor(rows, 'int64')}")
    return Net(s, net.name, [embedding(3, size)], x.dtype), Input(name, Traced(rows), x.dtype, requires_grad=False)


@scene(
    "module.split-equals-fused",
)
def test_split(s: Stage) -> None:
    """A network split into two at any layer gives the output and the parameter gradients of the whole."""
    it = prepare(s, nodes=False, least=2)
    net = it.net
    it.build(s)
    s.do(it.backward())
    look_at_grads(s, net.parameters, it.total)
    cuts = list(range(1, len(net.layers)))
    for cut in part(s, cuts)[:2] or cuts[:1]:
        _split(s, it, cut, copied=s.flip())


def _split(s: Stage, it: Pass, cut: int, *, copied: bool) -> None:
    """Two networks of the same modules, or of new ones that are filled alike."""
    net, front, back = it.net, s.name("front"), s.name("back")
    parameters, root = net.parameters, it.total
    if copied:
        layers = deepcopy(net.layers)
        one = Net(s, front, layers[:cut], net.dtype)
        two = Net(s, back, layers[cut:], net.dtype, start=len(one.parameters))
        one.build(s)
        two.build(s)
        parameters, root = [*one.parameters, *two.parameters], it.of(two(one(it.x.at)))
    else:
        paths = [net.paths[id(layer)] for layer in net.layers]
        s.do(f"{front} = torch.nn.Sequential({', '.join(paths[:cut])})")
        s.do(f"{back} = torch.nn.Sequential({', '.join(paths[cut:])})")
        s.do("\n".join(f"{p.path}.grad = None" for p in net.parameters))
    y = s.name("y")
    s.do(f"{y} = {back}({front}({it.x.name}))")
    s.close(f"{y}.detach()", it.y.value, "the two halves compute what the whole computes")
    s.do(f"{it.of.text.format(y)}.backward()")
    look_at_grads(s, parameters, root)


# --- switching parameters off -----------------------------------------------------------------------------------------


@scene("module.freeze-stops-own-grad")
def test_freeze(s: Stage) -> None:
    """What is switched off before the forward keeps .grad None, and nothing else changes."""
    it = prepare(s, nodes=False)
    net = it.net
    it.build(s)
    for number in range(s.number(1, 3)):
        if number:
            _reset(s, it)
        off = part(s, net.parameters)
        if not off and not it.x.requires_grad:
            off = net.parameters[1:] or []
        _switch(s, net, off, again=number > 0)
        if len(off) == len(net.parameters) and not it.x.requires_grad:
            s.false(f"{net.name}({it.x.name}).requires_grad", "everything is off, and the input does not require grad")
            continue
        s.do(it.backward())
        look_at_grads(s, net.parameters, it.total, frozen=off)
        look_at_input(s, it.x, it.total)


def _reset(s: Stage, it: Pass) -> None:
    """No gradients are left, and all parameters are on, so that the next pass starts anew."""
    leaves = [leaf.name for leaf in s.leaves if leaf.requires_grad] if it.x.paper is not None else []
    for name in [p.path for p in it.net.parameters] + (leaves or [it.x.name]):
        s.do(f"{name}.grad = None")


def _switch(s: Stage, net: Net, off: Sequence[Parameter], *, again: bool) -> None:
    """Switch these off, one by one or all at once, and, if the network was used before, all others on."""
    how = s.choose(OFF)
    if again:
        for p in net.parameters:
            s.do(f"{p.path}.requires_grad_({p not in off})")
    elif len(off) == len(net.parameters) and s.flip():
        s.do(f"for p in {net.name}.parameters():\n    {how.format('p')}")
    else:
        for p in off:
            s.do(how.format(p.path))


@scene("module.freeze-passes-through")
def test_passes_through(s: Stage) -> None:
    """A frozen module in the middle lets gradients through: the layers before it get what they get without it."""
    it = prepare(s, least=2, most=4)
    net = it.net
    holders = [layer for layer in net.layers if layer.parameters]
    s.require(len(holders) > 1)
    first = s.number(1, len(holders) - 1)
    frozen = holders[first : s.number(first + 1, len(holders))]
    it.build(s)
    for layer in frozen:
        path = net.paths[id(layer)]
        s.do(s.choose((f"{path}.requires_grad_(False)", f"for p in {path}.parameters():\n    p.requires_grad = False")))
    off = [p for layer in frozen for p in layer.parameters]
    if s.flip():
        s.do(f"y = {net.name}({it.x.name})")
        s.true("y.requires_grad", "layers before the frozen ones have parameters that require grad")
        s.do(f"{it.of.text.format('y')}.backward()")
    else:
        s.do(it.backward())
    look_at_grads(s, net.parameters, it.total, frozen=off)
    look_at_input(s, it.x, it.total)


@scene("module.output-requires-grad")
def test_output(s: Stage) -> None:
    """One parameter with the flag is enough for the output to require grad, whatever the input."""
    x = entry(s, tracked=False)
    net = network(s, "net", x.at, x.dtype)
    net.build(s)
    on = f"{net.name}({x.name})"
    s.true(f"{on}.requires_grad", "all parameters require grad")
    s.do(f"for p in {net.name}.parameters():\n    p.requires_grad = False")
    lit: set[str] = set()
    chosen = part(s, net.parameters) or net.parameters[-1:]
    for p in chosen[::-1] if s.flip() else chosen:
        lit.add(p.path)
        s.do(f"{p.path}.requires_grad_()")
        s.equal(f"({on}.requires_grad, {on}.is_leaf)", (True, False), f"{p.path} requires grad")
        if s.flip():
            lit.remove(p.path)
            s.do(f"{p.path}.requires_grad_(False)")
            s.equal(f"{on}.requires_grad", bool(lit), "a parameter requires grad, or none does any more")


@scene("module.requires-grad-method")
def test_method(s: Stage) -> None:
    """requires_grad_ of any module of a network sets the flags of all parameters below it, and returns it."""
    x = entry(s, tracked=False)
    net = network(s, "net", x.at, x.dtype, most=4)
    net.build(s, fill=False)
    flags = dict.fromkeys([p.path for p in net.parameters], True)
    buffer = s.name("buffer")
    s.do(f"{buffer} = {s.tensor([1.0], x.dtype, requires_grad=s.flip())}")
    tracked = "requires_grad=True" in s.script.items[-1].text  # type: ignore[union-attr]
    s.do(f"{net.name}.register_buffer('buffer', {buffer})")
    for _ in range(s.number(1, 3)):
        module, text, flag = (
            s.choose(net.modules),
            *s.choose((("False", False), ("", True), ("True", True), ("requires_grad=False", False))),
        )
        s.do(f"same = {module}.requires_grad_({text})")
        s.true(f"same is {module}", "the method returns the module")
        for path in flags:
            flags[path] = flag if _below(path, module) else flags[path]
            s.equal(f"{path}.requires_grad", flags[path], f"the last call that {path} was under said so")
        s.equal(f"{buffer}.requires_grad", tracked, "it is a buffer")
        s.equal(f"{net.name}({x.name}).requires_grad", any(flags.values()), "a parameter requires grad, or none")


def _below(path: str, module: str) -> bool:
    return path.startswith((f"{module}.", f"{module}["))


# --- resetting gradients ----------------------------------------------------------------------------------------------

OPTIMIZERS = ("SGD({0}, lr=0.5)", "Adam({0})", "SGD({0}, lr=0.5, momentum=0.5)", "AdamW({0})", "RMSprop({0})")
KEEP = (("", True), ("set_to_none=False", False), ("False", False), ("set_to_none=True", True), ("True", True))


@dataclass(slots=True)
class _Grad:
    """What is known of a parameter: its flag, and whether it has a .grad."""

    path: str
    flag: bool = True
    filled: bool = False

    def switch(self, s: Stage, *, flag: bool) -> None:
        """Set the flag, if it is another."""
        if flag != self.flag:
            s.do(f"{self.path}.requires_grad_({flag})")
        self.flag = flag


@scene("module.zero-grad-default-none")
def test_zero_grad(s: Stage) -> None:
    """zero_grad sets each .grad to None, or zeroes those that are there in place, cut from any graph."""
    it = prepare(s, tracked=False)
    it.build(s)
    grads = [_Grad(p.path) for p in it.net.parameters]
    for _ in range(s.number(1, 2)):
        _fill_grads(s, it, grads)
        owner, inside = _owner(s, it.net)
        for _ in range(s.number(1, 2)):
            s.do(f"kept = [{', '.join(f'{g.path}.grad' for g in grads)}]")
            text, to_none = s.choose(KEEP)
            s.do(f"{owner}.zero_grad({text})")
            _look_at_reset(s, grads, inside, to_none=to_none)


def _fill_grads(s: Stage, it: Pass, grads: Sequence[_Grad]) -> None:
    """Backward with all flags on; then some parameters lose their .grad, and some are switched off."""
    off, empty = part(s, grads, proper=True), part(s, grads, proper=True)
    for g in grads:
        g.switch(s, flag=True)
    s.do(it.backward().replace(".backward()", f".backward({s.choose(('', 'create_graph=True'))})"))
    for g in grads:
        g.filled = g not in empty
        if g in empty:
            s.do(f"{g.path}.grad = None")
        g.switch(s, flag=g not in off)


def _owner(s: Stage, net: Net) -> tuple[str, list[str]]:
    """Who resets: a module, or an optimizer of some parameters in one group or two; and the parameters below it."""
    paths = [p.path for p in net.parameters]
    if not s.flip():
        module = s.choose(net.modules)
        return module, [path for path in paths if _below(path, module)]
    given = part(s, paths) or paths
    groups, optimizer = f"[{', '.join(given)}]", s.name("optimizer")
    if len(given) > 1 and s.flip():
        groups = f"[{{'params': [{given[0]}]}}, {{'params': [{', '.join(given[1:])}]}}]"
    s.do(f"{optimizer} = torch.optim.{s.choose(OPTIMIZERS).format(groups)}")
    return optimizer, given


def _look_at_reset(s: Stage, grads: Sequence[_Grad], inside: Sequence[str], *, to_none: bool) -> None:
    for i, g in enumerate(grads):
        path, reset = g.path, g.path in inside
        g.filled = g.filled and not (to_none and reset)
        if not g.filled:
            s.equal(f"{path}.grad", None, "reset to None, as by default, or None before")
        elif reset:
            s.equal(
                f"{path}.grad is kept[{i}] and (kept[{i}].any().item(), kept[{i}].requires_grad, kept[{i}].grad_fn)",
                (False, False, None),
                "with set_to_none=False a .grad that is there is zeroed in place and has no graph",
            )
        else:
            s.true(f"{path}.grad is kept[{i}]", "it is not among those that are reset")


# --- apply ------------------------------------------------------------------------------------------------------------


@scene("module.apply-visits-all")
def test_apply(s: Stage) -> None:
    """apply calls a function once with every module of a tree, and returns the module."""
    x = entry(s, graph=False)
    net = network(s, "net", x.at, x.dtype, most=4)
    net.build(s, fill=False)
    for _ in range(s.number(1, 3)):
        module = s.choose(net.modules)
        below = [module, *(path for path in net.modules if _below(path, module))]
        s.do("visited = []")
        s.do(f"same = {module}.apply({s.choose(('visited.append', 'lambda m: visited.append(m)'))})")
        s.true(f"same is {module}", "apply returns the module")
        for path in below:
            s.equal(f"sum(m is {path} for m in visited)", 1, f"{path} is {module} or below it")
        s.equal("len(visited)", len(below), "nothing else is visited")


# init function -> what it fills in, if that is sure
INITS = (
    ("torch.nn.init.constant_({0}, 0.75)", 0.75),
    ("torch.nn.init.ones_({0})", 1.0),
    ("torch.nn.init.zeros_({0})", 0.0),
    ("torch.nn.init.uniform_({0}, 0.5, 0.5)", 0.5),
    ("torch.nn.init.normal_({0}, -0.5, 0.0)", -0.5),
    ("torch.nn.init.trunc_normal_({0}, 0.25, 1e-12, 0.0, 1.0)", 0.25),
)
WAYS = ("{0}", "torch.no_grad:{1}.fill_({2})", "torch.no_grad:{1}.copy_(torch.full_like({1}, {2}))")


@scene("module.apply-initialisation")
def test_initialisation(s: Stage) -> None:
    """Initialising through apply changes values only; filling a parameter in grad mode raises."""
    it = prepare(s, tracked=False)
    net = it.net
    it.build(s)
    off, with_grad = part(s, net.parameters, proper=True), s.flip()
    if with_grad:
        s.do(it.backward())
    for p in off:
        s.do(f"{p.path}.requires_grad_(False)")
    s.do(f"before = [{', '.join(p.path for p in net.parameters)}]\ngrads = [p.grad for p in before]")
    for _ in range(s.number(1, 2)):
        _initialise(s, net)
        for i, p in enumerate(net.parameters):
            s.equal(
                f"({p.path} is before[{i}], {p.path}.requires_grad, {p.path}.is_leaf, {p.path}.grad_fn, {p.path}.grad is grads[{i}])",
                (True, p not in off, True, None, True),
                "initialising changes values only",
            )
            s.close(f"{p.path}.detach()", p.at.value, "this is what the function fills in")
    if s.flip():
        p = s.choose([p for p in net.parameters if p not in off])
        owner = p.path.rpartition(".")[0]
        write = s.choose((f"m.{p.attribute}.fill_(0.5)", f"m.{p.attribute}.mul_(2.0)", f"m.{p.attribute}.zero_()"))
        text = f"{owner}.apply(lambda m: {write})"
        s.raises(
            text, "RuntimeError", f"{p.path} is a leaf that requires grad", fragment="leaf Variable that requires grad"
        )
        s.close(f"{p.path}.detach()", p.at.value, "nothing was written")
    y = net(it.x.at)
    s.require(net.clear and (it.of.margin is None or it.of.margin(y.value) > CLEAR))
    if not with_grad:
        for p in off:
            s.do(f"{p.path}.requires_grad_()")
        s.do(it.backward())
        look_at_grads(s, net.parameters, it.of(y))


def _initialise(s: Stage, net: Net) -> None:
    """One apply of a function that fills all parameters, or those of one name."""
    attribute = s.choose(("", *dict.fromkeys(p.attribute for p in net.parameters)))
    (call, value), way = s.choose(INITS), s.choose(WAYS)
    target = f"m.{attribute}" if attribute else "p"
    mode, _, text = way.format(call.format(target), target, value).rpartition(":")
    if "{0}" in way:
        mode, text = "", call.format(target)
    body = [f"with {mode}():", f"    {text}"] if mode else [text]
    one, each = f"if getattr(m, {attribute!r}, None) is not None:", "for p in m.parameters(recurse=False):"
    head = one if attribute else each
    s.do("\n".join(["def init(m):", f"    {head}", *(f"        {line}" for line in body)]))
    s.do(f"{net.name}.apply(init)")
    for p in net.parameters:
        if attribute in ("", p.attribute):
            p.set(np.full(p.shape, value))


# --- one parameter, many uses -----------------------------------------------------------------------------------------


@scene("module.shared-use-sums")
def test_shared(s: Stage) -> None:
    """A module applied several times, or a parameter that modules share, gets the sum over its uses."""
    x = entry(s, nodes=False)
    size, bias = x.at.shape[-1], s.flip()
    shared, after = linear(size, size, bias=bias), s.choose((None, *list(ACTIVATIONS)[:6]))
    between = [] if after is None else [activation(after)]
    how = s.number(
        0, 3
    )  # 0: in a loop; 1: twice in a container; 2: one weight or bias in two modules; 3: all parameters
    uses = s.number(2, 3)
    parts = [shared]
    for _ in range(uses - 1):
        follower = shared if how <= 1 else _tied(shared, size, bias=bias, all_of_them=how == 3)
        parts += [*between, follower]
    net = Net(s, "net", [shared, *between] if how == 0 else parts, x.dtype)
    y = x.at
    for _ in range(uses if how == 0 else 1):
        y = net(y)
    of = loss(s, y.shape, x.dtype)
    demand_clear(s, of, y, net)
    net.build(s)
    of.build(s)
    off = part(s, net.parameters[1:], proper=True) if len(net.parameters) > 1 else []
    for p in off:
        s.do(f"{p.path}.requires_grad_(False)")
    for times in range(1, s.number(1, 2) + 1):
        s.do(f"y = {x.name}\nfor _ in range({uses}):\n    y = net(y)" if how == 0 else f"y = net({x.name})")
        s.do(f"{of.text.format('y')}.backward()")
        look_at_grads(s, net.parameters, of(y), frozen=off, times=times)
        look_at_input(s, x, of(y), times=times)


def _tied(layer: Layer, size: int, *, bias: bool, all_of_them: bool) -> Layer:
    """Another Linear, with the weight of the first, or with its bias too."""
    other = linear(size, size, bias=bias)
    mine = layer.parameters if all_of_them else (layer.parameters[0], *other.parameters[1:])
    return replace(other, parameters=mine)


# --- registration -----------------------------------------------------------------------------------------------------

NODE = """class Node(torch.nn.Module):
    pass"""
PARAMETER = (
    "{n}.{k} = torch.nn.Parameter({v})",
    "{n}.register_parameter('{k}', torch.nn.Parameter({v}))",
    "setattr({n}, '{k}', torch.nn.Parameter(data={v}, requires_grad=True))",
)
PLAIN = (
    "{n}.{k} = {v}",
    "{n}.{k} = {v}.requires_grad_()",
    "{n}.{k} = [torch.nn.Parameter({v})]",
    "{n}.{k} = {{'p': torch.nn.Parameter({v})}}",
    "{n}.{k} = [torch.nn.Linear(1, 1)]",
    "{n}.{k} = (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))",
)
BUFFER = ("{n}.register_buffer('{k}', {v})", "{n}.register_buffer('{k}', {v}, persistent=False)")
CHILD = (
    "{n}.{k} = {c}",
    "{n}.add_module('{k}', {c})",
    "{n}.register_module('{k}', {c})",
    "{n}.{k} = torch.nn.ModuleList([{c}])",
    "{n}.{k} = torch.nn.ModuleDict({{'m': {c}}})",
    "{n}.{k} = torch.nn.Sequential({c})",
)


@scene("module.registration")
def test_registration(s: Stage) -> None:
    """Parameters and modules that are assigned are registered, each once; what else is assigned is not."""
    s.do(NODE)
    nodes = [f"n{i}" for i in range(1, s.number(1, 4) + 1)]
    s.do("; ".join(f"{n} = Node()" for n in nodes))
    below = {n: [n] for n in nodes}
    for i, child in enumerate(nodes[1:], 1):  # each hangs below an earlier one, perhaps below two of them
        for n in dict.fromkeys((s.choose(nodes[:i]), nodes[0] if s.flip() else nodes[i - 1])):
            s.do(s.choose(CHILD).format(n=n, k=f"c{i}", c=child))
            for above in nodes[:i]:
                below[above] += [child] if n in below[above] and child not in below[above] else []
    own: dict[str, list[str]] = {n: [] for n in nodes}  # parameters that hang on each
    value = s.tensor(s.numbers(s.choose(((1,), (), (2, 3), (0,)))), s.choose(("float32", s.wide)))
    for i in range(s.number(1, 5)):
        _attach(s, own, s.choose(nodes), f"k{i}", value)
    _look_at_trees(s, own, below)
    if own[nodes[0]] and s.flip():
        changed = own[nodes[0]][0]
        s.raises(f"{changed} = {value}", "TypeError", "it is no Parameter", fragment="as parameter")
        _look_at_trees(s, own, below)


def _attach(s: Stage, own: dict[str, list[str]], n: str, key: str, value: str) -> None:
    """One more attribute: a new parameter, one that another module has, or something that is none."""
    known = [p for each in own.values() for p in each]
    kind = s.choose(("new", "plain", "buffer", "new", "known" if known else "new"))
    if kind == "known":
        shared = s.choose(known)
        s.do(f"{n}.{key} = {shared}")
        own[n] += [shared] if shared not in own[n] else []
    elif kind == "plain":
        s.do(s.choose(PLAIN).format(n=n, k=key, v=value))
    elif kind == "buffer":
        s.do(s.choose(BUFFER).format(n=n, k=key, v=value))
        s.equal(f"({n}.{key}.requires_grad, sum(b is {n}.{key} for b in {n}.buffers()))", (False, 1), "it is a buffer")
    else:
        s.do(s.choose(PARAMETER).format(n=n, k=key, v=value))
        own[n].append(f"{n}.{key}")


def _look_at_trees(s: Stage, own: dict[str, list[str]], below: dict[str, list[str]]) -> None:
    """What parameters() lists, for each module."""
    for n, others in below.items():
        due = list(dict.fromkeys(p for other in others for p in own[other]))
        probe = f"[sum(p is q for p in {n}.parameters()) for q in [{', '.join(due)}]]"
        s.equal(probe, [1] * len(due), f"these hang on {n} or on what is below it, and are listed once")
        s.equal(f"len(list({n}.parameters()))", len(due), "nothing else is a parameter")
        mine = f"[sum(p is q for p in {n}.parameters(recurse=False)) for q in [{', '.join(own[n])}]]"
        s.equal(mine, [1] * len(own[n]), f"these hang on {n} itself")


# --- new modules ------------------------------------------------------------------------------------------------------

# source -> number of parameters
MODULES = (
    ("Linear(2, 3", 2),
    ("Linear(1, 1, bias=False", 1),
    ("Bilinear(2, 1, 3", 2),
    ("Conv1d(2, 2, 1", 2),
    ("Conv2d(1, 2, (2, 1)", 2),
    ("Conv3d(1, 1, 1, bias=False", 1),
    ("ConvTranspose1d(1, 2, 2", 2),
    ("ConvTranspose2d(1, 1, 2", 2),
    ("BatchNorm1d(2", 2),
    ("BatchNorm2d(1", 2),
    ("BatchNorm3d(1, affine=False", 0),
    ("InstanceNorm1d(2, affine=True", 2),
    ("GroupNorm(1, 2", 2),
    ("LayerNorm((2, 1)", 2),
    ("RMSNorm(2", 1),
    ("Embedding(3, 2", 1),
    ("Embedding(3, 2, padding_idx=0", 1),
    ("EmbeddingBag(3, 2", 1),
    ("RNN(1, 2", 4),
    ("LSTM(2, 1, num_layers=2, bidirectional=True", 16),
    ("GRU(1, 1, bias=False", 2),
    ("RNNCell(1, 2", 4),
    ("LSTMCell(1, 1", 4),
    ("GRUCell(1, 2", 4),
    ("PReLU(3", 1),
    ("MultiheadAttention(2, 1", 4),
    ("TransformerEncoderLayer(2, 1, 2", 12),
)
MODES = (
    "",
    "with torch.no_grad():",
    "with torch.set_grad_enabled(False):",
    "with torch.no_grad(), torch.enable_grad():",
    "with torch.enable_grad(), torch.no_grad():",
)
GRID = """class Grid(torch.nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = torch.nn.Parameter(numbers)
        self.more = torch.nn.ParameterList([numbers])"""
WHAT = "[(type(p).__name__, p.is_leaf, p.requires_grad, p.grad_fn, p.grad) for p in net.parameters()]"


@scene("module.params-require-grad")
def test_new(s: Stage) -> None:
    """Each parameter of a new module is a Parameter and a leaf that requires grad, whatever the mode."""
    mode = s.choose(MODES)
    tail = s.on.removeprefix(", ")
    tail += s.choose(("", f", dtype=torch.{s.wide}", ", dtype=torch.float16", ", dtype=torch.bfloat16"))
    how = s.number(0, 3)
    if how == 3:
        free = [t for t in s.tensors if not t.requires_grad]
        t = s.choose(free or s.tensors[:1])
        s.play()
        s.do(GRID)
        line, count = f"net = Grid({t.name}.detach())", 2
    else:
        chosen = [s.choose(MODULES) for _ in range(1 + how)]
        made = [f"torch.nn.{text}{', ' if tail else ''}{tail.removeprefix(', ')})" for text, _ in chosen]
        count = sum(number for _, number in chosen)
        line = f"net = {made[0]}" if not how else f"net = torch.nn.Sequential({', '.join(made)})"
    s.block(mode, line) if mode else s.do(line)
    s.equal(WHAT, [("Parameter", True, True, None, None)] * count, "these are all new")


# --- losses and activations -------------------------------------------------------------------------------------------

ELEMENTWISE = (
    "ReLU()", "Tanh()", "Sigmoid()", "GELU()", "Softplus()", "LeakyReLU()", "ELU()", "SELU()", "CELU()", "SiLU()", "Mish()",
    "Hardtanh()", "Hardswish()", "Hardsigmoid()", "Hardshrink()", "Softshrink()", "Softsign()", "Tanhshrink()", "ReLU6()",
    "LogSigmoid()", "Threshold(0.0, 0.5)", "RReLU()", "Softmin(-1)", "Softmax(-1)", "LogSoftmax(-1)", "GELU(approximate='tanh')",
)  # fmt: skip
# source -> its operands: f for numbers, p for numbers between 0 and 1, s for signs, c for classes
LOSSES = (
    ("MSELoss()", "ff"),
    ("L1Loss()", "ff"),
    ("SmoothL1Loss()", "ff"),
    ("HuberLoss()", "ff"),
    ("KLDivLoss(reduction='batchmean')", "fp"),
    ("PoissonNLLLoss()", "ff"),
    ("GaussianNLLLoss()", "ffp"),
    ("BCELoss()", "pp"),
    ("BCEWithLogitsLoss()", "fp"),
    ("SoftMarginLoss()", "fs"),
    ("HingeEmbeddingLoss()", "fs"),
    ("MarginRankingLoss()", "ffs"),
    ("CosineEmbeddingLoss()", "FFs"),
    ("TripletMarginLoss()", "FFF"),
    ("TripletMarginWithDistanceLoss()", "FFF"),
    ("CrossEntropyLoss()", "Fc"),
    ("NLLLoss()", "Fc"),
    ("MultiMarginLoss()", "Fc"),
    ("MultiLabelMarginLoss()", "FC"),
    ("MultiLabelSoftMarginLoss()", "FB"),
)


@scene("module.losses-activations-parameterless")
def test_parameterless(s: Stage) -> None:
    """Losses and activations have no parameters: their output requires grad if an input does."""
    what = s.number(0, 3)
    if what == 2:
        _all_of_them(s)
    elif what % 2:
        _a_loss(s)
    else:
        _an_activation(s)


def _all_of_them(s: Stage) -> None:
    made = [f"torch.nn.{text}" for text in (*ELEMENTWISE, *(text for text, _ in LOSSES))]
    s.do(f"nets = [{', '.join(made)}]")
    s.equal("[type(net).__name__ for net in nets if list(net.parameters())]", [], "these have no parameters")


def _an_activation(s: Stage) -> None:
    x = entry(s)
    made = s.choose(ELEMENTWISE)
    s.do(f"net = torch.nn.{made}")
    s.equal("len(list(net.parameters()))", 0, "an activation has no parameters")
    for flag in (x.requires_grad, *([not x.requires_grad] if x.paper is None and s.flip() else [])):
        if flag != x.requires_grad:
            s.do(f"{x.name}.requires_grad_({flag})")
        s.equal(f"net({x.name}).requires_grad", flag, "the input alone decides")


FLAGS = """def flags(net, inputs, numbers):
    found = []
    for on in (None, *numbers):
        for i in numbers:
            inputs[i].requires_grad_(i == on)
        found.append(net(*inputs).requires_grad)
    return found"""


def _a_loss(s: Stage) -> None:
    """Some losses: no input requires grad, then each of them alone does."""
    s.do(FLAGS)
    dtype = s.choose(("float32", s.wide))
    for _ in range(s.number(1, 3)):
        made, operands = s.choose(LOSSES)
        s.require(s.device.has("values") or made != "GaussianNLLLoss()")  # it looks at the numbers of its last input
        reduction = s.choose(("", "reduction='sum'", "reduction='none'"))
        if reduction and "reduction" not in made:
            made = made.replace("()", f"({reduction})")
        s.do(f"inputs = [{', '.join(_operand(s, kind, dtype) for kind in operands)}]\nnet = torch.nn.{made}")
        s.equal("len(list(net.parameters()))", 0, "a loss has no parameters")
        numbers = [i for i, kind in enumerate(operands) if kind in "fFp"]  # the others are classes and signs
        due = [False] + [True] * len(numbers)
        s.equal(f"flags(net, inputs, {numbers})", due, "the inputs alone decide: none, then each of them")


def _operand(s: Stage, kind: str, dtype: str) -> str:
    if kind in "cC":
        return s.tensor([1, 0] if kind == "c" else [[1, -1], [0, 1]], "int64")
    if kind == "B":
        return s.tensor([[1.0, 0.0], [0.0, 1.0]], dtype)
    if kind == "s":
        return s.tensor([1.0, -1.0], dtype)
    numbers = s.numbers((2, 2) if kind == "F" else (2,))
    return s.tensor((numbers + 2.0) / 4.0 if kind == "p" else numbers, dtype)


# --- copies and conversions -------------------------------------------------------------------------------------------


@scene("module.state-dict")
def test_state_dict(s: Stage) -> None:
    """state_dict holds the memory of the parameters; load_state_dict keeps leaves, flags and .grad."""
    it = prepare(s, tracked=False)
    net = it.net
    it.build(s)
    off = part(s, net.parameters)
    if s.flip() and len(off) < len(net.parameters):
        s.do(it.backward())
    for p in off:
        s.do(f"{p.path}.requires_grad_(False)")
    keys = {p.path: _key(net, p.path) for p in net.parameters}
    how = s.number(0, 3)
    if how == 0:
        s.do(f"state = {net.name}.state_dict()")
        for p in net.parameters:
            held = f"state[{keys[p.path]!r}]"
            s.equal(
                f"({held}.requires_grad, {held}.grad_fn, {held}.data_ptr() == {p.path}.data_ptr())",
                (False, None, True),
                "the state holds detached tensors in the memory of the parameters",
            )
            s.same(held, p.path, "it is the same memory")
    elif how == 1:
        s.do(f"state = {net.name}.state_dict(keep_vars=True)")
        for p in net.parameters:
            s.true(f"state[{keys[p.path]!r}] is {p.path}", "keep_vars=True holds the parameters themselves")
    else:
        _load(s, net, off, keys, assign=how == 3)


def _key(net: Net, path: str) -> str:
    """The name of a parameter in its network."""
    return path.removeprefix(net.name).removeprefix(".").replace("[", ".").replace("]", "").removeprefix(".")


def _load(s: Stage, net: Net, off: Sequence[Parameter], keys: dict[str, str], *, assign: bool) -> None:
    """Load other numbers, once or twice, from a state of plain tensors or of another network's."""
    text = ", assign=True" if assign else s.choose(("", ", assign=False"))
    tracked = s.flip()
    for _ in range(s.number(1, 2)):
        s.do(f"before = [{', '.join(p.path for p in net.parameters)}]\ngrads = [p.grad for p in before]")
        s.do(f"state = dict({net.name}.state_dict())")
        for p in net.parameters:
            p.set(1.0 - p.at.value)
            flag = tracked and p.path.endswith("weight")
            s.do(f"state[{keys[p.path]!r}] = {s.tensor(p.at.value, net.dtype, requires_grad=flag)}")
        s.do(f"{net.name}.load_state_dict(state{text})")
        for i, p in enumerate(net.parameters):
            s.equal(
                f"({p.path}.requires_grad, {p.path}.is_leaf, {p.path}.grad_fn, type({p.path}).__name__)",
                (p not in off, True, None, "Parameter"),
                "loading leaves the flags of the parameters as they are, and no trace in a graph",
            )
            if not assign:
                s.equal(f"({p.path} is before[{i}], {p.path}.grad is grads[{i}])", (True, True), "numbers are copied")
            s.close(f"{p.path}.detach()", p.at.value, "these are the numbers of the state")


NARROW = ("float16", "bfloat16")


@scene("module.conversion-keeps-leaf")
def test_conversion(s: Stage) -> None:
    """A conversion keeps parameters the same leaves with their flags, converts .grad, and training goes on."""
    it = prepare(s, tracked=False)
    net = it.net
    it.build(s)
    off, filled = part(s, net.parameters, proper=True), s.flip()
    if filled:
        s.do(it.backward())
    for p in off:
        s.do(f"{p.path}.requires_grad_(False)")
    s.do(f"before = [{', '.join(p.path for p in net.parameters)}]")
    chain = [s.choose((s.wide, "float32", *NARROW)) for _ in range(s.number(1, 2))]
    for dtype in (*chain, net.dtype):
        _convert(s, net, dtype, off, filled=filled)
    s.narrow |= "float32" in chain
    if filled and set(chain) & set(NARROW):
        s.do("for p in before:\n    p.grad = None")
        filled = False
    for p in off:
        s.do(f"{p.path}.requires_grad_()")
    s.do(it.backward())
    for p, g in zip(net.parameters, slopes(it.total, net.parameters), strict=True):
        s.close(f"{p.path}.grad", 2 * g if filled else g, "the network can be trained on")


def _convert(s: Stage, net: Net, dtype: str, off: Sequence[Parameter], *, filled: bool) -> None:
    short = {"float64": "double()", "float32": "float()", "float16": "half()", "bfloat16": "bfloat16()"}
    place = s.device.name
    ways = (f"to(torch.{dtype})", short[dtype], f"to(dtype=torch.{dtype})", f"to({place!r}, torch.{dtype})")
    s.do(f"{net.name}.{s.choose(ways)}")
    for i, p in enumerate(net.parameters):
        s.equal(
            f"({p.path} is before[{i}], {p.path}.requires_grad, {p.path}.is_leaf, {p.path}.grad_fn, str({p.path}.dtype))",
            (True, p not in off, True, None, f"torch.{dtype}"),
            "a conversion changes what the parameter holds, not the parameter",
        )
        held = f"torch.{dtype}" if filled else "None"
        s.equal(f"str(getattr({p.path}.grad, 'dtype', None))", held, "a .grad is converted too")
