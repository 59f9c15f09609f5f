"""Area retain-grad: gradients of tensors that are no leaves, kept where somebody asked for them."""

from __future__ import annotations

from functools import partial

import numpy as np

from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import SetRequiresGrad
from autograd_conformance.reverse import Rewrite
from autograd_conformance.scenes import scene
from autograd_conformance.snippets import untracked_names
from autograd_conformance.stage import Stage


@scene("retain-grad.populates")
def test_populates(s: Stage) -> None:
    """A retained non-leaf gets the gradient of the root with respect to it, however many are retained."""
    root = s.root()
    kept = s.some([t for t in s.above(root, root_too=True) if t.node is not None])
    s.play()
    head = s.choose(("", "", "with torch.no_grad():", "with torch.enable_grad():"))
    for t in kept:
        s.block(head, f"{t.name}.retain_grad()") if head else s.do(f"{t.name}.retain_grad()")
    grads = s.grads((root, s.backward(root)))
    for t in kept:
        s.close(
            f"{t.name}.grad", grads[t.name], f"{t.name} retains its gradient, which is that of the root by {t.name}"
        )


@scene("retain-grad.leaf-noop")
def test_leaf_noop(s: Stage) -> None:
    """retain_grad() on leaves leaves them as they are, however often it is called and whatever else is retained."""
    root = s.root(interior=False)
    late = s.flip() or any(isinstance(statement, SetRequiresGrad) for statement in s.scene.graph)
    leaves = s.some([t for t in (s.tracked if late else s.leaves) if t.requires_grad and t.node is None])
    s.play() if late else s.play_leaves()
    for t in leaves:
        for _ in range(s.number(1, 3)):
            s.do(f"{t.name}.retain_grad()")
            s.false(f"{t.name}.retains_grad", "a leaf does not retain, it has its .grad anyway")
            s.true(f"{t.name}.grad is None", "no backward has run")
    if not late:
        s.play(s.rest())
    if root.node is not None and s.flip():
        s.do(f"{root.name}.retain_grad()")
    passes = s.number(1, 2)
    for i in range(passes):
        grads = s.grads((root, s.backward(root, *(["retain_graph=True"] if i + 1 < passes else []))))
        for t in leaves:
            s.close(f"{t.name}.grad", grads.get(t.name), "as without retain_grad()")
            s.false(f"{t.name}.retains_grad", "a leaf does not retain")
        for t in leaves:
            s.do(f"{t.name}.grad = None")  # adding up is a claim of its own


def _add(total: dict[str, Array], grads: dict[str, Array]) -> None:
    for name, g in grads.items():
        total[name] = total[name] + g if name in total else g


@scene("retain-grad.needs-requires-grad")
def test_needs_requires_grad(s: Stage) -> None:
    """retain_grad() raises on whatever does not require grad, be it leaf, result, copy without history or integer."""
    s.play()
    names = untracked_names(s)
    for name in names:
        for _ in range(s.number(1, 2)):
            s.raises(f"{name}.retain_grad()", "RuntimeError", f"{name} does not require grad", fragment=_REFUSED)


_REFUSED = "can't retain_grad on Tensor that has requires_grad=False"


@scene("retain-grad.flag")
def test_flag(s: Stage) -> None:
    """retains_grad is a model's set of non-leaves, before and after passes, whatever is called in between."""
    s.play()
    root = s.root(interior=False)
    inner = [t for t in s.above(root, root_too=True) if t.node is not None]
    watched = s.some(inner, least=min(1, len(inner))) + s.some(s.interior, least=0) + s.some(s.leaves, least=1)
    retained: set[str] = set()

    def look() -> None:
        for t in watched:
            because = "retain_grad() was called on this non-leaf" if t.name in retained else "it retains nothing"
            s.equal(f"{t.name}.retains_grad", t.name in retained, because)

    look()
    for _ in range(s.number(1, 5)):
        what = s.choose(("retain", "retain", "backward", "again"))
        if what == "backward":
            s.backward(root, "retain_graph=True")
        elif what == "again" and retained:
            s.do(f"{s.choose(sorted(retained))}.retain_grad()")
        else:
            t = s.choose(inner) if inner and not s.flip() else s.choose(watched)
            if t.requires_grad:
                s.do(f"{t.name}.retain_grad()")
            else:
                s.may(f"{t.name}.retain_grad()")  # that it raises is a claim of its own
                s.do("pass")
            retained |= {t.name} if t.node is not None else set()
        look()


@scene("retain-grad.accumulates")
def test_accumulates(s: Stage) -> None:
    """After each of several passes, from one root or another, a retained .grad is the sum so far."""
    roots = s.some([t for t in reversed(s.interior) if np.size(t.value)], least=1)[:2]
    reached = {t.name: t for root in roots for t in s.above(root, root_too=True) if t.node is not None}
    kept = s.some(list(reached.values()))
    s.play()
    for t in kept:
        s.do(f"{t.name}.retain_grad()")
    total: dict[str, Array] = {}
    for _ in range(s.number(2, 4)):
        root = s.choose(roots)
        if s.number(0, 3) == 3:
            t = s.choose(kept)
            s.do(f"{t.name}.grad = None")
            total.pop(t.name, None)
        _add(total, s.grads((root, s.backward(root, "retain_graph=True", *s.choose(([], [], ["create_graph=True"]))))))
        for t in kept:
            s.close(f"{t.name}.grad", total.get(t.name), f"the sum of what the passes gave {t.name}")


