"""Area hook: functions that run in the middle of a pass, on tensors, nodes and modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autograd_conformance.modes import ERRORS
from autograd_conformance.oracle import executed_nodes
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Leaf, Rewrap, SetRequiresGrad
from autograd_conformance.reverse import Rewrite
from autograd_conformance.scenes import scene
from autograd_conformance.snippets import UNTRACKED, untracked_names
from autograd_conformance.stage import Stage

WATCH = """
seen = {}
def watch(name):
    seen[name] = []
    return lambda g: seen[name].append(g.clone())
""".strip()
EDGE = "torch.autograd.graph.get_gradient_edge"


# --- which hooks a pass runs ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pass:
    """A pass on paper.

    Attributes:
        root: where it starts.
        call: its source; ``{r}`` is the root, ``{v}`` its gradient argument and ``{k}`` further arguments.
        targets: what its gradient is asked of; None for all leaves.
        grad: is it a call of ``torch.autograd.grad``?
        fires: names of the tensors whose hooks run.
        silent: tensors without a gradient, whose node has other outputs with one.

    """

    root: Paper
    call: str
    targets: list[Paper] | None = None
    grad: bool = False
    fires: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)

    def run(self, s: Stage, *, last: bool = False, keep: str = "retain_graph=True") -> Array:
        """Add the call; returns the numbers that it starts from."""
        text, seed = s.seed(self.root)
        first = [f"grad_outputs={text}" if self.grad else text] if text else []
        options = [] if last and s.flip() else [keep]
        if self.targets is not None:
            inputs = f"[{', '.join(t.name for t in self.targets)}]"
            first.insert(0, inputs) if self.grad else options.append(f"inputs={inputs}")
        head = f"got = torch.autograd.grad({self.root.name}, " if self.grad else f"{self.root.name}.backward("
        s.do(f"{head}{', '.join([*first, *options])})")
        return seed


def a_pass(s: Stage, root: Paper, *, kinds: Sequence[str] = ("backward", "backward", "grad", "inputs")) -> Pass:
    """A pass from a root, of one of some kinds (one dial, and one for each tensor that may be asked for)."""
    kind = s.choose(kinds)
    reached = s.above(root)
    if kind == "grad" and reached:
        return plan(s, root, s.some(reached)[:: s.choose((1, -1))][:4], grad=True)
    leaves = [t for t in reached if t.node is None]
    if kind == "inputs" and leaves:
        return plan(s, root, s.some(leaves))
    return plan(s, root)


def plan(s: Stage, root: Paper, targets: list[Paper] | None = None, *, grad: bool = False) -> Pass:
    """What a pass runs: the hooks of a tensor if its gradient is computed, those of a node if the node is."""
    reached = s.grads((root, np.ones(root.shape)))
    executed = {id(node) for node in executed_nodes([root], targets)}
    wanted = {id(t) for t in targets or ()}
    busy = executed | {id(t.node) for t in targets or () if t.node is not None}
    p = Pass(root, "", targets, grad, nodes=executed)
    for t in s.tracked:
        computed = targets is None or id(t) in wanted or id(t.node) in executed
        if t.name in reached and computed:
            p.fires.add(t.name)
        elif t.node is not None and id(t.node) in busy and any(o.name in reached for o in t.node.outs):
            p.silent.add(t.name)
    return p


def node_runs(p: Pass, t: Paper) -> bool:
    """Does a pass run the node of a tensor, be it that of a leaf?"""
    if t.node is None:
        return not p.grad and t.name in p.fires
    return id(t.node) in p.nodes


def by_name(s: Stage, names: Iterable[str]) -> list[Paper]:
    """Tensors of the graph, in its order."""
    wanted = set(names)
    return [t for t in s.tensors if t.name in wanted]


# --- tensor hooks -----------------------------------------------------------------------------------------------------


@scene("hook.fires-once-with-total")
def test_fires_once(s: Stage) -> None:
    """In each of several passes the hook of each tensor runs once, with the sum over all uses, or not at all."""
    root = s.root(interior=False)
    passes = [a_pass(s, root)]
    further = [root, *[t for t in s.tracked[::-1] if np.size(t.value)]]
    passes += [a_pass(s, s.choose(further)) for _ in range(s.number(0, 2))]
    silent = set().union(*(p.silent for p in passes))
    wanted = set().union(*(p.fires for p in passes)) - silent
    watched = s.some(by_name(s, wanted))
    aside = [t for t in s.tracked if t.name not in wanted | silent]
    watched += [s.choose(aside)] if aside and s.flip() else []
    s.do(WATCH)
    early = s.flip() and not any(isinstance(t, SetRequiresGrad) for t in s.scene.graph)
    leaves = [t for t in watched if early and t.node is None and any(t is leaf for leaf in s.leaves)]
    if early:
        s.play_leaves()
        _watch(s, leaves)
        s.play(s.rest())
    else:
        s.play()
    _watch(s, [t for t in watched if t not in leaves])
    counts = dict.fromkeys((t.name for t in watched), 0)
    more = bool(silent) and s.number(0, 3) == 3
    for i, p in enumerate(passes):
        keep = s.choose(("retain_graph=True", "create_graph=True"))
        grads = s.grads((p.root, p.run(s, last=i == len(passes) - 1 and not more, keep=keep)))
        for t in watched:
            counts[t.name] += t.name in p.fires
            s.equal(
                f"len(seen[{t.name!r}])", counts[t.name], "a hook runs once in each pass that computes its gradient"
            )
            if t.name in p.fires:
                s.close(f"seen[{t.name!r}][-1]", grads[t.name], f"all that the root's gradient gives {t.name}, summed")
    if more:
        t = s.choose(by_name(s, silent))
        p = next(p for p in passes if t.name in p.silent)
        s.mark = "silent sibling"
        s.do(f"calls = []\n{t.name}.register_hook(lambda g: calls.append(g))")
        p.run(s)
        s.equal("len(calls)", 0, f"{t.name} gets no gradient: {p.root.name} does not depend on it")


def _watch(s: Stage, tensors: Iterable[Paper]) -> None:
    for t in tensors:
        s.do(f"{t.name}.register_hook(watch({t.name!r}))")


@dataclass(frozen=True, slots=True)
class Change:
    """What a hook makes of a gradient: ``scale * g + shift``, on paper and as the source of an expression of ``g``."""

    text: str
    scale: float = 1.0
    shift: float = 0.0

    def __call__(self, g: Array) -> Array:
        """The change on paper."""
        return np.asarray(self.scale * g + self.shift)


def a_change(s: Stage, *, simple: bool = False) -> Change:
    """A random change of a gradient (2 dials)."""
    f = s.factor()
    options = [
        Change(f"g * {f}", scale=f),
        Change(f"g + {f}", shift=f),
        Change(f"torch.stack([g, -g], -1)[..., 0] * {f}", scale=f),
        Change(f"torch.stack([g * {f}, g], -1)[..., 0]", scale=f),
        Change("-g", scale=-1.0),
        Change(f"torch.full_like(g, {f})", scale=0.0, shift=f),
        Change(f"g.detach().clone() * {f}", scale=f),
        Change("torch.zeros_like(g)", scale=0.0),
        Change(f"(g.unsqueeze(0).expand(2, *g.shape) * {f})[1]", scale=f),
        Change(f"torch.ones_like(g[..., :1] if g.dim() else g).expand_as(g) * {f}", scale=0.0, shift=f),
    ]
    return s.choose(options[:2] if simple else options)


def chained(changes: Sequence[Rewrite]) -> Rewrite:
    """One change after the other."""

    def all_of_them(g: Array) -> Array:
        for change in changes:
            g = change(g)
        return g

    return all_of_them


@scene("hook.return-replaces")
def test_return_replaces(s: Stage) -> None:
    """What hooks of some tensors return is what everything behind them is computed from; None changes nothing."""
    root = s.root()
    p = a_pass(s, root)
    fitting = by_name(s, p.fires)
    needed = {id(t) for t in p.targets or () if node_runs(p, t)}  # see hook.grad-inputs-run-hooks
    fitting = [t for t in fitting if id(t) not in needed]
    hooked = s.some(fitting)[:3]
    s.play()
    s.do(WATCH)
    rewrite: dict[str, Rewrite] = {}
    for t in hooked:
        change = a_change(s)
        rewrite[t.name] = change
        if s.number(0, 3) == 3:
            s.do(f"{t.name}.register_hook(lambda g: None)")
        s.do(f"{t.name}.register_hook(lambda g: {change.text})")
        if s.number(0, 3) == 3:
            s.do(f"{t.name}.register_hook(lambda g: None)")
    others = [t for t in fitting if not any(t is u for u in hooked)]
    watched = s.some(others, least=0)[:2]
    _watch(s, watched)
    kept = [t for t in fitting if t.node is not None and not p.grad and t not in watched and s.flip()]
    for t in kept:
        s.do(f"{t.name}.retain_grad()")
    times = s.number(1, 3)
    for i in range(times):
        keep = s.choose(("retain_graph=True", "create_graph=True"))
        grads = s.grads((root, p.run(s, last=i == times - 1, keep=keep)), rewrite=rewrite)
        for t in watched:
            s.close(f"seen[{t.name!r}][{i}]", grads[t.name], "computed from what the hooks returned")
        targets = [t for t in p.targets or s.leaves if t.requires_grad]
        for j, t in enumerate(targets):
            probe = f"got[{j}]" if p.grad else f"{t.name}.grad"
            if id(t) not in needed:
                s.close(probe, grads.get(t.name), "computed from what the hooks returned")
        for t in kept:
            s.close(f"{t.name}.grad", grads[t.name], "computed from what the hooks returned")
        if i < times - 1 and not p.grad:
            s.do("\n".join(f"{t.name}.grad = None" for t in [*targets, *kept]))


ORDER = """
order = {}
def then(name, i, change=None):
    def hook(*grads):
        order[name].append(i)
        if change is None:
            return None
        changed = tuple(None if g is None else change(g) for g in grads[0]) if name[:4] in ('pre ', 'node') else change(grads[0])
        return changed
    order.setdefault(name, [])
    return hook
