"""Area requires-grad: which tensors are recorded, and what switching the flag does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autograd_conformance.compare import HELD, Case, Finding, Findings, Made, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.ops import FLOATS, OPS
from autograd_conformance.paper import Array, Paper
from autograd_conformance.probes import forward_values
from autograd_conformance.program import (
    Apply,
    Backward,
    Leaf,
    Program,
    Rewrap,
    SetRequiresGrad,
    Statement,
    renamed,
    writes,
)
from autograd_conformance.reports.statements import statement_source
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage
from autograd_conformance.transform import needed


def _flips(case: Case, *, value: bool) -> Iterator[tuple[int, SetRequiresGrad]]:
    """Switches of the flag that had to work and did."""
    for at, s in case.at(SetRequiresGrad):
        if s.value is value and at not in case.due.refused:
            yield at, s


@claim("requires-grad.propagates-any")
def test_propagates_any(case: Case) -> Findings:
    """A recorded op with an operand that requires grad gives an output that requires grad."""
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if s.no_grad or made.paper.dtype not in FLOATS or not OPS[s.op].differentiable:
            continue
        if True in [t.requires_grad for t in operands]:
            yield case.judge(
                made.at, f"{made.name}.requires_grad", True, made.seen.requires_grad, "an operand requires grad"
            )
            yield case.judge(
                made.at, f"{made.name}.grad_fn is not None", True, made.seen.has_grad_fn, "an operand requires grad"
            )


@claim("requires-grad.propagates-none")
def test_propagates_none(case: Case) -> Findings:
    """An op whose operands do not require grad, or that runs under no_grad, records nothing."""
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if made.paper.dtype not in FLOATS:
            continue
        if s.no_grad or True not in [t.requires_grad for t in operands]:
            why = "under no_grad nothing is recorded" if s.no_grad else "no operand requires grad"
            yield case.judge(made.at, f"{made.name}.requires_grad", False, made.seen.requires_grad, why)
            yield case.judge(made.at, f"{made.name}.grad_fn is not None", False, made.seen.has_grad_fn, why)
            yield case.judge(made.at, f"{made.name}.is_leaf", True, made.seen.is_leaf, why)


@claim("requires-grad.integer-outputs-never")
def test_integer_outputs_never(case: Case) -> Findings:
    """An integer or bool output never requires grad, and a cast back to floating point does not revive it."""
    integral = {m.name for m in case.made if m.paper.dtype not in FLOATS}
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if made.name in integral and any(t.requires_grad for t in operands):
            yield case.judge(
                made.at, f"{made.name}.requires_grad", False, made.seen.requires_grad, "its dtype is not floating"
            )
        elif OPS[s.op].kind == "cast" and s.args[0] in integral:
            yield case.judge(
                made.at, f"{made.name}.requires_grad", False, made.seen.requires_grad, "it is cast from integers"
            )


@claim("requires-grad.nonleaf-always-true")
def test_nonleaf_always_true(case: Case) -> Findings:
    """A tensor that has a grad_fn requires grad."""
    for made in case.made:
        if made.seen.has_grad_fn:
            yield case.judge(made.at, f"{made.name}.requires_grad", True, made.seen.requires_grad, "it has a grad_fn")


@claim("requires-grad.multi-output")
def test_multi_output(case: Case) -> Findings:
    """All floating outputs of an op with several require grad alike, and share one node."""
    for made, operands in case.applied:
        s = made.statement
        assert isinstance(s, Apply)
        if OPS[s.op].kind != "several" or s.no_grad or not any(t.requires_grad for t in operands):
            continue
        floating = made.paper.dtype in FLOATS
        yield case.judge(
            made.at, f"{made.name}.requires_grad", floating, made.seen.requires_grad, "one op made all outputs"
        )
        if made.name == s.outs[-1] and floating and len(s.outs) > 1 and (made.at, "one node") in case.seen.facts:
            probe = f"{s.outs[0]}.grad_fn is {made.name}.grad_fn"
            yield case.judge(made.at, probe, True, case.seen.facts[made.at, "one node"], "one op made all outputs")


@claim("requires-grad.value-independent")
def test_value_independent(case: Case) -> Findings:
    """Values are bitwise the same whether leaves require grad or not, and whether recording is on or off."""
    if int(case.program.digest(), 16) % 8:  # each takes three runs of its own
        return
    graph = Program(tuple(s for s in case.program if isinstance(s, Leaf | Apply | Rewrap)))
    plain = Program(tuple(map(_untracked, graph)))
    seen = forward_values(graph, case.device)
    others = (
        (plain, "", forward_values(plain, case.device)),
        (graph, _OFF, forward_values(graph, case.device, record=False)),
    )
    for made in case.made:
        for program, prefix, due in others:
            if made.seen.requires_grad and 0 not in made.paper.shape and made.name in seen and made.name in due:
                same = repr(due[made.name]) == repr(seen[made.name])
                yield HELD if same else _differs(case, made, program, prefix)


_OFF = "with torch.no_grad(): "


def _untracked(s: Statement) -> Statement:
    if isinstance(s, Leaf):
        return Leaf(s.name, s.data, False, s.layout)
    if isinstance(s, Rewrap):
        return Rewrap(
            s.out, s.arg, {"reattach": "detach", "tensor_tracked": "tensor", "parameter": "detach"}.get(s.how, s.how)
        )
    return s


def _differs(case: Case, made: Made, program: Program, prefix: str) -> Finding:
    """The other run of the same ops, under other names, and the comparison of the two."""
    at = next(i for i, s in enumerate(program) if made.name in writes(s))
    part = needed(program, at)
    names = {name: f"{name}_other" for s in part for name in writes(s)}
    lines = [statement_source(renamed(s, names), case.device) for s in part]
    before = "\n".join(line if line.startswith(_OFF) else prefix + line for line in lines)
    why = (
        "the same ops on the same numbers with recording off"
        if prefix
        else "the same ops on the same numbers without requires_grad"
    )
    probe = f"{made.name}.tolist() == {names[made.name]}.tolist()"
    return case.judge(made.at, probe, True, False, why, before=before)


@claim("requires-grad.unset-nonleaf-error")
def test_unset_nonleaf_error(case: Case) -> Findings:
    """Switching the flag of a non-leaf off raises and leaves it on."""
    for at, s in case.at(SetRequiresGrad):
        if case.due.refused.get(at) != "nonleaf":
            continue
        yield case.judge_raise(at, f"{s.arg} has a grad_fn; only leaves can be switched")
        flags = case.seen.changed.get(at)
        if at in case.seen.errors and flags is not None:
            yield case.judge(
                at, f"{s.arg}.requires_grad", True, flags.requires_grad, "the refused change must not happen"
            )


@claim("requires-grad.inplace-setter-returns-self")
def test_setter_returns_self(case: Case) -> Findings:
    """requires_grad_ returns the tensor itself with the flag set; so does the attribute."""
    for at, s in case.at(SetRequiresGrad):
        flags = case.seen.changed.get(at)
        if at in case.due.refused or flags is None:
            continue
        yield case.judge(at, f"{s.arg}.requires_grad", s.value, flags.requires_grad, "the flag was just set")
        if (at, "returns self") in case.seen.facts:
            probe = f"{s.arg}.requires_grad_({s.value}) is {s.arg}"
            yield case.judge(at, probe, True, case.seen.facts[at, "returns self"], "requires_grad_ works in place")


@claim("requires-grad.start-recording-later")
def test_start_recording_later(case: Case) -> Findings:
    """A tensor made without grad and then switched on is a leaf, and passes fill its .grad."""
    computed = {m.name for m in case.made if not isinstance(m.statement, Leaf)}
    for at, s in _flips(case, value=True):
        flags = case.seen.changed.get(at)
        if s.arg not in computed or flags is None:
            continue
        yield case.judge(at, f"{s.arg}.is_leaf", True, flags.is_leaf, "its history starts here")
        for p in case.judged:
            if p.at > at and s.arg in case.carried(p):
                yield HELD


@claim("requires-grad.off-after-forward")
def test_off_after_forward(case: Case) -> Findings:
    """A leaf that is switched off between forward and backward keeps its .grad as it was."""
    for at, s in _flips(case, value=False):
        for p in case.judged:
            reached = isinstance(p.statement, Backward) and s.arg not in p.due.deltas and _leads_to(case, p, s.arg)
            if p.at > at and reached and p.statement.inputs is None:
                before, after = p.before.get(s.arg), p.after.get(s.arg)
                due, seen = (g and g.values for g in (before, after))
                yield case.judge(
                    p.at,
                    f"None if {s.arg}.grad is None else {s.arg}.grad.tolist()",
                    due,
                    seen,
                    "it does not require grad when backward comes",
                )


@claim("requires-grad.on-after-forward")
def test_on_after_forward(case: Case) -> Findings:
    """A leaf that is switched on after the forward is not part of the graph that was recorded before."""
    for at, s in _flips(case, value=True):
        for p in case.judged:
            executed = [n for n in p.due.executed if n.at < at and any(t.name == s.arg for t in n.inputs)]
            if p.at > at and executed and s.arg not in p.due.deltas and isinstance(p.statement, Backward):
                before, after = p.before.get(s.arg), p.after.get(s.arg)
                due, seen = (g and g.values for g in (before, after))
                yield case.judge(
                    p.at,
                    f"None if {s.arg}.grad is None else {s.arg}.grad.tolist()",
                    due,
                    seen,
                    "it did not require grad when the op ran",
                )


def _leads_to(case: Case, p: PassCase, name: str) -> bool:
    return any(edge is case.due.tensors[name] for node in p.due.executed for edge in node.edges)


@claim("requires-grad.means-differentiable")
def test_means_differentiable(case: Case) -> Findings:
    """From every tensor that requires grad one can backpropagate, from a leaf too."""
    for p in case.passes:
        if p.must_raise is False and not p.due.again:
            yield HELD  # an error that is not due is a difference, and its controls find the claim


# --- on scenes --------------------------------------------------------------------------------------------------------

FACTORIES = (
    "torch.zeros({n}{o})",
    "torch.ones({n}{o})",
    "torch.empty({n}{o})",
    "torch.full({n}, 0.5{o})",
    "torch.tensor([0.5, 1.5]{o})",
    "torch.rand({n}{o})",
    "torch.randn({n}{o})",
    "torch.eye(2{o})",
    "torch.arange(1.0, 4.0{o})",
    "torch.linspace(0.0, 1.0, 3{o})",
    "torch.logspace(0.0, 1.0, 3{o})",
    "torch.empty_strided({n}, {n}{o})",
    "torch.scalar_tensor(1.5{o})",
    "torch.asarray([0.5]{o})",
)
LIKE = (
    "torch.zeros_like({t}{o})",
    "torch.ones_like({t}{o})",
    "torch.empty_like({t}{o})",
    "torch.full_like({t}, 0.5{o})",
    "torch.rand_like({t}{o})",
    "torch.randn_like({t}{o})",
    "{t}.new_zeros({n}{o})",
    "{t}.new_ones({n}{o})",
    "{t}.new_empty({n}{o})",
    "{t}.new_full({n}, 0.5{o})",
    "{t}.new_tensor([0.5]{o})",
)
RANDOM = ("rand", "linspace", "logspace", "eye", "arange", "scalar_tensor")  # not made for every dtype
SHAPES = ("(2,)", "()", "(1,)", "(2, 3)", "(0,)", "(1, 2, 1)")


def _dtypes(s: Stage) -> list[str]:
    """Floating and complex dtypes that the device can make."""
    narrow = ["float16", "bfloat16"] if s.device.has("reduced") else []
    double = ["float64"] if s.device.has("float64") else []
    return ["float32", *double, *narrow, *(["complex64"] if s.device.has("complex") else [])]


def _factory(s: Stage, more: str = "") -> str:
    """A call of some factory, with ``more`` among its keywords."""
    call = s.choose(LIKE if s.tensors and s.flip() else FACTORIES)
    dtypes = _dtypes(s)
    if any(word in call for word in RANDOM):
        dtypes = [dtype for dtype in dtypes if dtype in ("float32", "float64")]
    dtype = "" if s.flip() else s.choose(dtypes)
    options = (f", dtype=torch.{dtype}" if dtype else "") + ("" if "{t}" in call else s.on) + more
    like = s.choose(s.tracked if s.tracked and not s.flip() else s.tensors).name if "{t}" in call else ""
    return call.format(n=s.choose(SHAPES), o=options, t=like)


@scene("requires-grad.default-false")
def test_default_false(s: Stage) -> None:
    """What a factory makes without requires_grad does not require grad, whoever asked for it before, in any mode."""
    s.play()
    for _ in range(s.number(1, 8)):
        if s.flip():
            s.do(f"{s.name('on')} = {_factory(s, ', requires_grad=True')}")
        name = s.name("f")
        made = f"{name} = {_factory(s, s.choose(('', '', ', requires_grad=False')))}"
        _in_modes(s, made)
        s.false(f"{name}.requires_grad", "nobody asked for it")


def _in_modes(s: Stage, line: str) -> bool:
    """Add a line inside of none, one or several nested grad modes; is the innermost inference mode?"""
    text, inference = line, False
    for _ in range(s.number(0, 2)):
        mode = s.choose(("no_grad()", "enable_grad()", "inference_mode()", "set_grad_enabled(False)"))
        text, inference = s.block_source(f"with torch.{mode}:", text), inference or mode == "inference_mode()"
    s.do(text)
    return inference


@scene("requires-grad.factory-kwarg")
def test_factory_kwarg(s: Stage) -> None:
    """requires_grad=True gives a leaf that requires grad, in every grad mode, and an inference tensor in inference mode."""
    s.play()
    for _ in range(s.number(1, 8)):
        name = s.name("f")
        inference = _in_modes(s, f"{name} = {_factory(s, ', requires_grad=True')}")
        s.true(f"{name}.requires_grad", "the factory was told so")
        s.true(f"{name}.is_leaf", "no op made it")
        s.true(f"{name}.grad_fn is None", "no op made it")
        s.equal(f"{name}.is_inference()", inference, "exactly inference mode makes inference tensors")


INTEGRAL = ("int64", "int32", "int16", "int8", "uint8", "bool")
_REFUSED = "nly Tensors of floating point"


@scene("requires-grad.only-float-complex")
def test_only_float_complex(s: Stage) -> None:
    """Integers and bools refuse the flag, however they are asked; floating and complex tensors take it."""
    s.play()
    whole = [t.name for t in s.due.tensors.values() if t.dtype not in FLOATS]
    for _ in range(s.number(1, 6)):
        shape = s.choose(SHAPES)
        if s.number(0, 3) == 3:
            _takes(s, shape, s.choose(_dtypes(s)))
            continue
        dtype = s.choose(INTEGRAL)
        if s.number(0, 2) == 2:
            call = s.choose(("zeros({n}", "ones({n}", "empty({n}", "full({n}, 1", "tensor(1", "tensor([1, 0]"))
            call = f"torch.{call.format(n=shape)}, dtype=torch.{dtype}{s.on}, requires_grad=True)"
            s.raises(call, "RuntimeError", f"{dtype} cannot require grad", fragment=_REFUSED)
            continue
        if whole and s.flip():
            name = s.choose(whole)
        else:
            name = s.name("i")
            made = s.choose(
                (f"torch.ones({shape}, dtype=torch.{dtype}{s.on})", f"{s.choose(s.tensors).name}.to(torch.{dtype})")
            )
            s.do(f"{name} = {made}")
        for _ in range(s.number(1, 2)):
            ask = s.choose(
                ("{}.requires_grad_()", "{}.requires_grad = True", "torch.nn.Parameter({})", "{}.requires_grad_(True)")
            )
            s.raises(ask.format(name), "RuntimeError", "integers and bools cannot require grad", fragment=_REFUSED)
            s.do("pass")
            s.false(f"{name}.requires_grad", "integers and bools cannot require grad")


def _takes(s: Stage, shape: str, dtype: str) -> None:
    """A tensor of a floating or complex dtype accepts the flag."""
    name = s.name("x")
    s.do(f"{name} = torch.ones({shape}, dtype=torch.{dtype}{s.on})")
    how = s.choose(("{0}.requires_grad_()", "{0}.requires_grad = True", "{0} = torch.nn.Parameter({0})",
                    "{0} = torch.zeros_like({0}, requires_grad=True)"))  # fmt: skip
    s.succeeds(how.format(name), f"{dtype} can require grad")
    s.true(f"{name}.requires_grad", "it was just asked for")


@scene("requires-grad.any-participant-settable")
def test_any_participant_settable(s: Stage) -> None:
    """Of all tensors of a graph exactly those without a grad_fn let their flag be changed."""
    s.play()
    for _ in range(s.number(1, 6)):
        t = s.choose([*s.interior[::-1], *(t for t in s.tensors if t.node is None)])
        if t.node is None:
            for value in s.choose(((True,), (False,), (False, True), (True, False))):
                s.do(f"{t.name}.{'requires_grad = %s' if s.flip() else 'requires_grad_(%s)'}" % value)
                s.equal(f"{t.name}.requires_grad", value, "a leaf may change its flag")
            s.do(f"{t.name}.requires_grad = {t.requires_grad}")  # what others see of it meanwhile is left open
            continue
        ask = s.choose(
            (".requires_grad = False", ".requires_grad = True", ".requires_grad_()", ".requires_grad_(True)")
        )
        if "=" in ask:
            _in_no_grad(s, f"{t.name}{ask}", raises=True)
        else:
            _in_no_grad(s, f"{t.name}{ask}", raises=False)
        s.do("pass")
        s.true(f"{t.name}.requires_grad", "it has a grad_fn")
        s.true(
            f"{t.name}.grad_fn is not None", "a refused change must not happen, and a confirmed flag changes nothing"
        )
    roots = [t for t in s.interior if np.size(t.value)]
    if roots and s.flip():
        root = s.choose(roots[::-1])
        grads = s.grads((root, s.backward(root)))
        for leaf in s.leaves:
            if leaf.requires_grad:
                s.close(f"{leaf.name}.grad", grads.get(leaf.name), "all flags are as they were")


def _in_no_grad(s: Stage, line: str, *, raises: bool) -> None:
    """Change a flag, perhaps under no_grad, which makes no difference."""
    text = s.block_source("with torch.no_grad():", line) if s.number(0, 3) == 3 else line
    if raises:
        fragment = "you can only change requires_grad flags of leaf variables"
        s.raises(text, "RuntimeError", "it has a grad_fn", fragment=fragment)
    else:
        s.succeeds(text, "the flag that it has may be confirmed")


@scene("requires-grad.inplace-op-turns-on")
def test_inplace_op_turns_on(s: Stage) -> None:
    """Tracked values written into a plain buffer, whole or through views, make it part of the graph."""
    fitting = [t for t in s.tracked if np.size(t.value)]
    first = s.choose(fitting[::-1])
    sources = [t for t in fitting if t.shape == first.shape]
    rows = s.number(0, 3)  # 0: the buffer has the shape of what is written
    shape = (rows, *first.shape) if rows else first.shape
    dtype = s.choose((first.dtype, s.wide))
    start = s.numbers(shape)
    s.play()
    s.do(f"u = {s.tensor(start, dtype)}")
    if len(shape) > 1 and s.flip():  # columns first
        s.do("u = u.mT.contiguous().mT" if not s.flip() else "u = torch.stack([u, u], -1)[..., 0]")
    written: list[tuple[Paper, int, Array | float]] = []
    fresh = set(range(max(1, rows)))
    for i in range(s.number(1, 3)):
        t = first if not i else s.choose(sources)
        row = s.number(0, rows - 1) if rows else 0
        written += _write(s, t, row, start[row] if rows else start, rows, row in fresh, written)
        fresh.discard(row)
        s.true("u.requires_grad", "something that requires grad was written to it")
        s.false("u.is_leaf", "the write was recorded")
        s.true("u.grad_fn is not None", "the write was recorded")
    seed = s.numbers(shape)
    s.do(f"v = {s.tensor(seed, dtype)}")
    s.do("u.backward(v)")
    parts = [(t, np.asarray((seed[row] if rows else seed) * factor)) for t, row, factor in written]
    grads = s.grads(*parts)
    lost = s.grads(*[(t, np.ones(t.shape)) for t in sources])  # zeros or None where all that was written is overwritten
    for leaf in s.leaves:
        if leaf.requires_grad and (leaf.name in grads or leaf.name not in lost):
            s.close(f"{leaf.name}.grad", grads.get(leaf.name), "gradients flow back to what was written")


def _write(
    s: Stage, t: Paper, row: int, start: Array, rows: int, first: bool, written: list[tuple[Paper, int, Array | float]]
) -> list[tuple[Paper, int, Array | float]]:
    """Write a tensor to the buffer ``u``, or to a row of it; returns by which factor its gradient comes back."""
    views = ("u[{}]", "u.select(0, {})", "u.narrow(0, {}, 1)[0]", "u[{}:].select(0, 0)")
    place = s.choose(views).format(row) if rows else s.choose(("u", "u.view_as(u)"))
    held = s.flip() and place != "u"
    how = s.choose(("copy", "add", "sub", "set", *(("mul",) if first else ())))
    factor: Array | float = start if how == "mul" else -1.0 if how == "sub" else 1.0
    if how in ("copy", "set"):
        written[:] = [part for part in written if part[1] != row]
    if how == "add" and s.flip():
        factor = s.factor()
    if held:
        name = s.name("w")
        s.do(f"{name} = {place}")
        place = name
    if how == "set":
        s.do(f"{place}[...] = {t.name}")
    elif how == "copy":
        s.do(f"{place}.copy_({t.name})")
    elif how == "add" and factor == 1.0 and place.isidentifier() and s.flip():
        s.do(f"{place} += {t.name}")
    else:
        s.do(f"{place}.{how}_({t.name}{f', alpha={factor}' if how == 'add' and factor != 1.0 else ''})")
    if held:
        s.true(f"{place}.requires_grad", "something that requires grad was written to it")
        s.false(f"{place}.is_leaf", "the write was recorded")
    return [(t, row, factor)]


@scene("requires-grad.no-buffers-for-frozen")
def test_no_buffers_for_frozen(s: Stage) -> None:
    """Ops without an operand that requires grad pack nothing, alone or in a whole frozen graph before a trained head."""
    s.do(_PACK)
    frozen = s.flip()
    for at, statement in enumerate(s.scene.graph):
        if isinstance(statement, Apply) and (frozen or statement.no_grad or _plain_operands(s, at, statement)):
            s.block("with torch.autograd.graph.saved_tensors_hooks(pack, unpack):", statement)
            s.equal("len(packed)", 0, "nothing that requires grad goes in")
        elif not (frozen and isinstance(statement, SetRequiresGrad)):
            s.play([_untracked(statement) if frozen else statement])
    if frozen:
        t = s.choose(s.tensors[::-1])
        s.do(f"w = {s.tensor(s.numbers(t.shape), t.dtype, requires_grad=True)}")
        packing = "with torch.autograd.graph.saved_tensors_hooks(pack, unpack):"
        s.block(packing, f"h = {t.name}.sin().exp()", "before = len(packed)", "y = h * w")
        s.equal("before", 0, "the head comes after")
        s.true("y.requires_grad", "the head is trained")


def _plain_operands(s: Stage, at: int, statement: Apply) -> bool:
    """Did no operand of the op require grad?"""
    tracked = any(s.due.made[name][0] or s.due.tensors[name].requires_grad for name in statement.args)
    return at not in s.due.nodes and not tracked


_PACK = "packed = []\ndef pack(t):\n    packed.append(t)\n    return t\ndef unpack(t):\n    return t"
