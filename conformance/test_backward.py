"""Area backward: the numbers, and the arguments of a backward call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autograd_conformance.algebra import Traced, gradient
from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.paper import Array, Node, Paper
from autograd_conformance.program import Backward, Leaf, Shape
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage, ops_of


def _carrying(case: Case) -> Iterator[PassCase]:
    """Backward calls that carried a gradient somewhere."""
    return (p for p in case.backwards if case.carried(p))


@claim("backward.chain-rule")
def test_chain_rule(case: Case) -> Findings:
    """The gradient of every leaf is the product of Jacobians along each path, summed over paths."""
    for p in _carrying(case):
        yield from (HELD for _ in case.carried(p))


def _inputs_of(node: Node) -> Iterator[int]:
    return (id(edge) for edge in node.edges if edge is not None)


@claim("backward.fan-out-sums")
def test_fan_out_sums(case: Case) -> Findings:
    """A tensor that is used several times gets the sum over its uses."""
    for p in _carrying(case):
        used = [edge for node in p.due.executed for edge in _inputs_of(node)]
        if len(set(used)) < len(used):
            yield HELD


@claim("backward.scalar-implicit-one")
def test_scalar_implicit_one(case: Case) -> Findings:
    """backward() of a tensor with one element is backward(torch.ones_like(it))."""
    for p in _carrying(case):
        if any(seed is None for seed in p.statement.seeds):
            yield HELD


@claim("backward.nonscalar-needs-gradient")
def test_nonscalar_needs_gradient(case: Case) -> Findings:
    """backward() of a tensor with none or several elements needs a gradient."""
    for p in case.passes:
        if p.due.why == "nonscalar":
            yield case.judge_raise(p.at, "the root has not exactly one element and no gradient is given")


@claim("backward.vector-jacobian")
def test_vector_jacobian(case: Case) -> Findings:
    """backward(v) gives the vector-Jacobian product with v."""
    for p in _carrying(case):
        if any(seed is not None and set(seed.values) - {1.0} for seed in p.statement.seeds):
            yield HELD


@claim("backward.no-requires-grad-error")
def test_no_requires_grad_error(case: Case) -> Findings:
    """A pass from a root that does not require grad raises."""
    for p in case.passes:
        if p.due.why == "untracked":
            yield case.judge_raise(p.at, "the root does not require grad")


@claim("backward.inputs-restricts")
def test_inputs_restricts(case: Case) -> Findings:
    """backward(inputs=...) fills the .grad of these tensors and touches no other."""
    for p in case.judged:
        s = p.statement
        if not isinstance(s, Backward) or s.inputs is None:
            continue
        yield from (HELD for name in s.inputs if name in p.due.deltas)
        yield from case.untouched(p, "it is not among the inputs")


@claim("backward.list-of-roots")
def test_list_of_roots(case: Case) -> Findings:
    """autograd.backward of several roots adds up their gradients in one go."""
    for p in _carrying(case):
        if len(p.statement.roots) > 1:
            yield HELD


@claim("backward.broadcast-sums")
def test_broadcast_sums(case: Case) -> Findings:
    """The gradient of an operand that was broadcast is summed down to its shape."""
    for p in _carrying(case):
        if any(node.op.kind == "binary" and _broadcasts(node) for node in p.due.executed):
            yield HELD


def _broadcasts(node: Node) -> bool:
    shape = node.outs[0].shape
    return any(
        e is not None and t.shape != shape and 0 not in t.shape for e, t in zip(node.edges, node.inputs, strict=True)
    )


@claim("backward.unused-output-is-zero")
def test_unused_output_is_zero(case: Case) -> Findings:
    """Outputs of an op that do not lead to the root count as zero."""
    for p in _carrying(case):
        roots = set(p.statement.roots)
        read = {id(t) for node in p.due.executed for t in node.inputs} | {id(case.due.tensors[r]) for r in roots}
        for node in p.due.executed:
            used = [id(out) in read for out in node.outs if 0 not in out.shape]
            if any(used) and not all(used):
                yield HELD


@claim("backward.returns-none")
def test_returns_none(case: Case) -> Findings:
    """backward() returns None and leaves the numbers and the version of its roots alone."""
    for p in case.backwards:
        root = p.statement.roots[0]
        nothing = case.seen.facts.get((p.at, "returns None"))
        yield case.judge(p.at, "returned is None", True, nothing, "gradients go to .grad, nothing is returned")
        same = case.seen.facts.get((p.at, "roots unchanged"))
        yield case.judge(
            p.at, f"{root}.tolist() == held", True, same, "backward only reads", before=f"held = {root}.tolist()"
        )
        for name in case.seen.written.get(p.at, ()):
            held = f"held = {name}._version"
            yield case.judge(p.at, f"{name}._version == held", True, False, "backward only reads", before=held)


# --- scenes -----------------------------------------------------------------------------------------------------------


def _fitting(s: Stage, found: Paper) -> list[Paper]:
    """Tensors that can be stacked with one."""
    return [t for t in s.tensors if (t.shape, t.dtype) == (found.shape, found.dtype)]


# Ops that torch records as one node whose inputs are the operands, with the operands that are differentiable.
_BINARY = ("add", "sub", "mul", "div", "pow", "atan2", "maximum", "minimum", "lerp", "bmm", "mv", "dot")
_UNARY = ("neg", "sin", "cos", "tanh", "sigmoid", "atan", "exp", "log", "sqrt", "relu", "abs", "clone")
_DIRECT: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_BINARY, (0, 1)),
    **dict.fromkeys(_UNARY, (0,)),
    "where": (1, 2),
}

_ACYCLIC = """def acyclic(node, above=()):
    return node is None or (node not in above and all(acyclic(n, (*above, node)) for n, _ in node.next_functions))"""


@scene("backward.any-arity")
def test_any_arity(s: Stage) -> None:
    """next_functions has an entry for each differentiable operand; outputs of one op share their node."""
    of = s.choose(s.tracked)
    parts = [of] + [s.choose(_fitting(s, of)) for _ in range(s.number(0, 5))]
    if s.flip():
        parts.reverse()
    s.play()
    names = ", ".join(t.name for t in parts)
    join = s.choose(("stack", "cat")) if of.shape else "stack"
    s.do(f"y = torch.{join}([{names}])")
    s.equal("len(y.grad_fn.next_functions)", len(parts), f"{len(parts)} tensors are joined")
    for i, t in enumerate(parts):
        _leads_to("y", i, t, s)
    if s.flip() and of.node is None:
        s.do(f"y = torch.addcmul({of.name}, {parts[0].name}, {parts[-1].name})")
        s.equal("len(y.grad_fn.next_functions)", 3, "three tensors go in")
    for op in ops_of(s.scene.graph):
        outs = [s.due.tensors[out] for out in op.outs]
        recorded = [t.name for t in outs if t.node is not None]
        if not recorded:
            continue
        for other in recorded[1:]:
            s.true(f"{recorded[0]}.grad_fn is {other}.grad_fn", "they are outputs of one op")
        places = range(len(op.args)) if op.op in ("cat", "stack") else _DIRECT.get(op.op)
        if places is None:
            continue
        s.equal(f"len({recorded[0]}.grad_fn.next_functions)", len(places), f"operands of {op.op} to differentiate by")
        for i, place in enumerate(places):
            _leads_to(recorded[0], i, s.due.tensors[op.args[place]], s)
    if s.flip():
        s.do(_ACYCLIC)
        s.true("acyclic(y.grad_fn)", "no node leads back to itself")


def _leads_to(name: str, i: int, operand: Paper, s: Stage) -> None:
    """The i-th entry of a node is for this operand."""
    entry = f"{name}.grad_fn.next_functions[{i}][0]"
    if not operand.requires_grad:
        s.true(f"{entry} is None", f"{operand.name} does not require grad")
    elif operand.node is None:
        s.true(f"{entry}.variable is {operand.name}", f"entry {i} is for {operand.name}")
    else:
        s.true(f"{entry} is {operand.name}.grad_fn", f"entry {i} is for {operand.name}")


def _other_shapes(shape: Shape) -> list[Shape]:
    """Shapes that are not this one; most of them broadcast with it, or have as many elements."""
    size = int(np.prod(shape))
    others: list[Shape] = [(), (1,), (size,), (*shape, 1), (1, *shape), (2, *shape), (*shape, 2), shape[:-1], shape[1:]]
    others += [shape[::-1], (0,), tuple(n + 1 for n in shape), tuple(1 for _ in shape), (size, 1), (1, size)]
    return [other for other in dict.fromkeys(others) if other != shape]


_CALLS = ("{y}.backward({v})", "torch.autograd.backward({y}, {v})", "torch.autograd.backward([{y}], [{v}])",
          "torch.autograd.grad({y}, {x}, {v})", "torch.autograd.grad([{y}], [{x}], [{v}])",
          "{y}.backward(gradient={v}, inputs=[{x}])", "{y}.backward({v}, create_graph=True)",
          "torch.autograd.backward([{y}, {y}], [{good}, {v}])", "torch.autograd.grad([{y}, {y}], {x}, [{good}, {v}])")  # fmt: skip


@scene("backward.gradient-shape")
def test_gradient_shape(s: Stage) -> None:
    """A gradient of any other shape, or of no tensor type, is refused, as often as it is tried; that shape is taken."""
    root = s.root(interior=False, empty=True)
    reached = s.above(root, root_too=True)
    x = s.choose([t for t in reached if t.is_leaf])
    s.play()
    numbers = s.numbers(root.shape)
    good = s.tensor(numbers, root.dtype)
    for _ in range(s.number(1, 3)):
        if s.number(0, 3) == 3:
            _one_element(s, root, x)
            continue
        call = s.choose(_CALLS)
        if s.number(0, 3) < 3:
            shape = s.choose(_other_shapes(root.shape))
            wrong = s.tensor(s.numbers(shape), root.dtype)
            why = f"the shape of the gradient is {shape}, that of {root.name} is {root.shape}"
            text = "" if "good" in call else "Mismatch in shape"  # which of several it is, the message may fail to say
            s.raises(call.format(y=root.name, x=x.name, v=wrong, good=good), "RuntimeError", why, fragment=text)
        else:
            wrong = s.choose(("1.0", "1", "True", "'1'", "(1.0,)", "object()"))
            plain = "torch.autograd.backward({y}, {v})", "torch.autograd.grad({y}, {x}, {v})", "{y}.backward({v})"
            if call in plain and wrong != "(1.0,)":
                wrong = f"[{wrong}]"
            s.raises(call.format(y=root.name, x=x.name, v=wrong, good=good), "TypeError", "this is no tensor")
    _taken(s, root, x, numbers)


def _one_element(s: Stage, root: Paper, x: Paper) -> None:
    """A root of one element takes none of the other shapes of one element."""
    shapes: tuple[Shape, ...] = ((1,), (1, 1), (), (1, 1, 1))
    shape, other = s.choose(shapes), s.choose(shapes)
    s.require(shape != other)
    s.do(f"one = {root.name}.sum().reshape({shape})")
    wrong = s.tensor(s.numbers(other), root.dtype)
    text = s.choose(_CALLS[:7]).format(y="one", x=x.name, v=wrong)
    s.raises(text, "RuntimeError", f"{other} is not {shape}", fragment="Mismatch in shape")


def _taken(s: Stage, root: Paper, x: Paper, numbers: Array) -> None:
    """A gradient of the right shape counts as it is, in whatever memory and however it is handed in."""
    good = s.tensor(numbers, root.dtype)
    s.do(f"v = {good}" if s.flip() else f"v = torch.stack([{good}] * 2, -1)[..., 0]")
    call, times = s.choose(_TAKEN)
    s.succeeds(call.format(y=root.name, x=x.name), "the gradient has the shape of the root")
    grads = s.grads((root, times * numbers))
    s.close("g" if "g, =" in call else f"{x.name}.grad", grads[x.name], "the gradient that was handed in")
    if "grad(" in call or "inputs" in call:
        for t in s.leaves:
            if t.requires_grad and (t is not x or "grad(" in call):
                s.true(f"{t.name}.grad is None", "it was not asked for")


_TAKEN = (
    ("{y}.backward(v)", 1.0),
    ("torch.autograd.backward({y}, v)", 1.0),
    ("torch.autograd.backward([{y}], (v,))", 1.0),
    ("g, = torch.autograd.grad({y}, {x}, v)", 1.0),
    ("torch.autograd.backward({y}, v, inputs={x} if torch.__version__ >= (2, 13) else [{x}])", 1.0),
    ("torch.autograd.backward({y}, v, inputs=({x},))", 1.0),
    ("{y}.backward(gradient=v, inputs=[{x}])", 1.0),
    ("{y}.backward(v, True, False, [{x}])", 1.0),
    ("{y}.backward(v, create_graph=True)", 1.0),
    ("torch.autograd.backward([{y}, {y}], [v, v])", 2.0),
    ("torch.autograd.backward(({y}, {y}), (v, v))", 2.0),
    ("g, = torch.autograd.grad([{y}, {y}], [{x}], [v, v])", 2.0),
)


_TWO = "torch.autograd.backward([{r}, z], [{ones}, {v}])"


@scene("backward.gradient-complexness")
def test_gradient_complexness(s: Stage) -> None:
    """Real roots refuse complex gradients and the other way round; complex roots never do without one."""
    root = s.root(interior=False)
    x = s.choose([t for t in s.above(root, root_too=True) if t.is_leaf])
    wide = root.dtype == "float64"
    dtype = "complex128" if wide else "complex64"
    s.play()
    factor = complex(s.factor(), s.factor())
    made = s.choose(("{r} * {k}", "torch.complex({r}, {r})", "{r}.to(torch.{d})", "torch.complex({r}, {r}).conj()"))
    shape = root.shape
    if made == "{r} * {k}" and s.flip():
        made, shape = "({r} * {k}).sum()", ()
    s.do(f"z = {made.format(r=root.name, k=factor, d=dtype)}")
    real = s.tensor(s.numbers(shape), root.dtype)
    first = s.numbers(shape)
    v = f"torch.complex({s.tensor(first, root.dtype)}, {s.tensor(s.numbers(shape)[::-1] if shape else first, root.dtype)})"
    for _ in range(s.number(1, 3)):
        call, kind = s.choose((*_CALLS[:7], _TWO)), s.choose(("real for complex", "complex for real", "none"))
        ones = s.tensor(np.ones(root.shape), root.dtype)
        mismatch = "" if call == _TWO else "required to have the same dtype"  # of several, the message may say less
        if kind == "real for complex":
            text = call.format(y="z", x=x.name, v=real, r=root.name, ones=ones)
            s.raises(text, "RuntimeError", "the root is complex and its gradient is real", fragment=mismatch)
        elif kind == "complex for real":
            given = f"torch.complex({ones}, {ones})"
            text = call.replace("z]", f"{root.name}]").format(y=root.name, x=x.name, v=given, r=root.name, ones=ones)
            s.raises(text, "RuntimeError", "the root is real and its gradient is complex", fragment=mismatch)
        else:
            text = call.format(y="z", x=x.name, v="None", r=root.name, ones=ones)
            s.raises(
                text, "RuntimeError", "a complex root needs a gradient", fragment="grad can be implicitly created only"
            )
    s.do(f"v = {v}")
    s.succeeds(s.choose(_CALLS[:6]).format(y="z", x=x.name, v="v"), "root and gradient are both complex")


@scene("backward.list-length")
def test_list_length(s: Stage) -> None:
    """A list of gradients that is shorter than that of the roots is refused, as often as it is tried."""
    roots = [s.root(interior=False) for _ in range(s.number(1, 3))]
    s.play()
    seeds = [s.tensor(s.numbers(t.shape), t.dtype) for t in roots]
    names = [t.name for t in roots]
    for _ in range(s.number(1, 3)):
        count = s.choose(range(len(roots))[::-1])
        given = seeds[:count]
        if count and s.flip():
            given = [*given[:-1], "None"] if np.size(roots[count - 1].value) == 1 else given
        listed = f"({', '.join(given)}{',' if count == 1 else ''})" if s.flip() else f"[{', '.join(given)}]"
        if count == 1 and s.flip():
            listed = seeds[0]
        options = s.choose(("", ", retain_graph=True", ", create_graph=True", ", inputs=[{x}]"))
        x = s.choose([t for t in s.above(roots[0], root_too=True) if t.is_leaf])
        call = f"torch.autograd.backward([{', '.join(names)}], {listed}{options.format(x=x.name)})"
        if len(roots) == 1 and s.flip():
            call = call.replace(f"[{names[0]}], ", f"{names[0]}, ", 1)
        s.raises(call, "RuntimeError", f"{len(roots)} roots and {count} gradients")
    s.succeeds(
        f"torch.autograd.backward([{', '.join(names)}], [{', '.join(seeds)}])", "there is a gradient for each root"
    )


@scene("backward.list-none-for-nonrequiring")
def test_list_none(s: Stage) -> None:
    """None stands for ones of a root with one element, wherever in the list; a root without grad is refused anyway."""
    tensors = [s.root(interior=False) for _ in range(s.number(1, 3))]
    s.play()
    roots, given, sums = [], [], []
    for i, t in enumerate(tensors):
        seed = s.numbers(t.shape)
        if np.size(t.value) == 1 and s.flip():
            roots.append(t.name)
            given.append("None")
            sums.append((t, np.ones(t.shape)))
        elif s.number(0, 2):
            s.do(f"r{i} = {t.name}.sum({'0' if t.shape and len(t.shape) == 1 else ''})")
            roots.append(f"r{i}")
            given.append("None")
            sums.append((t, np.ones(t.shape)))
        else:
            roots.append(t.name)
            given.append(s.tensor(seed, t.dtype))
            sums.append((t, seed))
    first, options = tensors[0], s.choose((", retain_graph=True", ", create_graph=True"))
    for _ in range(s.number(1, 3)):
        place, kind = s.number(0, len(roots)), s.choose(("untracked", "untracked", "untracked", "many"))
        many = [t for t in s.tracked if np.size(t.value) != 1]
        if kind == "many" and many:
            wrong, seed_text, why = s.choose(many).name, "None", "None stands for ones of one element only"
        else:
            plain = [t.name for t in s.tensors if not t.requires_grad and np.size(t.value) == 1]
            wrong = s.choose((f"{roots[0]}.detach()", *plain, f"torch.ones(1{s.on})"))
            fitting = [given[0]] if wrong == f"{roots[0]}.detach()" else []
            seed_text, why = s.choose(("None", *fitting)), "a root does not require grad"
        left, right = (*roots[:place], wrong, *roots[place:]), (*given[:place], seed_text, *given[place:])
        fragment = "does not require grad" if "does not" in why else "implicitly created only"
        text = f"torch.autograd.backward([{', '.join(left)}], [{', '.join(right)}]{options})"
        s.raises(text, "RuntimeError", why, fragment=fragment)
        for t in s.above(first, root_too=True):
            if t.is_leaf:
                s.do(f"{t.name}.grad = None")
    for leaf in s.leaves:
        s.do(f"{leaf.name}.grad = None")
    s.do(f"torch.autograd.backward([{', '.join(roots)}], [{', '.join(given)}])")
    _filled(s, s.grads(*sums), "the sum over the roots")


def _filled(s: Stage, grads: dict[str, Array], why: str) -> None:
    """The .grad of every leaf that requires grad is as due, or None."""
    for leaf in s.tracked:
        if leaf.is_leaf:
            s.close(f"{leaf.name}.grad", grads.get(leaf.name), f"{leaf.name}: {why}")


_MAPPINGS = (
    "collections.OrderedDict({d})",
    "types.MappingProxyType({d})",
    "collections.UserDict({d})",
    "collections.ChainMap({d})",
    "collections.defaultdict(int, {d})",
)


def _dict_source(s: Stage, tensors: Sequence[Paper]) -> str:
    """A dict of some tensors, with keys of one kind or another."""
    form = s.choose(("{n!r}", "{i}", "({i}, {n!r})", "'block.{i}.{n}'", "{n}"))
    items = [f"{form.format(n=t.name, i=len(tensors) - i)}: {t.name}" for i, t in enumerate(tensors)]
    return f"{{{', '.join(items)}}}"


def _distinct(s: Stage, tensors: Sequence[Paper]) -> list[Paper]:
    """Some tensors, in some order."""
    chosen = s.some(tensors)
    start = s.number(0, len(chosen) - 1)
    chosen = chosen[start:] + chosen[:start]
    return chosen[::-1] if s.flip() else chosen


@scene("backward.inputs-dict")
def test_inputs_dict(s: Stage) -> None:
    """Values of a dict of inputs, and no other tensors, get their gradients; other mappings are refused."""
    root = s.root()
    inputs = _distinct(s, s.above(root))
    s.do("import collections, types")
    s.play()
    seed, v = s.seed(root)
    given, source = f"{seed}, " if seed else "", _dict_source(s, inputs)
    for _ in range(s.number(0, 2)):
        other = s.choose(_MAPPINGS).format(d=source)
        s.raises(
            f"{root.name}.backward({given}inputs={other})",
            "TypeError",
            "this mapping is no plain dict",
            fragment="dict",
        )
    if s.flip():
        s.do(f"torch.autograd.backward({root.name}, {seed or None}, inputs={source})")
    else:
        s.do(f"{root.name}.backward({given}inputs={source})")
    grads, names = s.grads((root, v)), {t.name for t in inputs}
    for t in inputs:
        s.close(f"{t.name}.grad", grads[t.name], f"{t.name} is a value of the dict")
    for t in s.tracked:
        if t.is_leaf and t.name not in names:
            s.equal(f"{t.name}.grad", None, f"{t.name} is no value of the dict")


_DEPTHS = (1, 2, 3, 10, 30, 100, 300) * 5 + (1000, 2000)


@scene("backward.grads-independent-of-depth")
def test_grads_independent_of_depth(s: Stage) -> None:
    """Chains of any length, with leaves that join on the way, give the first and the last leaf their gradients."""
    root = s.root(interior=False)
    depth, dtype = s.choose(_DEPTHS), root.dtype
    joins = s.flip()
    kind = s.choose(
        ("y = y * -1.0", "y = y * w", "y = -y if i % 2 else y.clone()", "y = y * 2.0 if i % 2 else y * 0.5")
    )
    s.play()
    s.do(f"y = {root.name}")
    sign = np.array([(-1.0) ** i for i in range(int(np.prod(root.shape)))]).reshape(root.shape)
    if kind == "y = y * w":
        depth = min(depth, 300)  # the paper is slow here
        s.do(f"w = {s.tensor(sign, dtype, requires_grad=True)}")
    late = s.numbers(root.shape)
    if joins:
        s.do(f"late = {s.tensor(late, dtype, requires_grad=True)}")
    s.block(f"for i in range({depth}):", kind, *(["y = y + late"] if joins else []))
    v = s.numbers(root.shape)
    s.do(f"y.backward({s.tensor(v, dtype)})")
    steps = np.array(
        {"y = y * -1.0": (-1.0, -1.0), "y = y * w": (1.0, 1.0)}.get(
            kind, (1.0, -1.0) if "clone" in kind else (0.5, 2.0)
        )
    )
    steps = np.resize(steps, depth)
    after = np.append(np.cumprod(steps[::-1])[::-1][1:], 1.0)  # what the steps after each one come to
    onward, due_late, due_w = steps[0] * after[0], after.sum(), np.zeros(root.shape)
    if kind == "y = y * w":
        odd = np.arange(depth)[::-1] % 2  # an odd number of steps leaves the signs, an even one nothing
        onward, due_late = sign**depth, np.where(sign < 0, (1.0 - 2.0 * odd).sum(), depth)
        value = np.asarray(root.value, dtype=np.float64)
        for i in range(depth):
            due_w, value = due_w + v * sign ** (depth - 1 - i) * value, value * sign + (late if joins else 0.0)
    due_late, g = v * due_late, v * onward
    if joins:
        s.close("late.grad", due_late, "it joins at each step")
    if kind == "y = y * w":
        s.close("w.grad", due_w, "it is a factor at each step")
    _filled(s, s.grads((root, g)), f"it lies {depth} ops deep and more")


_OFF = ("torch.no_grad()", "torch.set_grad_enabled(False)", "torch.no_grad(), torch.no_grad()",
        "torch.enable_grad(), torch.no_grad()", "torch.no_grad(), torch.autograd.set_detect_anomaly(False)")  # fmt: skip


@scene("backward.inside-no-grad")
def test_inside_no_grad(s: Stage) -> None:
    """Passes under no_grad give the gradients that they give outside, and record derivatives if they are told to."""
    root = s.root()
    reached, leaves = s.above(root), [t for t in s.tracked if t.is_leaf]
    s.play()
    y, squared = root.name, s.flip()
    if squared:
        y = "y"
        s.do(f"y = {root.name} * {root.name}")
    seed, v = s.seed(root)
    given = f"{seed}, " if seed else ""
    grads = s.grads((root, 2.0 * root.value * v if squared else v))
    for _ in range(s.number(1, 2)):
        mode = s.choose(_OFF)
        inputs = [s.choose(reached)]
        way = s.choose(("backward", "grad", "again"))
        if way == "backward":
            s.block(f"with {mode}:", f"{y}.backward({given}retain_graph=True)")
            for t in reached:
                if t.is_leaf:
                    s.close(f"{t.name}.grad", grads[t.name], f"the gradient of {y} by {t.name}, in no_grad too")
            for t in leaves:
                s.do(f"{t.name}.grad = None")
            continue
        more = "create_graph=True" if way == "again" else "retain_graph=True"
        s.block(f"with {mode}:", f"g, = torch.autograd.grad({y}, {inputs[0].name}, {given}{more})")
        s.close("g", grads[inputs[0].name], f"the gradient of {y} by {inputs[0].name}, in no_grad too")
        if way != "again":
            s.false("g.requires_grad", "create_graph is not set")
            continue
        traced = s.differentiable[root.name]
        traced = traced * traced if squared else traced
        (first,) = s.derivative(traced, Traced(v), [s.differentiable[inputs[0].name]])
        w = s.numbers(inputs[0].shape)
        seconds = s.derivative(first, Traced(w), [s.differentiable[t.name] for t in leaves])
        if any(np.any(d.value) for d in seconds):
            s.true("g.requires_grad", "create_graph records derivatives in no_grad too")
            names, kept = ", ".join(t.name for t in leaves), "retain_graph=True, materialize_grads=True"
            call = f"h = torch.autograd.grad(g, [{names}], {s.tensor(w, inputs[0].dtype)}, {kept})"
            if s.flip():
                s.block(f"with {s.choose(_OFF)}:", call)
            else:
                s.do(call)
            for i, d in enumerate(seconds):
                s.close(f"h[{i}]", d.value, f"the second derivative of {y}")


_STEPS = """def steps(t, n, limit):
    done = []
    for i in range(n):
        if t.sum() > limit:
            t = t * 0.5 - 0.25
            done.append("down")
        elif t.sum() < -limit:
            t = t * t * 0.25
            done.append("square")
        else:
            t = t * 2.0 + 0.125
            done.append("up")
    return t, done"""
_WHILE = """def steps(t, n, limit):
    done = []
    while t.abs().sum() < limit and len(done) < n:
        if len(done) % 2:
            t = -t
        t = t + t * 0.5
        done.append("grow")
    return t, done"""


def _steps(t: Traced, n: int, limit: float, loop: str) -> tuple[Traced, list[str], bool]:
    """The same on paper, and whether each comparison was a clear one."""
    done: list[str] = []
    clear = True
    if loop == _WHILE:
        while len(done) < n:
            size = np.abs(t.value).sum()
            clear = clear and bool(abs(size - limit) > 0.01)
            if size >= limit:
                break
            t = -t if len(done) % 2 else t
            t = t + t * 0.5
            done.append("grow")
        return t, done, clear
    for _ in range(n):
        total = t.value.sum()
        clear = clear and bool(min(abs(total - limit), abs(total + limit)) > 0.01)
        if total > limit:
            t, word = t * 0.5 - 0.25, "down"
        elif total < -limit:
            t, word = t * t * 0.25, "square"
        else:
            t, word = t * 2.0 + 0.125, "up"
        done.append(word)
    return t, done, clear


@scene("backward.define-by-run")
def test_define_by_run(s: Stage) -> None:
    """In each round of a loop that branches on data, the branches that were taken are differentiated, and no others."""
    leaf = s.choose([t for t in s.leaves if t.requires_grad and np.size(t.value)])
    loop = s.choose((_STEPS, _WHILE))
    s.do(loop)
    s.play(x for x in s.scene.graph if isinstance(x, Leaf) and x.name == leaf.name)
    value, v = np.asarray(leaf.value, dtype=np.float64), s.numbers(leaf.shape)
    s.do(f"v = {s.tensor(v, leaf.dtype)}")
    for now in range(s.number(1, 3)):
        n, limit, k = s.number(1, 5), s.choose((1.5, 0.25, 4.0, 9.0)), s.factor()
        x = Traced(value)
        start = x if now == 0 else x * k
        end, done, clear = _steps(start, n, limit, loop)
        s.require(clear and np.all(np.abs(end.value) < 1e3))
        s.do(f"y, done = steps({leaf.name if now == 0 else f'{leaf.name} * {k}'}, {n}, {limit})")
        s.equal("done", done, "these branches are taken")
        (due,) = gradient(end, v, [x])
        if end is x:
            s.do(f"{leaf.name}.backward(v.clone())")
        else:
            s.do("y.backward(v)")
        s.close(f"{leaf.name}.grad", due, f"the branches taken are {done}")
        s.do(f"{leaf.name}.grad = None")


_TRANSFORMS = (
    "torch.func.grad(f)({x})",
    "torch.func.vmap(f)({x}.unsqueeze(0))",
    "torch.func.vjp(f, {x})",
    "torch.func.jvp(f, ({x},), ({x},))",
    "torch.func.jacrev(f)({x})",
    "torch.func.jacfwd(f)({x})",
    "torch.func.hessian(f)({x})",
    "torch.func.grad_and_value(f)({x})",
    "torch.func.grad(torch.func.grad(f))({x})",
    "torch.func.vmap(torch.func.grad(f))({x}.unsqueeze(0))",
    "torch.func.vmap(torch.func.vmap(f))({x}.unsqueeze(0).unsqueeze(0))",
    "torch.func.functionalize(f)({x})",
)
_FORWARD = ("jvp", "jacfwd", "hessian")  # they compute with tangents
_BODIES = (
    "    y.backward()",
    "    torch.autograd.backward(y)",
    "    torch.autograd.backward([y], [torch.ones_like(y)], create_graph=True)",
    "    y.backward(torch.ones_like(y), retain_graph=True)",
    "    w.sum().backward()",
)


@scene("backward.functorch-refused")
def test_functorch_refused(s: Stage) -> None:
    """Every way to call backward is refused inside every transform, and works again outside."""
    root = s.root()
    x = s.choose([t for t in s.tensors if np.size(t.value)])
    s.play()
    s.do(f"w = {s.tensor(s.numbers((2,)), requires_grad=True)}")
    tangents = s.device.has("forward_ad")
    transforms = [t for t in _TRANSFORMS if tangents or not any(word in t for word in _FORWARD)]
    for _ in range(s.number(1, 3)):
        transform, body = s.choose(transforms), s.choose(_BODIES)
        s.do(f"def f(x):\n    y = (x * x).sum()\n{body}\n    return y")
        why = "backward is called inside a transform"
        s.raises(
            transform.format(x=f"{x.name}.detach().clone()"),
            "RuntimeError",
            why,
            fragment="inside a functorch transform",
        )
    s.equal("w.grad", None, "each call was refused")
    _filled(s, s.grads((root, s.backward(root))), "outside all transforms backward works")


_ERRORS = ("ValueError", "RuntimeError", "KeyError", "Own", "TypeError", "AssertionError", "NotImplementedError",
           "IndexError", "ZeroDivisionError", "OSError", "AttributeError", "StopIteration", "Derived", "torch.OutOfMemoryError")  # fmt: skip
_OWN = """class Own(Exception):
    pass


