"""Area grad: what rests in ``.grad``, how it is added to, and whose memory it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from autograd_conformance.buffers import origins
from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Leaf, SetData, SetGrad, SetRequiresGrad, Shape
from autograd_conformance.reports.statements import constant_source
from autograd_conformance.scenes import scene
from autograd_conformance.seen import GradSeen
from autograd_conformance.stage import Stage
from autograd_conformance.verdicts import Violation


def _filled(case: Case) -> Iterator[tuple[PassCase, str, GradSeen]]:
    """Gradients that a backward call was due to give and gave."""
    for p in case.backwards:
        for name in p.due.deltas:
            after = p.after.get(name)
            if after is not None:
                yield p, name, after


def _added(case: Case) -> Iterator[tuple[PassCase, str, GradSeen, GradSeen]]:
    """Gradients that a backward call added to one that was there, in memory of its own."""
    for p, name, after in _filled(case):
        before = p.before.get(name)
        if before is not None and name not in p.shared:
            yield p, name, before, after


@claim("grad.none-initially")
def test_none_initially(case: Case) -> Findings:
    """A tensor that was just made has no .grad."""
    for m in case.made:
        if m.seen.is_leaf:
            yield case.judge(m.at, f"{m.name}.grad is None", True, m.seen.grad_is_none, "no backward has run for it")


@claim("grad.leaf-only")
def test_leaf_only(case: Case) -> Findings:
    """After backward the leaves that require grad and were reached have a .grad, and no non-leaf has."""
    for p in case.backwards:
        yield from (HELD for name in p.due.deltas if name in p.after)  # a missing one is a difference
    last = max((p.at for p in case.backwards), default=None)
    if last is None:
        return
    for m in case.made:
        if m.seen.has_grad_fn and m.at < last:
            yield case.judge(last, f"{m.name}.grad is None", True, m.name not in case.seen.kept, "it is no leaf")


@claim("grad.unreached-stays-none")
def test_unreached_stays_none(case: Case) -> Findings:
    """A leaf that the roots do not depend on keeps its .grad as it was, the very tensor."""
    for p in case.backwards:
        if p.statement.inputs is None:
            yield from case.untouched(p, "the roots do not depend on it")


@claim("grad.metadata-matches-leaf")
def test_metadata_matches_leaf(case: Case) -> Findings:
    """A .grad has the shape and the dtype of its leaf."""
    for p, name, after in _filled(case):
        tensor = case.due.tensors[name]
        yield case.judge(p.at, f"tuple({name}.grad.shape)", tensor.shape, after.shape, f"{name} has this shape")
        yield case.judge(
            p.at, f"str({name}.grad.dtype)", f"torch.{tensor.dtype}", f"torch.{after.dtype}", f"{name} has this dtype"
        )


@claim("grad.accumulates-sum")
def test_accumulates_sum(case: Case) -> Findings:
    """Backward adds to the .grad that is there: after k calls it is the sum of k gradients."""
    for p, name, before, after in _added(case):
        if name in case.carried(p) and after.values is not None and before.values is not None:
            yield HELD


@claim("grad.own-memory")
def test_own_memory(case: Case) -> Findings:
    """No two gradients, and no gradient and a tensor of the user's, share memory."""
    for p in case.backwards:
        shared = case.seen.overlaps.get(p.at, [])
        fresh = [name for name, after in p.after.items() if after is not None and 0 not in after.shape]
        yield from (HELD for _ in fresh[1:])
        earlier = {pair for at, pairs in case.seen.overlaps.items() if at < p.at for pair in pairs}
        for one, other in shared:
            if (one, other) in earlier:
                continue
            seeds = [name for name in (one, other) if name.startswith("gradient=")]
            if len(seeds) == 2 or (seeds and not seeds[0].endswith(f"@{p.at}")):
                continue
            yield _overlap(case, p, one, other)


