"""Area inplace: writes to tensors, their meaning without writes, version counters, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from autograd_conformance.algebra import Traced
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Leaf
from autograd_conformance.scenes import scene
from autograd_conformance.shared import Part, mapped, total, views_of, whole
from autograd_conformance.snippets import KEEP
from autograd_conformance.stage import Stage

CHANGED = "modified by an inplace operation"
LEAF = "leaf Variable that requires grad is being used in an in-place operation"
SEVERAL = "the output of a function that returns multiple views"

SMOOTH = ("sin", "tanh", "sigmoid", "atan", "cos")


Meaning = Callable[[], Any]


class Writer:
    """A program with in-place ops in the making: its lines, and what it means on paper.

    Args:
        s: the stage.
        linear: only ops of which no gradient needs a value, so that no write can spoil anything.
        plain: leave out writes to several tensors at once, and those that read what they write to.

    """

    def __init__(self, s: Stage, *, linear: bool, plain: bool = False) -> None:
        self.s, self.linear, self.plain = s, linear, plain
        self.lines: list[str] = []
        self.parts: list[Part] = []
        self.results: list[tuple[str, Traced]] = []
        self.sources: dict[str, tuple[Paper, Traced]] = {}

    def source(self, t: Paper) -> Traced:
        """A tensor of the graph as a value; its gradient is asked for later."""
        if t.name not in self.sources:
            self.sources[t.name] = t, Traced(t.value)
        return self.sources[t.name][1]

    def base(self, t: Paper, *, copied: bool = True) -> Part:
        """A tensor with memory of its own: a copy of one of the graph, or a constant of its shape."""
        name = self.s.name("base")
        if copied:
            self.lines.append(f"{name} = {t.name}.clone()")
            part = whole(name, self.source(t), t.dtype, tracked=t.requires_grad)
        else:
            self.lines.append(f"{name} = torch.full_like({t.name}, 0.5, requires_grad=False)")
            part = whole(name, Traced(np.full(t.shape, 0.5)), t.dtype, tracked=False)
        self.parts.append(part)
        return part

    def view(self, of: Part, p: int, which: Any) -> Part:
        """A view of a part; ``which`` chooses."""
        text, where = which(views_of(of, p))
        name = self.s.name("view")
        self.lines.append(f"{name} = {text.format(of.name)}")
        part = of.inner(name, where)
        self.parts.append(part)
        return part

    def use(self, part: Part, how: int) -> None:
        """An op that makes a new tensor of a part as it is now."""
        name, value = self.s.name("made"), part.read()
        ops = [
            (f"{part.name} * 2.0", value * 2.0),
            (f"{part.name} + 1.0", value + 1.0),
            (f"-{part.name}", value * -1.0),
        ]
        if not self.linear:
            op = SMOOTH[how % len(SMOOTH)]
            ops = [
                (f"{part.name}.{op}()", self.mapped(part, op)),
                (f"{part.name} * {part.name}", value * value),
                *ops,
            ]
        text, result = ops[how % len(ops)]
        self.lines.append(f"{name} = {text}")
        if part.memory.tracked:
            self.results.append((name, result))

    def mapped(self, part: Part, op: str) -> Traced:
        """An elementwise op of the table on a part."""
        return mapped(part.read(), op, _rounding(self.s, part))

    def others(self, v: Part) -> list[tuple[str, Any, bool]]:
        """Tensors that can be written into a part: of the graph, and of other memory."""
        fitting = [t for t in self.s.tensors if t.dtype == v.memory.dtype and _fits(t.shape, v.shape)]
        found: list[tuple[str, Any, bool]] = [(t.name, t, t.requires_grad) for t in fitting]
        parts = [part for part in self.parts if part.memory.dtype == v.memory.dtype and _fits(part.shape, v.shape)]
        return found + [(t.name, t, t.memory.tracked) for t in parts if t is v or not t.overlaps(v)]

    def write(self, v: Part, how: int, p: int) -> None:
        """An in-place op on a part; ``how`` and ``p`` say which."""
        if not v.writable:
            v = next(part for part in self.parts if part.memory is v.memory)
        others = self.others(v) if how % 2 else []
        if others:
            name, made, tracked = others[p % len(others)]
            other = made.read() if isinstance(made, Part) else self.source(made)
            if tracked and not v.memory.tracked:
                v.memory.tracked = v.settled = True
            options = self._with_other(v, name, other, p, itself=made is v)
        else:
            options = self._alone(v, p)
        text, meaning = options[how // 2 % len(options)]
        self.lines.append(text)
        v.write(meaning())

    def _alone(self, v: Part, p: int) -> list[tuple[str, Meaning]]:
        n, f, k, old = v.name, (2.0, -1.0, 0.5, 3.0)[p % 4], (0.5, -1.5, 2.0)[p % 3], v.read()
        mask = np.arange(v.where.size).reshape(v.shape) % 2 == p % 2
        i = 0 if self.plain or not v.shape else p % v.shape[0]
        found: list[tuple[str, Meaning]] = [
            (f"{n}.mul_({f})", lambda: old * f),
            (f"{n}.add_({k})", lambda: old + k),
            (f"{n} *= {f}", lambda: old * f),
            (f"{n}.neg_()", lambda: old * -1.0),
            (f"{n}.zero_()", lambda: 0.0),
            (f"{n}.fill_({k})", lambda: k),
            (f"{n}.div_(2.0)", lambda: old * 0.5),
            (f"{n}.sub_({k})", lambda: old - k),
            (f"{n}.masked_fill_({self.s.tensor(mask, 'bool')}, {k})", lambda: _masked(old, mask, k)),
        ]
        if not self.plain:
            found.append((f"torch._foreach_mul_([{n}], {f})", lambda: old * f))
        if v.shape:
            found += [(f"{n}[{i}] = {k}", lambda: _at(old, i, k)), (f"{n}[{i}] *= {f}", lambda: _at(old, i, None, f))]
        if not self.linear:
            found += [(f"{n}.{op}_()", partial(self.mapped, v, op)) for op in SMOOTH]
        return found

    def _with_other(self, v: Part, name: str, other: Traced, p: int, *, itself: bool) -> list[tuple[str, Meaning]]:
        n, f, old = v.name, (2.0, -1.0, 0.5, 3.0)[p % 4], v.read()
        found: list[tuple[str, Meaning]] = [
            (f"{n}.add_({name}, alpha={f})", lambda: old + other * f),
            (f"{n}.copy_({name})", lambda: other),
            (f"{n}[...] = {name}", lambda: other),
            (f"{n} += {name}", lambda: old + other),
            (f"{n}.sub_({name})", lambda: old - other),
        ]
        if not self.linear and not (self.plain and itself):
            found.append((f"{n}.mul_({name})", lambda: old * other))
            found.append((f"{n} *= {name}", lambda: old * other))
        return found

    def roots(self) -> list[tuple[str, Traced]]:
        """What can be differentiated: the tensors as they are now, and results made on the way."""
        return [(part.name, part.read()) for part in self.parts if part.memory.tracked] + self.results

    def backward(self, roots: list[tuple[str, Traced]], times: int = 1) -> tuple[list[str], list[tuple[Paper, Array]]]:
        """The lines that run backward from some roots, and what arrives at the tensors of the graph."""
        seeds = [_ramp(value.shape, i) for i, (_, value) in enumerate(roots)]
        dtypes = [f"{name}.dtype" for name, _ in roots]
        texts = [self.s.tensor(seed) + f".to({dtype})" for seed, dtype in zip(seeds, dtypes, strict=True)]
        call = f"{roots[0][0]}.backward({texts[0]}%s)"
        if len(roots) > 1:
            call = f"torch.autograd.backward([{', '.join(n for n, _ in roots)}], [{', '.join(texts)}]%s)"
        lines = [call % ", retain_graph=True"] * (times - 1) + [call % ""]
        wrt = [value for _, value in self.sources.values()]
        arrived = total([(value, seed * times) for (_, value), seed in zip(roots, seeds, strict=True)], wrt)
        return lines, [(t, g) for (t, _), g in zip(self.sources.values(), arrived, strict=True) if t.requires_grad]


def _rounding(s: Stage, part: Part) -> Callable[[Array], Array] | None:
    """Random rounding in the dtype of a part, if numbers are worked out with it."""
    noise = s.noise
    return None if noise is None else lambda y: noise(y, part.memory.dtype)


def _ramp(shape: tuple[int, ...], i: int) -> Array:
    """Exact numbers, no two neighbours equal, none of them zero."""
    return np.array([(2 * ((k * 7 + 3 * i) % 8) - 7) / 4 for k in range(int(np.prod(shape)))]).reshape(shape)


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Does a shape broadcast to another?"""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(m in (n, 1) for m, n in pairs)


