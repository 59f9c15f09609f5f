"""Area leaf: what a leaf is, and how tensors made from tensors become leaves or not."""

from __future__ import annotations

import numpy as np

from autograd_conformance.compare import HELD, Case, Findings, Made
from autograd_conformance.judge import claim
from autograd_conformance.ops import FLOATS, OPS
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Apply, Backward, Rewrap
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage


@claim("leaf.iff-no-grad-fn")
def test_iff_no_grad_fn(case: Case) -> Findings:
    """is_leaf says exactly that there is no grad_fn."""
    for m in case.made:
        yield case.judge(m.at, f"{m.name}.is_leaf", not m.seen.has_grad_fn, m.seen.is_leaf, "is_leaf means: no grad_fn")
    for at, flags in case.seen.changed.items():
        arg = case.program.statements[at].arg  # type: ignore[union-attr]
        yield case.judge(at, f"{arg}.is_leaf", not flags.has_grad_fn, flags.is_leaf, "is_leaf means: no grad_fn")


@claim("leaf.not-requiring-is-leaf")
def test_not_requiring_is_leaf(case: Case) -> Findings:
    """A tensor that does not require grad is a leaf, be it computed or not."""
    for m in case.made:
        if not m.seen.requires_grad:
            yield case.judge(m.at, f"{m.name}.is_leaf", True, m.seen.is_leaf, "it does not require grad")


@claim("leaf.created-by-user")
def test_created_by_user(case: Case) -> Findings:
    """A tensor that requires grad is a leaf if the user made it, and none if a recorded op did."""
    for m in case.made:
        if m.seen.requires_grad and m.paper.dtype in FLOATS:
            by_user = not isinstance(m.statement, Apply)
            why = "the user made it" if by_user else "a recorded op made it"
            yield case.judge(m.at, f"{m.name}.is_leaf", by_user, m.seen.is_leaf, why)


@claim("leaf.cast-makes-nonleaf")
def test_cast_makes_nonleaf(case: Case) -> Findings:
    """A conversion that converts is an op: from a tensor that requires grad it gives a non-leaf."""
    for m, operands in case.applied:
        s = m.statement
        assert isinstance(s, Apply)
        if OPS[s.op].kind == "cast" and operands[0].requires_grad and not s.no_grad:
            yield case.judge(m.at, f"{m.name}.is_leaf", False, m.seen.is_leaf, "the conversion is recorded")
            yield case.judge(
                m.at,
                f"{m.name}.dtype == torch.{m.paper.dtype}",
                True,
                m.seen.dtype == m.paper.dtype,
                "it was converted",
            )
    for at, s in case.at(Rewrap):
        if s.how == "same" and (at, "new object") in case.seen.facts:
            same = not case.seen.facts[at, "new object"]
            yield case.judge(at, f"{s.out} is {s.arg}", True, same, "there is nothing to convert")


@claim("leaf.clone-is-differentiable")
def test_clone_is_differentiable(case: Case) -> Findings:
    """A clone of what requires grad is a non-leaf, and backward through it changes no gradient."""
    clones = {}
    for m, operands in case.applied:
        s = m.statement
        assert isinstance(s, Apply)
        if s.op == "clone" and operands[0].requires_grad and not s.no_grad:
            clones[m.at] = m
            yield case.judge(m.at, f"{m.name}.is_leaf", False, m.seen.is_leaf, "clone is an op like any other")
        if s.op == "clone" and (m.at, "same memory") in case.seen.facts:
            probe = f"{m.name}.untyped_storage().data_ptr() == {s.args[0]}.untyped_storage().data_ptr()"
            yield case.judge(m.at, probe, False, case.seen.facts[m.at, "same memory"], "a clone has memory of its own")
    for p in case.judged:
        if case.carried(p) and any(node.at in clones for node in p.due.executed):
            yield HELD


def _copied(case: Case, m: Made, *, tracked: bool, shares: bool) -> Findings:
    """A copy without history: flag, leafness, numbers, memory."""
    arg = m.statement.arg  # type: ignore[union-attr]
    yield case.judge(m.at, f"{m.name}.requires_grad", tracked, m.seen.requires_grad, f"it has no history to {arg}")
    yield case.judge(m.at, f"{m.name}.is_leaf", True, m.seen.is_leaf, f"it has no history to {arg}")
    numbers = case.seen.values
    if (m.at, m.name) in numbers and 0 not in m.paper.shape:
        yield case.judge(
            m.at, f"{m.name}.tolist()", numbers[m.at, arg], numbers[m.at, m.name], f"it holds the numbers of {arg}"
        )
    if (m.at, "same memory") in case.seen.facts:
        probe = f"{m.name}.data_ptr() == {arg}.data_ptr()"
        why = f"it shares the memory of {arg}" if shares else "it is a copy in memory of its own"
        yield case.judge(m.at, probe, shares, case.seen.facts[m.at, "same memory"], why)