def _overlap(case: Case, p: PassCase, one: str, other: str) -> Violation:
    """Two names of the runner's that share memory, as a broken promise."""
    buffers = origins(p.due, [case.due.tensors[root] for root in p.statement.roots])
    reach = [buffers.get(name.removesuffix(".grad"), set()) for name in (one, other) if name.endswith(".grad")]
    seeds = [name for name in (one, other) if name.startswith("gradient=")]
    if not seeds:
        probe = f"{one}.untyped_storage().data_ptr() == {other}.untyped_storage().data_ptr()"
        handed_on = len(reach) == 2 and bool(reach[0] & reach[1])
        why = "each leaf owns its gradient" if len(reach) == 2 else "a gradient is no view of a leaf"
        return Violation("", p.at, probe, "False", "True", because=why, mark=_mark(handed_on))
    i = int(seeds[0].removeprefix("gradient=").split("@")[0])
    seed = p.statement.seeds[i]
    assert seed is not None
    grad = one if other == seeds[0] else other
    probe = f"{grad}.untyped_storage().data_ptr() == seed.untyped_storage().data_ptr()"
    before, why = f"seed = {constant_source(seed, case.device)}", "the tensor passed as gradient= belongs to the user"
    handed_on = ("seed", i) in reach[0]
    return Violation("", p.at, probe, "False", "True", before=before, because=why, mark=_mark(handed_on))


def _mark(handed_on: bool) -> str:
    """The word by which an expectation tells the known way to share a buffer from any other."""
    return "handed on" if handed_on else "shared"


@claim("grad.accumulate-in-place")
def test_accumulate_in_place(case: Case) -> Findings:
    """Backward without create_graph adds into the very tensor that .grad is, where it lies."""
    for p, name, before, after in _added(case):
        if p.statement.create_graph or before.has_grad_fn or 0 in after.shape:
            continue
        g, why = f"{name}.grad", "the gradient is added in place"
        yield case.judge(p.at, f"{g} is held", True, after.same_object, why, before=f"held = {g}")
        yield case.judge(
            p.at, f"{g}.stride() == held", True, after.stride == before.stride, why, before=f"held = {g}.stride()"
        )
        same = after.start == before.start
        yield case.judge(p.at, f"{g}.data_ptr() == held", True, same, why, before=f"held = {g}.data_ptr()")


@claim("grad.create-graph-replaces")
def test_create_graph_replaces(case: Case) -> Findings:
    """Backward with create_graph=True replaces .grad; the old tensor keeps its numbers."""
    for p, name, before, after in _added(case):
        if not p.statement.create_graph or before.values is None or 0 in after.shape:
            continue
        yield case.judge(
            p.at,
            f"{name}.grad is held",
            False,
            after.same_object,
            "create_graph does not write in place",
            before=f"held = {name}.grad",
        )
        old = case.seen.replaced.get(p.at, {})
        if name in old:
            yield case.judge(
                p.at,
                "held.tolist()",
                before.values,
                old[name],
                "the old tensor is left alone",
                before=f"held = {name}.grad",
            )


@claim("grad.reset-none-or-zero")
def test_reset_none_or_zero(case: Case) -> Findings:
    """After .grad = None or .grad.zero_() the next backward leaves its own gradient alone there."""
    yield from _reset(case)
    yield from _after_reset(case, ("none", "zero"))


@claim("grad.user-assigned-is-base")
def test_user_assigned_is_base(case: Case) -> Findings:
    """Backward adds to a .grad that the user assigned."""
    yield from _after_reset(case, ("assign",))


def _reset(case: Case) -> Findings:
    """What a reset itself leaves behind."""
    for at, s in case.at(SetGrad):
        after = case.seen.grads[at].get(s.arg)
        if s.how == "none":
            yield case.judge(at, f"{s.arg}.grad is None", True, after is None, "it was set to None")
        elif s.how == "zero" and after is not None and after.values is not None:
            zeros = np.zeros(after.shape).tolist()
            yield case.judge(at, f"{s.arg}.grad.tolist()", zeros, after.values, "it was set to zero")


def _after_reset(case: Case, hows: tuple[str, ...]) -> Findings:
    reset: dict[str, str] = {}
    filled: set[str] = set()
    steps = {p.at: p for p in case.backwards}
    for at, s in enumerate(case.program):
        if isinstance(s, SetGrad):
            reset[s.arg] = s.how
        elif at in steps:
            for name in case.carried(steps[at]):
                if reset.pop(name, None) in hows and (name in filled or hows == ("assign",)):
                    yield HELD
                filled.add(name)


