"""Area gan: two networks that are trained in turns on each other's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autograd_conformance.algebra import Traced
from autograd_conformance.nets import CLEAR, Input, Loss, Net, Parameter, entry, loss, network, slopes
from autograd_conformance.paper import Array
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage


@dataclass(slots=True)
class Trainer:
    """An optimizer of some parameters, on paper too: ``step`` changes them as the formula of its docs says."""

    name: str
    update: Callable[[Trainer, Parameter, Array], Array]
    parameters: Sequence[Parameter]
    first: dict[int, Array] = field(default_factory=dict)
    second: dict[int, Array] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)

    def step(self, grads: dict[int, Array]) -> None:
        """One step with these gradients."""
        for p in self.parameters:
            if id(p) in grads:
                self.times[id(p)] = self.times.get(id(p), 0) + 1
                p.set(p.at.value - self.update(self, p, grads[id(p)]))


def _sgd(_: Trainer, __: Parameter, g: Array) -> Array:
    return 0.25 * g


def _momentum(t: Trainer, p: Parameter, g: Array) -> Array:
    t.first[id(p)] = 0.5 * t.first[id(p)] + g if id(p) in t.first else g
    return 0.25 * t.first[id(p)]


def _adam(t: Trainer, p: Parameter, g: Array) -> Array:
    """With a large eps, lest rounding decide the sign of a step."""
    n = t.times[id(p)]
    m = t.first[id(p)] = 0.9 * t.first.get(id(p), np.zeros(p.shape)) + 0.1 * g
    v = t.second[id(p)] = 0.999 * t.second.get(id(p), np.zeros(p.shape)) + 0.001 * g * g
    return np.asarray(0.25 * (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.999**n)) + 0.5))


UPDATES = (
    ("SGD({0}, lr=0.25)", _sgd),
    ("Adam({0}, lr=0.25, eps=0.5)", _adam),
    ("SGD({0}, lr=0.25, momentum=0.5)", _momentum),
    ("SGD({0}, lr=0.25, foreach=True)", _sgd),
    ("Adam({0}, lr=0.25, eps=0.5, foreach=False)", _adam),
)


@dataclass(slots=True)
class Game:
    """Generator, discriminator, what they are given, their losses and optimizers; in the script and on paper.

    ``owed`` holds the gradients that each parameter has in the script at the moment.
    """

    s: Stage
    x: Input
    gen: Net
    dis: Net
    d_loss: Loss
    g_loss: Loss
    d_opt: Trainer
    g_opt: Trainer
    y: Traced
    owed: dict[int, Array] = field(default_factory=dict)

    def forward(self) -> None:
        """Compute the generator's output."""
        self.s.do(f"y = gen({self.x.name})")
        self.y = self.gen(self.x.at)

    def judged(self, y: Traced, of: Loss) -> Traced:
        """A loss of the discriminator's verdict, on paper."""
        z = self.dis(y)
        clear = self.gen.clear and self.dis.clear and (of.margin is None or of.margin(z.value) > CLEAR)
        self.s.require(clear)
        return of(z)

    def collect(self, root: Traced, *nets: Net) -> None:
        """Backward on paper: add the slopes to what the parameters of these networks have."""
        parameters = [p for net in nets for p in net.parameters if p.requires_grad]
        for p, g in zip(parameters, slopes(root, parameters), strict=True):
            self.owed[id(p)] = self.owed[id(p)] + g if id(p) in self.owed else g

    def reset(self, net: Net, opt: Trainer) -> None:
        """Reset the gradients of a network, by itself or by its optimizer."""
        self.s.do(f"{self.s.choose((net.name, opt.name))}.zero_grad()")
        for p in net.parameters:
            self.owed.pop(id(p), None)

    def step(self, opt: Trainer) -> None:
        """One step; nothing else must change."""
        other = self.gen if opt is self.d_opt else self.dis
        self.s.do(f"kept = [p.detach().clone() for p in {other.name}.parameters()]")
        self.s.do(f"{opt.name}.step()")
        opt.step(self.owed)
        own = self.dis if opt is self.d_opt else self.gen
        for p in own.parameters:
            self.s.close(f"{p.path}.detach()", p.at.value, "the step moves it by its gradient, if it has one")
        same = f"all(torch.equal(p, q) for p, q in zip({other.name}.parameters(), kept))"
        if self.s.device.has("values"):
            self.s.true(same, f"{opt.name} has no parameters of {other.name}")

    def look(self, net: Net, because: str) -> None:
        """Every .grad of a network is as on paper."""
        for p in net.parameters:
            self.s.close(f"{p.path}.grad", self.owed.get(id(p)), because)


