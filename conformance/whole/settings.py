"""Statements that change flags, modes, names, hooks and gradients. No torch."""

from __future__ import annotations

import numpy as np

from autograd_conformance.whole.state import UNKNOWN, Hook, Tensor
from autograd_conformance.whole.tell import Author, Dials
from autograd_conformance.whole.words import Numbers


def flag(author: Author, d: Dials) -> None:
    """requires_grad_ on a leaf, or what a non-leaf answers."""
    if d.q % 4 == 3:
        t = author.pick(d.y, lambda t: not t.leaf)
        text = f"{t.name}.requires_grad = False" if d.r % 2 else f"{t.name}.requires_grad_(False)"
        author.refused(text, "flag", "requires-grad.unset-nonleaf-error", f"{t.name} is no leaf")
        return
    t = author.pick(d.y, lambda t: t.leaf and not (t.requires_grad or t.memory.used) and _alone(author, t))
    t.requires_grad = True
    if t.base is None and not t.cut:
        author.state.own(t)
    author.say(f"{t.name}.requires_grad_()", "flag").claim = "requires-grad.start-recording-later"


def _alone(author: Author, t: Tensor) -> bool:
    """No other tensor is a view of it, and it is no view."""
    others = [o for o in author.state.aliases(t.memory) if o is not t]
    return (t.base is None or t.cut) and not t.viewed and all(o.cut or t.cut for o in others)


def mode(author: Author, d: Dials) -> None:
    """A switch of the grad mode, or a block that an exception leaves."""
    if d.q % 2:
        inner = ("torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)")[d.x % 3]
        text = f"try:\n    with {inner}:\n        raise KeyError\nexcept KeyError:\n    pass"
        author.say(text, "mode")
        author.whole.features.add("nested modes")
        return
    author.state.recording = not author.state.recording
    author.say(f"torch.set_grad_enabled({author.state.recording})", "mode")


def forget(author: Author, d: Dials) -> None:
    """A name goes; what was made from it stays."""
    t = author.pick(d.y, lambda t: len(author.state.live) > 2)
    del author.state.live[t.name]
    author.say(f"del {t.name}", "del")


def hook(author: Author, d: Dials) -> None:
    """A hook of a tensor, one that runs after accumulation, one of a node, or the removal of one."""
    if d.q % 7 == 4 and author.hooks:
        handle, _, known = author.hooks.pop(d.x % len(author.hooks))
        known.home.remove(known)
        told = author.say(f"{handle}.remove()", "hook")
        told.claim, told.bare = "hook.remove", told.text
        return
    if d.q % 7 in (2, 5):
        _node_hook(author, d)
        return
    t = author.pick(d.y, _can_be_watched)
    if not t.requires_grad:
        text = f"{t.name}.register_hook(lambda g: None)"
        told = author.refused(text, "hook", "hook.needs-requires-grad", f"{t.name} does not require grad")
        told.bare = told.text
        return
    log, handle = author.name("log"), author.name("handle")
    after = d.q % 7 == 3 and t.leaf
    factor = (2.0, -1.0, 0.5)[d.p % 3] if d.q % 7 == 1 and not after else None
    if after:
        call = f"register_post_accumulate_grad_hook(lambda p: {log}.append(p.grad.clone()))"
    else:
        call = f"register_hook(lambda g: {log}.append(g.clone()){f' or g * {factor}' if factor else ''})"
    made = Hook(log, factor, "after" if after else "tensor", t.hooks)
    _hang(author, t, made, handle, f"{t.name}.{call}")
    _watch(author, t)
    author.whole.lines[-1].claim = "hook.return-replaces" if factor else "hook.observer-is-neutral"


_NOWHERE = "torch.ones(1, requires_grad=True).register_hook(lambda g: None)"


def _hang(author: Author, t: Tensor, made: Hook, handle: str, call: str) -> None:
    made.home.append(made)
    author.hooks.append((handle, t, made))
    told = author.say(f"{made.log} = []\n{handle} = {call}", "hook")
    if not made.factor:
        told.bare = f"{made.log} = []\n{handle} = {_NOWHERE}"


def _node_hook(author: Author, d: Dials) -> None:
    """A hook before or behind the node that made a tensor."""
    t = author.pick(d.y, lambda t: _has_plain_node(author, t))
    log, handle = author.name("log"), author.name("handle")
    reading = author.state.read(t)
    author.state.kept.append(reading)
    made = Hook(log, kind="node", home=author.state.hooked.setdefault(id(reading), []))
    before = d.p % 2 == 0
    call = f"register_prehook(lambda gs: {log}.append(gs[0].clone()))"
    call = call if before else f"register_hook(lambda _, gs: {log}.append(gs[0].clone()))"
    _hang(author, t, made, handle, f"{t.name}.grad_fn.{call}")
    author.whole.lines[-1].claim = "hook.observer-is-neutral"
    author.whole.features.add("node hook")


def _has_plain_node(author: Author, t: Tensor) -> bool:
    """Is its grad_fn the node of the statement that made its value, with this output alone?"""
    if t.leaf or t.base is not None or t.sibling or t.memory.hidden or not t.size:
        return False
    node = author.state.node_of(author.state.read(t))
    return node is not None and not (node.vague or node.derived)


def _can_be_watched(t: Tensor) -> bool:
    return t.size > 0 and not t.sibling and not (t.base is not None and t.viewed)


def _watch(author: Author, t: Tensor) -> None:
    """From now on it matters which value of the memory this is."""
    if t.leaf:
        return
    reading = author.state.read(t)
    author.state.kept.append(reading)
    author.state.watched[id(reading)] = t
    t.memory.hooked = True


def retain(author: Author, d: Dials) -> None:
    """retain_grad, which a tensor that does not require grad refuses."""
    t = author.pick(d.y, lambda t: _can_be_watched(t) and not t.retains)
    text = f"{t.name}.retain_grad()"
    if not t.requires_grad:
        author.refused(text, "retain_grad", "retain-grad.needs-requires-grad", f"{t.name} does not require grad")
        return
    if not t.leaf:
        t.retains = True
        _watch(author, t)
    author.say(text, "retain_grad").claim = "retain-grad.flag"


def reset(author: Author, d: Dials) -> None:
    """.grad set to None or to zeros."""
    t = author.pick(d.y, lambda t: t.requires_grad and t.leaf and t.grad is not None)
    if d.q % 3 == 2 and t.grad is not UNKNOWN:
        t.grad = np.zeros(t.shape)
        told = author.say(f"{t.name}.grad.zero_()", "reset")
        told.numbers.append(
            Numbers(f"{t.name}.grad", t.grad, "grad.reset-none-or-zero", "zeros were written", 1.0, t.name)
        )
        return
    t.grad = None
    told = author.say(f"{t.name}.grad = None", "reset")
    told.cleared = (t.name,)
