"""Area optim: the step that follows a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autograd_conformance.optimizers import (
    RULED,
    UNRULED,
    Group,
    Optimizer,
    Weight,
    group_options,
    group_source,
    listed,
    nesterov,
    optimizer,
)
from autograd_conformance.oracle import executed_nodes, predict
from autograd_conformance.paper import Due, Paper
from autograd_conformance.program import Constant, Leaf, Program
from autograd_conformance.reverse import cotangents
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

HUGE = 1e6


class Training:
    """The leaves of a graph as weights, trained on paper and in the script at once."""

    def __init__(self, s: Stage) -> None:
        self.s = s
        self.due: Due = s.due
        made = {t.name: t for t in s.leaves}
        leaves = [x for x in s.scene.graph if isinstance(x, Leaf) and x.name in made]
        self.weights = {
            x.name: Weight(x.name, made[x.name].value, x.data.dtype, x.requires_grad)
            for x in leaves
            if x.layout != "expanded" or x.data.shape[:1] == (1,)  # several elements in one place cannot be updated
        }

    @property
    def tracked(self) -> list[Weight]:
        """Weights that require grad."""
        return [w for w in self.weights.values() if w.requires_grad]

    def dense(self, w: Weight) -> bool:
        """Do its elements lie in memory one after the other?"""
        return all(
            leaf.layout == "contiguous" for leaf in self.s.scene.graph if isinstance(leaf, Leaf) and leaf.name == w.name
        )

    def roots(self) -> list[Paper]:
        """What can be differentiated, the newest first."""
        return [t for t in reversed(list(self.due.tensors.values())) if t.node is not None and np.size(t.value)]

    def forward(self) -> None:
        """Run the graph with the weights as they are now; the leaves are there already."""
        self.due = self.again()
        values = [w.value for w in self.weights.values()] + [r.value for r in self.roots()]
        self.s.require(all(np.all(np.abs(v) < HUGE) for v in values))
        self.s.play(self.s.rest())

    def again(self) -> Due:
        """The graph on paper with the weights as they are now."""
        now = (self._now(x) if isinstance(x, Leaf) else x for x in self.s.scene.graph)
        return predict(Program(tuple(now)), self.s.noise)

    def _now(self, leaf: Leaf) -> Leaf:
        w = self.weights.get(leaf.name)
        if w is None:
            return leaf
        data = Constant(leaf.data.shape, leaf.data.dtype, tuple(w.value.ravel().tolist()))
        return replace(leaf, data=data, requires_grad=w.requires_grad)

    def backward(self, root: Paper, *options: str) -> None:
        """Backward from one root, which accumulates."""
        seed = self.s.backward(root, *options)
        found = cotangents([(root, seed)], noise=self.s.noise)
        for w in self.weights.values():
            w.accumulate(found.get(w.name))

    def at_once(self, roots: Sequence[Paper]) -> None:
        """One backward from several roots."""
        seeds = [(root, self.s.numbers(root.shape)) for root in roots]
        texts = ", ".join(self.s.tensor(numbers, root.dtype) for root, numbers in seeds)
        self.s.do(f"torch.autograd.backward([{', '.join(root.name for root in roots)}], [{texts}])")
        found = cotangents(seeds, noise=self.s.noise)
        for w in self.weights.values():
            w.accumulate(found.get(w.name))

    def zero(self, call: str, weights: Iterable[Weight], *, zeros: bool | None = None) -> None:
        """zero_grad of one kind or the other."""
        zeros = self.s.flip() if zeros is None else zeros
        self.s.do(f"{call}({'set_to_none=False' if zeros else ''})")
        for w in weights:
            w.grad = np.zeros_like(w.value) if zeros and w.grad is not None else None

    def reach(self, root: Paper) -> list[Weight]:
        """Weights that backward from a root reaches."""
        reached = {edge.name for node in executed_nodes([root]) for edge in node.edges if isinstance(edge, Paper)}
        return [w for w in self.tracked if w.name in reached]

    def look(self, weights: Iterable[Weight], because: str) -> None:
        """Weights must be as on paper."""
        for w in weights:
            self.s.close(w.name, w.value, because)

    def step(self, opt: Optimizer, call: str = "opt.step()") -> None:
        """A step, on paper too."""
        self.s.do(call)
        opt.step(self.s.noise)


def by_hand(s: Stage, w: Weight, *, plain: bool = False, expanded: bool = False) -> None:
    """Set a .grad to exact numbers, in memory of one layout or another; nothing can be added to ``expanded`` memory."""
    numbers = s.numbers(w.value.shape)
    text = s.tensor(numbers, w.dtype)
    layout = 0 if plain or not numbers.ndim else s.number(0, 4 + expanded)
    if layout == 3:
        text = f"torch.stack([{text}] * 2, -1)[..., 0]"
    elif layout == 4:
        text = f"{text}.t().contiguous().t()" if numbers.ndim == 2 else text
    elif layout == 5 and numbers.size:
        numbers = np.full(numbers.shape, numbers.flat[0])
        text = f"{s.tensor(numbers.flat[0], w.dtype)}.expand({numbers.shape})"
    s.do(f"{w.name}.grad = {text}")
    w.grad = numbers


_KINDS = tuple((shape, dtype) for dtype in ("", "", "float32") for shape in ((), (2,), (1,), (2, 3), (1, 1), (2, 1, 2)))


def extra(s: Stage, count: int) -> list[Weight]:
    """More parameters, of small shapes."""
    weights = []
    for _ in range(count):
        name, (shape, narrow) = s.name("w"), s.choose(_KINDS)
        s.narrow = s.narrow or bool(narrow)
        values = s.numbers(shape)
        s.do(f"{name} = {s.tensor(values, narrow or s.wide, requires_grad=True)}")
        weights.append(Weight(name, values, narrow or s.wide))
    return weights


def names(weights: Sequence[Weight]) -> str:
    """Weights as a tuple that a line can go through."""
    return f"({', '.join(w.name for w in weights)},)"


def still(s: Stage, exprs: Sequence[str]) -> str:
    """Note some tensors; returns the probe that tells which of them are as they were, bit by bit."""
    if not exprs:
        return ""
    held = s.name("held")
    s.do(f"{held} = [t.detach().clone() for t in ({', '.join(exprs)},)]")
    return f"[torch.equal(t, h) for t, h in zip(({', '.join(exprs)},), {held})]"


def unchanged(s: Stage, probe: str, count: int, because: str) -> None:
    """What :func:`still` noted must be as it was."""
    if probe:
        s.equal(probe, [True] * count, because)


# --- what a step changes ----------------------------------------------------------------------------------------------


def others(training: Training, chosen: Sequence[Weight]) -> list[str]:
    """All tensors that lie in other memory than some weights."""
    mine = {id(training.due.tensors[w.name].storage) for w in chosen if w.name in training.due.tensors}
    found = [t for t in training.due.tensors.values() if id(t.storage) not in mine]
    return list(dict.fromkeys(t.name for t in found if np.all(np.isfinite(t.value))))


@scene("optim.own-params-only")
def test_own_params_only(s: Stage) -> None:
    """Steps move the parameters by the rule, and no bit of any tensor in other memory."""
    s.play()
    training = Training(s)
    root = s.choose(training.roots())
    given = s.some(training.reach(root))
    given += [w for w in training.weights.values() if w not in given and s.number(0, 3) == 3]
    other = others(training, given)
    spare = extra(s, s.number(0, 1))
    for w in spare:
        by_hand(s, w)
    opt = optimizer(s, given, (*RULED, *UNRULED), groups=True)
    if s.flip():
        opt.groups[0].weights.reverse()
    s.do(f"opt = {opt.source()}")
    roots = [root] + [s.choose(training.roots()) for _ in range(s.number(0, 2))]
    for i, each in enumerate(roots):
        training.backward(each, *(["retain_graph=True"] if i + 1 < len(roots) else []))
    aside = [w for w in training.weights.values() if w not in given and w.grad is not None] + spare
    watched = other + [w.name for w in spare] + [f"{w.name}.grad" for w in aside]
    for i in range(s.number(1, 3)):
        if i and s.flip():
            by_hand(s, s.choose(given), expanded=True)
        probe = still(s, watched)
        if opt.kind in RULED:
            training.step(opt)
            training.look(given, "a parameter of the optimizer follows its rule")
        else:
            s.do("opt.step()")
        unchanged(s, probe, len(watched), "none of these is a parameter of the optimizer")


@scene("optim.none-grad-skipped")
def test_none_grad_skipped(s: Stage) -> None:
    """Whatever had .grad None in a step is as it was, with its state, and zeros are a step like any other."""
    s.play_leaves()
    training = Training(s)
    weights = list(training.weights.values())
    weights += extra(s, max(s.number(0, 2), 2 - len(weights)))
    opt = optimizer(s, weights, groups=True)
    s.do(f"opt = {opt.source()}")
    s.do(_STATE)
    for i in range(s.number(1, 4)):
        for j, w in enumerate(weights):
            _another_grad(s, w, first=i == 0, none=j == 0)
        if s.number(0, 3) == 3:
            training.zero("opt.zero_grad", weights)
        bare = [w for w in weights if w.grad is None]
        probe = still(s, [w.name for w in bare])
        if bare and i:
            s.do(f"states = [state(opt, w) for w in {names(bare)}]")
        training.step(opt)
        unchanged(s, probe, len(bare), "their .grad is None, so the step passes over them")
        if bare and i:
            s.equal(
                f"[same(state(opt, w), old) for w, old in zip({names(bare)}, states)]",
                [True] * len(bare),
                "their .grad is None, so the step leaves their state alone",
            )
        training.look([w for w in weights if w.grad is not None], "a .grad that is there counts, zeros too")


_STATE = """def state(opt, w):
    return {k: torch.as_tensor(v).clone() for k, v in opt.state.get(w, {}).items() if v is not None}