@claim("grad.not-requiring-grad")
def test_not_requiring_grad(case: Case) -> Findings:
    """Without create_graph a new .grad does not require grad."""
    for p, name, after in _filled(case):
        if not p.statement.create_graph and p.before.get(name) is None:
            yield case.judge(p.at, f"{name}.grad.requires_grad", False, after.requires_grad, "create_graph is not set")
            yield case.judge(
                p.at, f"{name}.grad.grad_fn is None", True, not after.has_grad_fn, "create_graph is not set"
            )


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Non-overlapping and without gaps."""
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape, strict=True) if sz > 1):
        if step != expected:
            return False
        expected *= size
    return True


def _rowmajor(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


def _layouts(case: Case, *, dense: bool) -> Iterator[tuple[PassCase, str, GradSeen, tuple[int, ...]]]:
    moved = {s.arg for s in case.program if isinstance(s, SetData)}
    leaves = {m.name: m.seen.stride for m in case.made if m.seen.is_leaf and m.name not in moved}
    for p, name, after in _filled(case):
        stride = leaves.get(name)
        shape = case.due.tensors[name].shape
        if p.statement.create_graph or stride is None or p.before.get(name) is not None or not prod(shape):
            continue
        if _dense(shape, stride) is dense and len(shape) > 0:
            yield p, name, after, tuple(st for st, size in zip(stride, shape, strict=True) if size > 1)


@claim("grad.layout-dense-follows-param")
def test_layout_dense(case: Case) -> Findings:
    """A new .grad of a dense leaf has the strides of the leaf; where a size is 1 the stride says nothing."""
    for p, name, after, stride in _layouts(case, dense=True):
        sizes = case.due.tensors[name].shape
        seen = tuple(st for st, size in zip(after.stride, sizes, strict=True) if size > 1)
        probe = f"tuple(s for s, n in zip({name}.grad.stride(), {name}.shape) if n > 1)"
        yield case.judge(p.at, probe, stride, seen, f"{name} lies in memory like this")


@claim("grad.layout-nondense-rowmajor")
def test_layout_nondense(case: Case) -> Findings:
    """A new .grad of a leaf with gaps or overlaps in memory is row-major contiguous."""
    for p, name, after, _ in _layouts(case, dense=False):
        sizes = case.due.tensors[name].shape
        due = tuple(st for st, size in zip(_rowmajor(sizes), sizes, strict=True) if size > 1)
        seen = tuple(st for st, size in zip(after.stride, sizes, strict=True) if size > 1)
        probe = f"tuple(s for s, n in zip({name}.grad.stride(), {name}.shape) if n > 1)"
        yield case.judge(p.at, probe, due, seen, f"the memory of {name} is not dense")


@claim("grad.multi-loss-equals-sum-loss")
def test_multi_loss(case: Case) -> Findings:
    """Backward of one loss and then of another adds up to backward of both."""
    filled_by: dict[str, tuple[str, ...]] = {}
    for p in case.backwards:
        roots = p.statement.roots
        for name in case.carried(p):
            if p.before.get(name) is not None and filled_by.get(name, roots) != roots:
                yield HELD
            filled_by[name] = roots


# --- on scenes --------------------------------------------------------------------------------------------------------


@scene("grad.input-without-flag-none")
def test_input_without_flag(s: Stage) -> None:
    """Leaves of a network without the flag get no .grad, and the others the gradients that they have with it."""
    top = s.choose([t for t in s.tensors[::-1] if np.size(t.value)])
    reached = s.grads((top, np.ones(top.shape))) if top.requires_grad else {}
    names = {r.name for r in s.scene.graph if isinstance(r, Leaf)}
    off = set(s.some(sorted(names & set(reached)), least=1 if names & set(reached) else 0))
    for r in s.scene.graph:
        if not isinstance(r, SetRequiresGrad):  # the flags are those of the claim
            s.play([replace(r, requires_grad=False) if isinstance(r, Leaf) and r.name in off else r])
    layer = _linear if top.shape and s.flip() else _product
    seed, back, params = layer(s, top)
    due = s.grads((top, back)) if top.requires_grad else {}
    switched = {r.arg for r in s.scene.graph if isinstance(r, SetRequiresGrad)}
    looked = [t for t in s.tensors if t.node is None and t.name not in switched and (t.name in off or t.name in due)]
    s.do(f"v = {s.tensor(seed, top.dtype)}")
    passes = s.number(1, 2)
    for i in range(passes):
        s.do(f"y.backward(v{', retain_graph=True' if i + 1 < passes else ''})")
        for name, g in params.items():
            s.close(f"{name}.grad", g, "the parameter does not ask for its input's flag")
        for t in looked:
            because = "it does not require grad" if t.name in off else "the flags of the others do not matter"
            s.close(f"{t.name}.grad", None if t.name in off else due[t.name], because)
        s.do("; ".join(f"{name}.grad = None" for name in (*params, *(t.name for t in looked))))


def _product(s: Stage, top: Paper) -> tuple[Array, Array, dict[str, Array]]:
    """``y`` of a tensor and one parameter; a seed for it, and the gradients of the tensor and of the parameter."""
    weight, seed = s.numbers(top.shape), s.numbers(top.shape)
    s.do(f"w = {s.tensor(weight, top.dtype, requires_grad=True)}")
    head = s.choose(("w * {0}", "{0} * w", "{0} + w"))
    s.do(f"y = {head.format(top.name)}")
    times = "*" in head
    return seed, seed * weight if times else seed, {"w": seed * top.value if times else seed}


def _linear(s: Stage, top: Paper) -> tuple[Array, Array, dict[str, Array]]:
    """The same of a layer with a bias."""
    n, m = top.shape[-1], s.number(1, 2)
    weight, seed = s.numbers((m, n)), s.numbers((*top.shape[:-1], m))
    s.do(f"net = torch.nn.Linear({n}, {m}, dtype=torch.{top.dtype}{s.on})")
    s.block("with torch.no_grad():", f"net.weight.copy_({s.tensor(weight, top.dtype)})")
    s.do(f"y = net({top.name})")
    rows = seed.reshape(-1, m)
    return seed, seed @ weight, {"net.weight": rows.T @ top.value.reshape(-1, n), "net.bias": rows.sum(0)}


_READ = """
import warnings
def read(t):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grad = t.grad
    return grad, [w.category.__name__ for w in caught if "that is not a leaf Tensor is being accessed" in str(w.message)]