def start(s: Stage) -> Game:
    """Two networks, two losses and two optimizers."""
    x = entry(s, graph=False, tracked=False)
    gen = network(s, "gen", x.at, x.dtype, most=2)
    y = gen(x.at)
    dis = network(s, "dis", y, x.dtype, most=2, start=len(gen.parameters))
    shape = dis(y).shape
    d_loss = loss(s, shape, x.dtype)
    g_loss = loss(s, shape, x.dtype) if s.flip() else d_loss
    gen.build(s)
    dis.build(s)
    for of in (d_loss, g_loss) if g_loss is not d_loss else (d_loss,):
        of.build(s)
    return Game(s, x, gen, dis, d_loss, g_loss, _trainer(s, "d_opt", dis), _trainer(s, "g_opt", gen), y)


def _trainer(s: Stage, name: str, net: Net) -> Trainer:
    text, update = s.choose(UPDATES)
    s.do(f"{name} = torch.optim.{text.format(f'{net.name}.parameters()')}")
    return Trainer(name, update, net.parameters)


@scene("gan.detach-step")
def test_detach(s: Stage) -> None:
    """With the output detached, each step fills and moves its own network only, and the output serves again."""
    game = start(s)
    gen, dis = game.gen, game.dis
    real = s.numbers(game.y.shape) if s.flip() else None
    if real is not None:
        s.do(f"real = {s.tensor(real, game.x.dtype)}")
    for _ in range(s.number(1, 2)):
        game.reset(gen, game.g_opt)
        game.reset(dis, game.d_opt)
        game.forward()
        if real is not None:
            s.do(f"{game.d_loss.text.format('dis(real)')}.backward()")
            game.collect(game.judged(Traced(real), game.d_loss), dis)
        s.do(f"{game.d_loss.text.format('dis(y.detach())')}.backward()")
        game.collect(game.judged(Traced(game.y.value), game.d_loss), dis)
        game.look(gen, "the generator is cut off by the detach")
        game.look(dis, "this is the derivative of the discriminator's loss")
        game.step(game.d_opt)
        s.do(f"{game.g_loss.text.format('dis(y)')}.backward()")
        game.collect(game.judged(game.y, game.g_loss), gen, dis)
        game.look(gen, "the loss through the same output, not detached, reaches the generator")
        game.step(game.g_opt)


@scene("gan.no-detach-error")
def test_no_detach(s: Stage) -> None:
    """Without the detach the first backward fills both networks and frees the generator's graph."""
    game = start(s)
    for _ in range(s.number(1, 2)):
        game.reset(game.gen, game.g_opt)
        game.reset(game.dis, game.d_opt)
        game.forward()
        s.do(f"{game.d_loss.text.format('dis(y)')}.backward()")
        game.collect(game.judged(game.y, game.d_loss), game.gen, game.dis)
        game.look(game.gen, "nothing is detached, so that the discriminator's loss reaches the generator")
        game.look(game.dis, "this is the derivative of the discriminator's loss")
        if s.flip():
            game.step(game.d_opt)
        if s.flip():
            game.reset(game.gen, game.g_opt)
        again = s.choose(("dis(y)", "dis(y * 2.0)", "y"))
        text = f"{again}.sum().backward()" if again == "y" else f"{game.g_loss.text.format(again)}.backward()"
        s.raises(text, "RuntimeError", "the graph of y was freed", fragment="backward through the graph a second time")