def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)"""


def _another_grad(s: Stage, w: Weight, *, first: bool, none: bool) -> None:
    what = s.choose(
        ("none", "numbers", "zeros", "keep") if none and not first else ("numbers", "none", "zeros", "keep")
    )
    if what == "numbers":
        by_hand(s, w, plain=not first)
    elif what == "zeros":
        s.do(f"{w.name}.grad = torch.zeros_like({w.name})")
        w.grad = np.zeros_like(w.value)
    elif what == "none" and w.grad is not None:
        s.do(f"{w.name}.grad = None")
        w.grad = None


@scene("optim.separate-from-backward")
def test_separate_from_backward(s: Stage) -> None:
    """No pass changes a parameter, and no step a .grad: not one bit, and it stays the same object."""
    s.play_leaves()
    training = Training(s)
    weights = training.tracked
    s.require(weights)
    opt = optimizer(s, list(training.weights.values()), (*RULED, *UNRULED), groups=True)
    if nesterov(opt) and s.flip():
        opt.how = {"foreach": True}
    s.do(f"opt = {opt.source()}")
    count = s.number(1, 3) if opt.kind in RULED else 1
    for i in range(count):
        training.forward()
        root = s.choose(training.roots()[:3])
        if i and s.flip():
            training.zero("opt.zero_grad", opt.weights)
        reached = training.reach(root)
        passes = s.number(1, 2)
        for j in range(passes):
            every = [w.name for w in training.weights.values()]
            probe = still(s, every)
            graph = s.choose(("", "retain_graph=True", "create_graph=True")) if j + 1 == passes else "retain_graph=True"
            training.backward(root, *([graph] if graph else []))
            unchanged(s, probe, len(every), "backward fills .grad and moves no parameter")
        if s.number(0, 3) == 3 and weights:
            w = s.choose(weights)
            by_hand(s, w)
            reached += [w] if w not in reached else []
        if not reached:
            continue
        grads = [f"{w.name}.grad" for w in weights if w.grad is not None]
        probe = still(s, grads)
        s.do(f"grads = [{', '.join(grads)}]")
        s.mark = "nesterov" if opt.how.get("foreach") and nesterov(opt) else ""
        for _ in range(s.number(1, 2)):
            if opt.kind in RULED:
                training.step(opt)
            else:
                s.do("opt.step()")
            unchanged(s, probe, len(grads), "a step reads .grad and does not change it")
            s.equal(
                f"[g is h for g, h in zip(({', '.join(grads)},), grads)]",
                [True] * len(grads),
                "a step puts no other tensor into .grad",
            )


@scene("optim.step-untracked")
def test_step_untracked(s: Stage) -> None:
    """After steps, in whatever mode, parameters are the leaves that they were, and so is the state."""
    s.play()
    training = Training(s)
    root = s.choose(training.roots())
    weights = s.some(training.reach(root))
    weights += [w for w in training.weights.values() if w not in weights and s.flip()]
    kinds = (*RULED, *UNRULED) if s.device.has("values") else RULED  # some look at numbers
    opt = optimizer(s, weights, kinds, groups=True)
    s.do(f"opt = {opt.source()}")
    s.do(f"objects = [id(w) for w in {names(weights)}]")
    graph = s.choose(([], ["create_graph=True"], ["retain_graph=True"]))
    training.backward(root, *graph)
    flags = [[w.requires_grad, True, True] for w in weights]
    for _ in range(s.number(1, 3)):
        head = s.choose(("", "", "with torch.no_grad():", "with torch.enable_grad():"))
        if head:
            s.block(head, "opt.step()")
        else:
            s.do("opt.step()")
        s.equal(
            f"[[w.requires_grad, w.is_leaf, w.grad_fn is None] for w in {names(weights)}]",
            flags,
            "a step is not recorded, so parameters stay leaves with their flags",
        )
        s.true(f"[id(w) for w in {names(weights)}] == objects", "a step changes tensors and makes no new ones")
        s.true(f"[id(w) for g in opt.param_groups for w in g['params']] == [{_ids(opt)}]", "the same parameters")
        s.equal(_TRACKED_STATE, [], "what a step computes is not recorded, even if .grad has a history")


def _ids(opt: Optimizer) -> str:
    return ", ".join(f"id({w.name})" for w in opt.weights)


_TRACKED_STATE = (
    "[k for state in opt.state.values() for k, v in state.items() if torch.is_tensor(v) and v.requires_grad]"
)


# --- by how much ------------------------------------------------------------------------------------------------------


@scene("optim.sgd-formula")
def test_sgd_formula(s: Stage) -> None:
    """Each of up to four steps follows the formula, from gradients of passes or set by hand."""
    training = Training(s)
    hand = s.flip()
    if hand:
        s.play_leaves()
        weights = list(training.weights.values()) + extra(s, s.number(0, 2))
        s.require(weights)
    else:
        s.play()
        root = s.choose(training.roots())
        weights = training.reach(root)
        s.require(weights)
    opt = optimizer(s, weights, ("SGD",), groups=True)
    plain = hand and _fusable(s, training, weights) and s.number(0, 3) == 3
    if plain:
        opt.how = {"fused": True}
    elif hand and s.device.name == "cpu" and s.number(0, 15) == 15:
        opt.how, s.mark = {"fused": True}, "fused layout"
    s.do(f"opt = {opt.source()}")
    if not hand:
        training.backward(root)
    for i in range(s.number(1, 4) if not s.mark else 1):
        for w in weights if hand else []:
            if i == 0 or s.flip():
                by_hand(s, w, plain=plain, expanded=not s.mark)
        training.step(opt)
        training.look(weights, "the formula of SGD with this gradient")


def _fusable(s: Stage, training: Training, weights: Sequence[Weight]) -> bool:
    """Is there a fused implementation, and may it be used with these parameters?

    It takes for granted that a parameter and its gradient lie in memory in the same way.
    """
    return all(training.dense(w) for w in weights) and s.device.name.startswith(("cpu", "cuda"))


@scene("optim.multi-loss-step")
def test_multi_loss_step(s: Stage) -> None:
    """Several losses, each differentiated in turn, and one step: as with the sum of what they give."""
    s.play_leaves()
    training = Training(s)
    opt: Optimizer | None = None
    for i in range(s.number(1, 2)):
        training.forward()
        losses = [s.choose(training.roots()) for _ in range(s.number(2, 3))]
        if opt is None:
            reached = list(dict.fromkeys(w for root in losses for w in training.reach(root)))
            s.require(reached)
            opt = optimizer(s, reached, groups=True)
            s.do(f"opt = {opt.source()}")
        if i and s.number(0, 3):
            training.zero("opt.zero_grad", opt.weights)
        if s.number(0, 3) == 3:
            training.at_once(losses)
        else:
            for j, root in enumerate(losses):
                training.backward(root, *(["retain_graph=True"] if j + 1 < len(losses) else []))
        training.step(opt)
        training.look(opt.weights, "the step uses the sum of what the losses gave")


@scene("optim.three-step-loop")
def test_three_step_loop(s: Stage) -> None:
    """Rounds of zero_grad, forward, backward and step, in the orders that people write, and with zero_grad forgotten."""
    s.play_leaves()
    training = Training(s)
    weights = list(training.weights.values())
    s.require(training.tracked)
    opt = optimizer(s, weights, groups=True)
    s.do(f"opt = {opt.source()}")
    for _ in range(s.number(1, 3)):
        when = s.choose(("first", "before", "after", "never"))
        if when == "first":
            training.zero("opt.zero_grad", weights)
        training.forward()
        root = s.choose(training.roots()[:3])
        if when == "before":
            training.zero("opt.zero_grad", weights)
        training.backward(root)
        training.step(opt)
        training.look(weights, "the step follows the gradients since zero_grad")
        for w in training.tracked:
            s.close(f"{w.name}.grad", w.grad, "what the passes since zero_grad have given")
        if when == "after":
            training.zero("opt.zero_grad", weights)


# --- which parameters, with which options -----------------------------------------------------------------------------


@scene("optim.zero-grad-own-only")
def test_zero_grad_own_only(s: Stage) -> None:
    """Optimizers take turns with zero_grad: each .grad is reset with its owner's call, and is left alone otherwise."""
    s.play()
    training = Training(s)
    root = s.choose(training.roots())
    weights = list(training.weights.values())
    weights += extra(s, max(s.number(0, 2), 2 - len(weights)))
    count = s.number(1, 3)
    turns = [(s.number(0, count - 1), s.flip()) for _ in range(s.number(1, 3))]
    owners = [s.number(0, count) for _ in weights]  # the last is nobody
    owned = [[w for w, owner in zip(weights, owners, strict=True) if owner == k] or [weights[-1]] for k in range(count)]
    inner = [root] if s.number(0, 3) == 3 else []
    for t in inner:
        s.do(f"{t.name}.retain_grad()")
    training.backward(root, *s.choose(([], [], ["create_graph=True"])))
    for w in weights:
        if w.grad is None and s.number(0, 3) < 3:
            by_hand(s, w, plain=True)
    for k, mine in enumerate(owned):
        cut = s.number(0, len(mine) - 1)  # 0: one group
        groups = [Group(mine[:cut]), Group(mine[cut:])] if cut else [Group(mine)]
        opt = Optimizer(s.choose((*RULED, *UNRULED)), {"lr": 0.5}, groups)
        s.do(f"opt{k} = {opt.source()}")
    for k, zeros in turns:
        foreign = [w for w in weights if w not in owned[k]]
        grads = [f"{w.name}.grad" for w in foreign if w.grad is not None] + [f"{t.name}.grad" for t in inner]
        if grads:
            s.do(f"grads = [{', '.join(grads)}]")
            probe = still(s, grads)
        training.zero(f"opt{k}.zero_grad", owned[k], zeros=zeros)
        for w in owned[k]:
            s.equal(_reset(w), True, "it is a parameter of this optimizer")
        for w in foreign:
            if w.grad is None:
                s.true(f"{w.name}.grad is None", "it is no parameter of this optimizer")
        if grads:
            s.equal(f"[g is h for g, h in zip([{', '.join(grads)}], grads)]", [True] * len(grads), _FOREIGN)
            unchanged(s, probe, len(grads), _FOREIGN)
        if s.flip():
            by_hand(s, s.choose(weights), plain=True)