""".strip()


@scene("grad.nonleaf-access-warns")
def test_nonleaf_access_warns(s: Stage) -> None:
    """Each reading of .grad warns for a non-leaf that retains nothing, and for nothing else."""
    s.do(_READ)
    s.play()
    roots = [t for t in s.interior[::-1] if np.size(t.value)]
    watched = s.some(s.interior[::-1], least=0)[:3] + s.some([t for t in s.tensors if t.node is None], least=0)[:2]
    s.require(watched)
    retained: set[str] = set()
    total: dict[str, Array] = {}

    def look() -> None:
        for t in watched:
            s.do(f"grad, told = read({t.name})")
            if t.node is None:
                s.equal("told", [], "a leaf is read without a warning")
            elif t.name in retained:
                s.equal("told", [], "it retains its gradient")
                s.close("grad", total.get(t.name), "it retains its gradient")
            else:
                s.true('"UserWarning" in told', "it is no leaf and retains nothing")
                s.true("grad is None", "it is no leaf and retains nothing")

    look()
    for _ in range(s.number(1, 3)):
        inner = [t for t in watched if t.node is not None]
        if inner and not s.flip():
            t = s.choose(inner)
            s.do(f"{t.name}.retain_grad()")
            retained.add(t.name)
        elif roots:
            root = s.choose(roots)
            for name, g in s.grads((root, s.backward(root, "retain_graph=True"))).items():
                if name in retained:
                    total[name] = total.get(name, 0.0) + g
        look()


def _wrong_shape(s: Stage, shape: Shape) -> Shape:
    grown = ((shape[0] + 1, *shape[1:]), shape[1:]) if shape else ((2,), (0,))
    flat = (int(np.prod(shape)),)
    others = (*grown, (*shape, 1), (1, *shape), tuple(reversed(shape)), flat, (*shape, 2))
    return s.choose([other for other in others if other != shape])


_LIKE = ("torch.zeros_like({0})", "torch.ones_like({0}).contiguous()", "torch.ones_like({0}.mT.contiguous()).mT")


@scene("grad.assignment-checked")
def test_assignment_checked(s: Stage) -> None:
    """.grad takes None and tensors like its own, and refuses all others, in any order."""
    s.play()
    t = s.choose([*(t for t in s.leaves if t.requires_grad), *s.tracked])
    x, fragment = t.name, "attempting to assign a gradient"
    here = s.on or ', device="cpu"'
    dtypes = ("float32", s.wide, *(("float16",) if s.device.has("reduced") else ()), "int64", "bool")
    s.do("held = None")
    for _ in range(s.number(1, 4)):
        kind = s.choose(("shape", "dtype", "device", "object", "right", "none"))
        if kind == "right":
            s.do(f"held = {s.choose(_LIKE if len(t.shape) > 1 else _LIKE[:2]).format(x)}")
            s.succeeds(f"{x}.grad = held", "it has the shape, dtype and device")
        elif kind == "none":
            s.do("held = None")
            s.succeeds(f"{x}.grad = held", "None is always allowed")
        elif kind == "object":
            other = s.choose(("1.0", "[1.0]", "()", '"x"', "False", "object()", "torch.Tensor"))
            s.raises(f"{x}.grad = {other}", "TypeError", "it is neither a tensor nor None")
        else:
            shape = _wrong_shape(s, t.shape) if kind == "shape" else t.shape
            dtype = s.choose([d for d in dtypes if d != t.dtype]) if kind == "dtype" else t.dtype
            place = f", device={'cpu' if s.device.name == 'meta' else 'meta'!r}" if kind == "device" else here
            other = f"torch.zeros({shape}, dtype=torch.{dtype}{place})"
            s.raises(f"{x}.grad = {other}", "RuntimeError", f"another {kind} than that of {x}", fragment=fragment)
        s.do("pass")
        s.true(f"{x}.grad is held", "what was refused is not there, what was accepted is")
    if t.node is None and s.flip():
        _other_dtype(s, t)


def _other_dtype(s: Stage, t: Paper) -> None:
    """The dtype that the user allows takes the place of the tensor's own; nothing of it is in older releases."""
    x = t.name
    dtype = s.choose([d for d in ("float32", "float64") if d != t.dtype])
    s.do(f"{x}.grad = None")
    s.do(f"{x}.grad_dtype = torch.{dtype}")
    s.do('new = hasattr(torch.Tensor, "grad_dtype")')
    s.raises(
        f"{x}.grad = torch.zeros_like({x}, dtype={x}.dtype if new else torch.int64)",
        "RuntimeError",
        "another dtype than the grad_dtype",
        fragment="attempting to assign a gradient",
    )
    s.succeeds(f"{x}.grad = torch.zeros_like({x}, dtype=torch.{dtype} if new else {x}.dtype)", "it has the grad_dtype")