class Derived(ValueError):
    pass"""
_FAIL = """def fail(*args):
    raise kind(*what)"""
_FAILING = """class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, g):
        raise kind(*what)"""
_TRY = """caught = None
try:
    {call}
except Exception as error:
    caught = error"""


@scene("backward.errors-propagate")
def test_errors_propagate(s: Stage) -> None:
    """What a hook or a custom backward raises arrives as it was raised, wherever it sits and however often."""
    root = s.root(interior=False)
    reached = s.above(root, root_too=True)
    t = s.choose(reached)
    place = s.choose(("hook", "function", "pre", "post", "accumulate"))
    s.do(f"{_OWN}\n\n\n{_FAIL}")
    s.play()
    y = root.name
    if place == "function":
        s.do(f"{_FAILING}\n\n\ny = Failing.apply({y})")
        y = s.choose(("y", "(y * 2.0)"))
    elif place == "accumulate":
        t = s.choose([x for x in reached if x.is_leaf])
        s.do(f"{t.name}.register_post_accumulate_grad_hook(fail)")
    elif place in ("pre", "post"):
        t = s.choose([x for x in reached if x.node is not None])
        s.do(f"{t.name}.grad_fn.register_{'prehook' if place == 'pre' else 'hook'}(fail)")
    else:
        s.do(f"{t.name}.register_hook(fail)")
    v = s.tensor(s.numbers(root.shape), root.dtype)
    leaves = [x.name for x in reached if x.is_leaf]
    for now in range(s.number(1, 3)):
        kind, text = (
            s.choose(_ERRORS),
            s.choose(("'on purpose'", "'one', 2", f"'pass {now}: %s {{}}\\n'", "", "'ä' * 300", "'1', 2, 3")),
        )
        s.do(f"kind, what = {kind}, ({text}{',' if text else ''})")
        ways = ["{y}.backward({v}, retain_graph=True)", "torch.autograd.backward([{y}], [{v}], retain_graph=True)",
                "{y}.backward({v}, create_graph=True)"]  # fmt: skip
        if place != "accumulate":
            ways.append("torch.autograd.grad({y}, [{x}], {v}, retain_graph=True)")
            ways = ways if place != "post" else ways[:3]
        call = s.choose(ways).format(y=y, v=v, x=", ".join(leaves))
        s.do(_TRY.format(call=call))
        s.true("type(caught) is kind", f"{kind} was raised inside")
        s.true("str(caught) == str(kind(*what))", "the message is that of what was raised")
        for x in leaves:
            s.do(f"{x}.grad = None")
    s.do("caught = None")


_INNER = """def inner(level, way):
    with torch.enable_grad():
        w = start.clone().requires_grad_()
        z = w * w * w
        if level:
            z.register_hook(lambda g: inner(level - 1, way))
        z = z.sum()
    if way == "grad":
        got.append(torch.autograd.grad(z, w)[0])
    else:
        z.backward(inputs=[w] if way == "inputs" else None)
        got.append(w.grad)"""
_AGAIN = """class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x * x
        y.backward(g)
        return x.grad"""


@scene("backward.reentrant")
def test_reentrant(s: Stage) -> None:
    """Passes that hooks and custom backwards start give what they give outside, and do not disturb the outer one."""
    root = s.root(interior=False)
    reached = s.above(root, root_too=True)
    kind = s.choose(("hook", "function", "graph"))
    s.play()
    if kind == "graph":  # the inner pass is that of the drawn graph, the outer one runs through a leaf of its own
        seed, v = s.seed(root)
        start = s.numbers((2,))
        s.do(f"p = {s.tensor(start, requires_grad=True)}\nq = p * p")
        s.do(
            f"q.{s.choose(('register_hook', 'grad_fn.register_prehook', 'grad_fn.register_hook'))}(lambda *g: {root.name}.backward({seed}))"
        )
        s.do("(q * q).sum().backward()")
        s.close("p.grad", 4.0 * start**3, "the outer pass")
        _filled(s, s.grads((root, v)), "the inner pass")
        return
    if kind == "function":
        s.do(f"{_AGAIN}\n\n\ny = Again.apply({root.name})")
        v = s.numbers(root.shape)
        s.do(f"y.backward({s.tensor(v, root.dtype)})")
        _filled(s, s.grads((root, 2.0 * root.value * v)), "the custom backward gives 2 x g")
        return
    start, level, way = s.numbers((2,)), s.number(0, 2), s.choose(("grad", "backward", "inputs"))
    s.do(f"start, got = {s.tensor(start)}, []\n{_INNER}")
    hooked = s.some(reached)
    for t in hooked:
        places = ["register_hook"]
        places += (
            ["register_post_accumulate_grad_hook"]
            if t.is_leaf
            else ["grad_fn.register_prehook", "grad_fn.register_hook"]
        )
        s.do(f"{t.name}.{s.choose(places)}(lambda *g: inner({level}, {way!r}))")
    grads = s.grads((root, s.backward(root)))
    _filled(s, grads, "hooks that start other passes change nothing")
    count = len(hooked) * (level + 1)
    s.equal("len(got)", count, f"{len(hooked)} hooks, each with {level} more inside")
    for i in range(count):
        s.close(f"got[{i}]", 3.0 * start**2, "the gradient of the sum of w ** 3")


# Loss, how its input, target and further arguments are made for n samples and c classes, and the shape of its losses.
_LOSSES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("MSELoss", "x", ("t",), "nc"),
    ("L1Loss", "x", ("t",), "nc"),
    ("SmoothL1Loss", "x", ("t",), "nc"),
    ("HuberLoss", "x", ("t",), "nc"),
    ("BCEWithLogitsLoss", "x", ("t",), "nc"),
    ("BCELoss", "x.sigmoid()", ("t",), "nc"),
    ("KLDivLoss", "x.log_softmax(-1)", ("t",), "nc"),
    ("PoissonNLLLoss", "x", ("t",), "nc"),
    ("GaussianNLLLoss", "x", ("t", "t + 1.0"), "nc"),
    ("SoftMarginLoss", "x", ("sign",), "nc"),
    ("HingeEmbeddingLoss", "x", ("sign",), "nc"),
    ("MarginRankingLoss", "x", ("t", "sign"), "nc"),
    ("CrossEntropyLoss", "x", ("k",), "n"),
    ("NLLLoss", "x.log_softmax(-1)", ("k",), "n"),
    ("MultiMarginLoss", "x", ("k",), "n"),
    ("MultiLabelSoftMarginLoss", "x", ("t",), "n"),
    ("CosineEmbeddingLoss", "x", ("t + 1.0", "sign[:, 0]"), "n"),
    ("TripletMarginLoss", "x", ("t", "t - 1.0"), "n"),
    ("TripletMarginWithDistanceLoss", "x", ("t", "t - 1.0"), "n"),
)


@scene("backward.loss-modules-are-scalar")
def test_loss_modules(s: Stage) -> None:
    """A loss with a reduction is one number without dimensions; without one it needs a gradient, if it is several."""
    for _ in range(s.number(1, 2)):
        loss, x, rest, per = s.choose(_LOSSES)
        n, c = s.number(1, 4), s.number(1, 5)
        reduction = s.choose(("", "mean", "sum", "none", "none"))
        dtype = s.choose(("float32", s.wide))
        values = s.numbers((n, c))
        s.do(f"x = {s.tensor(values, dtype, requires_grad=True)}")
        s.do(f"t = {s.tensor(np.abs(values) / 2, dtype)}\nsign = {s.tensor(np.sign(values), dtype)}")
        if "k" in rest:
            labels = [(i * 3 + n) % c for i in range(n)]
            s.do(f"k = torch.tensor({labels}{s.on})")
        argument = f"reduction={reduction!r}" if reduction else ""
        s.do(f"loss = torch.nn.{loss}({argument})({', '.join((x, *rest))})")
        shape = ((n, c) if per == "nc" else (n,)) if reduction == "none" else ()
        s.equal("tuple(loss.shape)", shape, f"{n} samples of {c}, reduction {reduction or 'by default'}")
        if int(np.prod(shape)) == 1:
            s.succeeds("loss.backward()", "the loss has one element")
        else:
            s.raises(
                "loss.backward()",
                "RuntimeError",
                "there are several losses",
                fragment="grad can be implicitly created only",
            )
            s.succeeds("loss.backward(torch.ones_like(loss))", "there is a gradient for each loss")
        s.equal("tuple(x.grad.shape)", (n, c), "the gradient of the input")


_WATCH = """class Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        seen.append(("function", torch.is_grad_enabled()))
        return g * 1.0"""
_MODES = ("torch.enable_grad()", "torch.no_grad()", "torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)",
          "torch.no_grad(), torch.enable_grad()", "torch.enable_grad(), torch.no_grad()")  # fmt: skip


@scene("backward.grad-mode-inside")
def test_grad_mode_inside(s: Stage) -> None:
    """Hooks and custom backwards find grad mode on with create_graph=True and off without, in any mode of the caller."""
    root = s.root(interior=False)
    reached = s.above(root, root_too=True)
    s.do("seen = []")
    s.play()
    y, labels = root.name, []
    if s.flip():
        s.do(f"{_WATCH}\n\n\ny = Watch.apply({y})")
        y = "y"
        labels.append("function")
    for i, t in enumerate(s.some(reached)):
        node = ["grad_fn.register_prehook", "grad_fn.register_hook"]
        place = s.choose(["register_hook", *(["register_post_accumulate_grad_hook"] if t.is_leaf else node)])
        label = f"{i} {place}"
        labels.append(label)
        s.do(f"{t.name}.{place}(lambda *g: seen.append(({label!r}, torch.is_grad_enabled())))")
    v = s.tensor(s.numbers(root.shape), root.dtype)
    leaves = [t for t in reached if t.is_leaf]
    for _ in range(s.number(1, 3)):
        mode, create = s.choose(("", *_MODES)), s.flip()
        options = "create_graph=True" if create else "retain_graph=True"
        call = s.choose((f"{y}.backward({v}, {options})", f"torch.autograd.backward([{y}], [{v}], {options})"))
        if not any("accumulate" in label for label in labels) and s.flip():
            call = f"torch.autograd.grad({y}, [{', '.join(t.name for t in leaves)}], {v}, {options})"
        if mode:
            s.block(f"with {mode}:", call)
        else:
            s.do(call)
        why = f"create_graph={create} sets the mode in which backward runs, and the caller's mode does not"
        s.equal("sorted(seen)", sorted((label, create) for label in labels), why)
        s.do("seen.clear()")
        for t in leaves:
            s.do(f"{t.name}.grad = None")