_FOREIGN = "none of these belongs to a parameter of this optimizer"


def _reset(w: Weight) -> str:
    """The probe of a .grad that was reset."""
    return f"{w.name}.grad is None" if w.grad is None else f"torch.equal({w.name}.grad, torch.zeros_like({w.name}))"


@scene("optim.frozen-not-updated")
def test_frozen_not_updated(s: Stage) -> None:
    """What is frozen and has no .grad stays as it is; what was frozen later moves as long as its .grad is there."""
    s.play_leaves()
    training = Training(s)
    trainable = training.tracked
    for w in trainable:
        if s.number(0, 2) == 1:
            _freeze(s, w)
    weights = list(training.weights.values())
    s.require(weights)
    opt = optimizer(s, weights, groups=True)
    s.do(f"opt = {opt.source()}")
    for _ in range(s.number(1, 3)):
        training.forward()
        roots = training.roots()
        if roots and s.number(0, 3) < 3:
            training.backward(s.choose(roots))
        for w in weights:
            if w.requires_grad and s.flip():
                _freeze(s, w)
            elif w in trainable and s.number(0, 3) == 3:
                s.do(f"{w.name}.requires_grad_()")
                w.requires_grad = True
        for _ in range(s.number(1, 2)):
            bare = [w for w in weights if w.grad is None]
            probe = still(s, [w.name for w in bare])
            training.step(opt)
            unchanged(s, probe, len(bare), "without .grad the optimizer does not change them, frozen or not")
            training.look([w for w in weights if w.grad is not None], "a .grad that is there is used, frozen or not")
        if s.flip():
            w = s.choose(weights)
            s.do(f"{w.name}.grad = None")
            w.grad = None