@claim("leaf.torch-tensor-copies")
def test_torch_tensor_copies(case: Case) -> Findings:
    """torch.tensor(t) and t.new_tensor(t) copy the numbers and nothing else."""
    for m in case.rewrapped("tensor", "tensor_tracked", "new_tensor", "copy"):
        assert isinstance(m.statement, Rewrap)
        yield from _copied(case, m, tracked=m.statement.how == "tensor_tracked", shares=False)


@claim("leaf.parameter-of-nonleaf")
def test_parameter_of_nonleaf(case: Case) -> Findings:
    """Parameter(t) is a leaf that requires grad, shares memory with t and has no history to it."""
    for m in case.rewrapped("parameter"):
        yield from _copied(case, m, tracked=True, shares=True)
    made = {m.name for m in case.rewrapped("parameter")}
    for p in case.judged:
        for name in made.intersection(case.carried(p)) if isinstance(p.statement, Backward) else ():
            yield case.judge(
                p.at, f"{name}.grad is not None", True, p.after.get(name) is not None, "it is a leaf that requires grad"
            )


# --- on scenes --------------------------------------------------------------------------------------------------------


def _pointer(name: str) -> str:
    return f"{name}.untyped_storage().data_ptr()"


@scene("leaf.as-tensor-keeps-history")
def test_as_tensor_keeps_history(s: Stage) -> None:
    """as_tensor gives the tensor itself or a recorded cast, asarray keeps the history or shares memory without it."""
    s.play()
    parts: list[tuple[Paper, Array]] = []
    roots: list[str] = []
    for _ in range(s.number(1, 5)):
        t = s.choose([*s.interior[::-1], *(t for t in s.tensors if t.node is None)])
        name, n = s.name("y"), t.name
        how = s.choose(("same", "cast", "array", "drop"))
        if how == "same":
            call = s.choose(("torch.as_tensor({0})", "torch.as_tensor({0}, dtype={0}.dtype, device={0}.device)"))
            s.do(f"{name} = {call.format(n)}")
            s.true(f"{name} is {n}", "it has the dtype and device that are asked for")
        elif how == "drop" and t.node is not None:  # a leaf has no history to drop
            _dropped(s, t, name)
            continue
        else:
            _recorded(s, t, name, array=how == "array")
        if t.requires_grad and np.size(t.value):
            seed = s.numbers(t.shape)
            parts.append((t, seed))
            roots.append(f"({name} * {s.tensor(seed, 'float32')}).sum()")
    if not parts:
        return
    s.do(f"({' + '.join(roots)}).backward()")
    grads = s.grads(*parts)
    for leaf in s.leaves:
        if leaf.requires_grad:
            s.close(f"{leaf.name}.grad", grads.get(leaf.name), "gradients flow through what keeps the history")


def _dropped(s: Stage, t: Paper, name: str) -> None:
    """Make ``name`` from a non-leaf, or from a view of it, by the call that drops the history."""
    n = f"{t.name}.mT" if len(t.shape) > 1 and s.flip() else t.name
    s.do(f"{name} = torch.asarray({n}, requires_grad=False)")
    s.false(f"{name}.requires_grad", "requires_grad=False was asked for")
    s.true(f"{name}.grad_fn is None", "it has no history")
    s.true(f"{t.name}.requires_grad", f"the flag of {t.name} is its own")
    if np.size(t.value):
        s.true(f"{_pointer(name)} == {_pointer(n)}", f"it lies in the memory of {t.name}")
        s.same(name, f"{n}.detach()", f"it lies in the memory of {t.name}")


def _recorded(s: Stage, t: Paper, name: str, *, array: bool) -> None:
    """Make ``name`` from a tensor by a call that keeps its history, perhaps in another dtype."""
    other = "float32" if t.dtype == "float64" else s.wide
    cast = not array or s.flip()
    option = f", dtype=torch.{other}" if cast else ""
    s.do(f"{name} = torch.{'asarray' if array else 'as_tensor'}({t.name}{option})")
    s.equal(f"{name}.requires_grad", t.requires_grad, f"it keeps the history of {t.name}")
    if t.node is not None or (t.requires_grad and cast and other != t.dtype):
        s.true(f"{name}.grad_fn is not None", f"it keeps the history of {t.name}")
    if cast:
        s.equal(f"str({name}.dtype)", f"torch.{other}", "it was asked for")
    elif np.size(t.value):
        s.true(f"{_pointer(name)} == {_pointer(t.name)}", f"it lies in the memory of {t.name}")