def _own_strides(s: Stage, shape: Shape) -> tuple[str, Shape]:
    """The source of zeros, but for a dtype, in memory of an order of their own, perhaps with gaps; and their strides."""
    order = list(range(len(shape)))
    if s.flip():
        order.sort(key=lambda _: s.number(0, 7))
    step, strides = s.choose((2, 1, 3)), [0] * len(shape)
    for i in order:
        strides[i], step = step, step * shape[i]
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return f"torch.zeros({size}, dtype=torch.{{}}{s.on}).as_strided({shape}, {tuple(strides)})", tuple(strides)


@scene("grad.layout-manual-preserved")
def test_layout_manual_preserved(s: Stage) -> None:
    """Zeros that the user laid out as .grad stay as they lie while passes add to them."""
    root = s.root(interior=False)
    reached = [t for t in s.above(root, root_too=True) if np.size(t.value)]
    leaves = s.some([t for t in reached if t.node is None and t.requires_grad])
    s.play()
    strides: dict[str, Shape] = {}
    for t in leaves:
        source, strides[t.name] = _own_strides(s, t.shape)
        s.do(f"{t.name}.grad = {source.format(t.dtype)}")
    total: dict[str, Array] = {}
    for _ in range(s.number(1, 3)):
        for name, g in s.grads((root, s.backward(root, "retain_graph=True"))).items():
            total[name] = total.get(name, 0.0) + g
        for t in leaves:
            s.equal(f"{t.name}.grad.stride()", strides[t.name], "these are the strides that the user gave it")
            s.close(f"{t.name}.grad", total[t.name], "backward adds to the zeros")