def _freeze(s: Stage, w: Weight) -> None:
    s.do(s.choose((f"{w.name}.requires_grad_(False)", f"{w.name}.requires_grad = False")))
    w.requires_grad = False


@scene("optim.param-groups")
def test_param_groups(s: Stage) -> None:
    """Groups with and without options of their own, some of them added between steps."""
    s.play_leaves()
    training = Training(s)
    weights = list(training.weights.values())
    weights += extra(s, max(s.number(0, 2), 2 - len(weights)))
    opt = optimizer(s, weights[:1])
    opt.groups[0].options = group_options(s, opt)
    waiting: list[Group] = []
    for w in weights[1:]:
        if s.number(0, 3) == 3:
            [*opt.groups, *waiting][-1].weights.append(w)
            continue
        group = Group([w], group_options(s, opt))
        late = opt.kind != "Adagrad" and (waiting or s.flip())  # whose state is made with it, in most releases
        (waiting if late else opt.groups).append(group)
    if opt.kind == "Adagrad" and s.number(0, 15) == 15:
        opt.groups[-1].options["initial_accumulator_value"] = 0.25
        s.mark = "initial accumulator"
    s.do(f"opt = {opt.source()}")
    for i in range(s.number(1, 3) + len(waiting)):
        if waiting and (i or s.flip()):
            group = waiting.pop(0)
            bare = s.flip()  # a single tensor need not be in a list
            s.do(f"opt.add_param_group({group_source(group, bare=bare)})")
            opt.groups.append(group)
        again = s.number(0, 3) == 3
        for w in weights:
            if w.grad is None or again:
                by_hand(s, w, plain=not again, expanded=True)
        outside = [w for group in waiting for w in group.weights]
        probe = still(s, [w.name for w in outside])
        training.step(opt)
        unchanged(s, probe, len(outside), "no group has them yet")
        training.look(opt.weights, "each group has its own options, and the defaults for the rest")


