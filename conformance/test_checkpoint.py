"""Area checkpoint: functions that run again in backward instead of keeping what they saved."""

from __future__ import annotations

import numpy as np

from autograd_conformance.paper import Array, Paper
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

CALL = "torch.utils.checkpoint.checkpoint"


def _function(s: Stage, root: Paper, tail: str = "root ** 2") -> list[str]:
    """A function of the leaves that computes the square of a root; returns the names of its arguments."""
    leaves = [t.name for t in s.leaves]
    body = [s.source(st) for st in s.rest()]
    lines = [f"def f({', '.join(leaves)}):", "    runs.append(1)", *[f"    {line}" for line in body]]
    lines += [f"    root = {root.name}.clone()", "    kept.append(weakref.ref(root))", f"    return {tail}"]
    s.play_leaves()
    s.do("import weakref")
    s.do("import torch.utils.checkpoint")
    s.do("runs, kept = [], []")
    s.do("\n".join(lines))
    return leaves


def _grads(s: Stage, root: Paper, seed: Array, because: str) -> None:
    """The gradients of the square of a root."""
    grads = s.grads((root, 2.0 * root.value * seed))
    for leaf in s.leaves:
        due = grads.get(leaf.name) if leaf.requires_grad else None
        probe = f"{leaf.name}.grad"
        if due is not None and not np.any(due):
            probe = f"torch.zeros_like({leaf.name}) if {probe} is None else {probe}"
        s.close(probe, due, because)


def _root(s: Stage) -> Paper:
    root = s.root()
    s.require(np.max(np.abs(root.value)) < 64.0)
    s.require(any(t.requires_grad for t in s.leaves))
    return root


def _seed(s: Stage, root: Paper) -> tuple[str, Array]:
    values = s.numbers(root.shape)
    s.do(f"v = {s.tensor(values, root.dtype)}")
    return "v", values


@scene("checkpoint.same-gradients")
def test_same(s: Stage) -> None:
    """Output and gradients of the function itself; what it saved is made again."""
    root = _root(s)
    reentrant, random = s.flip(), s.number(0, 3) == 3
    names = _function(s, root, "root ** 2" if not random else "root ** 2 * drawn(root)")
    if random:
        s.do("draws = []")
        s.do("def drawn(t):\n    draws.append(torch.rand_like(t))\n    return draws[-1]")
    before = s.number(0, 1) if random else 0
    options = f"use_reentrant={reentrant}" + (", preserve_rng_state=True" if before else "")
    call = f"{CALL}(f, {', '.join(names)}, {options})"
    if s.number(0, 3) == 3:
        call = f"{CALL}(lambda *args: {CALL}(f, *args, {options}), {', '.join(names)}, {options})"
    times = s.number(1, 2)
    for _ in range(times):
        s.do(f"out = {call}")
    if not random:
        s.close("out", root.value**2, "the output is that of the function")
    s.equal("len(runs)", times, "it ran once for each call")
    s.equal("[ref() for ref in kept]", [None] * times, "what it saved is not kept")
    if random and s.flip():
        s.do("torch.rand(3)")
    _, seed = _seed(s, root)
    s.do("out.backward(v)")
    s.true(f"len(runs) > {times}", "it ran again in backward")
    if random:
        s.same(f"draws[{times - 1}]", "draws[-1]", "it drew the same numbers again")
        return
    _grads(s, root, seed, "the gradients are those of the function")


@scene("checkpoint.reentrant-limits")
def test_limits(s: Stage) -> None:
    """What the reentrant variant refuses, and the other does not."""
    root = _root(s)
    kind, reentrant = s.number(0, 4), not s.flip()
    names = _function(s, root, "root.detach() ** 2" if kind == 4 and reentrant else "root ** 2")
    leaf = s.choose([t for t in s.above(root) if any(t is x for x in s.leaves)])
    arguments = ", ".join(names)
    if kind == 3:  # no input requires grad
        s.do("import warnings")
        s.do(f"with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
             f"    out = {CALL}(lambda *args: f(*args), {', '.join(f'{n}.detach()' for n in names)}, use_reentrant={reentrant})")  # fmt: skip
        if reentrant:
            s.false("out.requires_grad", "no input requires grad")
            s.true("any(issubclass(w.category, UserWarning) for w in caught)", "a warning says so")
        else:
            s.do(f"out = {CALL}(lambda: f({arguments}), use_reentrant=False)")
            s.true("out.requires_grad", "the function tracks tensors that are no arguments")
            _, seed = _seed(s, root)
            s.do("out.backward(v)")
            _grads(s, root, seed, "the gradients are those of the function")
        return
    if kind == 2:
        call = f"{CALL}(lambda *args, scale: f(*args) * scale, {arguments}, scale=1.0, use_reentrant={reentrant})"
        if reentrant:
            s.raises(call, "ValueError", "the reentrant variant takes no keyword arguments")
            return
        s.do(f"out = {call}")
    else:
        s.do(f"out = {CALL}(f, {arguments}, use_reentrant={reentrant})")
    _, seed = _seed(s, root)
    if kind == 4 and reentrant:
        s.raises("out.backward(v)", "RuntimeError", "all outputs of the region are detached")
    elif kind in (0, 1) and reentrant:
        call = (f"torch.autograd.grad(out, [{leaf.name}], v)", f"out.backward(v, inputs=[{leaf.name}])")[kind]
        s.raises(
            call,
            "RuntimeError",
            "the reentrant variant needs a plain backward",
            fragment="torch.utils.checkpoint is incompatible with",
        )
    elif kind == 0:
        s.do(f"got, = torch.autograd.grad(out, [{leaf.name}], v)")
        s.close("got", s.grads((root, 2.0 * root.value * seed))[leaf.name], "the gradient is that of the function")
    elif kind == 1:
        s.do(f"out.backward(v, inputs=[{leaf.name}])")
        s.close(
            f"{leaf.name}.grad",
            s.grads((root, 2.0 * root.value * seed))[leaf.name],
            "the gradient is that of the function",
        )
    else:
        s.do("out.backward(v)")
        _grads(s, root, seed, "the gradients are those of the function")