_HOLDERS = (
    "torch.optim.SGD([{0}], lr=0.1)",
    "torch.nn.ParameterList([{0}])",
    "torch.optim.Adam([{0}])",
    "torch.nn.Sequential(torch.nn.ParameterList([{0}]))",
    "torch.optim.SGD([{1}], lr=0.1, momentum=0.9)",
    "torch.optim.AdamW([{0}], foreach=False)",
    "torch.optim.RMSprop([{1}], foreach=True)",
)


@scene("grad.layout-zero-grad-keeps")
def test_layout_zero_grad_keeps(s: Stage) -> None:
    """zero_grad(set_to_none=False) zeroes each .grad where it lies; the default forgets it, layout included."""
    params: list[tuple[str, Paper, bool, float]] = []
    for _ in range(s.choose((1, 2, 2, 3))):
        name, t = s.name("p"), s.choose([t for t in s.tensors if np.size(t.value)])
        turned = len(t.shape) > 1 and s.flip()
        made = f"torch.zeros({t.shape[::-1] if turned else t.shape}, dtype=torch.{t.dtype}{s.on})"
        made += f".permute({tuple(range(len(t.shape)))[::-1]})" if turned else ""
        s.do(f"{name} = torch.nn.Parameter({made})")
        params.append((name, t, turned, s.factor()))
    names = [name for name, *_ in params]
    holder = s.choose(_HOLDERS).format(", ".join(names), ", ".join(f'{{"params": [{name}]}}' for name in names))
    s.do(f"holder = {holder}")
    losses = [f"({name} * {factor}).sum().to(torch.{s.wide})" for name, _, _, factor in params]
    loss = f"({' + '.join(losses)}).backward()"
    strides: dict[str, Shape] = {}
    for name, t, _, _ in params:
        source, strides[name] = _own_strides(s, t.shape)
        s.do(f"{name}.grad = {source.format(t.dtype)}")
    s.do(loss)
    for _ in range(s.number(1, 2)):
        s.do("holder.zero_grad(set_to_none=False)")
        for name, t, _, _ in params:
            s.equal(f"{name}.grad.stride()", strides[name], "it is zeroed where it lies")
            s.close(f"{name}.grad", np.zeros(t.shape), "it is zeroed")
        s.do(loss)
        for name, t, _, factor in params:
            s.equal(f"{name}.grad.stride()", strides[name], "backward adds where it lies")
            s.close(f"{name}.grad", np.full(t.shape, factor), "backward adds to zeros")
    s.do(f"holder.zero_grad({s.choose(('', 'set_to_none=True', 'True'))})")
    for name in names:
        s.true(f"{name}.grad is None", "the default forgets the gradient")
    s.do(loss)
    for name, t, turned, factor in params:
        due = _rowmajor(t.shape[::-1])[::-1] if turned else _rowmajor(t.shape)
        probe = f"tuple(s for s, n in zip({name}.grad.stride(), {name}.shape) if n > 1)"
        s.equal(probe, tuple(st for st, n in zip(due, t.shape, strict=True) if n > 1), f"as {name} itself lies")
        s.close(f"{name}.grad", np.full(t.shape, factor), "nothing is left of what was")


_OBEYS = """
def obeys(p, c):
    p.grad = None
    (p * c).sum().backward()
    return p.grad.stride() == p.stride()
""".strip()


