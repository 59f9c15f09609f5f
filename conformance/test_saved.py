"""Area saved: hooks that pack and unpack what ops save for backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from autograd_conformance.modes import ERRORS
from autograd_conformance.paper import Array, Paper
from autograd_conformance.scenes import scene
from autograd_conformance.snippets import KEEP
from autograd_conformance.stage import Stage

HOOKS = "torch.autograd.graph.saved_tensors_hooks"
COUNTERS = """
packed, unpacked = [], []

def pack(t):
    packed.append(t.shape)
    return len(packed) - 1, t

def unpack(pair):
    unpacked.append(pair[0])
    return pair[1]
""".strip()


def _filled(s: Stage) -> Paper:
    return s.choose([t for t in s.tracked[::-1] if np.size(t.value)])


def _copy(s: Stage, t: Paper) -> str:
    name = s.name("x")
    s.do(f"{name} = {t.name}.clone()")
    return name


def _recorded(s: Stage, x: str) -> tuple[str, int]:
    """An op of which it is documented what it saves, and how many tensors these are."""
    kinds = [
        (f"{x} ** 2", 1),
        (f"{x}.exp()", 1),
        (f"{x} * {x}.clone()", 2),
        (f"Keep.apply({x})", 1),
        (f"Keep.apply({x}, {x}.clone(), {x}.detach())", 3),
        (f"Keep.apply({x}, {x})", 2),
    ]
    return s.choose(kinds)


@scene("saved.pack-unpack-calls")
def test_calls(s: Stage) -> None:
    """pack runs once for each tensor saved, then; unpack once for each in each backward of its node."""
    t = _filled(s)
    s.play()
    s.do(COUNTERS)
    s.do(KEEP)
    x = _copy(s, t)
    s.do(f"hooks = {HOOKS}(pack, unpack)")
    total, slots = 0, {}
    for _ in range(s.number(1, 3)):
        name, what = s.name("made"), s.number(0, 7)
        text, count = _recorded(s, x)
        if what == 6:
            s.block("with hooks:", f"with torch.no_grad(): free = {text}")
        elif what == 7:
            s.block("with hooks:", f"free = ({x}.detach() ** 2).exp()")
        elif what == 5:
            s.do(f"outside = {text}")
        else:
            s.block("with hooks:", f"{name} = {text}")
            slots[name] = list(range(total, total + count))
            total += count
        s.equal("len(packed)", total, "pack runs when a recorded op saves a tensor, once for each")
    s.equal("unpacked[:]", [], "nothing was needed yet")
    s.require(slots)
    due: list[int] = []
    for _ in range(s.number(1, 3)):
        names = s.some(list(slots))
        due += [slot for name in names for slot in slots[name]]
        s.do(f"torch.autograd.backward([{', '.join(f'{n}.sum()' for n in names)}], retain_graph=True)")
        s.equal("sorted(unpacked)", sorted(due), "each backward of a node unpacks what it saved, once")
    s.equal("len(packed)", total, "a backward that records nothing packs nothing")


NEUTRAL: tuple[tuple[str, str], ...] = (
    ("lambda t: t", "lambda t: t"),
    ("lambda t: t.detach()", "lambda t: t"),
    ("lambda t: t.detach().clone()", "lambda t: t"),
    ("lambda t: (t.detach().clone(), t.shape)", "lambda p: p[0].view(p[1])"),
    (
        "lambda t: (t.device, t.dtype, t.cpu().tolist(), t.shape)",
        "lambda p: torch.tensor(p[2], dtype=p[1], device=p[0]).reshape(p[3])",
    ),
    ("lambda t: store.append(t.detach().clone()) or len(store) - 1", "lambda i: store[i]"),
    ("lambda t: (t.device, t.cpu())", "lambda p: p[1].to(p[0])"),
    ("lambda t: t.detach().expand(2, *t.shape).clone()", "lambda t: t[1]"),
    ("lambda t: [t]", "lambda p: p[0].detach().clone().requires_grad_(p[0].is_floating_point())"),
)


@scene("saved.identity-neutral")
def test_neutral(s: Stage) -> None:
    """Hooks that give back what they were given change no gradient, wherever the numbers lay in between."""
    root = s.root()
    s.play_leaves()
    s.do("store = []")
    rest = s.rest()
    cuts = sorted({0, len(rest), *(s.number(0, len(rest)) for _ in range(s.number(0, 1)))})
    for start, stop in pairwise(cuts):
        pack, unpack = s.choose(NEUTRAL)
        head = f"with {HOOKS}({pack}, {unpack}):"
        if s.number(0, 7) == 7:
            head = "with torch.autograd.graph.save_on_cpu():"
        s.block(head, *rest[start:stop])
    text, seed = s.seed(root)
    times = s.number(1, 2)
    for i in range(times):
        options = [text] if text else []
        options += ["retain_graph=True"] if i < times - 1 else []
        s.do(f"{root.name}.backward({', '.join(options)})")
    grads = s.grads((root, seed))
    for leaf in s.leaves:
        if leaf.requires_grad:
            due = grads.get(leaf.name)
            s.close(
                f"{leaf.name}.grad", None if due is None else due * times, "what is unpacked equals what was packed"
            )


@scene("saved.innermost-only")
def test_innermost(s: Stage) -> None:
    """However deep they are nested, the innermost pair alone is applied, to pack and to unpack."""
    t = _filled(s)
    s.play()
    x = _copy(s, t)
    depth = s.number(2, 4)
    s.do("calls = []")
    s.do(f"def pair(i):\n    return {HOOKS}(lambda t: calls.append(i) or t, lambda t: calls.append(-i) or t)")
    lines: list[str] = []
    due: list[int] = []
    used: list[int] = []

    def op(indent: int, level: int) -> None:
        name = s.name("made")
        lines.append(f"{'    ' * indent}{name} = {x} ** 2")
        if level:
            due.append(level)
            used.append(level)

    for level in range(1, depth + 1):
        lines.append(f"{'    ' * (level - 1)}with pair({level}):")
        if level == depth or s.flip():
            op(level, level)
    for level in range(depth - 1, -1, -1):
        if s.flip():
            op(level, level)
    s.do("\n".join(lines))
    s.equal("calls[:]", due, "each op used the pair that was entered last and not left")
    if s.flip():
        s.do(
            f"with pair(7):\n    try:\n        with pair(8), pair(9):\n            {x} ** 2\n            raise ValueError\n"
            f"    except ValueError:\n        pass\n    {x} ** 2"
        )
        due = [*due, 9, 7]
        s.equal("calls[:]", due, "leaving by an error is leaving")
    names = ["made", *[f"made{i}" for i in range(2, s._names["made"] + 1)]]
    s.do("calls.clear()")
    outer = s.flip()
    s.do(f"{'with pair(6): ' if outer else ''}torch.autograd.backward([m.sum() for m in ({', '.join(names)},)])")
    s.equal("sorted(calls)", sorted(-level for level in used), "what one pair packed, that pair unpacks")


@scene("saved.pack-inplace-error")
def test_errors(s: Stage) -> None:
    """A pack hook must not write to its argument, an unpack hook must return a tensor."""
    t = _filled(s)
    s.play()
    x = _copy(s, t)
    s.do(KEEP)
    text, _ = _recorded(s, x)
    direct = text == f"{x} ** 2" and s.flip()
    if s.flip():
        what = s.choose(("3", "None", "'text'", "[t]", "(t, t)", "2.0", "t.shape", "{}"))
        if direct:
            s.do(f"made = {text}")
            s.do(f"made.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: {what})")
        else:
            s.block(f"with {HOOKS}(lambda t: t, lambda t: {what}):", f"made = {text}")
        call = s.choose(("made.sum().backward()", f"torch.autograd.grad(made.sum(), [{t.name}])"))
        s.raises(call, "TypeError", "an unpack hook returned no tensor")
        return
    writes = (
        "t.mul_(2.0)", "t.add_(0.0)", "t.zero_()", "t.detach().mul_(1.0)", "t[...].fill_(0.5)", "t.copy_(t.detach().clone())",
        "torch._foreach_mul_([t], 2.0)", "t.__setitem__(..., 1.0)",
    )  # fmt: skip
    s.do(
        f"def pack(t):\n    with torch.no_grad():\n        {s.choose(writes)}\n    return {s.choose(('t', 't.detach().clone()', '0'))}"
    )
    if direct:
        s.do(f"made = {text}")
        text = "made.grad_fn._raw_saved_self.register_hooks(pack, lambda t: t)"
    else:
        text = f"with {HOOKS}(pack, lambda t: t): {text}"
    s.raises(
        text, "RuntimeError", "a pack hook wrote to its argument", fragment="pack hook is modifying its input in place"
    )


CHANGES: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("t * 2.0", lambda v: v * 2.0),
    ("torch.ones_like(t)", lambda v: np.ones(v.shape)),
    ("t + 1.0", lambda v: v + 1.0),
    ("-t.detach().clone()", lambda v: -v),
    ("torch.zeros_like(t)", lambda v: np.zeros(v.shape)),
)
FLAGS = ("{}", "({}).detach()", "({}).detach().requires_grad_()", "{} + aside * 0.0")


@scene("saved.unpack-value-used")
def test_value_used(s: Stage) -> None:
    """What unpack returns is what backward computes with, whatever its flags."""
    t = _filled(s)
    s.play()
    x = _copy(s, t)
    s.do(f"aside = torch.ones({', '.join(map(str, t.shape)) or '()'}, dtype={t.name}.dtype, requires_grad=True{s.on})")
    arrived: list[tuple[Paper, Array]] = []
    kinds: list[tuple[str, Callable[[Array], Array], Any]] = [
        (f"{x} ** 2", lambda v: 2.0 * v, t.value),
        (f"{x}.exp()", lambda v: v, np.exp(np.minimum(t.value, 20.0))),
        (f"{x} ** 3", lambda v: 3.0 * v**2, t.value),
        (f"{x} * {x}", lambda v: 2.0 * v, t.value),
    ]
    kinds = [kind for kind in kinds if "exp" not in kind[0] or np.max(t.value) < 5.0]
    names = []
    for _ in range(s.number(1, 2)):
        text, slope, saved = s.choose(kinds)
        source, change = s.choose(CHANGES)
        unpack = s.choose(FLAGS).format(source)
        name = s.name("made")
        if " ** " in text and s.number(0, 3) == 3:
            s.do(f"{name} = {text}")
            s.do(f"{name}.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: {unpack})")
        else:
            s.block(f"with {HOOKS}(lambda t: t, lambda t: {unpack}):", f"{name} = {text}")
        names.append(name)
        arrived.append((t, slope(change(saved))))
    times = s.number(1, 2)
    for i in range(times):
        keep = ", retain_graph=True" if i < times - 1 else ""
        s.do(f"torch.autograd.backward([{', '.join(names)}], [torch.ones_like({x})] * {len(names)}{keep})")
    grads = s.grads(*arrived)
    for leaf in s.leaves:
        due = grads.get(leaf.name) if leaf.requires_grad else None
        probe = f"{leaf.name}.grad"
        if due is not None and not np.any(due):
            probe = f"torch.zeros_like({leaf.name}) if {probe} is None else {probe}"
        s.close(probe, None if due is None else due * times, "backward computes with what unpack returns")
    s.close("aside.grad", None, "where the unpacked values came from plays no part")


@scene("saved.thread-local-and-disable")
def test_threads_and_disable(s: Stage) -> None:
    """Hooks act in their thread, and cannot be entered where they are disabled."""
    t = _filled(s)
    s.play()
    x = _copy(s, t)
    s.do(COUNTERS)
    s.do(f"hooks = lambda: {HOOKS}(pack, unpack)")
    if s.flip():
        s.do("import threading")
        s.do(
            f"def work():\n    {x} ** 2\n    counts.append(len(packed))\n\ndef run():\n    one = threading.Thread(target=work)\n    one.start()\n    one.join()"
        )
        s.do(
            f"def inside():\n    with hooks():\n        {x} ** 2\n    counts.append(len(packed))\n\ndef run_inside():\n    one = threading.Thread(target=inside)\n    one.start()\n    one.join()"
        )
        s.do("counts = []")
        here, total, due = s.flip(), 0, []
        lines = []
        for _ in range(s.number(1, 3)):
            what = s.number(0, 2)
            total += (0, int(here), 1)[what]
            lines.append(("run()", f"{x} ** 2; counts.append(len(packed))", "run_inside()")[what])
            due.append(total)
        s.block("with hooks():", *lines) if here else s.do("\n".join(lines))
        s.equal("counts[:]", due, "an op packs in the thread whose hooks were entered, and in no other")
        return
    depth = s.number(1, 3)
    messages = [f"message {i}" for i in range(depth)]
    s.do("import contextlib")
    s.do("stack = contextlib.ExitStack()\nother = contextlib.ExitStack()")
    enter = s.choose(("hooks().__enter__()", "with hooks(): pass", "with torch.autograd.graph.save_on_cpu(): pass"))
    stacks = [s.name("off") for _ in range(depth)]
    for name, message in zip(stacks, messages, strict=True):
        s.do(f"{name} = torch.autograd.graph.disable_saved_tensors_hooks({message!r})")
        s.do(f"{name}.__enter__()")
        s.raises(enter, "RuntimeError", "entering hooks is disabled here", fragment=message)
    for level in range(depth - 1, -1, -1):
        if s.number(0, 3) == 3:  # left by an error
            error = s.choose(ERRORS[:3])
            s.do(f"with contextlib.suppress({error}): {stacks[level]}.__exit__({error}, {error}(), None)")
        else:
            s.do(f"{stacks[level]}.__exit__(None, None, None)")
        if level:
            s.raises(
                enter, "RuntimeError", "entering hooks is still disabled by the outer one", fragment=messages[level - 1]
            )
    s.succeeds(f"with hooks(): {x} ** 2", "the last of them was left")
    s.equal("len(packed)", 1, "the hooks act again")


@scene("saved.per-tensor-hooks")
def test_per_tensor(s: Stage) -> None:
    """Hooks on one saved tensor pack at once, unpack at each reading, and are set once only."""
    t = _filled(s)
    s.play()
    x = _copy(s, t)
    s.do(COUNTERS)
    kinds = [
        (f"{x} ** 2", "self"),
        (f"{x}.exp()", "result"),
        (f"{x} * {x}.clone()", "other"),
        (f"{x} * {x}.clone()", "self"),
    ]
    again = "made.grad_fn._raw_saved_{}.register_hooks(lambda t: t, lambda t: t)"
    fragment = "Calling register_hooks on a saved tensor"
    kind = s.number(0, 3)
    text, which = s.choose(kinds)
    if kind == 3:  # hooks of the context count as set
        s.block(f"with {HOOKS}(pack, unpack):", f"made = {text}")
        s.raises(again.format(which), "RuntimeError", "the tensor has hooks already", fragment=fragment)
        s.do("calls = len(packed), len(unpacked)")
        s.equal("unpacked[:]", [], "a refused registration runs no hook")
        return
    s.do(f"made = {text}")
    if kind == 2:
        early = s.flip()
        if early:
            s.do(f"raw = made.grad_fn._raw_saved_{which}")
        s.do("made.backward(torch.ones_like(made))")
        line = "raw.register_hooks(pack, unpack)" if early else again.format(which)
        s.raises(line, "RuntimeError", "the tensor was freed", fragment=fragment)
        s.do("calls = len(packed), len(unpacked)")
        s.equal("packed[:]", [], "there is nothing to pack any more")
        return
    s.do(f"made.grad_fn._raw_saved_{which}.register_hooks(pack, unpack)")
    s.equal("packed[:]", [t.value.shape], "the tensor is packed at once")
    reads = 0
    for _ in range(s.number(1, 3)):
        what = s.number(0, 2)
        if what == 1:
            s.do("made.backward(torch.ones_like(made), retain_graph=True)")
        elif what == 2:
            s.raises(again.format(which), "RuntimeError", "the tensor has hooks already", fragment=fragment)
        else:
            s.do(f"read = made.grad_fn._saved_{which}")
            s.same(
                "read.detach()",
                "x.detach()" if which != "result" else "made.detach()",
                "the hooks give back what they got",
            )
        reads += what < 2
        s.do("calls = len(unpacked)")
        s.equal("unpacked[:]", [0] * reads, "each reading unpacks, and nothing else does")
    s.equal("len(packed)", 1, "it was packed once")