@scene("checkpoint.default-argument")
def test_default(s: Stage) -> None:
    """Without use_reentrant there is a warning, and the reentrant variant."""
    root = _root(s)
    names = _function(s, root)
    s.do("import warnings")
    arguments = ", ".join(names) + s.choose(("", ", preserve_rng_state=False", ", preserve_rng_state=True"))
    for _ in range(s.number(1, 2)):
        s.do(
            f"with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n    out = {CALL}(f, {arguments})"
        )
        s.true(
            "any(issubclass(w.category, UserWarning) and 'use_reentrant parameter should be passed' in str(w.message) for w in caught)",
            "the variant should be chosen",
        )
    s.close("out", root.value**2, "the output is that of the function")
    _, seed = _seed(s, root)
    leaf = s.choose([t for t in s.above(root) if any(t is x for x in s.leaves)])
    if s.flip():
        call = s.choose((f"torch.autograd.grad(out, [{leaf.name}], v)", f"out.backward(v, inputs=[{leaf.name}])"))
        s.raises(
            call,
            "RuntimeError",
            "it acts as the reentrant variant",
            fragment="torch.utils.checkpoint is incompatible with",
        )
        return
    s.do("out.backward(v)")
    _grads(s, root, seed, "the gradients are those of the function")


@scene("checkpoint.determinism-check")
def test_determinism(s: Stage) -> None:
    """A second run that saves something else is an error; where it stops is a choice."""
    t = s.choose([x for x in s.tracked[::-1] if np.size(x.value)])
    s.play()
    s.do("import torch.utils.checkpoint")
    x = s.name("x")
    s.do(f"{x} = {t.name}.clone()")
    kind, count = s.number(0, 4), s.number(1, 3)
    early = not s.flip()
    head = (
        s.choose((f"with torch.utils.checkpoint.set_checkpoint_early_stop({early}):", ""))
        if early
        else "with torch.utils.checkpoint.set_checkpoint_early_stop(False):"
    )
    saves = "\n".join(["    t = t ** 2", "    log.append('saved')"] * count)
    other = {
        0: "t.sin()",
        1: "t + 1.0",
        2: "t.sum() ** 2 + t[..., None] ** 2" if t.shape else "t[None] ** 2",
        3: "(t.double() if t.dtype == torch.float32 else t.float()) ** 2",
        4: "(t ** 2) ** 2",
    }[kind]
    if kind == 3 and not s.device.has("float64"):
        s.require(False)
    at = s.number(0, 1)
    first = "    t = t ** 2" if kind != 0 else "    t = t.sin()"
    odd = f"{first} if log.count('start') == 1 else {other}"
    body = [odd, saves] if at == 0 else [saves, odd]
    s.do("log = []")
    s.do(
        "\n".join(
            [
                "def f(t):",
                "    log.append('start')",
                *body,
                "    log.append('saved')",
                "    t = t * 2.0",
                "    log.append('end')",
                "    return t",
            ]
        )
    )
    call = f"out = {CALL}(f, {x}, use_reentrant=False)"
    s.block(head, call) if head else s.do(call)
    s.equal("log.count('end')", 1, "the function ran once, to its end")
    run = "out.backward(torch.ones_like(out))"
    if kind in (1, 2, 3) or (kind == 4 and not early):
        s.raises(run, "CheckpointError", "the second run saved other tensors than the first")
        return
    if kind == 4:  # it has stopped before it could save more
        s.may(run)
        return
    s.succeeds(run, "the second run saved tensors of the same number, shapes and dtypes")
    s.equal("log.count('start')", 2, "the function ran again")
    s.equal("log.count('end')", 1 if early else 2, "it stops after the last tensor needed, unless it is told not to")