@scene("grad.layout-policy-off")
def test_layout_policy_off(s: Stage) -> None:
    """Gradients within the policy, nested and left in whatever way, are as ever; outside, layouts follow leaves again."""
    root = s.root(interior=False)
    leaves = [t for t in s.tracked if t.node is None]
    s.do(_OBEYS)
    s.do("torch.autograd.enforce_grad_layout_policy(True)")
    s.play()
    shape = s.choose(((2, 3), (3, 2, 2), (4, 2)))
    turned = tuple(range(len(shape)))[::-1]
    made = f"torch.zeros({shape[::-1]}, dtype=torch.{s.wide}{s.on}).permute({turned}).requires_grad_()"
    s.do(f"p_, c_, seen = {made}, torch.ones({shape}, dtype=torch.{s.wide}{s.on}), []")
    text, seed = s.seed(root)
    grads = s.grads((root, seed))
    policies = [False, *s.some((True, False), least=0)]
    inner = [f"{root.name}.backward({', '.join([*([text] if text else []), 'retain_graph=True'])})"]
    body, asked = "\n".join(inner), 0
    for policy in reversed(policies):
        checked = "seen.append(obeys(p_, c_))" if policy else ""
        parts = [part for part in (checked, body, checked) if part]
        asked += 2 * bool(policy)
        body = s.block_source(f"with torch.autograd.enforce_grad_layout_policy({policy}):", *parts)
    for i in range(s.number(1, 2)):
        if s.flip():
            left = s.block_source("with torch.autograd.enforce_grad_layout_policy(False):", "raise ValueError")
            s.do(f"try:\n{_indented(left)}\nexcept ValueError:\n    pass")
        s.do(body)
        for t in leaves:
            s.close(f"{t.name}.grad", grads.get(t.name), "the policy is about strides, not about numbers")
        s.true("all(seen)", "where the policy is in force, gradients lie as their leaves")
        s.equal("len(seen)", asked * (i + 1), "the lines ran")
        s.do("last = obeys(p_, c_)")
        s.true("last", "the policy is in force again")
        s.do("; ".join(f"{t.name}.grad = None" for t in leaves))
    s.do("torch.autograd.enforce_grad_layout_policy(True)")  # whatever went wrong, nobody else is to suffer


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


@scene("grad.grad-dtype")
def test_grad_dtype(s: Stage) -> None:
    """grad_dtype rules over the dtype of .grad, leaf by leaf, and cannot be set on others."""
    s.play()
    x = s.name("x")
    like = s.choose(s.tensors[::-1])
    shape = like.shape if np.size(like.value) else ()
    floats = ["float16", "bfloat16", "float32", *(["float64"] if s.device.has("float64") else [])]
    own = s.choose(["float32", *floats])
    c = s.numbers(shape)
    s.do(
        f"{x} = {s.choose(('{}', 'torch.nn.Parameter({})')).format(s.tensor(np.ones(shape), own, requires_grad=True))}"
    )
    s.do(f"c_ = {s.tensor(c, own)}")
    leaf = s.choose([t for t in s.tensors if t.node is None])
    s.equal(f"str({leaf.name}.grad_dtype)", f"torch.{leaf.dtype}", "it was not set")
    s.equal(f"str({x}.grad_dtype)", f"torch.{own}", "it was not set")
    for _ in range(s.number(1, 3)):
        other = s.choose([d for d in floats if d != own])
        s.do(f"{x}.grad = None")
        s.do(f"{x}.grad_dtype = torch.{other}")
        s.equal(f"str({x}.grad_dtype)", f"torch.{other}", "it was just set")
        for k in range(1, s.number(1, 2) + 1):
            s.do(f"({x} * c_).sum().backward()")
            s.equal(f"str({x}.grad.dtype)", f"torch.{other}", "it was set so")
            s.close(f"{x}.grad.to(torch.{s.wide})", k * c, "the numbers are exact in either dtype")
        third = s.choose([d for d in floats if d != other])
        s.raises(f"{x}.grad_dtype = torch.{third}", "RuntimeError", "there is a .grad of another dtype")
        if s.flip():
            s.do(f"{x}.grad_dtype = None")
            s.true(f"{x}.grad_dtype is None", "it was just set")
            for dtype in s.some(floats):
                s.succeeds(f"{x}.grad = torch.zeros_like({x}, dtype=torch.{dtype})", "None allows any dtype")
    for t in s.some(s.interior, least=0)[:2]:
        if s.flip():
            value = s.choose((f"torch.{t.dtype}", "torch.float16", "None"))
            s.raises(f"{t.name}.grad_dtype = {value}", "RuntimeError", "it is no leaf")