""".strip()
KINDS = {
    "tensor": "{t}.register_hook(then({n!r}, {i}{c}))",
    "pre": "{e}.register_prehook(then({n!r}, {i}{c}))",
    "node": "{e}.register_hook(then({n!r}, {i}{c}))",
    "post": "{t}.register_post_accumulate_grad_hook(then({n!r}, {i}))",
}


def _alone(t: Paper) -> bool:
    """Is it the only output of its node, so that what hooks of the node do is done to it alone?"""
    return t.node is None or len(t.node.outs) == 1


def node_of(t: Paper) -> str:
    """The node of a tensor, as source: that which made it, or which accumulates into it."""
    return f"{t.name}.grad_fn" if t.node is not None else f"{EDGE}({t.name}).node"


@scene("hook.order-and-chaining")
def test_order(s: Stage) -> None:
    """Up to four hooks of a kind run in the order of their registration, each on what those before it left."""
    root = s.root()
    p = plan(s, root)
    hooked = s.some(by_name(s, p.fires))[:3]
    s.play()
    s.do(ORDER)
    rewrite: dict[str, Rewrite] = {}
    due: dict[str, list[int]] = {}
    for t in hooked:
        kinds = ["tensor", "pre", "tensor", "node" if t.node is not None else "post"]
        kind, count = s.choose(kinds if _alone(t) else kinds[:1]), s.number(2, 4)
        name = f"{kind} {t.name}"
        if kind != "tensor":
            s.do(f"n_{t.name} = {node_of(t)}")
        changes = []
        for i in range(count):
            change = a_change(s, simple=True) if i < 3 and (kind != "node" or s.flip()) else None
            if kind == "node":  # its gradients may be sent on to several tensors: no shift that would be sent twice
                change = change if change is None or change.scale != 1.0 else None
            text = "" if change is None or kind == "post" else f", lambda g: {change.text}"
            s.do(KINDS[kind].format(t=t.name, e=f"n_{t.name}", n=name, i=i, c=text))
            if text and change is not None:
                changes.append(change)
        due[name] = list(range(count))
        rewrite[t.name] = chained(changes)
        if s.number(0, 3) == 3:  # taken away and put back: the last one now
            s.do(f"h = {KINDS[kind].format(t=t.name, e=f'n_{t.name}', n=name, i=9, c='')}")
            s.do(KINDS[kind].format(t=t.name, e=f"n_{t.name}", n=name, i=8, c=""))
            s.do("h.remove()")
            due[name].append(8)
    times = s.number(1, 2)
    for i in range(times):
        grads = s.grads((root, p.run(s, last=i == times - 1)), rewrite=rewrite)
        for name, numbers in due.items():
            s.equal(
                f"list(order[{name!r}])", numbers * (i + 1), "hooks of a kind run in the order of their registration"
            )
        for leaf in s.leaves:
            if leaf.requires_grad:
                s.close(f"{leaf.name}.grad", grads.get(leaf.name), "each hook got what the one before it left")
        if i < times - 1:
            s.do("\n".join(f"{leaf.name}.grad = None" for leaf in s.leaves if leaf.requires_grad))


# --- register and remove ----------------------------------------------------------------------------------------------

NOTE = """
calls, handles = [], {}
def note(i, once=False):
    def hook(*grads):
        calls.append(i)
        if once:
            handles[i].remove()
    return hook