@scene("leaf.deepcopy-leaves-only")
def test_deepcopy_leaves_only(s: Stage) -> None:
    """A deep copy of a leaf is a leaf of its own, .grad included; that of a non-leaf is refused, also inside containers."""
    roots = [t for t in s.interior if np.size(t.value)]
    s.do("import copy")
    s.play()
    grads: dict[str, Array] = {}
    if roots and s.number(0, 3):
        root = s.choose(roots[::-1])
        grads = s.grads((root, s.backward(root, "retain_graph=True")))
    parameters = {r.out for r in s.scene.graph if isinstance(r, Rewrap) and r.how == "parameter"}
    for _ in range(s.number(1, 5)):
        filled = [t for t in s.tensors if t.node is None and t.name in grads]
        t = (
            s.choose(filled)
            if filled and s.flip()
            else s.choose([*(t for t in s.tensors if t.node is None), *s.interior])
        )
        held = s.choose(("{}", "[{}]", "{{0: ({},)}}", "[1.0, {}]"))
        if t.node is not None:
            fragment = "Only Tensors created explicitly by the user"
            s.raises(
                f"copy.deepcopy({held.format(t.name)})", "RuntimeError", f"{t.name} has a history", fragment=fragment
            )
            continue
        name, n = s.name("d"), t.name
        get = {"{}": "", "[{}]": "[0]", "{{0: ({},)}}": "[0][0]", "[1.0, {}]": "[1]"}[held]
        s.do(f"{name} = copy.deepcopy({held.format(n)}){get}")
        s.true(f"{name}.is_leaf", "a copy of a leaf")
        s.equal(f"{name}.requires_grad", t.requires_grad, f"as {n}")
        s.same(name, n, f"a copy of {n}")
        s.true(f"{name} is not {n}", "a copy")
        if np.size(t.value):
            s.false(f"{_pointer(name)} == {_pointer(n)}", "it has memory of its own")
        due = grads.get(n) if t.requires_grad else None
        s.close(f"{n}.grad", due, "copying changes nothing")
        if n in parameters:  # whether the copy of a Parameter has its .grad is left open
            continue
        s.close(f"{name}.grad", due, f"as {n}")
        if due is not None and np.size(due):
            s.same(f"{name}.grad", f"{n}.grad", "a copy of .grad")
            s.false(f"{_pointer(f'{name}.grad')} == {_pointer(f'{n}.grad')}", "the copy of .grad has memory of its own")


@scene("leaf.numpy-refused")
def test_numpy_refused(s: Stage) -> None:
    """numpy() is refused to what requires grad; what gives its numbers anyway gives them, and leaves the graph alone."""
    s.play()
    host = "" if s.device.name == "cpu" else ".cpu()"
    due: dict[str, Array] = {}
    for _ in range(s.number(1, 4)):
        t = s.choose(s.tracked[::-1])
        n = t.name
        if not s.flip():
            fragment = "Can't call numpy() on Tensor that requires grad"
            s.raises(f"{n}{host}.numpy()", "RuntimeError", f"{n} requires grad", fragment=fragment)
            s.do("pass")
            s.true(f"{n}.requires_grad", "a refused call changes nothing")
        name = s.name("x")
        how = s.choose(("tolist", "detach", "force", "item"))
        if how == "item" and np.size(t.value) == 1:
            s.do(f"{name} = {n}.item()")
            s.equal(f"type({name}).__name__", "float", "a Python number is outside the graph")
            s.close(f"torch.tensor({name}, dtype=torch.{s.wide}).reshape({t.shape})", t.value, f"the number in {n}")
        elif how in ("detach", "force"):
            s.do(f"{name} = {n}{f'.detach(){host}.numpy()' if how == 'detach' else '.numpy(force=True)'}")
            s.equal(f"type({name}).__name__", "ndarray", "an array is outside the graph")
            s.equal(f"{name}.shape", t.shape, f"the numbers in {n}")
            s.close(
                f"torch.tensor({name}.tolist(), dtype=torch.{s.wide}).reshape({t.shape})",
                t.value,
                f"the numbers in {n}",
            )
        else:
            s.do(f"{name} = {n}.tolist()")
            s.equal(f"type({name}).__name__", "list" if t.shape else "float", "a list is outside the graph")
            s.close(f"torch.tensor({name}, dtype=torch.{s.wide}).reshape({t.shape})", t.value, f"the numbers in {n}")
    roots = [t for t in s.interior if np.size(t.value)]
    if roots and s.flip():
        root = s.choose(roots[::-1])
        due = s.grads((root, s.backward(root)))
        for leaf in s.leaves:
            if leaf.requires_grad:
                s.close(f"{leaf.name}.grad", due.get(leaf.name), "the graph is as it was")
