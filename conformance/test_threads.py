"""Area threads: passes that run at once, and the thread on which they run."""

from __future__ import annotations

import numpy as np

from autograd_conformance.modes import ERRORS
from autograd_conformance.oracle import predict
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Apply, Leaf, Program
from autograd_conformance.reverse import cotangents
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

AT_ONCE = """import threading
def at_once(tasks):
    found, barrier = [None] * len(tasks), threading.Barrier(len(tasks))
    def work(k):
        barrier.wait(60)
        try:
            found[k] = tasks[k]()
        except RuntimeError as error:
            found[k] = error
    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found"""
AGAIN = "backward through the graph a second time"


@scene("threads.concurrent-grad")
def test_concurrent_grad(s: Stage) -> None:
    """Several threads that differentiate at once get what each would get alone."""
    ops = [t for t in s.scene.graph if isinstance(t, Leaf | Apply)]
    known = {t.name for t in ops if isinstance(t, Leaf)}
    kept: list[Leaf | Apply] = []
    for t in ops:
        if isinstance(t, Leaf) or known.issuperset(t.args):
            kept.append(t)
            known.update((t.name,) if isinstance(t, Leaf) else t.outs)
    due = predict(Program(tuple(kept)), s.noise)
    leaves = [due.tensors[t.name] for t in kept if isinstance(t, Leaf) and t.requires_grad]
    inner = {id(t): t for t in due.tensors.values() if t.node is not None and np.size(t.value)}
    root = s.choose([*inner.values()][::-1])
    s.play([t for t in kept if isinstance(t, Leaf)])
    how = s.choose(("own", "retained", "own", "freed"))
    seed, count = s.numbers(root.shape), s.choose((2, 2, 3))
    s.do(f"v = {s.tensor(seed, root.dtype)}")
    body = [t for t in kept if isinstance(t, Apply)]
    names = ", ".join(leaf.name for leaf in leaves)
    options = "retain_graph=True, " if how == "retained" else ""
    call = f"torch.autograd.grad({root.name}, [{names}], v * k, {options}allow_unused=True)"
    if how == "own":
        s.do(s.block_source("def task(k):", *body, f"return {call}"))
    else:
        s.play(body)
        s.do(f"def task(k):\n    return {call}")
    s.do(AT_ONCE)
    factors = [s.factor() for _ in range(count)]
    s.do(f"found = at_once([lambda k=k: task(k) for k in {factors}])")
    for i, factor in enumerate(factors):
        grads = cotangents([(root, seed * factor)], noise=s.noise)
        if how == "freed":  # which of them finds the graph freed is a matter of luck, and it may be all of them
            zeros = [grads.get(leaf.name, np.zeros(())) for leaf in leaves]
            s.do(f"late = isinstance(found[{i}], RuntimeError) and {AGAIN!r} in str(found[{i}])")
            s.do(f"if late: found[{i}] = [{', '.join(s.tensor(g) for g in zeros)}]")
        for j, leaf in enumerate(leaves):
            if how == "freed" and leaf.name not in grads:
                continue
            s.close(f"found[{i}][{j}]", grads.get(leaf.name), f"what thread {i} would get alone")
    for leaf in leaves:
        s.true(f"{leaf.name}.grad is None", "autograd.grad accumulates nothing")


SWITCH = "torch.autograd.set_multithreading_enabled"
SETTING = "torch._C._is_multithreading_enabled()"


@scene("threads.multithreading-switch")
def test_multithreading_switch(s: Stage) -> None:
    """Without multithreading backward runs on the calling thread with the same gradients; the setting comes back."""
    root = s.root()
    above = s.above(root, root_too=True)
    hooked = s.some(above)
    s.play()
    s.do("import threading\nran = []")
    for t in hooked:
        s.do(f"{t.name}.register_hook(lambda g: ran.append(threading.get_ident()))")
    setting, total = True, None
    for _ in range(s.number(1, 3)):
        if s.flip():
            setting = s.flip()
            s.do(f"{SWITCH}({setting})")
        inner = [False, *([s.flip()] if s.flip() else [])]
        if s.flip():
            inner.reverse()
        text, seed = s.seed(root)
        call = f"{root.name}.backward({', '.join([*([text] if text else []), 'retain_graph=True'])})"
        managers = [f"{SWITCH}({flag})" for flag in inner]
        block = s.block_source(f"with {', '.join(managers)}:", f"held = {SETTING}", call)
        s.do("ran.clear()")
        if s.flip():
            error = s.choose(ERRORS)
            indented = [f"    {line}" for line in [*block.splitlines(), f"    raise {error}"]]
            block = "\n".join(["try:", *indented, f"except {error}:", "    pass"])
        s.do(block)
        s.equal("held", inner[-1], "the innermost one decides")
        s.equal(SETTING, setting, "the setting from before is back")
        if not inner[-1]:
            s.true("ran == [threading.get_ident()] * " + str(len(hooked)), "every hook ran once, on the calling thread")
        total = _added(total, s.grads((root, seed)))
        _leaves(s, total)
    s.do(f"{SWITCH}(True)")
    s.true(SETTING, "a plain call holds until the next one")


def _added(total: dict[str, Array] | None, grads: dict[str, Array]) -> dict[str, Array]:
    return grads if total is None else {name: g + total[name] for name, g in grads.items()}


def _leaves(s: Stage, total: dict[str, Array]) -> None:
    leaves: list[Paper] = [leaf for leaf in s.leaves if leaf.requires_grad]
    for leaf in leaves:
        s.close(f"{leaf.name}.grad", total.get(leaf.name), "the gradients do not depend on the thread")