""".strip()
REGISTER = {
    "tensor": "{t}.register_hook({f})",
    "post": "{t}.register_post_accumulate_grad_hook({f})",
    "pre": "{e}.register_prehook({f})",
    "node": "{e}.register_hook({f})",
    "multi": "torch.autograd.graph.register_multi_grad_hook([{t}], {f})",
}


@scene("hook.remove")
def test_remove(s: Stage) -> None:  # noqa: C901, PLR0915 - a scene, told in order
    """Hooks of all kinds are registered and removed at random, and each pass runs those that are left, once each."""
    root = s.root()
    p = plan(s, root)
    hooked = s.some(by_name(s, p.fires))[:3]
    s.play()
    s.do(NOTE)
    alive: dict[int, bool] = {}  # number: does it remove itself?
    gone: list[int] = []

    def register() -> None:
        t = s.choose(hooked)
        last = "multi" if t is not root else "tensor"  # see hook.multi-grad
        kind = s.choose(("tensor", "tensor", "pre", "node" if t.node is not None else "post", last))
        i, once = len(alive) + len(gone), s.number(0, 3) == 3 and kind in ("tensor", "post")
        if kind in ("pre", "node") and t.node is None:
            s.do(f"n_{t.name} = {node_of(t)}")
        edge = node_of(t) if t.node is not None else f"n_{t.name}"
        call = REGISTER[kind].format(t=t.name, e=edge, f=f"note({i}{', True' if once else ''})")
        s.do(f"handles[{i}] = {call}")
        alive[i] = once

    def look(here: Iterable[int]) -> None:
        p.run(s)
        s.equal("sorted(calls)", sorted(here), "those hooks run that are registered and not removed")
        s.do("calls.clear()")
        for i in [i for i, once in alive.items() if once]:
            gone.append(i)
            del alive[i]

    for _ in range(s.number(2, 3)):
        register()
    for _ in range(s.number(2, 5)):
        what = s.choose(("remove", "pass", "register", "with", "again", "remove"))
        if what == "remove" and alive:
            i = s.choose(sorted(alive))
            s.do(f"handles[{i}].remove()")
            gone.append(i)
            del alive[i]
        elif what == "register":
            register()
        elif what == "with" and alive and not any(alive.values()):
            i = s.choose(sorted(alive))
            error = s.flip()
            text = f"with handles[{i}]:\n    {root.name}.backward(torch.ones_like({root.name}), retain_graph=True)"
            if error:
                word = s.choose(ERRORS)
                text = s.block_source("try:", f"{text}\n    raise {word}") + f"\nexcept {word}:\n    pass"
            s.do(text)
            s.equal("sorted(calls)", sorted(alive), "within the block the hook is registered")
            s.do("calls.clear()")
            gone.append(i)
            del alive[i]
        elif what == "again" and gone:
            s.do(f"handles[{s.choose(gone)}].remove()")
        elif what == "pass":
            look(alive)
    look(alive)
    look(alive)


# --- errors -----------------------------------------------------------------------------------------------------------


@scene("hook.needs-requires-grad")
def test_needs_requires_grad(s: Stage) -> None:
    """register_hook raises on whatever does not require grad, be it leaf, result, copy, integer or switched off."""
    s.play()
    s.do("calls = []\ndef hook(g):\n    calls.append(g)")
    names = untracked_names(s, (*UNTRACKED, "{}.data"))
    if s.flip():
        name = s.name("u")
        s.do(f"{name} = {s.tensor(s.numbers((2,)), requires_grad=True)}")
        if s.flip():
            s.do(f"{name}.register_hook(hook)")
        s.do(f"{name}.requires_grad_(False)")
        names.append(name)
    t = s.choose(s.tracked)
    s.succeeds(f"handle = {t.name}.register_hook(hook)", f"{t.name} requires grad")
    for name in names:
        for _ in range(s.number(1, 2)):
            s.raises(f"{name}.register_hook(hook)", "RuntimeError", f"{name} does not require grad", fragment=_REFUSED)
    s.equal("len(calls)", 0, "no pass has run")


_REFUSED = "cannot register a hook on a tensor that doesn't require gradient"
NO_TENSOR = ("3", "2.0", "True", "False", "'text'", "[g]", "(g,)", "(None,)", "{}", "list(g.shape)", "g.dtype", "()")


def _misfits(t: Paper) -> list[str]:
    """Tensors that do not fit a gradient of ``t``."""
    sizes = ["g.unsqueeze(0)", "torch.cat([g.reshape(-1)] * 2)", "g.new_zeros((7, 5))", "g[None].clone()"]
    if t.shape:
        sizes += ["g.sum()", "g[..., None]"]
    if len(t.shape) == 2 and t.shape[0] != t.shape[1]:
        sizes += ["g.t()"]
    if len(t.shape) > 1 or t.shape == ():
        sizes += ["g.reshape(-1)"]
    sizes = [text for text in sizes if np.size(t.value) or "cat" not in text]
    dtypes = ["g.to(torch.int64)", "g.float()" if t.dtype == "float64" else "g.to(torch.int32)", "g > 0"]
    return [*sizes[:2], *dtypes, *sizes[2:]]


@scene("hook.return-checked")
def test_return_checked(s: Stage) -> None:
    """A hook that returns what is no gradient of its tensor makes the pass raise, and the next pass is right again."""
    root = s.root()
    p = a_pass(s, root)
    t = s.choose([t for t in by_name(s, p.fires) if np.size(t.value)])
    before, behind = s.number(0, 2), s.number(0, 1)
    s.play()
    for _ in range(before):
        s.do(f"{t.name}.register_hook(lambda g: {s.choose(('None', 'g', 'g * 1.0'))})")
    for _ in range(s.number(1, 2)):
        if s.flip():
            text, error, fragment = s.choose(NO_TENSOR), "TypeError", ""
        else:
            text, error = s.choose(_misfits(t)), "RuntimeError"
            fragment = (
                "has changed the type of value" if "torch.int" in text or "float" in text or ">" in text else _SIZE
            )
        s.do(f"handle = {t.name}.register_hook(lambda g: {text})")
        for _ in range(behind):
            s.do(f"{t.name}.register_hook(lambda g: None)")
        text, _ = s.seed(root)
        call = _call(p, text)
        s.raises(call, error, f"the hook of {t.name} returns what is no gradient of it", fragment=fragment)
        s.do("handle.remove()")
    for leaf in s.leaves:
        if leaf.requires_grad and s.device.has("values"):
            s.do(f"{leaf.name}.grad = None")
    if s.flip():
        p = plan(s, root)
        grads = s.grads((root, p.run(s)))
        for leaf in s.leaves:
            if leaf.requires_grad:
                s.close(f"{leaf.name}.grad", grads.get(leaf.name), "without that hook the pass is as any other")


_SIZE = "has changed the size of value"


def _call(p: Pass, text: str) -> str:
    inputs = f"[{', '.join(t.name for t in p.targets or ())}]"
    rest = [f"grad_outputs={text}"] if text and p.grad else [text] if text else []
    if p.grad:
        return f"torch.autograd.grad({', '.join([p.root.name, inputs, *rest, 'retain_graph=True'])})"
    rest += [f"inputs={inputs}"] if p.targets is not None else []
    return f"{p.root.name}.backward({', '.join([*rest, 'retain_graph=True'])})"


# --- observers --------------------------------------------------------------------------------------------------------


@scene("hook.observer-is-neutral")
def test_neutral(s: Stage) -> None:
    """The same pass with and without hooks of all kinds that look and return None gives the leaves the same bits."""
    root = s.root()
    inner = s.above(root, root_too=True)
    leaves = [t for t in inner if t.node is None and t.requires_grad]
    for t in inner:
        s.require(np.all(np.isfinite(t.value)))
    watched = s.some(inner)[:4]
    s.play()
    text, _ = s.seed(root)
    grad = s.flip() and root.node is not None
    wanted = ", ".join(t.name for t in leaves)
    if grad:
        given = f"grad_outputs={text}, " if text else ""
        call = f"torch.autograd.grad({root.name}, [{wanted}], {given}retain_graph=True)"
        s.do(f"plain = {call}")
    else:
        call = f"{root.name}.backward({', '.join([*([text] if text else []), 'retain_graph=True'])})"
        s.do(call)
        s.do(f"leaves = [{wanted}]\nplain = [t.grad.clone() for t in leaves]")
    s.do("calls = []\ndef look(*args):\n    calls.append([a.shape for a in args if isinstance(a, torch.Tensor)])")
    for t in watched:
        for _ in range(s.number(1, 2)):
            kinds = ["tensor", "pre", "node" if t.node is not None or not grad else "tensor"]
            kinds += ["post" if t.node is None else "node", *([] if grad and t.node is None else ["multi"])]
            s.do(REGISTER[s.choose(kinds)].format(t=t.name, e=node_of(t), f="look"))
    if len(leaves) > 1 and not grad and s.flip():
        mode = s.choose(("'all'", "'any'"))
        s.do(f"torch.autograd.graph.register_multi_grad_hook([{wanted}], look, mode={mode})")
    for _ in range(s.number(1, 2)):
        if grad:
            s.do(f"again = {call}")
        else:
            s.do("for t in leaves:\n    t.grad = None")
            s.do(call)
            s.do("again = [t.grad for t in leaves]")
        s.true("all(map(torch.equal, plain, again))", "the same pass, but for hooks that return None")
        s.true("[t.shape for t in plain] == [t.shape for t in again]", "the same pass, but for hooks that return None")


# --- what runs, and when ----------------------------------------------------------------------------------------------


@scene("hook.grad-inputs-run-hooks")
def test_grad_inputs(s: Stage) -> None:
    """autograd.grad runs the hooks of what its inputs need and no others, and returns what those of its inputs made."""
    root = s.root()
    reached = s.above(root, root_too=True)
    targets = s.some(reached)[:: s.choose((1, -1))][:3]
    p = plan(s, root, targets, grad=True)
    s.play()
    s.do(NOTE)
    tensors = [t for t in s.tracked if t.name not in p.silent]
    hooked = [t for t in tensors if s.flip()][:5] or targets
    nodes = [t for t in reached if t.node is not None and s.flip()][:4]
    rewrite: dict[str, Rewrite] = {}
    for i, t in enumerate(hooked):
        s.do(f"{t.name}.register_hook(note({i}))")
    for i, t in enumerate(nodes, len(hooked)):
        s.do(REGISTER[s.choose(("pre", "node"))].format(t=t.name, e=node_of(t), f=f"note({i})"))
    for t in targets:
        if s.flip() and (not node_runs(p, t) or s.number(0, 7) == 7):
            change = a_change(s)
            rewrite[t.name] = change
            made = f"made_{t.name}"
            s.do(f"{made} = []\n{t.name}.register_hook(lambda g: {made}.append({change.text}) or {made}[-1])")
    due = [i for i, t in enumerate(hooked) if t.name in p.fires]
    due += [i for i, t in enumerate(nodes, len(hooked)) if node_runs(p, t)]
    for _ in range(s.number(1, 2)):
        grads = s.grads((root, p.run(s)), rewrite=rewrite)
        s.equal(
            "sorted(calls)", due, "hooks run where a gradient is needed for an input, nodes where one is behind them"
        )
        for j, t in enumerate(targets):
            if t.name in rewrite and node_runs(p, t):
                s.mark = "needed too"
                s.same(f"got[{j}]", f"made_{t.name}[-1]", f"the gradient of {t.name} is what its own hook returned")
                s.mark = ""
            else:
                s.close(f"got[{j}]", grads[t.name], f"the gradient of {t.name}, as its own hooks left it")
        s.do("calls.clear()")


@scene("hook.kind-order")
def test_kind_order(s: Stage) -> None:  # noqa: C901 - a scene, told in order
    """Hooks of different kinds at one tensor run in the promised order, in whatever order they were registered."""
    root = s.root()
    p = plan(s, root)
    hooked = s.some([t for t in by_name(s, p.fires) if np.size(t.value)])[:2]
    s.play()
    s.do("order, states = {}, {}")
    s.do(STATE)
    rewrite: dict[str, Rewrite] = {}
    expected: dict[str, tuple[list[str], bool, float, float]] = {}
    for t in hooked:
        leaf = t.node is None
        kinds = ["tensor", "pre", "post" if leaf else "node", *(["node"] if leaf else [])]
        kinds = s.some(kinds, least=2)
        if not leaf and s.flip():
            kinds.append("retain")
        shuffled = [kinds.pop(s.number(0, len(kinds) - 1)) for _ in range(len(kinds))]
        if leaf:
            s.do(f"n_{t.name} = {node_of(t)}")
        edge = f"n_{t.name}" if leaf else node_of(t)
        first, then = 1.0, 1.0
        for kind in shuffled:
            if kind == "retain":
                s.do(f"{t.name}.retain_grad()")
                continue
            f = s.choose((1.0, 2.0, -1.0)) if kind == "tensor" or (kind == "pre" and _alone(t) and s.flip()) else 1.0
            first, then = (f, then) if kind == "tensor" else (first, f if kind == "pre" else then)
            text = f"then({t.name!r}, {kind!r}, {t.name}, {f})"
            s.do(REGISTER[kind].format(t=t.name, e=edge, f=text))
        expected[t.name] = (
            [k for k in ("tensor", "pre", "post", "node") if k in shuffled],
            "retain" in shuffled,
            first,
            then,
        )
        rewrite[t.name] = Change("", scale=first * then)
    grads = s.grads((root, p.run(s, last=True)), rewrite=rewrite)
    strict = s.number(0, 7) == 7
    for t in hooked:
        kinds, retains, first, then = expected[t.name]
        s.equal(f"list(order[{t.name!r}])", kinds, "tensor hooks, pre-hooks of the node, post-accumulate, the node's")
        for kind in kinds:
            if kind != "pre":
                filled = kind == "post" or (kind == "node" and (retains or t.node is None))
                s.equal(f"states[{t.name!r}, {kind!r}][0]", filled, f"whether {t.name}.grad is there yet")
        if "pre" in kinds:
            s.close(f"states[{t.name!r}, 'pre'][1]", grads[t.name] / then, "what the tensor hooks left")
        if "post" in kinds:
            s.close(f"states[{t.name!r}, 'post'][2]", grads[t.name], "what tensor hooks and pre-hooks left is in .grad")
        if t.node is None or then == 1.0:
            s.close(f"{t.name}.grad", grads[t.name] if retains or t.node is None else None, "the gradient at the node")
        if retains and "pre" in kinds and strict:
            s.mark = "retained before pre-hooks"
            s.close(f"{t.name}.grad", grads[t.name], "what the tensor hooks and the pre-hooks of the node left")
            s.false(f"states[{t.name!r}, 'pre'][0]", "the retained .grad is updated after the pre-hooks of the node")
            s.mark = ""


STATE = """
def then(name, kind, t, factor):
    order[name] = []
    def hook(*args):
        order[name].append(kind)
        g = args[0][t.output_nr] if kind == 'pre' else None
        states[name, kind] = t.grad is not None, g if g is None else g.clone(), t.grad if t.grad is None else t.grad.clone()
        if kind == 'tensor':
            return args[0] * factor
        if kind == 'pre':
            return tuple(None if g is None else g * factor for g in args[0])
    return hook