@scene("gan.retain-or-recompute")
def test_retain(s: Stage) -> None:
    """Retaining the graph or computing the output anew makes the second backward work, with its own gradients."""
    game = start(s)
    game.forward()
    retained = s.flip()
    for number in range(s.number(1, 2)):
        if number or s.flip():
            game.reset(game.gen, game.g_opt)
            game.reset(game.dis, game.d_opt)
        s.do(f"{game.d_loss.text.format('dis(y)')}.backward({'retain_graph=True' if retained else ''})")
        game.collect(game.judged(game.y, game.d_loss), game.gen, game.dis)
        game.look(game.dis, "this is the derivative of the discriminator's loss, as with the detach")
        if s.flip():
            game.step(game.d_opt)
        if not retained:
            game.forward()
    game.reset(game.gen, game.g_opt)
    s.do(f"{game.g_loss.text.format('dis(y)')}.backward()")
    game.collect(game.judged(game.y, game.g_loss), game.gen, game.dis)
    game.look(game.gen, "these are the gradients of the second loss")


@scene("gan.generator-step-pollutes-d")
def test_pollution(s: Stage) -> None:
    """The generator's loss adds to the discriminator's gradients, unless the discriminator is switched off."""
    game = start(s)
    gen, dis = game.gen, game.dis
    for number in range(s.number(1, 3)):
        if number and s.flip():
            game.reset(dis, game.d_opt)
        game.reset(gen, game.g_opt)
        freeze = s.flip()
        if number or s.flip():
            game.forward()
            s.do(f"{game.d_loss.text.format('dis(y.detach())')}.backward()")
            game.collect(game.judged(Traced(game.y.value), game.d_loss), dis)
            game.look(dis, "what it had, if it was not reset, and the derivative of its own loss")
            if s.flip():
                game.step(game.d_opt)
            if freeze and s.flip():
                game.reset(dis, game.d_opt)
        if freeze:
            s.do("dis.requires_grad_(False)")
        game.forward()
        s.do(f"{game.g_loss.text.format('dis(y)')}.backward()")
        game.collect(game.judged(game.y, game.g_loss), gen, *([] if freeze else [dis]))
        game.look(gen, "this is the derivative of the generator's loss")
        game.look(dis, "it was switched off in this pass" if freeze else "the generator's loss adds to it")
        if freeze:
            s.do("dis.requires_grad_(True)")
        if s.flip():
            game.step(game.g_opt)


@scene("gan.stale-graph-after-step")
def test_stale(s: Stage) -> None:
    """A step between a forward and its backward makes that backward raise; a forward after the step works."""
    game = start(s)
    for _ in range(s.number(1, 2)):
        game.reset(game.gen, game.g_opt)
        game.reset(game.dis, game.d_opt)
        game.forward()
        s.do(f"g_loss = {game.g_loss.text.format('dis(y)')}")
        s.do(f"{game.d_loss.text.format('dis(y.detach())')}.backward()")
        game.collect(game.judged(Traced(game.y.value), game.d_loss), game.dis)
        for _ in range(s.number(1, 2)):
            game.step(game.d_opt)
        if s.flip():
            game.reset(game.dis, game.d_opt)
        text = "g_loss.backward()" if not s.flip() else "torch.autograd.grad(g_loss, y)"
        because = "the backward of this graph needs weights that the step has changed"
        s.raises(text, "RuntimeError", because, fragment="modified by an inplace operation")
        game.reset(game.gen, game.g_opt)
        game.reset(game.dis, game.d_opt)
        if s.flip():
            game.forward()
        s.do(f"{game.g_loss.text.format('dis(y)')}.backward()")
        game.collect(game.judged(game.y, game.g_loss), game.gen, game.dis)
        game.look(game.gen, "the discriminator's forward was run after its step")