# --- several networks -------------------------------------------------------------------------------------------------


@scene("optim.chain-of-iterators")
def test_chain_of_iterators(s: Stage) -> None:
    """One optimizer over chained parameters does what one optimizer for each network does, in any order."""
    if s.flip():
        _chain_of_networks(s)
    else:
        _chain_of_leaves(s)


def _chained(parts: Sequence[str]) -> str:
    return f"itertools.chain({', '.join(parts)})"


def _chain_of_leaves(s: Stage) -> None:
    s.play_leaves()
    training = Training(s)
    weights = list(training.weights.values())
    weights += extra(s, max(s.number(0, 2), 2 - len(weights)))
    parts: list[list[Weight]] = [[], []]
    for i, w in enumerate(weights):
        parts[i if i < 2 else s.number(0, 1)].append(w)
    if s.flip():
        parts.reverse()
    opt = optimizer(s, [*parts[0], *parts[1]])
    form = s.choose(("{}", "iter({})", "tuple({})", "(w for w in {})"))
    s.do("import itertools")
    s.do(f"opt = {opt.source(_chained([form.format(listed(part)) for part in parts]))}")
    for i in range(s.number(1, 3)):
        for w in weights:
            if (w.grad is None and s.number(0, 3) < 3) or (i and s.flip()):
                by_hand(s, w, expanded=True)
        training.step(opt)
        training.look(weights, "each parameter follows its rule, wherever it is in the chain")