""".strip()


# --- in-place ---------------------------------------------------------------------------------------------------------

IN_PLACE: tuple[tuple[str, Callable[[Array, float], Array], Callable[[Array, float], Array]], ...] = (
    ("{u}.mul_({f})", lambda v, f: v * f, lambda v, f: np.full(v.shape, f)),
    ("{u}.add_({f})", lambda v, f: v + f, lambda v, f: np.ones(v.shape)),
    ("{u}.sin_()", lambda v, f: np.sin(v), lambda v, f: np.cos(v)),
    ("{u}.neg_()", lambda v, f: -v, lambda v, f: -np.ones(v.shape)),
    ("{u} *= {f}", lambda v, f: v * f, lambda v, f: np.full(v.shape, f)),
    ("{u}.fill_({f})", lambda v, f: np.full(v.shape, f), lambda v, f: np.zeros(v.shape)),
    ("{u}.pow_(2)", lambda v, f: v**2, lambda v, f: 2.0 * v),
    ("{u}.copy_({u} * {f})", lambda v, f: v * f, lambda v, f: np.full(v.shape, f)),
)


@scene("hook.bound-to-version")
def test_bound_to_version(s: Stage) -> None:
    """Between up to four in-place ops hooks are registered; each gets the gradient of the value it was registered on."""
    start = s.choose([t for t in s.tracked[::-1] if np.size(t.value) and np.max(abs(t.value)) < 4])
    s.play()
    s.do(WATCH)
    made = s.choose((("{}.clone()", 1.0), ("({} * 2.0)", 2.0), ("({} + 0.0)", 1.0)))
    s.do(f"u = {made[0].format(start.name)}")
    value = start.value * made[1]
    slopes: list[Array] = [np.full(value.shape, made[1])]
    at: list[list[tuple[str, Change | None]]] = []

    def register() -> None:
        hooks: list[tuple[str, Change | None]] = []
        for _ in range(s.number(0 if at else 1, 2)):
            if s.number(0, 3) == 3:
                change = a_change(s, simple=True)
                s.do(f"u.register_hook(lambda g: {change.text})")
                hooks.append(("", change))
            else:
                name = s.name("h")
                s.do(f"u.register_hook(watch({name!r}))")
                hooks.append((name, None))
        at.append(hooks)

    register()
    for _ in range(s.number(1, 4)):
        text, f, slope = s.choose(IN_PLACE)
        factor = s.choose((2.0, 0.5, -1.0))
        s.do(text.format(u="u", f=factor))
        slopes.append(slope(value, factor))
        value = f(value, factor)
        register()
    last, end = s.choose((("u * 3.0", 3.0), ("u.clone()", 1.0), ("u", 1.0)))
    seed = s.numbers(start.shape)
    s.do(f"y = {last}\nv = {s.tensor(seed, start.dtype)}")
    passes = s.number(1, 2)
    grad = s.flip()
    for i in range(passes):
        s.do(
            "y.backward(v, retain_graph=True)"
            if not grad
            else f"torch.autograd.grad(y, {start.name}, v, retain_graph=True)"
        )
        g = seed * end
        for hooks, slope in zip(reversed(at), reversed(slopes), strict=True):
            for name, change in hooks:
                if change is not None:
                    g = change(g)
                else:
                    s.equal(f"len(seen[{name!r}])", i + 1, "once in each pass")
                    s.close(f"seen[{name!r}][-1]", g, "the gradient of the value that the hook was registered on")
            g = g * slope


# --- after the gradient is there --------------------------------------------------------------------------------------

AFTER = """
after = {}
def note(name, leaf):
    after[name] = []
    def hook(p):
        after[name].append((p is leaf, p.grad is not None, torch.is_grad_enabled(), p.grad.clone()))
    return hook
