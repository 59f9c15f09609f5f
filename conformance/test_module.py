"""Area module: parameters, networks and what one backward does to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autograd_conformance.algebra import Traced
from autograd_conformance.nets import CLEAR, Input, Loss, Net, Parameter, embedding, entry, loss, network, slopes
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
    for p in off:
        s.do(s.choose(OFF).format(p.path))
    rounds = s.number(1, 2) if x.paper is None or x.paper.node is None else 1
    for times in range(1, rounds + 1):
        s.do(f"y = net1({x.name})")
        s.true("y.requires_grad", "it was made with parameters that require grad")
        s.do(f"{of.text.format('net2(y)')}.backward()")
        s.equal("y.grad", None, "y is no leaf")
        look_at_grads(s, (*one.parameters, *two.parameters), of(z), frozen=off, times=times)
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
    for cut in part(s, cuts) or cuts[:1]:
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
        s.do(f"{net.name}.zero_grad()")
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
    """Backward, with some parameters switched off before or after it; those without .grad may be given one."""
    off, after = part(s, grads, proper=True), s.flip()
    for g in grads:
        g.switch(s, flag=after or g not in off)
    s.do(it.backward().replace(".backward()", f".backward({s.choose(('', 'create_graph=True'))})"))
    given = s.flip()
    for g in grads:
        g.filled = g.filled or g.flag
        g.switch(s, flag=g not in off)
        if given and not g.filled:
            s.do(f"{g.path}.grad = torch.ones_like({g.path})")
            g.filled = True


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
                f"({path}.grad is kept[{i}], {path}.grad.any().item(), {path}.grad.requires_grad, {path}.grad.grad_fn)",
                (True, False, False, None),
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
    off = part(s, net.parameters, proper=True)
    for p in off:
        s.do(f"{p.path}.requires_grad_(False)")
    with_grad = s.flip()
    if with_grad:
        s.do(it.backward())
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
        s.do(it.backward())
        look_at_grads(s, net.parameters, it.of(y), frozen=off)


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
