"""Passes: backward, autograd.grad, and gradients with create_graph. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from autograd_conformance.algebra import Differentiable, Traced, ancestors, next_order
from autograd_conformance.whole.state import UNKNOWN, Hook, Node, Tensor
from autograd_conformance.whole.sweep import Swept, sweep
from autograd_conformance.whole.tell import LARGEST, Author, Dials, Skip
from autograd_conformance.whole.words import Numbers, Plainly, Told


def backward(author: Author, d: Dials) -> None:
    """backward from one root or two."""
    state = author.state
    roots = [author.pick(d.y, lambda t: t.requires_grad and t.size > 0 and (not t.leaf or d.flags > 240))]
    if d.q % 8 == 7:
        roots.append(author.pick(d.z, lambda t: t.requires_grad and t.size > 0 and t is not roots[0] and not t.leaf))
    inputs = None
    if d.r % 8 == 7:
        inputs = author.pick(d.z, lambda t: t.leaf and not t.cut and all(_reached(author, root, t) for root in roots))
    summed = len(roots) == 1 and d.p % 8 == 5 and state.recording
    seeds = (
        [("", np.ones(roots[0].shape))] if summed else [_seed(author, root, d.p + i) for i, root in enumerate(roots)]
    )
    retain = d.x >= 128
    swept = sweep(
        state,
        [(state.read(root), seed) for root, (_, seed) in zip(roots, seeds, strict=True)],
        wanted=None if inputs is None else state.targets(inputs),
    )
    options = [f"inputs=[{inputs.name}]"] if inputs else []
    options += ["retain_graph=True"] if retain else []
    call = _call(roots, [text for text, _ in seeds], options)
    if summed:  # the gradient that starts backward is one number, expanded
        call = call.replace(".backward", ".sum().backward")
    if d.flags % 16 == 6:
        _interrupted(author, d, call, swept)
        return
    watched = _watched_together(author, d, roots) if d.flags % 8 == 5 else []
    log = author.name("log") if watched else ""
    verdict, why = _verdict(author, swept)
    told = _pass(author, _within_multi_hook(call, watched, log) if watched else call, "backward", verdict, why)
    _after(author, told, swept, verdict, retain=retain, asked=inputs)
    if watched and verdict == "never" and not any(node.derived for node in swept.executed):
        _multi_notes(author, told, swept, watched, log)


def backward_from(author: Author, root: Tensor, *, retain: bool) -> None:
    """The sum of a tensor that no pass has seen yet, differentiated."""
    swept = sweep(author.state, [(author.state.read(root), np.ones(root.shape))])
    verdict, why = _verdict(author, swept)
    told = _pass(
        author, f"{root.name}.sum().backward({'retain_graph=True' if retain else ''})", "backward", verdict, why
    )
    _after(author, told, swept, verdict, retain=retain)


def _interrupted(author: Author, d: Dials, call: str, swept: Swept) -> None:
    """A pass that a hook ends by raising: the error comes out as it is, and nobody knows what has been done until then."""
    if _verdict(author, swept)[0] != "never" or any(node.derived for node in swept.executed):
        raise Skip
    t = author.pick(d.z, lambda t: t.requires_grad and t.size > 0 and not t.sibling and _is_plain(author, swept, t))
    log = author.name("log")
    lines = [
        f"{log} = []",
        f"handle = {t.name}.register_hook(lambda g: {log}.append(1) or 1 / 0)",
        "try:",
        f"    {call}",
        "except ZeroDivisionError:",
        f"    {log}.append(2)",
        "finally:",
        "    handle.remove()",
    ]
    told = author.say("\n".join(lines), "backward")
    author.whole.features.add("interrupted")
    told.plain.append(Plainly(log, [1, 2], "hook.fires-once-with-total", "the hook runs once, and its error comes out"))
    _after(author, told, swept, "may", retain=True)


def _is_plain(author: Author, swept: Swept, t: Tensor) -> bool:
    """Does a gradient surely reach the tensor as it is now?"""
    return t.base is None and not (t.viewed or t.cut) and _noted(author, swept, t) is not None


def _watched_together(author: Author, d: Dials, roots: Sequence[Tensor]) -> list[Tensor]:
    """Two or three tensors for one hook, none of them a root: see docs/findings.md."""

    def fits(t: Tensor) -> bool:
        return t.requires_grad and t.size > 0 and not (t.sibling or t.cut or t.viewed or t.base) and t not in roots

    found = [t for t in author.state.live.values() if fits(t)]
    start = d.z % max(1, len(found))
    chosen = [*found[start:], *found[:start]][: 2 + d.r % 2]
    return chosen if len(chosen) > 1 else []


def _within_multi_hook(call: str, watched: Sequence[Tensor], log: str) -> str:
    """A pass with a hook on several tensors, which goes afterwards whatever comes of the pass."""
    names = ", ".join(t.name for t in watched)
    note = f"lambda gs: {log}.append([g if g is None else g.clone() for g in gs])"
    return "\n".join(
        [
            f"{log} = []",
            f"handle = torch.autograd.graph.register_multi_grad_hook(({names}), {note})",
            "try:",
            f"    {call}",
            "finally:",
            "    handle.remove()",
        ]
    )


def _multi_notes(author: Author, told: Told, swept: Swept, watched: Sequence[Tensor], log: str) -> None:
    """The hook ran once, with the gradients that were computed."""
    given = [_noted(author, swept, t) for t in watched]
    claim = "hook.multi-grad"
    author.whole.features.add("multi-grad hook")
    calls = int(any(g is not None for g in given))
    told.plain.append(Plainly(f"len({log})", calls, claim, "once in a pass that reaches any of its tensors"))
    for i, (t, g) in enumerate(zip(watched, given, strict=True)):
        if calls:
            due = None if g is None else np.asarray(g)
            told.numbers.append(Numbers(f"{log}[-1][{i}]", due, claim, f"the gradient of {t.name}", swept.size))


def _noted(author: Author, swept: Swept, t: Tensor) -> Any:
    """What reached a tensor in a pass; None if nothing did."""
    values = t.sources if t.leaf else [author.state.read(t)]
    return next((swept.noted[id(value)] for value in values if id(value) in swept.noted), None)


def _call(roots: Sequence[Tensor], seeds: Sequence[str], options: Sequence[str]) -> str:
    if len(roots) == 1:
        arguments = ", ".join([*([seeds[0]] if seeds[0] else []), *options])
        return f"{roots[0].name}.backward({arguments})"
    named = ", ".join(root.name for root in roots)
    given = ", ".join(seed or "None" for seed in seeds)
    return f"torch.autograd.backward([{named}], [{given}]{''.join(', ' + option for option in options)})"


def _seed(author: Author, root: Tensor, byte: int) -> tuple[str, np.ndarray]:
    if root.size == 1 and byte % 2 == 0:
        return "", np.ones(root.shape)
    return author.constant(root.shape, byte)


def _verdict(author: Author, swept: Swept) -> tuple[Any, str]:
    """Must the pass raise? And which rule says so."""
    executed = swept.executed
    if any(node.unsure for node in executed):
        return "may", ""
    bent = any(known.factor and not t.leaf for _, t, known in author.hooks)
    if any(node.derived for node in executed) and (bent or any(node.freed or _written(node) for node in executed)):
        return "may", ""  # which of the first pass's nodes a derivative goes through, is the formulas' business
    written = [node for node in executed if _written(node)]
    if written:
        return ("may", "") if any(node.vague for node in written) else ("must", "written")
    again = [node for node in executed if node.freed]
    if any(node.packs for node in again):
        return "must", "freed"
    return ("may", "") if again else ("never", "")


def _written(node: Node) -> bool:
    """Did anything that it touched change, in a way that matters?"""
    return any(memory.version != version for memory, version in node.saw if node.vague or memory in node.packs)


def _pass(author: Author, call: str, what: str, verdict: Any, why: str) -> Told:
    told = author.say(call, what)
    told.raises = verdict
    if verdict == "must":
        author.whole.features.add("error")
        freed = "agrad.frees-executed-part" if what == "grad" else "free.second-backward-error"
        told.claim, told.because = {
            "freed": (freed, "an earlier pass freed tensors that this one needs"),
            "written": ("inplace.saved-modified-error", "a tensor that this pass needs was written since it was saved"),
        }[why]
    return told


def _after(
    author: Author, told: Told, swept: Swept, verdict: Any, *, retain: bool, asked: Tensor | None = None
) -> None:
    """What a pass leaves behind."""
    if verdict != "never":
        _forget(swept)
        return
    derived = any(node.derived for node in swept.executed)
    for node in swept.executed:
        if derived and not retain:
            node.unsure = True  # which of the first pass's nodes the derivative goes through, is the formulas' business
        node.freed = node.freed or not retain
    for called in (*swept.called, *_after_hooks(swept), *_of_functions(swept)):
        called.calls += 1
        called.unsure = called.unsure or derived
    if derived:  # and so is which tensors it passes on its way
        for _, _, known in author.hooks:
            known.unsure = True
        for t in author.state.live.values():
            if t.retains and not t.leaf:
                t.grad = UNKNOWN
    _collect(swept, asked)
    _grads(author, told, swept)
    if not derived:
        _notes(author, told, swept)


def _forget(swept: Swept) -> None:
    """Nobody can say what a pass has done that raised, or may have."""
    for node in swept.executed:
        node.unsure = True
    for t, _ in (*swept.arrived.values(), *swept.kept.values()):
        t.grad = UNKNOWN
    for called in (*swept.called, *_after_hooks(swept), *_of_functions(swept)):
        called.unsure = True


def _of_functions(swept: Swept) -> list[Hook]:
    return [node.notes for node in swept.executed if node.notes is not None]


def _after_hooks(swept: Swept) -> list[Hook]:
    return [known for t, _ in swept.arrived.values() for known in t.hooks if known.after]


def _collect(swept: Swept, asked: Tensor | None) -> None:
    for t, g in swept.arrived.values():
        if t.grad is not UNKNOWN and (asked is None or t is asked):
            t.grad = g if t.grad is None else t.grad + g
    for t, g in swept.kept.values():
        if asked is not None:
            t.grad = UNKNOWN
        elif t.grad is not UNKNOWN:
            t.grad = g if t.grad is None else t.grad + g


def _grads(author: Author, told: Told, swept: Swept) -> None:
    """Every .grad after a pass."""
    for t in author.state.live.values():
        if not (t.leaf or t.retains) or t.grad is UNKNOWN:
            continue
        claim = "retain-grad.populates" if t.retains and not t.leaf else ""
        due = None if t.grad is None else np.asarray(t.grad)
        why = f"what passes gave to {t.name} so far" if due is not None else f"no pass reached {t.name}"
        told.numbers.append(Numbers(f"{t.name}.grad", due, claim, why, swept.size, grad_of=t.name))


_HOOK_CLAIMS = {"tensor": "hook.fires-once-with-total", "after": "hook.post-accumulate", "node": "hook.node-hooks"}


def _notes(author: Author, told: Told, swept: Swept) -> None:
    """How often hooks ran, and what they got the last time."""
    called = {id(known) for known in (*swept.called, *_after_hooks(swept))}
    for _, t, known in author.hooks:
        claim, of = _HOOK_CLAIMS[known.kind], f"{t.name}{'.grad_fn' if known.kind == 'node' else ''}"
        if not known.unsure:
            told.plain.append(Plainly(f"len({known.log})", known.calls, claim, f"a hook of {of} counts its calls"))
        if id(known) not in called:
            continue
        due = t.grad if known.after else swept.given[id(known)]
        if due is not UNKNOWN and due is not None:
            of_grad = t.name if known.after else ""
            why = f"what a hook of {of} gets"
            told.numbers.append(Numbers(_last(known), np.asarray(due), claim, why, swept.size, of_grad))
    for node in swept.executed:
        if node.notes is not None and not node.notes.unsure:
            _function_notes(told, swept, node, node.notes)


def _last(known: Hook) -> str:
    """What a hook got the last time; None if it never ran."""
    return f"({known.log} or [None])[-1]"


def _function_notes(told: Told, swept: Swept, node: Node, notes: Hook) -> None:
    """What the backward of a custom Function has written down."""
    told.plain.append(Plainly(f"len({notes.log})", notes.calls, "function.acts-as-op", "backward runs once in a pass"))
    silent = tuple(out is not None and id(out) not in swept.reached for out in node.outs)
    why = "None for an output that gets no gradient"
    told.plain.append(Plainly(_last(notes), silent, "function.non-differentiable-and-materialize", why))


def grad(author: Author, d: Dials) -> None:
    """autograd.grad of one root by one or two tensors."""
    state = author.state
    root = author.pick(d.y, lambda t: t.requires_grad and t.size > 0 and not t.leaf)
    reading = state.read(root)
    first = author.pick(d.z, partial(_can_be_asked, author, root))
    inputs = [first]
    if d.q % 4 == 3 and not _scaled(first):
        inputs.append(author.pick(d.r, lambda t: t is not first and not _scaled(t) and _can_be_asked(author, root, t)))
    text, seed = _seed(author, root, d.p)
    retain = d.x >= 128
    wanted = [state.targets(t) for t in inputs]
    swept = sweep(state, [(reading, seed)], wanted=[value for values in wanted for value in values])
    verdict, why = _verdict(author, swept)
    name = author.name("g")
    options = ([text] if text else []) + (["retain_graph=True"] if retain else [])
    listed = ", ".join(t.name for t in inputs)
    call = f"{name} = torch.autograd.grad({', '.join([root.name, f'[{listed}]', *options])})"
    told = _pass(author, call, "grad", verdict, why)
    for t, _ in swept.kept.values():
        t.grad = UNKNOWN
    if verdict == "never":
        for i, values in enumerate(wanted):
            got = np.asarray(sum(swept.captured[id(value)] for value in values if id(value) in swept.captured))
            told.numbers.append(Numbers(f"{name}[{i}]", got, "agrad.equals-backward", "by the chain rule", swept.size))
    swept.arrived = {}
    _after(author, told, swept, verdict, retain=retain)


def _scaled(t: Tensor) -> bool:
    """Has hooks that change its gradient: beside an input further back torch returns what it was before them.

    See docs/findings.md.
    """
    return any(known.factor for known in t.hooks)


def _can_be_asked(author: Author, root: Tensor, t: Tensor) -> bool:
    """Is it promised, and known on paper, what the gradient of the root by this tensor is?

    Not if it is one of several outputs of a node, for nodes are run as a whole; and where the root is itself a
    gradient, only for leaves: which tensors in between a formula goes through, is its own business. On paper a view of
    a view looks at the base directly.
    """
    if t.sibling or (t.base is not None and t.viewed):
        return False
    return _reached(author, root, t) and (t.leaf or not _is_derived(author, root))


def _is_derived(author: Author, root: Tensor) -> bool:
    nodes = [author.state.node_of(value) for value in ancestors(author.state.read(root))]
    return any(node.derived for node in nodes if node is not None)


def _reached(author: Author, root: Tensor, t: Tensor) -> bool:
    """Does the root depend on it?"""
    if not t.requires_grad or t is root:
        return False
    targets = {id(value) for value in author.state.targets(t)}
    return any(id(value) in targets for value in ancestors(author.state.read(root)))


def second(author: Author, d: Dials) -> None:
    """A gradient with create_graph, which is a tensor like any other afterwards."""
    state = author.state
    if not state.recording:
        raise Skip
    root = author.pick(d.y, lambda t: t.requires_grad and t.size > 0 and not t.leaf)
    x = author.pick(d.z, partial(_can_be_asked, author, root))
    text, seed = _seed(author, root, d.p)
    source, targets = state.read(root), state.targets(x)
    begin = next_order()
    swept = sweep(state, [(source, Traced(seed))], wanted=targets, algebra=Differentiable)
    verdict, why = _verdict(author, swept)
    g = sum(
        (swept.captured[id(value)] for value in targets if id(value) in swept.captured), start=Traced(np.zeros(x.shape))
    )
    depends = verdict == "never" and _matters(author, g)
    name = author.name("g")
    options = ([text] if text else []) + ["create_graph=True"]
    memories = [memory for node in swept.executed for memory, _ in node.saw]
    if depends and np.max(np.abs(g.value), initial=0.0) < LARGEST:
        made = state.result(name, d.key, g, author.dtype, tracked=True)
        made.writable = False
        node = state.record(len(author.whole.lines), begin, next_order(), memories, [])
        node.vague = node.derived = True
    told = _pass(
        author,
        f"{name}, = torch.autograd.grad({', '.join([root.name, f'[{x.name}]', *options])})",
        "second",
        verdict,
        why,
    )
    author.whole.features.add("higher order")
    for t, _ in swept.kept.values():
        t.grad = UNKNOWN
    if verdict == "never":
        told.numbers.append(
            Numbers(name, np.asarray(g.value), "create-graph.same-values", "by the chain rule", swept.size)
        )
    swept.arrived = {}
    _after(author, told, swept, verdict, retain=True)


def _matters(author: Author, g: Traced) -> bool:
    """Is the gradient, beyond all doubt, a function of a leaf? Some derivative of it is not zero."""
    if not isinstance(g, Traced) or not g.parents:
        return False
    again = sweep(author.state, [(g, np.ones(g.shape))])
    return any(np.any(np.abs(part) > 1e-6) for _, part in again.arrived.values())