""".strip()


@scene("hook.post-accumulate")
def test_post_accumulate(s: Stage) -> None:  # noqa: C901 - a scene, told in order
    """After each update of a leaf's .grad its hook runs once, gets the leaf, sees the sum, may clear it or make a step."""
    root = s.root(interior=False)
    shared = any(isinstance(t, Rewrap) for t in s.scene.graph)
    reached = s.above(root, root_too=True)
    leaves = [t for t in s.leaves if t.requires_grad]
    hooked = s.some([t for t in reached if t.node is None and any(t is leaf for leaf in leaves)])
    aside = [t for t in leaves if not any(t is u for u in hooked)]
    hooked += aside[:1] if s.flip() else []
    s.do(AFTER)
    early = s.flip()
    s.play_leaves() if early else s.play()
    written = {leaf.name for leaf in s.scene.graph if isinstance(leaf, Leaf) and leaf.layout == "expanded"}
    does: dict[str, str] = {}
    for t in hooked:
        t_does = [s.choose(("look", "clear", "step", "look"))]
        if shared or t.name in written:
            t_does = ["look" if t_does[0] == "step" else t_does[0]]
        does[t.name] = t_does[0]
        if s.number(0, 3) == 3:
            s.do(f"{t.name}.register_post_accumulate_grad_hook(lambda p: None)")
        s.do(f"{t.name}.register_post_accumulate_grad_hook(note({t.name!r}, {t.name}))")
        if t_does[0] == "clear":
            s.do(f"def clear(p):\n    p.grad = None\n{t.name}.register_post_accumulate_grad_hook(clear)")
        elif t_does[0] == "step":
            s.do(f"{t.name}.register_post_accumulate_grad_hook(lambda p: p.add_(p.grad, alpha=-0.5))")
    if early:
        s.play(s.rest())
    total: dict[str, Array] = {}
    counts = dict.fromkeys(does, 0)
    passes = 1 if "step" in does.values() else s.number(1, 3)
    for i in range(passes):
        kinds = ("backward", "grad", "inputs", "backward")
        p = a_pass(s, root, kinds=kinds if i < passes - 1 or "step" not in does.values() else ("backward", "inputs"))
        keep = (
            s.choose(("retain_graph=True", "create_graph=True")) if "step" not in does.values() else "retain_graph=True"
        )
        grads = s.grads((root, p.run(s, keep=keep)))
        for t in hooked:
            runs = not p.grad and t.name in p.fires
            if runs:
                total[t.name] = total[t.name] + grads[t.name] if t.name in total else grads[t.name]
            counts[t.name] += runs
            s.equal(
                f"len(after[{t.name!r}])", counts[t.name], "it runs once for each update of .grad, and in no other pass"
            )
            if runs:
                probe = f"after[{t.name!r}][-1]"
                mode = keep.startswith("create")
                s.equal(
                    f"{probe}[:3]", (True, True, mode), "it gets the leaf, whose .grad is there; grad mode as the pass"
                )
                s.close(f"{probe}[3]", total[t.name], "the .grad that it sees is the sum")
                if does[t.name] == "step":
                    s.close(t.name, t.value - 0.5 * total[t.name], "the hook changed the leaf")
                if does[t.name] == "clear":
                    del total[t.name]
            s.close(f"{t.name}.grad", total.get(t.name), "what the hook left of it")


@scene("hook.post-accumulate-leaf-only")
def test_leaf_only(s: Stage) -> None:
    """Registration raises on non-leaves and on what does not require grad, and succeeds on a leaf that does."""
    s.play()
    s.do("calls = []\ndef hook(p):\n    calls.append(p)")
    wrong = [(t.name, _NO_LEAF) for t in s.interior]
    wrong += [(t.name, _REFUSED) for t in s.due.tensors.values() if not t.requires_grad]
    names = s.some(wrong, least=0)[:4]
    made = (
        ("{}.detach()", _REFUSED), ("{} * 2.0", _NO_LEAF), ("{}.clone()", _NO_LEAF), ("{}.detach().clone()", _REFUSED),
        ("{} > 0", _REFUSED), ("{}.view_as({})", _NO_LEAF), ("{}.sum()", _NO_LEAF),
    )  # fmt: skip
    for _ in range(s.number(0 if names else 1, 2)):
        name, (text, fragment) = s.name("u"), s.choose(made)
        t = s.choose(s.tracked)
        s.do(f"{name} = {text.format(t.name, t.name)}")
        names.append((name, fragment))
    for name, fragment in names:
        if fragment is _NO_LEAF and s.flip():
            s.do(f"{name}.retain_grad()")
        for _ in range(s.number(1, 2)):
            because = f"{name} is no leaf" if fragment is _NO_LEAF else f"{name} does not require grad"
            s.raises(f"{name}.register_post_accumulate_grad_hook(hook)", "RuntimeError", because, fragment=fragment)
    leaf = s.choose([t for t in s.tracked if t.node is None])
    s.succeeds(f"{leaf.name}.register_post_accumulate_grad_hook(hook)", f"{leaf.name} is a leaf that requires grad")
    s.equal("len(calls)", 0, "no pass has run")


_NO_LEAF = "post accumulate grad hooks cannot be registered on non-leaf tensors"


# --- nodes ------------------------------------------------------------------------------------------------------------

NODES = """
met = {}
def meet(name, slot, factor=None):
    met[name] = []
    def hook(*grads):
        met[name].append([None if g is None else g.clone() for g in grads[-1]][slot])
        if factor is not None:
            return tuple(None if g is None else g * factor for g in grads[0])
    return hook
""".strip()
SINGLE: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("{}.clone()", np.ones_like),
    ("{}.sin()", np.cos),
    ("-{}", lambda v: -np.ones_like(v)),
    ("{}.cos()", lambda v: -np.sin(v)),
)