def _masked(old: Traced, mask: Array, k: float) -> Traced:
    return Traced(np.where(mask, k, old.value), [old], lambda _, g: (np.where(mask, 0.0, g),))


def _at(old: Traced, i: int, k: float | None, factor: float = 0.0) -> Traced:
    """``old`` with row ``i`` replaced by ``k``, or multiplied."""
    slope = np.ones(old.shape)
    slope[i] = factor
    value = old.value * slope
    if k is not None:
        value[i] = k
    return Traced(value, [old], lambda _, g: (g * slope,))


def _due(s: Stage, arrived: list[tuple[Paper, Array]], because: str) -> None:
    """The ``.grad`` of each leaf, for what arrived at tensors of the graph."""
    grads = s.grads(*arrived) if arrived else {}
    for leaf in s.leaves:
        due = grads.get(leaf.name) if leaf.requires_grad else None
        if due is not None and not np.any(due):  # None, or zeros: where all was overwritten, nobody promises which
            s.close(f"torch.zeros_like({leaf.name}) if {leaf.name}.grad is None else {leaf.name}.grad", due, because)
        else:
            s.close(f"{leaf.name}.grad", due, because)


def _compose(s: Stage, w: Writer, steps: int) -> list[tuple[str, Traced]]:
    """Draw a program: bases, views of views, uses and writes in any order; returns the roots to run backward from."""
    base = w.base(s.choose([t for t in s.tracked[::-1] if np.size(t.value)]))
    if s.number(0, 3) == 3:
        w.base(s.choose([t for t in s.tensors[::-1] if np.size(t.value)]), copied=s.flip())
    for _ in range(steps):
        kind = s.number(0, 7)
        part = w.parts[0] if kind == 0 else s.choose(w.parts[::-1])
        if kind in (1, 2, 3) and part.depth < 3:
            w.view(part, s.number(0, 63), s.choose)
        elif kind == 4:
            w.use(part, s.number(0, 15))
        else:
            dial = s.number(0, 255)
            w.write(part, dial, dial // 3)
    w.write(w.parts[-1] if s.flip() else base, 2 * s.number(0, 15), 1)
    roots = w.roots()
    chosen = [roots[0], *s.some(roots[1:], least=0)]
    return chosen[1:] if len(chosen) > 1 and s.flip() else chosen


@scene("inplace.error-or-correct")
def test_error_or_correct(s: Stage) -> None:
    """Whatever is written to when: an error, or the gradients of the program without in-place ops."""
    w = Writer(s, linear=False)
    roots = _compose(s, w, s.number(1, 4))
    lines, arrived = w.backward(roots)
    s.play()
    late = s.number(0, 7)
    if late > 3:  # a write that nothing comes after: only what was saved can notice it
        part = s.choose(w.parts)
        alias = (part.name, f"{part.name}.detach()", part.name, f"{part.name}.detach()")[late - 4]
        w.lines.append(f"with torch.no_grad(): {alias}.{('mul_(2.0)', 'zero_()')[late % 2]}")
    s.may("\n".join([*w.lines, *lines]))
    _due(s, arrived, "no error was raised, so the gradients are those of the same program without in-place ops")


@scene("inplace.view-rebase")
def test_view_rebase(s: Stage) -> None:
    """Views and their base have one history, whichever of them is written to."""
    w = Writer(s, linear=True)
    roots = _compose(s, w, s.number(1, 5))
    lines, arrived = w.backward(roots, times=1 + (s.number(0, 3) == 3))
    s.play()
    for line in w.lines:
        s.do(line)
    for part in w.parts:
        s.close(f"{part.name}.detach()", part.read().value, f"all that was written to the memory of {part.name} so far")
        s.equal(f"{part.name}.requires_grad", part.memory.tracked, "a base and its views are tracked together")
    for line in lines:
        s.do(line)
    _due(s, arrived, "the gradients are those of the program without in-place ops")


# --- one tensor and its aliases ---------------------------------------------------------------------------------------

MODES = ("with torch.no_grad():", "with torch.inference_mode():", "if True:")


def _filled(s: Stage, *, tracked: bool = True) -> Paper:
    """A tensor with elements, the newest first."""
    return s.choose([t for t in (s.tracked if tracked else s.tensors)[::-1] if np.size(t.value)])


def _copy(s: Stage, t: Paper, name: str = "base") -> Part:
    """A copy of a tensor of the graph, with memory of its own."""
    name = s.name(name)
    s.do(f"{name} = {t.name}.clone()")
    return whole(name, Traced(t.value), t.dtype, tracked=t.requires_grad)


def _deeper(s: Stage, part: Part, most: int) -> Part:
    """A view, or a view of a view ..., or the tensor itself."""
    for _ in range(s.number(0, most)):
        text, where = s.choose(views_of(part, s.number(0, 63)))
        name = s.name("view")
        s.do(f"{name} = {text.format(part.name)}")
        part = part.inner(name, where)
    return part


def _writes(n: str, part: Part) -> list[str]:
    """In-place ops that a tensor can be given in any mode, whether or not it requires grad."""
    found = [
        f"{n}.mul_(2.0)",
        f"{n}.mul_(1.0)",
        f"{n}.add_(0.5)",
        f"{n}.zero_()",
        f"{n}.fill_(0.5)",
        f"{n}.copy_({n}.detach().clone())",
        f"{n}[...] = 1.5",
        f"{n}.neg_()",
        f"{n}.add_(torch.ones_like({n}), alpha=0.5)",
        f"torch._foreach_mul_([{n}], 2.0)",
        f"torch._foreach_add_([{n}], 0.0)",
        f"{n}.sub_(0.5)",
        f"{n}.clamp_(-1.0, 1.0)",
        f"{n}.masked_fill_({n}.detach() > 0.0, 0.5)",
        f"torch.nn.functional.relu({n}, inplace=True)",
        f"{n}.div_(2.0)",
        f"{n}.sin_()",
        f"{n}.uniform_()",
    ]
    return [*found, f"{n}[0] = 0.5", f"{n}[-1] *= 2.0", f"{n}[..., :1].mul_(2.0)"] if part.shape else found


def _unrecorded(n: str) -> list[str]:
    """Writes that need a mode without recording: ``out=``, initialisers."""
    return [f"torch.mul({n}, 2.0, out={n})", f"torch.add({n}, 0.5, out={n})", f"torch.nn.init.ones_({n})"]


@scene("inplace.saved-modified-error")
def test_saved_modified(s: Stage) -> None:
    """A saved tensor that was written to since raises in backward, through whichever alias and in whichever mode."""
    t = _filled(s)
    how = s.number(0, 5)
    s.play()
    base = _copy(s, t)
    saved = _deeper(s, base, 2)
    aliases = [saved.name, base.name, f"{saved.name}.detach()", f"{saved.name}[...]", f"{base.name}.detach()[...]"]
    if how in (0, 2):
        s.do(f"out = {saved.name} ** {2 + how // 2}")
    elif how in (1, 3):
        s.do(f"out = {saved.name}.exp()")
        aliases = ["out", "out.detach()", "out[...]", "out.detach()[...]"]
    else:
        s.do(KEEP)
        s.do(f"extra = torch.full_like({t.name}, 0.5, requires_grad=False)")
        s.do(f"out = Keep.apply({saved.name}, extra)" if how == 4 else f"out = Keep.apply(extra, {saved.name})")
        aliases += ["extra", "extra.detach()"]
    alias, later = s.choose(aliases), s.number(0, 2)
    s.do(("top = out", "top = out.sum()", "top = (out * 2.0).sum() + 1.0")[later])
    call = s.choose((
        "top.backward(torch.ones_like(top))",
        f"torch.autograd.grad(top, [{t.name}], torch.ones_like(top))",
        "torch.autograd.backward([top], [torch.ones_like(top)], create_graph=True)",
    ))  # fmt: skip
    if s.flip():
        s.do(f"top.backward(torch.ones_like(top), retain_graph=True, inputs=[{t.name}])")
    for _ in range(s.number(1, 2)):
        mode = s.choose(MODES)
        if mode == "if True:" and alias.endswith("[...]"):
            mode = MODES[0]
        part = base if alias.startswith(("base", "extra")) else saved
        options = _writes(alias, part)[:-3] if alias.endswith(")") else _writes(alias, part)
        options = [o for o in options if not alias.endswith(("]", ")")) or not o.startswith(f"{alias}[")]
        line = s.choose(options)
        s.succeeds(f"{mode}\n    {line}", "the write itself is no error; only backward can tell that it did harm")
    s.raises(call, "RuntimeError", "a tensor that a node saved was changed in place since", fragment=CHANGED)


@scene("inplace.unsaved-ok")
def test_unsaved(s: Stage) -> None:
    """What no node saved can be written to."""
    t = _filled(s)
    s.play()
    base = _copy(s, t)
    x = _deeper(s, base, 2)
    value, roots, kept = x.read(), [], []
    for _ in range(s.number(1, 2)):
        name, which = s.name("made"), s.number(0, 8)
        flat = x.shape[:1] == x.shape
        ops = [
            (f"{x.name} * 2.0", value * 2.0),
            (f"{x.name} + 0.5", value + 0.5),
            (f"-{x.name}", value * -1.0),
            (f"{x.name} - {x.name}.detach()", value - value.value),
            (f"{x.name}.sum()", mapped_sum(value)),
            (f"{x.name}.clone()", value * 1.0),
        ]
        if which < 6 or (flat and which == 6):
            text, result = ops[which % 6]
        else:  # the gradient needs the output only; that it is all the node saves is looked at first
            op = ("sigmoid", "tanh", "exp" if np.max(x.read().value) < 5.0 else "tanh")[which - 6]
            text, result = f"{x.name}.{op}()", mapped(value, op, _rounding(s, x))
            s.do("kept = []")
            s.block("with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda t: t):", text)
            kept.append(name)
        s.do(f"{name} = {text}")
        roots.append((name, result))
    if kept:
        s.do(f"free = all(k.untyped_storage()._cdata != {base.name}.untyped_storage()._cdata for k in kept)")
    if s.flip():
        s.do(f"aside = {x.name} ** 2")  # saved, by a node that no pass runs
    for _ in range(s.number(1, 3)):
        alias = s.choose((x.name, base.name, f"{x.name}.detach()"))
        mode = s.choose((*MODES[::-1], MODES[0]))
        options = [
            o
            for o in _writes(alias, x if alias != base.name else base)
            if not o.startswith(f"{alias}[") or "(" not in alias
        ]
        line = s.choose(options)
        s.succeeds(f"{mode}\n    {'if free: ' if kept else ''}{line}", "no node that runs has saved this tensor")
    seeds = [_ramp(value.shape, i) for i, (_, value) in enumerate(roots)]
    texts = [f"{s.tensor(seed)}.to({name}.dtype)" for seed, (name, _) in zip(seeds, roots, strict=True)]
    names = ", ".join(name for name, _ in roots)
    s.succeeds(f"torch.autograd.backward([{names}], [{', '.join(texts)}])", "nothing that was saved was changed")
    (g,) = total([(v, seed) for (_, v), seed in zip(roots, seeds, strict=True)], [base.memory.now])
    _due(s, [(t, g.reshape(t.shape))], "the gradients are those of the values that the ops saw")


def mapped_sum(x: Traced) -> Traced:
    """The sum of all elements."""
    return Traced(x.value.sum(), [x], lambda _, g: (np.zeros(x.shape) + g,))


@scene("inplace.leaf-error")
def test_leaf_error(s: Stage) -> None:
    """A leaf that requires grad, and its views, are refused in grad mode, and keep their values."""
    leaf = s.choose([t for t in s.leaves[::-1] if t.requires_grad and np.size(t.value)])
    root = s.root()
    s.play()
    part = whole(leaf.name, Traced(leaf.value), leaf.dtype, tracked=True)
    if s.number(0, 3) == 3:
        s.do(f"owned = torch.nn.Parameter({leaf.name}.detach().clone())")
        part.name = "owned"
    name = part.name
    s.do(f"before = {name}.detach().clone()")
    for _ in range(s.number(1, 3)):
        view = _deeper(s, part, 3)
        line = s.choose(_writes(view.name, view))
        s.raises(
            line, "RuntimeError", "a leaf that requires grad must not be changed in place in grad mode", fragment=LEAF
        )
        s.do(f"after = {name}.detach().clone()")
        s.same("after", "before", "a write that is refused changes nothing")
    s.true(f"{name}.is_leaf and {name}.requires_grad", "the leaf stays what it was")
    if s.flip():
        mode = s.choose(("with torch.no_grad():", "with torch.set_grad_enabled(False):"))
        if np.unique(leaf.value).size == leaf.value.size or name == "owned":  # not expanded memory
            s.succeeds(f"{mode}\n    {name}.mul_(1.0)", "the rule is one for grad mode")
            return
    grads = s.grads((root, s.backward(root)))
    s.close(f"{leaf.name}.grad", grads.get(leaf.name), "nothing was changed, so the gradients are as ever")


@scene("inplace.multi-view-error")
def test_multi_view(s: Stage) -> None:
    """One of several views that an op returned is refused in grad mode, and so is each view of it."""
    t = s.choose([x for x in s.tracked[::-1] if np.size(x.value) and x.shape])
    s.play()
    base = _copy(s, t) if s.number(0, 3) else whole(t.name, Traced(t.value), t.dtype, tracked=True)
    inner = _deeper(s, base, 1)
    shape = inner.shape
    s.require(shape)
    dim = s.number(0, len(shape) - 1)
    size = shape[dim]
    texts = [(f".unbind({dim})", size), (f".chunk(2, {dim})", 2 if size > 1 else 1), (f".split(1, {dim})", size)]
    texts += [(f".split([1, {size - 1}], {dim})", 2), (f".split_with_sizes([{size - 1}, 1], {dim})", 2)]
    text, count = s.choose(texts[: 5 if size > 1 else 3])
    s.do(f"several = {inner.name}{text}")
    s.do(f"before = {base.name}.detach().clone()")
    for _ in range(s.number(1, 2)):
        i = s.number(0, count - 1)
        s.do(f"one = several[{i}]")
        picked = np.zeros((1,)) if text.startswith(".unbind") and len(shape) == 1 else np.zeros((1, 1))
        options = _writes("one", Part("one", base.memory, picked.astype(np.int64)))
        options = options if not text.startswith(".unbind") or len(shape) > 1 else options[:18]
        if s.number(0, 3) == 3:
            s.do(s.choose(("one = one[...]", "one = one.unsqueeze(0)", "one = one.view_as(one)")))
        s.raises(
            s.choose(options), "RuntimeError", "one of several views must not be changed in place", fragment=SEVERAL
        )
        s.do(f"after = {base.name}.detach().clone()")
        s.same("after", "before", "a write that is refused changes nothing")
    s.do(f"{base.name}.backward({s.tensor(_ramp(base.shape, 0))}.to({base.name}.dtype))")
    _due(s, [(t, _ramp(base.shape, 0))], "nothing was changed, so the gradients are as ever")


VIEWED = """
class Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return g
""".strip()


@scene("inplace.alias-error-doc")
def test_aliases(s: Stage) -> None:
    """Shared memory is no reason to refuse a write; five kinds of tensors are refused."""
    t = _filled(s)
    s.play()
    base = _copy(s, t)
    if s.flip():
        _refused(s, base)
        return
    parts = [base]
    for _ in range(s.number(1, 3)):
        of = s.choose(parts[::-1])
        detached = s.flip()
        text, where = s.choose(views_of(of, s.number(0, 63)))
        name = s.name("alias")
        s.do(f"{name} = {text.format(of.name)}" + (".detach()" if detached else ""))
        part = of.inner(name, where)
        part.settled = of.settled and not detached
        parts.append(part)
    tracked = [part for part in parts if part.settled]
    for _ in range(s.number(1, 3)):
        part, factor = s.choose(tracked), s.factor()
        s.do(f"before = {base.name}._version")
        s.succeeds(f"{part.name}.mul_({factor})", "that others share this memory is no reason to refuse")
        part.write(part.read() * factor)
        s.true(f"{base.name}._version > before", "autograd notes the write")
    for part in parts:
        s.close(f"{part.name}.detach()", part.read().value, "all of them see what was written to their memory")
    root, seed = s.choose(tracked), _ramp((), 0)
    seed = _ramp(root.shape, 0)
    s.do(f"{root.name}.backward({s.tensor(seed)}.to({root.name}.dtype))")
    start = base.memory.now
    while start.parents and start.parents[0].size == base.memory.now.size and start.parents[0].parents:
        start = start.parents[0]
    (g,) = total([(root.read(), seed)], [start])
    _due(s, [(t, g.reshape(t.shape))], "writes through aliases are part of the history")


def _refused(s: Stage, base: Part) -> None:
    leaves = [x for x in s.leaves if x.requires_grad and np.size(x.value)]
    kinds = [
        (f"part = {base.name}.expand(2, *{base.name}.shape)", "memory that is expanded"),
        (f"with torch.no_grad(): part = {base.name}[...]", "a view that was made without recording"),
        (f"part = Viewed.apply({base.name})", "a view from a custom Function"),
        (f"part = {leaves[0].name}[...]" if leaves else "", "a view of a leaf that requires grad"),
        (f"part = {base.name}.unsqueeze(0).unbind(0)[0]", "one of several views"),
    ]
    s.do(f"before = {base.name}.detach().clone()")
    for line, what in s.some([kind for kind in kinds if kind[0]]):
        if "Viewed" in line:
            s.do(VIEWED)
        s.do(line)
        write = s.choose(
            ("part.mul_(2.0)", "part.add_(0.5)", "part.neg_()", "part += 1.0", "part.copy_(part.detach().clone())")
        )
        s.raises(write, "RuntimeError", f"what is written to is {what}")
        s.do(f"after = {base.name}.detach().clone()")
        s.same("after", "before", "a write that is refused changes nothing")


# --- version counters -------------------------------------------------------------------------------------------------


@scene("inplace.version-counter")
def test_version_counter(s: Stage) -> None:
    """One counter for a base, its views and its detached aliases: it starts at 0, and goes up with writes only."""
    t = _filled(s, tracked=False)
    kind = s.number(0, 3)
    s.play()
    if kind == 3 and t.is_leaf and np.unique(t.value).size == t.value.size:
        base = whole(t.name, Traced(t.value), t.dtype, tracked=t.requires_grad)
    elif kind == 2:
        s.do(f"base = torch.full_like({t.name}, 0.5, requires_grad={s.flip()})")
        base = whole("base", Traced(t.value), t.dtype, tracked=True)
    else:
        base = _copy(s, t)
    s.equal(f"{base.name}._version", 0, "nothing was ever written to it")
    parts, names = [base], [base.name]
    s.do(f"hidden = {base.name}.data")
    for _ in range(s.number(1, 5)):
        action, part = s.number(0, 5), s.choose(parts)
        if action in (0, 1):
            options = _writes(part.name, part) + _unrecorded(part.name)
            for _ in range(s.number(1, 6)):
                s.do(f"before = {base.name}._version")
                s.block("with torch.no_grad():", s.choose(options))
                s.true(f"{base.name}._version > before", f"{part.name} was written to, which shares the counter")
        elif action in (2, 3):
            text, where = s.choose(views_of(part, s.number(0, 63)))
            name = s.name("alias")
            s.do(f"{name} = {text.format(part.name)}" + (".detach()" if action == 3 else ""))
            parts.append(part.inner(name, where))
            names.append(name)
        elif action == 4:
            s.do(f"before = {base.name}._version")
            s.do(s.choose(("hidden.mul_(2.0)", f"{part.name}.data.zero_()", "hidden.fill_(0.5)")))
            s.equal(f"{base.name}._version - before", 0, "writes through .data are not counted")
        else:
            n = part.name
            s.do(f"before = {base.name}._version")
            s.do(
                "new = "
                + s.choose(
                    (
                        f"{n} * 2.0",
                        f"{n}.sum()",
                        f"{n}.clone()",
                        f"{n}.sin()",
                        f"torch.stack([{n}, {n}])",
                        f"({n} > 0.0)",
                    )
                )
            )
            s.equal(f"{base.name}._version - before", 0, "nothing was written")
            s.equal("new._version", 0, "a new tensor has a counter of its own, which starts at 0")
        s.true(f"all(t._version == {base.name}._version for t in ({', '.join(names)},))", "they share one counter")


@scene("inplace.increment-version")
def test_increment_version(s: Stage) -> None:
    """increment_version does to graphs what a write does, for one tensor or several."""
    t = _filled(s)
    s.play()
    count = s.number(1, 3)
    parts = [_copy(s, t) for _ in range(count)]
    saved = [_deeper(s, part, 1) for part in parts]
    for i, part in enumerate(saved):
        s.do(f"out{i} = {part.name} ** 2")
    bumped = s.some(range(count))
    names = [s.choose((saved[i].name, parts[i].name, f"{saved[i].name}.detach()")) for i in bumped]
    s.do(f"before = [{', '.join(part.name for part in parts)}]")
    s.do("versions = [t._version for t in before]")
    if len(names) == 1 and s.flip():
        argument = f"[{names[0]}]"
    elif len(names) == 1:
        argument = names[0]
    else:
        argument = s.choose((f"[{', '.join(names)}]", f"({', '.join(names)})"))
    line = f"torch.autograd.graph.increment_version({argument})"
    if argument[0] in "[(":  # no release says since when it takes several; 2.4 does not
        line = (
            f"for given in [{argument}] if torch.__version__ >= (2, 13) else {argument}:\n"
            "    torch.autograd.graph.increment_version(given)"
        )
    s.do(line)
    s.equal(
        "[t._version > v for t, v in zip(before, versions)]", [i in bumped for i in range(count)],
        "the counters of the tensors that were given go up, and no other",
    )  # fmt: skip
    for i in range(count):
        if i in bumped:
            s.raises(
                f"out{i}.sum().backward(retain_graph=True)",
                "RuntimeError",
                "a tensor that was saved counts as changed",
                fragment=CHANGED,
            )
        else:
            s.succeeds(f"out{i}.sum().backward(retain_graph=True)", "this tensor was not among those given")


# --- modes and pairs --------------------------------------------------------------------------------------------------


@scene("inplace.allow-mutation")
def test_allow_mutation(s: Stage) -> None:
    """Within the context backward takes the values of the time of saving."""
    kind = s.number(0, 4)
    context = "with torch.autograd.graph.allow_mutation_on_saved_tensors():"
    if kind == 4:
        t = _filled(s)
        s.play()
        power = s.choose(("** 2", "* base", ".exp()", ".sin()"))
        s.block(
            context, f"base = {t.name}.clone()", f"out = (base {power})" if power[0] != "." else f"out = base{power}"
        )
        call = s.choose(("out.sum().backward()", f"torch.autograd.grad(out.sum(), [{t.name}])"))
        s.raises(
            call,
            "AssertionError",
            "the graph was recorded inside the context, which is over",
            fragment="Trying to backward outside of the",
        )
        text = f"{context}\n    {context}\n        pass"
        s.raises(text, "RuntimeError", "these contexts cannot be nested", fragment="cannot be nested")
        return
    w = Writer(s, linear=False, plain=True)
    base = w.base(_filled(s))
    for _ in range(s.number(1, 3)):
        p = s.number(0, 255)
        part = s.choose(w.parts)
        if p % 4 == 3:
            part = w.view(part, p // 4, _at_start)
        w.use(part, p // 2)
        _write_at_start(s, w)
    w.use(base, 0)
    _write_at_start(s, w)
    roots = w.results
    lines, arrived = w.backward(roots)
    s.play()
    s.block(context, *w.lines, *lines)
    _due(s, arrived, "backward takes each tensor as it was when it was saved")


def _at_start(options: list[tuple[str, Array]]) -> tuple[str, Array]:
    """A view that begins where its base begins."""
    fitting = [option for option in options if option[1].flat[0] == 0]
    return fitting[len(options) % len(fitting)]


def _write_at_start(s: Stage, w: Writer) -> None:
    """A write to a tensor that begins where its base begins: the context of torch 2.13 knows memory by its address."""
    part = s.choose(w.parts)
    how = s.number(0, 63)
    if part.where.flat[0] == 0:
        w.write(part, how, 4 * how)


@scene("inplace.out-variant-refused")
def test_out_variant(s: Stage) -> None:
    """out= is refused where gradients would be needed, and works where none are."""
    t = _filled(s)
    s.play()
    x = t.name
    ops: list[tuple[str, str, Any]] = [
        ("torch.mul(%s, 2.0, out=%s)", x, lambda v: v * 2.0),
        ("torch.add(%s, 0.5, out=%s)", x, lambda v: v + 0.5),
        ("torch.sin(%s, out=%s)", x, np.sin),
        (f"torch.stack([%s, {x}.detach()], out=%s)", f"torch.stack([{x}, {x}])", lambda v: np.stack([v, v])),
        ("torch.sum(%s, dim=0, out=%s)", f"{x}.sum(0)", lambda v: v.sum(0)),
        ("torch.neg(%s, out=%s)", x, np.negative),
        (f"torch.sub(torch.ones_like({x}), %s, out=%s)", x, lambda v: 1.0 - v),
    ]
    ops = ops if t.shape else [op for op in ops if "dim=0" not in op[0]]
    for _ in range(s.number(1, 2)):
        call, like, value = s.choose(ops)
        into, kind = s.name("into"), s.number(0, 3)
        s.do(f"{into} = torch.full_like({like}, 0.5, requires_grad={kind == 1})")
        if kind == 2:
            s.do(f"{into} = {into}.requires_grad_() * 1.0")
        asked = call % (f"{x}.detach()" if kind in (1, 2) and s.flip() else x, into)
        s.do(f"before = {into}.detach().clone()")
        s.raises(
            asked,
            "RuntimeError",
            "out= knows no gradients, and one would be needed",
            fragment="support automatic differentiation",
        )
        s.do(f"after = {into}.detach().clone()")
        s.same("after", "before", "a call that is refused writes nothing")
        mode = s.choose(("with torch.no_grad():", "with torch.set_grad_enabled(False):"))
        s.succeeds(f"{mode}\n    got = {asked}", "without recording no gradient is needed")
        s.true(f"got is {into}", "the tensor given as out= is what comes back")
        s.close(f"{into}.detach()", np.asarray(value(t.value)), "it has the values of the op")
        s.equal(f"{into}.requires_grad", kind in (1, 2), "the call changes no flag")


@scene("inplace.out-of-place-equivalence")
def test_equivalence(s: Stage) -> None:
    """An in-place op gives the same object a new history, with the values and gradients of its twin."""
    w = Writer(s, linear=True, plain=True)
    base = w.base(_filled(s))
    if s.flip():
        base = w.view(base, s.number(0, 63), s.choose)
    n = base.name
    s.play()
    for line in w.lines:
        s.do(line)
    for last in [False] * s.number(0, 2) + [True]:
        s.do(f"old, same = {n}.grad_fn, {n}")
        dial, done = s.number(0, 255), len(w.lines)
        w.linear = not (last and s.flip())  # what needs its output comes last
        w.write(base, dial, dial // 5)
        line = w.lines[done]
        if line.startswith(f"{n}.") and "]" not in line.partition("(")[0]:
            s.do(f"got = {line}")
            s.true(f"got is {n}", "an in-place op returns the tensor that it was given")
        else:
            s.do(line)
        s.true(f"{n} is same", "the name still means the tensor that was written to")
        s.true(f"{n}.grad_fn is not None and {n}.grad_fn is not old", "the tensor has a new history")
    s.close(f"{n}.detach()", base.read().value, "the values are those of the op that makes a new tensor")
    lines, arrived = w.backward([(n, base.read())])
    s.do(lines[0])
    _due(s, arrived, "the gradients are those of the ops that make new tensors")


OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")


@scene("inplace.optimizer-step-detected")
def test_optimizer_step(s: Stage) -> None:
    """A step between forward and backward is noticed, whichever parameter it changed."""
    t = _filled(s, tracked=False)
    s.play()
    count = s.number(1, 3)
    names = [f"p{i}" for i in range(count)]
    for name in names:
        s.do(f"{name} = torch.ones_like({t.name}, requires_grad=True)")
    changed = s.some(range(count))
    for i in changed:
        s.do(f"{names[i]}.grad = torch.ones_like({names[i]})")
    kind = s.choose(OPTIMIZERS)
    options = s.choose(("", ", foreach=False", ", foreach=True"))
    if kind in ("SGD", "Adam", "AdamW", "RMSprop") and s.number(0, 3) == 3:
        options += ", maximize=True"
    groups = f"[{', '.join(names)}]"
    if count > 1 and s.flip():
        groups = f"[{{'params': [{names[0]}]}}, {{'params': [{', '.join(names[1:])}], 'lr': 0.25}}]"
    s.do(f"opt = torch.optim.{kind}({groups}, lr=0.5{options})")
    if s.number(0, 3) == 3:
        s.do("opt.step()")
    for name in names:
        s.do(f"out_{name} = {name} ** 2")
    s.succeeds("opt.step()", "the step itself harms nobody")
    for i, name in enumerate(names):
        call = f"out_{name}.backward(torch.ones_like({name}))"
        if i in changed:
            s.raises(call, "RuntimeError", "the step changed a parameter that the graph saved", fragment=CHANGED)
        else:
            s.succeeds(call, "without a gradient the step leaves a parameter alone")


@scene("inplace.no-grad-view-then-write")
def test_no_grad_view(s: Stage) -> None:
    """A view taken without recording is not written to in grad mode; both in one mode is fine."""
    t = _filled(s)
    s.play()
    own = any(isinstance(st, Leaf) and st.name == t.name and st.layout == "contiguous" for st in s.scene.graph)
    own = own and s.number(0, 3) == 3  # torch 2.13 overlooks leaves that are views of plain memory themselves
    base = whole(t.name, Traced(t.value), t.dtype, tracked=True) if own else _copy(s, t)
    modes = ("with torch.no_grad():", "with torch.inference_mode():", "with torch.set_grad_enabled(False):")
    for _ in range(s.number(1, 3)):
        mode = s.choose(modes)
        lines, part = [], base
        for _ in range(s.number(1, 2)):
            text, where = s.choose(views_of(part, s.number(0, 63)))
            name = s.name("view")
            lines.append(f"{name} = {text.format(part.name)}")
            part = part.inner(name, where)
        options = _writes(part.name, part)
        within = s.number(0, 2)
        if within == 1:  # taken and written without recording
            s.succeeds("\n    ".join([mode, *lines, s.choose(options)]), "taken and written in one mode")
            continue
        if within == 2 and base.name != t.name:
            s.succeeds("\n".join([*lines, f"{part.name}.mul_(2.0)"]), "taken and written in grad mode")
            continue
        s.block(mode, *lines)
        s.do(f"before = {base.name}.detach().clone()")
        for _ in range(s.number(1, 2)):
            line = s.choose(options)
            s.raises(line, "RuntimeError", "the view was taken without recording", fragment="modified inplace")
            s.do(f"after = {base.name}.detach().clone()")
            s.same("after", "before", "a write that is refused changes nothing")
