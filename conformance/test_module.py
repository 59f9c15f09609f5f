"""Area module: parameters, networks and what one backward does to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar

from autograd_conformance.algebra import Traced
from autograd_conformance.nets import CLEAR, Input, Loss, Net, Parameter, embedding, entry, loss, network, slopes
from autograd_conformance.paper import Array
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
    alone = part(s, net.parameters)
    for p in alone[::-1] if s.flip() else alone:
        s.do(f"{p.path}.requires_grad_()")
        s.equal(f"({on}.requires_grad, {on}.is_leaf)", (True, False), f"{p.path} requires grad")
        if s.flip():
            s.do(f"{p.path}.requires_grad_(False)")
            off = all(p is other for other in alone)
            if off:
                s.false(f"{on}.requires_grad", "nothing requires grad any more")


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