@scene("hook.node-hooks")
def test_node_hooks(s: Stage) -> None:  # noqa: PLR0915 - a scene, told in order
    """Hooks before and after nodes run when the nodes do, get the gradients on both sides and may replace them."""
    top = s.root()
    slope: Array | None = None
    s.play()
    text, derivative = s.choose(SINGLE)
    s.do(f"z = {text.format(top.name)}")
    slope = derivative(top.value)
    p = a_pass(s, top, kinds=("backward", "grad", "backward"))
    nodes = [t for t in s.above(top, root_too=True) if t.name not in p.silent]
    targets = {id(t) for t in p.targets or ()}
    hooked = s.some(nodes)[:3]
    s.do(NODES)
    scale: dict[str, float] = {}
    names: list[tuple[str, Paper, float]] = []
    removed: list[str] = []
    for t in hooked:
        if t.node is None:
            s.do(f"n_{t.name} = {node_of(t)}")
        edge = node_of(t) if t.node is not None else f"n_{t.name}"
        slot = f"{t.name}.output_nr"
        for kind in [s.choose(("pre", "pre" if t.node is None else "node")) for _ in range(s.number(1, 2))]:
            f = s.factor() if _alone(t) and id(t) not in targets and s.flip() else None
            name = s.name("h")
            s.do(f"{name} = {REGISTER[kind].format(e=edge, t='', f=f'meet({name!r}, {slot}, {f})')}")
            if s.number(0, 3) == 3:
                s.do(f"{name}.remove()")
                removed.append(name)
                continue
            names.append((name, t, 0.0))
            scale.setdefault(t.name, 1.0)
            scale[t.name] *= f if f is not None else 1.0
    own = [s.factor() if s.flip() else None, s.factor() if s.flip() else None]
    s.do(f"z.grad_fn.register_hook(meet('out', 0, {own[1]}))")
    s.do(f"z.grad_fn.register_prehook(meet('in', 0, {own[0]}))")
    s.do("sides = []\nz.grad_fn.register_hook(lambda gi, go: sides.append((len(gi), gi[0].clone(), len(go))))")
    seed = s.numbers(top.shape)
    s.do(f"v = {s.tensor(seed, top.dtype)}")
    arrived = seed * (own[0] or 1.0)
    below = arrived * slope * (own[1] or 1.0)
    rewrite: dict[str, Rewrite] = {n: Change("", scale=f) for n, f in scale.items()}
    targets_text = f"[{', '.join(t.name for t in p.targets or ())}]"
    call = (
        f"got = torch.autograd.grad(z, {targets_text}, v, retain_graph=True)"
        if p.grad
        else "z.backward(v, retain_graph=True)"
    )
    for i in range(s.number(1, 2)):
        s.do(call)
        s.close("met['in'][-1]", seed, "a pre-hook gets the gradient of the output")
        s.close("met['out'][-1]", arrived, "a hook gets what the pre-hooks left")
        s.equal("(sides[-1][0], sides[-1][2])", (1, 1), "a gradient for each input and each output of the node")
        s.close("sides[-1][1]", below, "the gradient of the input, as the hook before left it")
        grads = s.grads((top, below), rewrite=rewrite)
        for name, t, _ in names:
            s.equal(f"len(met[{name!r}])", (i + 1) * node_runs(p, t), f"hooks of the node of {t.name} run if it does")
        for name in removed:
            s.equal(f"len(met[{name!r}])", 0, "it was removed")
        for j, t in enumerate(p.targets or s.leaves):
            if t.requires_grad:
                s.close(
                    f"got[{j}]" if p.grad else f"{t.name}.grad", grads.get(t.name), "what the hooks of the nodes left"
                )
        if not p.grad:
            s.do("\n".join(f"{t.name}.grad = None" for t in s.leaves if t.requires_grad))


# --- several tensors --------------------------------------------------------------------------------------------------

MULTI = """
calls = []
def both(grads):
    calls.append([None if g is None else g.clone() for g in grads])
def first(grad):
    calls.append(grad if grad is None else grad.clone())
""".strip()


@scene("hook.multi-grad")
def test_multi_grad(s: Stage) -> None:  # noqa: C901, PLR0912, PLR0915 - a scene, told in order
    """Mode 'all' calls once, when all that is computed is there; mode 'any' with the first; each in every pass anew."""
    root = s.root()
    mode = s.choose(("all", "any", "all"))
    passes = [a_pass(s, root)]
    further = [t for t in s.interior[::-1] if np.size(t.value)]
    passes += [a_pass(s, s.choose(further)) for _ in range(s.number(0, 2))]
    tensors = [t for t in s.tracked if not any(_at_root(t, p) for p in passes)]
    if mode == "any":
        tensors = [t for t in tensors if all(t.name not in p.silent for p in passes)]
    odd = s.number(0, 7) == 7
    if any(p.grad for p in passes) and not (odd and mode == "all"):
        tensors = [t for t in tensors if t.node is not None or mode == "any"]
    elif odd and mode == "all":
        tensors = [t for t in s.tracked if t is root or t.node is None or t in tensors]
    given = s.some(tensors)[:4]
    s.play()
    s.do(MULTI)
    text = ", ".join(t.name for t in given)
    wrong = s.choose(("", "", "", "'both'", "'ALL'", "''", "None"))
    call = f"torch.autograd.graph.register_multi_grad_hook([{text}], {{}}, mode={{}})"
    if wrong:
        fragment = "Expects mode to be one of ('all', 'any')"
        s.raises(call.format("both", wrong), "ValueError", "there is no such mode", fragment=fragment)
    what = "both" if mode == "all" else "first"
    shown = "" if mode == "all" and s.flip() else f", mode={mode!r}"
    s.do(f"handle = torch.autograd.graph.register_multi_grad_hook(({text},), {what}{shown})")
    if s.number(0, 3) == 3:
        s.do(f"h = {call.format(what, repr(mode))}\nh.remove()")
    for p in passes:
        s.do("calls.clear()")
        due = [t for t in given if t.name in p.fires]
        if p.grad and any(t.node is None for t in given) and mode == "all":
            s.mark = "leaf in autograd.grad"
        elif any(_at_root(t, p) for t in given):
            s.mark = "root among them"
        text, seed = s.seed(p.root)
        grads = s.grads((p.root, seed))
        if s.mark == "leaf in autograd.grad" and due:
            s.succeeds(_call(p, text), "tensors that are no inputs are passed over")
        elif s.mark == "leaf in autograd.grad":
            s.mark = ""
            s.do(_call(p, text))
        else:
            s.do(_call(p, text))
        if due or not any(t.name in p.silent for t in given):  # see hook.fires-once-with-total
            s.equal("len(calls)", int(bool(due)), "once in each pass that computes any of the gradients")
        if mode == "all" and due:
            pattern = [t.name in p.fires for t in given]
            shapes = [list(t.shape) if t.name in p.fires else None for t in given]
            known = [t for t in given if t.name not in p.silent]
            if len(known) == len(given):
                s.equal("[g is not None for g in calls[0]]", pattern, "None for those whose gradient is not computed")
                s.equal(
                    "[None if g is None else list(g.shape) for g in calls[0]]", shapes, "gradients of these tensors"
                )
            for i, t in enumerate(given):
                if t.name in p.fires:
                    s.close(f"calls[0][{i}]", grads[t.name], f"the gradient of {t.name}")
        elif due:
            newest = _newest(s, due)
            if newest is not None:
                s.close("calls[0]", grads[newest.name], f"all others are computed from the gradient of {newest.name}")
        s.mark = ""
    s.do("handle.remove()\ncalls.clear()")
    plan(s, root).run(s)
    s.equal("len(calls)", 0, "it was removed")


def _at_root(t: Paper, p: Pass) -> bool:
    """Is it the root of a pass, or another output of its node?"""
    return t is p.root or (t.node is not None and t.node is p.root.node)


def _newest(s: Stage, tensors: Sequence[Paper]) -> Paper | None:
    """The tensor whose gradient is computed before those of all the others, if that is sure."""
    for t in tensors:
        behind = {u.name for u in s.above(t)} if np.size(t.value) else set()
        if all(u is t or u.name in behind for u in tensors):
            return t
    return None


# --- modules ----------------------------------------------------------------------------------------------------------

NET = """
class Net(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.p = torch.nn.Parameter(factor)

    def forward(self, x, k=2.0, y=None, *, z=None):
        out = x * self.p * k
        if z is not None:
            out = out + z.detach().sum()
        return out if y is None else (out, k, y * self.p - x.sum())
""".strip()
OUTER = """
class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)
""".strip()
SEEN = """
seen = {}
def keep(gs):
    return [None if g is None else g.clone() for g in gs]
def hook(name, change=None):
    seen[name] = []
    def run(module, grad_input, grad_output):
        seen[name].append((module, type(grad_input), type(grad_output), keep(grad_input), keep(grad_output)))
        if change is not None:
            return tuple(None if g is None else change(g) for g in grad_input)
    return run
def before(name, change=None):
    seen[name] = []
    def run(module, grad_output):
        seen[name].append((module, type(grad_output), keep(grad_output)))
        if change is not None:
            return tuple(None if g is None else change(g) for g in grad_output)
    return run
""".strip()


