"""Area inference: what inference mode makes, and what may be done with it outside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autograd_conformance import modes
from autograd_conformance.modes import INFERENCE_HEADS, INFERENCE_MANAGERS, PLAIN_HEADS, Mode, Nest
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Leaf
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

Paperwork = Callable[[Array], Array]
# Inference tensors in the shape of ``x``, and their numbers.
MADE: tuple[tuple[str, Paperwork], ...] = (
    ("{x}.clone()", lambda v: v),
    ("{x} * 2.0", lambda v: 2.0 * v),
    ("{x}.detach().clone()", lambda v: v),
    ("({x} + 0.5)[...]", lambda v: v + 0.5),
    ("torch.ones_like({x})", lambda v: v * 0.0 + 1.0),
    ("-{x}.detach()", lambda v: -v),
    ("torch.stack([{x}, {x}])[1]", lambda v: v),
)


def _inference(s: Stage, x: Paper, name: str, *more: str) -> Array:
    """Make an inference tensor in the shape of ``x``; returns its numbers."""
    text, paper = s.choose(MADE)
    s.block(s.choose(INFERENCE_HEADS), f"{name} = {text.format(x=x.name)}", *more)
    return paper(x.value)


def _outside(s: Stage, text: str) -> str:
    """A line in some mode other than inference mode."""
    head = s.choose(PLAIN_HEADS)
    return s.block_source(head, text) if head else text


def _finite(s: Stage) -> list[Paper]:
    return [t for t in s.tracked if np.size(t.value) and np.all(np.isfinite(t.value))]


@scene("inference.outputs")
def test_outputs(s: Stage) -> None:
    """Results are inference tensors without history, and views are what their base is."""
    s.require(not s.added)  # where a custom Function is recorded is a claim of its own
    parts = modes.cut(s)
    x = s.choose(parts.tracked)
    s.play(parts.before)
    s.do(f"u = torch.zeros_like({x.name})")
    write = s.choose(("u.add_(1.0)", "u.copy_({x})", "u[...] = 2.0")).format(x=x.name)
    views = [
        "w = {x}[...]",
        "w = {x}.unsqueeze(0)",
        "w = {x}.detach()",
        "w = {x}.expand_as({x})",
        "w = {x}.view_as({x})",
    ]
    own = [f"y = {s.choose(modes.PROBES).format(x=x.name)}", s.choose(views).format(x=x.name), "v = y[...]", write]
    s.block(s.choose(INFERENCE_HEADS), *own, *parts.ops, f"z = torch.zeros(2{s.on})")
    for name in ("y", "v", "z"):
        _pure(s, name)
    s.equal("(w.is_inference(), w.grad_fn)", (False, None), f"a view of {x.name}, which is a normal tensor")
    s.equal("(u.is_inference(), u.requires_grad)", (False, False), "an in-place op makes no new tensor")
    made: dict[str, bool | None] = {}
    for op in parts.ops:
        inference = True if not modes.in_memory_of(op) else made.get(op.args[0], False)
        if inference is False and not modes.is_view(op):
            inference = None  # a copy, or not
        for name in op.outs:
            made[name] = inference
            if inference:
                _pure(s, name)
            elif inference is False:
                s.equal(f"({name}.is_inference(), {name}.grad_fn)", (False, None), "a view of a normal tensor")
            else:
                s.true(f"{name}.grad_fn is None", "nothing is recorded in inference mode")


def _pure(s: Stage, name: str) -> None:
    flags = f"({name}.is_inference(), {name}.requires_grad, {name}.grad_fn)"
    s.equal(flags, (True, False, None), f"{name} was made in inference mode")


# Ops of a tracked ``t`` whose gradient cannot be had without the inference tensor ``i`` (``j``: indices, ``m``: a mask).
SAVES = (
    "{t} * i",
    "i * {t}",
    "{t} / i",
    "i / {t}",
    "torch.dot({t}.reshape(-1), f)",
    "torch.outer(f, {t}.reshape(-1))",
    "torch.nn.functional.linear({t}.reshape(1, -1), f[None])",
    "torch.nn.functional.linear(f[None], {t}.reshape(1, -1))",
    "torch.atan2({t}, i)",
    "torch.maximum({t}, i)",
    "torch.addcmul({t}, {t}, i)",
    "torch.nn.functional.mse_loss({t}, i)",
    "{t} ** i",
    "{t}.sum() * i",
    "{t} * i[...]",
    "{t} * i.detach()",
    "i.unsqueeze(0) * {t}",
    "{t}.reshape(-1).index_select(0, j)",
    "{t}.reshape(-1).gather(0, j)",
    "{t}.reshape(-1)[j]",
    "{t}.masked_fill(m, 0.0)",
    "torch.where(m, {t}, 0.0)",
)
# Ops that need nothing of ``i``, and the cotangent of ``{t}`` for one of the sum of the result.
ACCEPTS: tuple[tuple[str, float], ...] = (
    ("{t} + i", 1.0),
    ("i + {t}", 1.0),
    ("{t} - i", 1.0),
    ("i - {t}", -1.0),
    ("torch.add(i, {t}, alpha=2.0)", 2.0),
    ("torch.cat([{t}.reshape(-1), f])", 1.0),
    ("torch.stack([i, {t}])", 1.0),
)
SAVED = "Inference tensors cannot be saved for backward"


@scene("inference.save-error")
def test_save_error(s: Stage) -> None:
    """A recorded op that needs the inference tensor later raises at once, one that does not is right."""
    t = s.choose(_finite(s)[::-1])
    s.play()
    size = int(np.size(t.value))
    index = f"j = torch.tensor([{size - 1}, 0]{s.on})"
    _inference(s, t, "i", "f = i.reshape(-1)", index, f"m = torch.zeros({t.shape}, dtype=torch.bool{s.on})")
    total = 0.0
    for _ in range(s.number(1, 4)):
        what = s.choose(("saves", "accepts", "saves", "saves", "unrecorded"))
        if what == "saves":
            text = f"z = {s.choose(SAVES).format(t=t.name)}"
            if s.flip():
                text = s.block_source(
                    s.choose(("with torch.enable_grad():", "with torch.inference_mode(False):")), text
                )
            s.raises(text, "RuntimeError", "it would have to be saved", fragment=SAVED)
        elif what == "accepts":
            text, factor = s.choose(ACCEPTS)
            s.succeeds(f"z = {text.format(t=t.name)}", "nothing of it has to be saved")
            s.true("z.requires_grad", f"{t.name} requires grad")
            s.do("z.sum().backward(retain_graph=True)")
            total += factor
            _grads(s, t, np.full(t.shape, total))
        else:
            text = s.choose(SAVES).format(t=f"{t.name}.detach()")
            s.succeeds(f"z = {text}", "nothing is recorded, so nothing is saved")
            text = f"z = {s.choose(SAVES).format(t=t.name)}"
            s.succeeds(s.block_source("with torch.no_grad():", text), "nothing is recorded, so nothing is saved")


def _grads(s: Stage, t: Paper, cotangent: Array) -> None:
    """The gradients of all leaves for what reached ``t``."""
    grads = s.grads((t, cotangent))
    for leaf in s.leaves:
        if leaf.requires_grad:
            s.close(f"{leaf.name}.grad", grads.get(leaf.name), f"the gradient that {t.name} got goes on to the leaves")


Write = Callable[[Array, float], Array]
WRITES: tuple[tuple[str, Write], ...] = (
    ("{p}.add_({k})", lambda v, k: v + k),
    ("{p}.mul_({k})", lambda v, k: v * k),
    ("{p} += {k}", lambda v, k: v + k),
    ("{p}.zero_()", lambda v, k: np.zeros(v.shape)),
    ("{p}.fill_({k})", lambda v, k: np.full(v.shape, k)),
    ("{p}[...] = {k}", lambda v, k: np.full(v.shape, k)),
    ("{p}.copy_(torch.full_like({p}, {k}))", lambda v, k: np.full(v.shape, k)),
    ("torch.mul({p}, {k}, out={p})", lambda v, k: v * k),
    ("{p}.view_as({p}).mul_({k})", lambda v, k: v * k),
    ("{p}.unsqueeze(0).add_({k})", lambda v, k: v + k),
    ("{p}.neg_()", lambda v, k: -v),
    ("{p}.sub_({p}, alpha={k})", lambda v, k: v - k * v),
)


@scene("inference.inplace-outside-error")
def test_inplace_outside_error(s: Stage) -> None:
    """An inference tensor is written to in inference mode alone, by whatever op."""
    x = s.choose([t for t in s.tensors if np.size(t.value) and np.all(np.isfinite(t.value))])
    s.play()
    now = _inference(s, x, "i")
    for _ in range(s.number(1, 4)):
        text, paper = s.choose(WRITES)
        k = s.factor()
        line = text.format(p="i", k=k)
        if s.number(0, 2) < 2:
            s.raises(_outside(s, line), "RuntimeError", "i is an inference tensor", fragment=WRITTEN)
            now = np.full(now.shape, np.nan)  # nobody says whether the numbers were written before it raised
        else:
            s.succeeds(s.block_source(s.choose(INFERENCE_HEADS), line), "it is allowed in inference mode")
            now = paper(now, k)
        s.true("i.is_inference()", "it stays what it is")
        if not np.any(np.isnan(now)):
            s.close("i", now, "this was written in inference mode")


WRITTEN = "Inplace update to inference tensor outside InferenceMode is not allowed"
SWITCHES = ("{i}.requires_grad_()", "{i}.requires_grad = True", "{i}.requires_grad_(True)", "{i}[...].requires_grad_()")


@scene("inference.requires-grad-error")
def test_requires_grad_error(s: Stage) -> None:
    """requires_grad of an inference tensor cannot be switched on outside, in whatever way."""
    x = s.choose(s.tensors)
    s.play()
    _inference(s, x, "i", "f = i.reshape(-1)", "e = torch.zeros(0)" if not s.on else f"e = torch.zeros(0{s.on})")
    for _ in range(s.number(1, 3)):
        name = s.choose(("i", "f", "e", "i"))
        line = _outside(s, s.choose(SWITCHES).format(i=name))
        s.raises(line, "RuntimeError", f"{name} is an inference tensor", fragment=SWITCHED)
        s.equal(f"({name}.requires_grad, {name}.is_inference())", (False, True), "nothing has changed")
    s.succeeds("i.requires_grad_(False)", "it is off already")


SWITCHED = "Setting requires_grad=True on inference tensor outside InferenceMode is not allowed"
UNVERSIONED = "Inference tensors do not track version counter"


@scene("inference.no-version")
def test_no_version(s: Stage) -> None:
    """_version of an inference tensor raises wherever it is read, and increment_version leaves it alone."""
    x = s.choose(s.tensors)
    s.play()
    _inference(s, x, "i", "w = i[...]")
    s.do(f"n = {x.name}.detach().clone()")
    for _ in range(s.number(1, 3)):
        name = s.choose(("i", "w"))
        what = s.choose(("read", "write", "bump"))
        if what == "bump":
            bump = f"if torch.__version__ >= (2, 5):\n    torch.autograd.graph.increment_version({name})"
            s.succeeds(_anywhere(s, bump), "it passes over such a tensor")
            s.do("before = n._version\ntorch.autograd.graph.increment_version(n)")
            s.true("n._version > before", "n is a normal tensor")
        elif what == "write":
            s.succeeds(s.block_source(s.choose(INFERENCE_HEADS), f"{name}.mul_(2.0)"), "it needs no counter")
        s.raises(_anywhere(s, f"{name}._version"), "RuntimeError", "it is an inference tensor", fragment=UNVERSIONED)


def _anywhere(s: Stage, text: str) -> str:
    head = s.choose((*PLAIN_HEADS, *INFERENCE_HEADS))
    return s.block_source(head, text) if head else text


# Copies of ``i``, and what they do to its numbers.
COPIES: tuple[tuple[str, Paperwork], ...] = (
    ("i.clone()", lambda v: v),
    ("i * 2.0", lambda v: 2.0 * v),
    ("i + 0.5", lambda v: v + 0.5),
    ("-i", lambda v: -v),
    ("i.detach().clone()", lambda v: v),
    ("i[...].clone()", lambda v: v),
    ("torch.stack([i, i])[0]", lambda v: v),
    ("torch.cat([i.reshape(1, -1)]).reshape(i.shape)", lambda v: v),
    ("torch.empty_like(i).copy_(i)", lambda v: v),
    ("torch.where(i > 9.0, i, -i)", lambda v: np.where(v > 9.0, v, -v)),
)


@scene("inference.clone-rescues")
def test_clone_rescues(s: Stage) -> None:
    """Copies that are made outside are normal tensors, to be saved, written to and switched on; detach() is no copy."""
    t = s.choose(_finite(s)[::-1])
    s.play()
    value = _inference(s, t, "i")
    total = np.zeros(t.shape)
    for _ in range(s.number(1, 2)):
        text, paper = s.choose(COPIES)
        c, copied = s.name("copy"), paper(value)
        s.do(_outside(s, f"{c} = {text}"))
        s.false(f"{c}.is_inference()", "it was made outside")
        s.succeeds(f"version = {c}._version", "a normal tensor has a counter")
        s.succeeds(f"z = {t.name} * {c}", "a normal tensor can be saved")
        s.do("z.sum().backward(retain_graph=True)")
        total = total + copied
        _grads(s, t, total)
        if s.flip():
            s.succeeds(f"{c}.requires_grad_()\n({c} * {c}).sum().backward()", "a normal tensor can require grad")
            s.close(f"{c}.grad", 2.0 * copied, "the derivative of its squares")
        else:
            s.succeeds(f"{c}.mul_(2.0)", "a normal tensor can be written to")
            s.true(f"{c}._version > version", "and counts it")
            s.close(c, 2.0 * copied, "it was doubled")
    s.do(_outside(s, f"d = {s.choose(('i.detach()', 'i[...]', 'i.view_as(i)', 'i.unsqueeze(0).detach()'))}"))
    s.true("d.is_inference()", "it is no copy")
    s.close("i", value, "the copies have memory of their own")


@scene("inference.nesting")
def test_nesting(s: Stage) -> None:
    """The innermost inference_mode decides, each exit restores, and enable_grad brings no recording back."""
    s.play()
    log = modes.look(s, s.choose(s.tracked).name)
    managers = (*INFERENCE_MANAGERS, "torch.enable_grad()", "torch.no_grad()", "torch.set_grad_enabled(True)")
    nest = Nest(s, managers)
    lines: list[str] = []
    for _ in range(s.number(1, 2)):
        lines += nest.block(Mode(), s.number(1, 3))
        lines += nest.look(Mode())
    s.do("\n".join(lines))
    s.equal(log, nest.seen, "a stack of modes, the innermost on top; recording needs both")


MODIFIED = "has been modified by an inplace operation"
KEEPS = ("{w} * {w}", "{w}.sin()", "{w} ** 3", "{w} * {w}.sum()", "torch.nn.functional.silu({w})")


@scene("inference.normal-inplace-tracked")
def test_normal_inplace_tracked(s: Stage) -> None:
    """A write to a normal tensor in inference mode is noticed by backward of whatever saved it."""
    fitting = [t for t in s.scene.graph if isinstance(t, Leaf) and t.requires_grad and t.data.values]
    leaf = s.choose([t for t in fitting if t.layout != "expanded"])  # whose elements share memory
    value = np.array(leaf.data.values, dtype=np.float64).reshape(leaf.data.shape)
    s.play_leaves()
    kind = s.choose(("leaf", "inner", "plain"))
    w = leaf.name if kind == "leaf" else "w"
    if kind == "inner":
        s.do(f"w = {leaf.name} * 2.0")
        value = value * 2.0
    elif kind == "plain":
        s.do(f"w = {leaf.name}.detach().clone()")
    saved = s.number(1, 2)
    for i in range(saved):
        text = f"{leaf.name} * w" if kind == "plain" else s.choose(KEEPS).format(w=w)
        s.do(f"y{i} = {text}")
    s.do(f"before = {w}._version")
    lines = []
    for _ in range(s.number(1, 2)):
        text, paper = s.choose(WRITES)
        k = s.factor()
        lines.append(text.format(p=w, k=k))
        value = paper(value, k)
    s.block(s.choose(INFERENCE_HEADS), *lines)
    flags = f"({w}.is_inference(), {w}.requires_grad, {w}.is_leaf)"
    s.equal(flags, (False, kind != "plain", kind != "inner"), "the write was not recorded")
    s.true(f"{w}._version > before", "it is a normal tensor, so that a write counts")
    s.close(w, value, "these numbers were written")
    for i in range(saved):
        s.raises(
            f"y{i}.sum().backward()", "RuntimeError", f"y{i} saved {w} before it was written to", fragment=MODIFIED
        )
    if kind == "leaf":
        s.do(f"{w}.grad = None\n({w} * {w}).sum().backward()")
        s.close(f"{w}.grad", 2.0 * value, "a graph made since is fine")


TANGENTS: tuple[tuple[str, Callable[[Array, Array], Array]], ...] = (
    ("{d} * 2.0", lambda x, v: 2.0 * v),
    ("{d}.sin()", lambda x, v: np.cos(x) * v),
    ("{d} * {d}", lambda x, v: 2.0 * x * v),
    ("{d}.sum()", lambda x, v: np.asarray(v.sum())),
    ("{d} + {d}", lambda x, v: 2.0 * v),
    ("-{d}.reshape(-1)", lambda x, v: -v.reshape(-1)),
    ("{d}.clone()", lambda x, v: v),
)
TANGENT_HEADS = (
    "with torch.no_grad():",
    "with torch.set_grad_enabled(False):",
    "with torch.no_grad(), torch.no_grad():",
)


@scene("inference.no-forward-ad")
def test_no_forward_ad(s: Stage) -> None:
    """Results in inference mode have no tangent; under no_grad, and outside again, they have the right one."""
    x = s.choose([t for t in s.tensors if np.size(t.value) and np.all(np.isfinite(t.value))])
    s.play()
    s.do("import torch.autograd.forward_ad as fwad")
    tangent = s.numbers(x.shape)
    value = x.value if s.noise is None else s.noise(x.value, x.dtype)
    s.do(f"tangent = {s.tensor(tangent, x.dtype)}")
    lines = [f"d = fwad.make_dual({x.name}.detach().clone(), tangent)", "found = []"]
    due: list[Array | None] = []
    for _ in range(s.number(1, 4)):
        head = s.choose(("inference", "no_grad", "inference", "plain"))
        text, paper = s.choose(TANGENTS)
        line = f"y = {text.format(d='d')}"
        if head == "inference":
            lines.append(s.block_source(s.choose(INFERENCE_HEADS[:4]), line))
        else:
            lines.append(s.block_source(s.choose(TANGENT_HEADS), line) if head == "no_grad" else line)
        lines.append("found.append(fwad.unpack_dual(y).tangent)")
        due.append(None if head == "inference" else paper(value, tangent))
    s.block("with fwad.dual_level():", *lines)
    for i, paper_tangent in enumerate(due):
        because = "made in inference mode" if paper_tangent is None else "no_grad is about backward mode"
        s.close(f"found[{i}]", paper_tangent, because)