_NETWORKS = (
    ("torch.nn.Linear(2, 2{on})", 2),
    ("torch.nn.Linear(2, 2, bias=False{on})", 1),
    ("torch.nn.Sequential(torch.nn.Linear(2, 3{on}), torch.nn.Tanh(), torch.nn.Linear(3, 2{on}))", 4),
    ("torch.nn.Sequential(torch.nn.PReLU(1{on}), torch.nn.LayerNorm(2{on}))", 3),
)
_FILL = """with torch.no_grad():
    for p in [p for net in nets for p in net.parameters()]:
        p.copy_(torch.linspace(-0.75, 1.0, p.numel() + 1)[1:].view_as(p))
twins = copy.deepcopy(nets)"""
_LOSS = """def loss(nets, x):
    for net in nets:
        x = net(x)
    return (x * x).sum()"""
_PAIRS = "zip([p for net in nets for p in net.parameters()], [q for twin in twins for q in twin.parameters()])"


def _chain_of_networks(s: Stage) -> None:
    dtype = s.choose((s.wide, "float32"))
    chosen = [s.choose(_NETWORKS) for _ in range(s.number(2, 3))]
    made = [text.replace("{on}", f", dtype=torch.{dtype}{s.on}") for text, _ in chosen]
    s.do("import copy, itertools")
    s.do(f"nets = [{', '.join(made)}]")
    s.do(_FILL)
    s.do(_LOSS)
    s.do(f"x = {s.tensor(s.numbers((3, 2)), dtype)}")
    order = list(range(len(chosen)))
    if s.flip():
        order.reverse()
    opt = optimizer(s, [], (*RULED, *UNRULED))
    s.do(f"opt = {opt.source(_chained([f'nets[{i}].parameters()' for i in order]))}")
    s.do(f"opts = [{opt.source('twin.parameters()')} for twin in twins]")
    count = sum(number for _, number in chosen)
    for _ in range(s.number(1, 3)):
        used = s.choose(("", "", "[1:]", "[:1]"))
        s.do(f"loss(nets{used}, x).backward(); loss(twins{used}, x).backward()")
        s.do("opt.step()\nfor each in opts: each.step()")
        s.equal(
            f"[torch.allclose(p, q, equal_nan=True) for p, q in {_PAIRS}]",
            [True] * count,
            "the twins have an optimizer for each network, which does the same",
        )
        if s.flip():
            s.do("opt.zero_grad()\nfor each in opts: each.zero_grad()")