@dataclass(slots=True)
class Call:
    """A call of a :data:`NET` on tensors of the graph, and its derivatives."""

    x: Paper
    y: Paper | None
    factor: float
    k: float
    text: str

    def outputs(self) -> list[str]:
        """The tensors that it returns, as source."""
        return ["out"] if self.y is None else ["out[0]", "out[2]"]

    def seeds(self, s: Stage) -> tuple[list[str], list[Array]]:
        """Adds lines; a gradient for each output."""
        values = [s.numbers(t.shape) for t in (self.x, self.y) if t is not None]
        if self.y is not None:  # x.sum() may have made it wider
            values[1] = s.numbers(np.broadcast_shapes(self.y.shape, ()))
        names = []
        for value, out in zip(values, self.outputs(), strict=True):
            names.append(s.name("v"))
            s.do(f"{names[-1]} = {s.tensor(value, self.x.dtype)}.to({out}.dtype)")
        return names, values

    def slopes(self, seeds: Sequence[Array]) -> tuple[list[Array], Array]:
        """The gradients of the inputs that are tensors, and that of the parameter."""
        gx, gp = seeds[0] * self.factor * self.k, np.sum(seeds[0] * self.x.value * self.k)
        if self.y is None:
            return [gx], np.asarray(gp)
        return [gx - np.sum(seeds[1]), seeds[1] * self.factor], np.asarray(gp + np.sum(seeds[1] * self.y.value))

    def spread(self, gs: Sequence[Array]) -> tuple[list[Array | None], list[Paper]]:
        """Gradients as the tuple of grad_input has them, None for the number, and the inputs."""
        if self.y is None:
            return [gs[0]] + ([None] if self.text.count(",") and "z" not in self.text.split(",")[1] else []), [self.x]
        return [gs[0], None, gs[1]], [self.x, self.y]


def a_call(s: Stage, *, tracked: bool = True) -> Call:
    """Adds a network and chooses what it is called with (5 dials)."""
    pool = s.tracked[::-1] if tracked else [t for t in s.tensors[::-1] if not t.requires_grad]
    fitting = [t for t in pool if np.size(t.value)]
    x = s.choose(fitting)
    alike = [t for t in fitting if t.dtype == x.dtype]
    y = s.choose([None, *alike][:6])
    k = s.choose((2.0, 3.0, -1.0))
    parts = [x.name]
    if y is not None or s.flip():
        parts.append(str(k))
    else:
        k = 2.0
    parts += [y.name] if y is not None else []
    if s.flip():
        parts.append(f"z=torch.zeros_like({x.name})")
    factor = s.factor()
    s.do(NET)
    s.do(f"net = Net({s.tensor(factor, x.dtype)})")
    return Call(x, y, factor, k, ", ".join(parts))


@scene("hook.module-full-backward")
def test_module_full(s: Stage) -> None:  # noqa: C901, PLR0912, PLR0915 - a scene, told in order
    """Hooks of nested modules get the gradients of inputs and outputs, and what they return goes further back."""
    s.play()
    call = a_call(s)
    s.do(SEEN)
    depth = s.choose((0, 0, 1, 2))
    modules = ["net"]
    if depth:
        s.do(OUTER)
        for i in range(depth):
            s.do(f"outer{i} = Outer({modules[-1]})")
            modules.append(f"outer{i}")
    hooks: list[tuple[str, str, Change | None]] = []
    for module in modules:
        for _ in range(s.number(1 if module == "net" else 0, 2)):
            name = s.name("h")
            change = a_change(s, simple=True) if s.flip() else None
            text = f"hook({name!r})" if change is None else f"hook({name!r}, lambda g: {change.text})"
            gone = s.number(0, 7) == 7
            s.do(f"{module}.register_full_backward_hook({text}){'.remove()' if gone else ''}")
            if not gone:
                hooks.append((name, module, change))
    s.do(f"out = {modules[-1]}({call.text})")
    wrong = s.number(0, 3) == 3
    if wrong:
        many = s.choose(("grad_input + grad_input[:1]", "grad_input[1:]", "()", "(None,) * 7"))
        s.do(f"handle = net.register_full_backward_hook(lambda module, grad_input, grad_output: {many})")
        s.do(f"bad = {modules[-1]}({call.text})")
        s.do("handle.remove()")
        loss = "bad.sum()" if call.y is None else "bad[0].sum() + bad[2].sum()"
        fragment = "Backward hook returned an invalid number of grad_input"
        s.raises(f"({loss}).backward(retain_graph=True)", "RuntimeError", "one for each input", fragment=fragment)
        s.do("for h in seen.values():\n    h.clear()")
        names = [*[t.name for t in s.leaves if t.requires_grad], "net.p"]
        s.do("\n".join(f"{name}.grad = None" for name in names))
    names, seeds = call.seeds(s)
    given, gp = call.slopes(seeds)
    passes = s.choose((1, 1, 2))
    for i in range(passes):
        outs = ", ".join(call.outputs())
        s.do(f"torch.autograd.backward([{outs}], [{', '.join(names)}], retain_graph=True)")
        gs = given
        for name, module, change in hooks:
            s.equal(f"len(seen[{name!r}])", i + 1, "once in each backward through the module")
            last = f"seen[{name!r}][-1]"
            s.true(f"{last}[0] is {module} and {last}[1:3] == (tuple, tuple)", "the module, and two tuples")
            row, _ = call.spread(gs)
            s.equal(f"[g is not None for g in {last}[3]]", [g is not None for g in row], "None for what is no tensor")
            for j, g in enumerate(row):
                if g is not None:
                    s.close(f"{last}[3][{j}]", g, "the gradient of this input, as earlier hooks left it")
            row = [seeds[0]] if call.y is None else [seeds[0], None, seeds[1]]
            s.equal(f"[g is not None for g in {last}[4]]", [g is not None for g in row], "None for what is no tensor")
            for j, g in enumerate(row):
                if g is not None:
                    s.close(f"{last}[4][{j}]", g, "the gradient of this output")
            gs = [change(g) for g in gs] if change is not None else gs
        s.close("net.p.grad", gp * (i + 1), "hooks do not change the gradients of parameters")
        grads = s.grads(*zip([t for t in (call.x, call.y) if t is not None], gs, strict=True))
        for t in s.leaves:
            if t.requires_grad:
                s.close(f"{t.name}.grad", grads.get(t.name), "further back is what the hooks returned")
        s.do("\n".join(f"{t.name}.grad = None" for t in s.leaves if t.requires_grad))