@scene("retain-grad.does-not-disturb")
def test_does_not_disturb(s: Stage) -> None:
    """The same pass with and without retained tensors gives the leaves the same bits."""
    root = s.root()
    inner = s.above(root, root_too=True)
    leaves = [t for t in inner if t.node is None and t.requires_grad]
    for t in inner:
        s.require(np.all(np.isfinite(t.value)))
    interior = [t for t in inner if t.node is not None]
    kept = interior if s.flip() else s.some(interior)
    s.play()
    text, _ = s.seed(root)
    call = f"{root.name}.backward({', '.join([*([text] if text else []), 'retain_graph=True'])})"
    s.do(call)
    for t in leaves:
        s.do(f"plain_{t.name}, {t.name}.grad = {t.name}.grad.clone(), None")
    for _ in range(s.number(1, 2)):
        for t in kept:
            s.do(f"{t.name}.retain_grad()")
        s.do(call)
        for t in leaves:
            s.same(f"{t.name}.grad", f"plain_{t.name}", "the same pass, but for what is retained")
            s.do(f"{t.name}.grad = None")


@scene("retain-grad.root-gets-gradient-arg")
def test_root_gets_gradient_arg(s: Stage) -> None:
    """The .grad of a retained root is what was passed as gradient, or one."""
    root = s.root()
    others = [t for t in s.above(root) if t.node is not None]
    s.play()
    for t in s.some(others, least=0):
        s.do(f"{t.name}.retain_grad()")
    s.do(f"{root.name}.retain_grad()")
    if s.flip():
        s.do(f"{root.name}.retain_grad()")
    options = s.choose(("", "retain_graph=True", "create_graph=True"))
    text, seed = s.seed(root)
    if text and s.flip():  # memory of another order, or with gaps
        s.do(f"{text} = torch.stack([{text}, {text}], -1)[..., 0]")
    if text and s.flip():
        s.do(f"{text}.requires_grad_()")
    apart = [t for t in s.interior if np.size(t.value) and t not in (root, *s.above(root)) and root not in s.above(t)]
    if text and apart and s.flip():
        _two_roots(s, root, seed, text, s.choose(apart), options)
        return
    call = s.choose(("{r}.backward({a})", "torch.autograd.backward({r}, {a})", "torch.autograd.backward([{r}], {b})"))
    first, listed = ([text], [f"[{text}]"]) if text else ([], [])
    rest = [options] if options else []
    s.do(call.format(r=root.name, a=", ".join(first + rest), b=", ".join(listed + rest)).replace(", )", ")"))
    s.close(f"{root.name}.grad", seed, "backward started here with this gradient")


def _two_roots(s: Stage, root: Paper, seed: Array, text: str, other: Paper, options: str) -> None:
    """One pass from two roots of which neither depends on the other."""
    values = s.numbers(other.shape)
    s.do(f"{other.name}.retain_grad()")
    pairs = [(root.name, text), (other.name, s.tensor(values, other.dtype))]
    (one, first), (two, second) = pairs if s.flip() else pairs[::-1]
    s.do(f"torch.autograd.backward([{one}, {two}], [{first}, {second}]{options and f', {options}'})")
    s.close(f"{root.name}.grad", seed, "backward started here with this gradient")
    s.close(f"{other.name}.grad", values, "backward started here with this gradient")


@scene("retain-grad.after-tensor-hooks")
def test_after_tensor_hooks(s: Stage) -> None:
    """What is retained is what the hooks of the tensor have made of the gradient, in whatever order they came."""
    root = s.root()
    kept = s.some([t for t in s.above(root, root_too=True) if t.node is not None])
    s.play()
    rewrite: dict[str, Rewrite] = {}
    for t in kept:
        scale, shift, hooks = 1.0, 0.0, s.number(1, 3)
        at = s.number(0, hooks)
        for i in range(hooks + 1):
            if i == at:
                s.do(f"{t.name}.retain_grad()")
            if i < hooks:
                scale, shift = _hook(s, t, scale, shift)
        rewrite[t.name] = partial(_line, scale, shift)
    total: dict[str, Array] = {}
    passes = s.number(1, 2)
    for i in range(passes):
        seed = s.backward(root, *(["retain_graph=True"] if i + 1 < passes else []))
        _add(total, s.grads((root, seed), rewrite=rewrite))
        for t in kept:
            s.close(f"{t.name}.grad", total.get(t.name), "hooks come before it is retained")


def _hook(s: Stage, t: Paper, scale: float, shift: float) -> tuple[float, float]:
    """Register one hook; returns what the hooks so far make of a gradient: ``scale * g + shift``."""
    kind = s.choose(("scale", "shift", "scale", "look", "removed"))
    if kind == "look":
        s.do(f"{t.name}.register_hook(lambda g: None)")
        return scale, shift
    if kind == "removed":
        s.do(f"{t.name}.register_hook(lambda g: g * 7.0).remove()")
        return scale, shift
    factor = s.factor()
    if kind == "shift":
        s.do(f"{t.name}.register_hook(lambda g: g + {factor})")
        return scale, shift + factor
    s.do(f"{t.name}.register_hook(lambda g: g * {factor})")
    return scale * factor, shift * factor


def _line(scale: float, shift: float, g: Array) -> Array:
    return scale * g + shift