# --- calls ------------------------------------------------------------------------------------------------------------


@scene("optim.closure")
def test_closure(s: Stage) -> None:
    """step(closure) runs it in grad mode, whatever the mode outside, and hands its loss on; LBFGS insists on one."""
    s.play_leaves()
    training = Training(s)
    s.require(training.tracked)
    root = s.choose(training.roots())
    kind = s.choose((*RULED, *["LBFGS"] * 4, *UNRULED))
    chosen = training.tracked
    if kind == "LBFGS":  # which takes each .grad for one row of numbers
        chosen = [w for w in chosen if np.size(w.value) and training.dense(w)]
        s.require(chosen)
    opt = optimizer(s, chosen, (kind,), groups=kind != "LBFGS")
    if kind == "LBFGS":
        opt.options, opt.how = {"lr": 0.125, "max_iter": s.number(1, 2)}, {}
    s.do(f"opt = {opt.source()}")
    seed, numbers = s.name("v"), s.numbers(root.shape)
    s.do(f"{seed} = {s.tensor(numbers, root.dtype)}")
    s.block(
        "def closure():",
        "modes.append(torch.is_grad_enabled())",
        "opt.zero_grad()",
        *s.rest(),
        f"loss = ({root.name} * {seed}).sum()",
        "loss.backward()",
        "return loss",
    )
    for i in range(s.number(1, 3) if kind in RULED else 1):
        if kind == "LBFGS" and s.flip():
            s.raises(s.choose(("opt.step()", "with torch.no_grad(): opt.step()")), "TypeError", "LBFGS needs a closure")
        if i:
            training.due = training.again()
        now = training.due.tensors[root.name]
        s.require(np.all(np.abs(now.value) < HUGE))
        found = cotangents([(now, numbers)], noise=s.noise)
        for w in training.tracked:
            w.grad = found.get(w.name)
        s.do("modes = []")
        _call(s)
        s.close("result", np.asarray(np.sum(now.value * numbers)), "step returns what the closure returned")
        s.equal("sorted(set(modes))", [True], "the closure runs, in grad mode whatever the mode outside")
        if kind in RULED:
            opt.step(s.noise)
            training.look(training.tracked, "the step uses the gradient that the closure made")


def _call(s: Stage) -> None:
    off = ("with torch.no_grad():", "with torch.set_grad_enabled(False):")
    head = s.choose(("", *off, *off, *off, "with torch.enable_grad():"))
    call = s.choose(("result = opt.step(closure)", "result = opt.step(closure=closure)"))
    if not head:
        s.do(call)
        return
    inner = s.choose(("", "", "", "with torch.enable_grad():", "with torch.no_grad():"))
    s.block(head, s.block_source(inner, call) if inner else call)


@scene("optim.argument-errors")
def test_argument_errors(s: Stage) -> None:
    """Each wrong argument is refused with its error, by constructors and add_param_group, and a right one is taken."""
    s.play()
    weights = list(Training(s).weights.values())
    weights += extra(s, max(s.number(0, 1), 2 - len(weights)))
    weights = weights[::-1] if s.flip() else weights
    for _ in range(s.number(1, 3)):
        kind = s.choose((*RULED, *UNRULED, "LBFGS"))
        call = f"torch.optim.{kind}({{}}, lr=0.5)"
        case = s.choose((_empty, _non_leaf, _two_groups, _no_list, _no_tensor, _duplicates))
        if case is _two_groups and kind == "LBFGS":  # which has one group only
            call = call.replace(kind, "SGD")
        case(s, call, [w.name for w in weights])