@scene("hook.module-firing-rules")
def test_module_firing(s: Stage) -> None:
    """What must require grad, and what must be asked for, that full backward hooks run."""
    s.play()
    kind = s.choose(("input", "parameters alone", "no input", "no output", "input"))
    tracked = kind in ("input", "parameters alone")
    if not tracked:
        s.do(f"plain = {s.choose(s.tracked).name}.detach()")
        s.do(f"plain2 = {s.tensor(s.numbers(s.choose(((2,), (), (2, 3)))))}")
    call = a_call(s) if tracked else None
    if call is None:
        s.do(NET)
        s.do(f"net = Net({s.tensor(s.factor())})")
    s.do(SEEN)
    module = "net"
    if s.flip():
        s.do(OUTER)
        s.do("outer = Outer(net)")
        module = "outer"
    hooks = s.number(1, 2)
    for i in range(hooks):
        s.do(f"{s.choose((module, 'net'))}.register_full_backward_hook(hook('h{i}'))")
    text = call.text if call is not None else s.choose(("plain", "plain2", "plain, 3.0", "plain2, 2.0, plain2"))
    y = call.y is not None if call is not None else text.endswith("plain2") and "," in text
    outs = "[out[0], out[2]]" if y else "[out]"
    s.do("import warnings\ncaught = []")
    if kind == "no output":
        if s.flip():
            s.block("with torch.no_grad():", f"out = {module}({text})")
        else:
            s.do(f"net.requires_grad_(False)\nout = {module}({text})")
        s.do(f"w = {s.tensor(2.0, requires_grad=True)}")
        s.do(f"(sum(o.sum() for o in {outs}) * w).backward()")
        due = 0
    else:
        s.do(f"out = {module}({text})\nloss = sum(o.sum() for o in {outs})")
        asks = {
            "input": ["loss.backward(retain_graph=True)", "torch.autograd.grad(loss, [{x}], retain_graph=True)",
                      "torch.autograd.grad(loss, [{x}, net.p], retain_graph=True)",
                      "torch.autograd.grad(loss, [net.p, {x}], retain_graph=True)"],
            "parameters alone": ["torch.autograd.grad(loss, [net.p], retain_graph=True)",
                                 "torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)",
                                 "loss.backward(inputs=[net.p], retain_graph=True)"],
            "no input": ["loss.backward(retain_graph=True)", "torch.autograd.grad(loss, [net.p], retain_graph=True)"],
        }[kind]  # fmt: skip
        due = 0
        for _ in range(s.number(1, 2)):
            ask = s.choose(asks).format(x=call.x.name if call is not None else "")
            head = "with warnings.catch_warnings(record=True) as now:"
            s.block(head, "warnings.simplefilter('always')", ask, "caught += now")
            due += kind != "parameters alone"
            for i in range(hooks):
                s.equal(f"len(seen['h{i}'])", due, f"{kind}: whether the hook runs in this pass")
    for i in range(hooks):
        s.equal(f"len(seen['h{i}'])", due, f"{kind}: whether the hook runs")
        if kind == "no input":
            s.true(f"all(g is None for row in seen['h{i}'] for g in row[3])", "no input has a gradient")
            s.true(f"all(row[4][0] is not None for row in seen['h{i}'])", "the outputs have one")
    warned = f"any(w.category is UserWarning and {_FIRING!r} in str(w.message) for w in caught)"
    warned = f"torch.__version__ < (2, 9) or {warned}" if kind == "no input" else warned
    s.equal(warned, kind == "no input", "there is a UserWarning exactly if no input requires grad")


_FIRING = "Full backward hook is firing when gradients are computed with respect to module outputs"
WRITES = (
    "{}.mul_(2.0)", "{}.add_(1.0)", "{}.zero_()", "{}.relu_()", "{}.copy_({}.detach())", "{}.sin_()",
    "torch.nn.functional.relu({}, inplace=True)", "{}.fill_(1.0)", "{}[...] = 0.0",
)  # fmt: skip
WRITER = """
class Writer(torch.nn.Module):
    def __init__(self, write=None):
        super().__init__()
        self.write, self.views = write, []

    def forward(self, *xs):
        self.views.append([x._is_view() for x in xs])
        if self.write is not None:
            self.write(xs[-1])
        outs = tuple(x * 2.0 for x in xs)
        return outs[0] if len(outs) == 1 else outs
""".strip()
_VIEW = "is a view and is being modified inplace"


@scene("hook.module-inplace-refused")
def test_module_in_place(s: Stage) -> None:
    """Where a module has full hooks, neither its forward may write to an input nor the caller to an output."""
    s.play()
    s.do(WRITER)
    made = []
    for _ in range(s.number(1, 3)):
        name, t = s.name("x"), s.choose([t for t in s.tracked[::-1] if np.size(t.value)])
        s.do(f"{name} = {t.name} * 1.0")
        made.append(name)
    write = s.choose(WRITES)
    inside = s.flip()
    s.do(f"def write(t):\n    {write.format('t', 't')}" if inside else "write = None")
    s.do("net = Writer(write)")
    kind = s.choose(("backward_hook(lambda *args: None)", "backward_pre_hook(lambda *args: None)"))
    arguments = ", ".join(made)
    rounds = s.number(1, 3)
    for _ in range(rounds):
        s.do(f"handle = net.register_full_{kind}")
        if inside:
            s.raises(f"net({arguments})", "RuntimeError", "its inputs are views of what was passed", fragment=_VIEW)
        else:
            out = s.name("out")
            s.do(f"{out} = net({arguments})")
            s.equal("all(net.views[-1])", True, "forward gets views")
            parts = [out] if len(made) == 1 else [f"{out}[{j}]" for j in range(len(made))]
            for part in parts:
                s.true(f"{part}._is_view()", "the caller gets views")
            part = s.choose(parts)
            s.raises(write.format(part, part), "RuntimeError", "what a hooked module returns is a view", fragment=_VIEW)
        s.do("handle.remove()")
    s.do("net.write = None")
    s.do(f"free = net({arguments})")
    part = "free" if len(made) == 1 else f"free[{s.number(0, len(made) - 1)}]"
    s.succeeds(write.format(part, part), "without hooks the output may be written to")


@scene("hook.module-pre-and-legacy")
def test_module_pre(s: Stage) -> None:
    """Pre-hooks change what comes in from the outputs, prepend puts one first, and the old kind cannot be mixed in."""
    s.play()
    call = a_call(s)
    s.do(SEEN)
    pre: list[tuple[str, Change | None]] = []
    full: list[tuple[str, Change | None]] = []
    for _ in range(s.number(0, 4)):
        kind = s.choose(("pre", "pre", "full"))
        name, front = s.name("h"), s.flip()
        change = a_change(s, simple=True) if s.flip() else None
        maker = "before" if kind == "pre" else "hook"
        text = f"{maker}({name!r})" if change is None else f"{maker}({name!r}, lambda g: {change.text})"
        tail = ", prepend=True" if front else ""
        word = "pre_hook" if kind == "pre" else "hook"
        s.do(f"net.register_full_backward_{word}({text}{tail})")
        row = pre if kind == "pre" else full
        row.insert(0 if front else len(row), (name, change))
    old = "net.register_backward_hook(lambda *args: None)"
    if full and s.flip():
        s.raises(old, "RuntimeError", "the module has full hooks", fragment=_BOTH)
    if s.number(0, 3) == 3:
        s.do(f"other = Net({s.tensor(1.0)})")
        s.do(f"other = torch.nn.{s.choose(('Tanh()', 'Linear(1, 1)', 'Sequential()'))}" if s.flip() else "pass")
        s.do(old.replace("net", "other"))
        new = "other.register_full_backward_hook(lambda *args: None)"
        s.raises(new, "RuntimeError", "the module has a hook of the deprecated kind", fragment=_BOTH)
    s.do(f"out = net({call.text})")
    names, seeds = call.seeds(s)
    passes = s.choose((1, 1, 2, 3))
    for i in range(passes):
        keep = ", retain_graph=True" if i + 1 < passes else ""
        s.do(f"torch.autograd.backward([{', '.join(call.outputs())}], [{', '.join(names)}]{keep})")
        gs = list(seeds)
        for name, change in pre:
            s.equal(f"len(seen[{name!r}])", i + 1, "once in each backward through the module")
            for j, g in enumerate(gs):
                why = "the gradient of this output, as the hooks before it left it"
                s.close(f"seen[{name!r}][-1][2][{2 * j}]", g, why)
            gs = [change(g) for g in gs] if change is not None else gs
        inputs, gp = call.slopes(gs)
        for name, change in full:
            s.close(f"seen[{name!r}][-1][3][0]", inputs[0], "the gradient of the input, as the hooks before it left it")
            inputs = [change(g) for g in inputs] if change is not None else inputs
        s.close("net.p.grad", gp, "the gradient of a parameter comes of what the pre-hooks left, or of no hook")
        grads = s.grads(*zip([t for t in (call.x, call.y) if t is not None], inputs, strict=True))
        tracked = [t for t in s.leaves if t.requires_grad]
        for t in tracked:
            s.close(f"{t.name}.grad", grads.get(t.name), "further back comes what the hooks returned")
        if keep:
            s.do("\n".join(f"{name}.grad = None" for name in ("net.p", *(t.name for t in tracked))))


_BOTH = "Cannot use both regular backward hooks and full backward hooks on a single Module"