def _late(s: Stage, call: str, good: str, params: str) -> str:
    """The call with these parameters, or add_param_group with them as the only ones of another group."""
    if "LBFGS" in call or not s.flip():
        return call.format(f"[{params}]" if not s.flip() else f"[{{'params': [{params}]}}]")
    s.do(f"opt = {call.format(f'[{good}]')}")
    return f"opt.add_param_group({{'params': [{params}]}})"


def _empty(s: Stage, call: str, _: list[str]) -> None:
    nothing = s.choose(("[]", "()", "iter([])", "(w for w in [])", "torch.nn.ReLU().parameters()", "{}.values()"))
    s.raises(call.format(nothing), "ValueError", "there is nothing to optimize", fragment="empty parameter list")


def _non_leaf(s: Stage, call: str, good: list[str]) -> None:
    bad = s.choose(s.interior[::-1]).name if not s.flip() else f"({s.choose(s.tracked).name} * 1.0)"
    params = s.choose((f"{bad}", f"{good[-1]}, {bad}", f"{bad}, {good[-1]}"))
    s.raises(_late(s, call, good[0], params), "ValueError", "a result of an op is no parameter", fragment="non-leaf")
    if s.flip():
        kept = s.name("u")
        s.do(f"{kept} = {bad} * 1.0")
        s.raises(call.format(f"[{kept}]"), "ValueError", "it does not retain its gradient yet", fragment="non-leaf")
        s.do(f"{kept}.retain_grad()")
        s.succeeds(call.format(f"[{kept}]"), "a non-leaf that retains its gradient may be optimized")


def _two_groups(s: Stage, call: str, good: list[str]) -> None:
    one, two = good[0], good[-1]
    groups = s.choose((f"{{'params': [{one}]}}, {{'params': [{one}]}}",
                       f"{{'params': [{one}, {two}]}}, {{'params': [{two}]}}",
                       f"{{'params': [{one}]}}, {{'params': [{two}, {one}]}}",
                       f"{{'params': {one}}}, {{'params': {two}}}, {{'params': {one}}}"))  # fmt: skip
    if not s.flip():
        s.raises(call.format(f"[{groups}]"), "ValueError", "one tensor is in two groups", fragment="more than one")
        return
    s.do(f"opt = {call.format(f'[{one}, {two}]')}")
    for i in range(s.number(1, 3)):
        if s.flip():
            s.do(f"w_{i} = {s.tensor(1.0, requires_grad=True)}\nopt.add_param_group({{'params': [w_{i}]}})")
        again = s.choose((f"[{one}]", f"[{two}]", one, f"[{s.tensor(1.0, requires_grad=True)}, {two}]"))
        s.raises(f"opt.add_param_group({{'params': {again}}})", "ValueError", "it is in another group already",
                 fragment="more than one")  # fmt: skip


def _no_list(s: Stage, call: str, good: list[str]) -> None:
    bad = s.choose((*good, *(t.name for t in s.tensors)))
    s.raises(call.format(bad), "TypeError", "a tensor is no iterable of parameters", fragment="iterable")


def _no_tensor(s: Stage, call: str, good: list[str]) -> None:
    bad = s.choose(("1.0", "None", "'w'", "[1.0]", "1", "object()", f"[{good[0]}]"))
    params = s.choose((bad, f"{good[-1]}, {bad}"))
    s.raises(
        _late(s, call, good[0], params), "TypeError", "only tensors can be optimized", fragment="only optimize Tensors"
    )


def _duplicates(s: Stage, call: str, good: list[str]) -> None:
    one, two = good[0], good[-1]
    params = s.choose((f"{one}, {one}", f"{one}, {two}, {one}", f"{two}, {one}, {one}"))
    s.do("import warnings")
    text = _late(s, call, _spare(s), params)
    s.block("with warnings.catch_warnings(record=True) as caught:", "warnings.simplefilter('always')", f"made = {text}")
    s.true("any('duplicate' in str(w.message) for w in caught)", "a parameter is there twice in one group")


def _spare(s: Stage) -> str:
    (w,) = extra(s, 1)
    return w.name
