"""Area function: custom Functions beside the built-in ops whose twins they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from autograd_conformance.algebra import Traced, traced_op
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Apply
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

HOOKS = "torch.autograd.graph.saved_tensors_hooks"


# --- twins ------------------------------------------------------------------------------------------------------------


class Twin(NamedTuple):
    """A custom Function that does what an op of the table does: sources of its value, of what it saves, of its VJP."""

    value: str
    saves: str
    vjp: str
    arity: int = 1


TWINS: dict[str, Twin] = {
    "sin": Twin("x.sin()", "x", "g * x.cos()"),
    "square": Twin("x ** 2", "x", "g * 2.0 * x"),
    "cos": Twin("x.cos()", "x", "-g * x.sin()"),
    "tanh": Twin("x.tanh()", "out", "g * (1.0 - out * out)"),
    "exp": Twin("x.exp()", "out", "g * out"),
    "sigmoid": Twin("x.sigmoid()", "out", "g * out * (1.0 - out)"),
    "cube": Twin("x ** 3", "x", "g * 3.0 * x ** 2"),
    "atan": Twin("x.atan()", "x", "g / (1.0 + x * x)"),
    "neg": Twin("-x", "", "-g"),
    "double": Twin("x * 2.0", "", "g * 2.0"),
    "shift": Twin("x + 0.5", "", "g.clone()"),
    "clone": Twin("x.clone()", "", "g * 1.0"),
    "mul": Twin("x * y", "x, y", "g * y, g * x", 2),
    "add": Twin("x + y", "", "g.clone(), g * 1.0", 2),
    "sub": Twin("x - y", "", "g.clone(), -g", 2),
    "div": Twin("x / y", "x, y", "g / y, -g * x / (y * y)", 2),
    "mm": Twin("x @ y", "x, y", "g @ y.t(), x.t() @ g", 2),
}


def twin_source(name: str, *, separate: bool = False, head: str = "", once: bool = False) -> str:
    """The class of a twin, in one of the two styles; ``head`` is a line of its body."""
    twin = TWINS[name]
    inputs = "x, y" if twin.arity == 2 else "x"
    keep = f"ctx.save_for_backward({twin.saves})"
    lines = [f"class {name.title()}(torch.autograd.Function):", *([f"    {head}"] if head else []), "    @staticmethod"]
    if separate:
        lines += [f"    def forward({inputs}):", f"        return {twin.value}", "    @staticmethod"]
        lines += [
            "    def setup_context(ctx, inputs, out):",
            f"        {inputs}{'' if twin.arity == 2 else ','} = inputs",
        ]
        lines += [f"        {keep}"]
    else:
        lines += [
            f"    def forward(ctx, {inputs}):",
            f"        out = {twin.value}",
            f"        {keep}",
            "        return out",
        ]
    lines += ["    @staticmethod", *(["    @torch.autograd.function.once_differentiable"] if once else [])]
    lines += ["    def backward(ctx, g):"]
    if twin.saves:
        lines.append(f"        {twin.saves}{'' if ',' in twin.saves else ','} = ctx.saved_tensors")
    return "\n".join([*lines, f"        return {twin.vjp}"])


def play_twins(s: Stage, *, flags: bool = False) -> list[str]:
    """Play the graph, some of its ops as twins (a dial each); returns the names of these."""
    used: list[str] = []
    for statement in s.scene.graph:
        if not isinstance(statement, Apply) or not _has_twin(s, statement) or not s.flip():
            s.play([statement])
            continue
        if statement.op not in used:
            s.do(twin_source(statement.op, separate=s.flip()))
            used.append(statement.op)
        s.do(f"{statement.out} = {statement.op.title()}.apply({', '.join(statement.args)})")
        if flags:
            out, due = statement.out, s.due.made[statement.out]
            s.equal(f"({out}.requires_grad, {out}.is_leaf)", due, "it requires grad as soon as an argument does")
            s.equal(f"isinstance({out}.grad_fn, torch.autograd.graph.Node)", due[0], "its grad_fn is a node, or None")
    return used


def _has_twin(s: Stage, statement: Apply) -> bool:
    operands = [s.due.tensors[name] for name in statement.args]
    return statement.op in TWINS and not statement.no_grad and len({t.dtype for t in operands}) == 1


SLOPES: dict[str, Callable[[Array], Array]] = {
    "sin": np.cos,
    "square": lambda v: 2.0 * v,
    "cos": lambda v: -np.sin(v),
    "tanh": lambda v: 1.0 - np.tanh(v) ** 2,
    "cube": lambda v: 3.0 * v**2,
    "atan": lambda v: 1.0 / (1.0 + v**2),
    "double": lambda v: np.full(v.shape, 2.0),
    "neg": lambda v: -np.ones(v.shape),
}


def filled(s: Stage) -> Paper:
    """A tensor that requires grad and has elements."""
    return s.choose([t for t in s.tracked[::-1] if np.size(t.value)])


def modest(s: Stage) -> Paper:
    """The same, with no numbers so large that a slope might drown."""
    return s.choose([t for t in s.tracked[::-1] if np.size(t.value) and np.max(abs(t.value)) <= 16.0])


def _steep(t: Paper) -> list[str]:
    """Twins whose slope at the numbers of a tensor is not the difference of two that are nearly equal."""
    return [name for name in SLOPES if name != "tanh" or np.max(abs(t.value)) <= 2.0]


def check_leaves(s: Stage, grads: dict[str, Array], because: str, *, times: int = 1) -> None:
    """The .grad of every leaf."""
    for t in s.leaves:
        if t.requires_grad:
            g = grads.get(t.name)
            s.close(f"{t.name}.grad", None if g is None else g * times, because)


INTEGERS = """
class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        return x * k, (x > 0).to(torch.int64), x > 0
    @staticmethod
    def backward(ctx, g, gi, gb):
        return g * 3.0, None
""".strip()
FREED = "Trying to backward through the graph a second time"


@scene("function.acts-as-op")
def test_acts_as_op(s: Stage) -> None:
    """Some ops of the graph are replaced by custom twins, and nothing else changes: flags, nodes, freeing, gradients."""
    used = play_twins(s, flags=True)
    top = modest(s)
    name = s.choose([n for n in _steep(top) if n not in used])
    s.do(twin_source(name, separate=s.flip()))
    apply = f"{name.title()}.apply"
    if s.flip():
        s.block(
            s.choose(("with torch.no_grad():", "with torch.set_grad_enabled(False):")), f"off = {apply}({top.name})"
        )
        s.equal("(off.requires_grad, off.grad_fn, off.is_leaf)", (False, None, True), "grad mode is off")
    if s.flip():
        plain = s.choose((f"{top.name}.detach()", f"torch.zeros_like({top.name})"))
        s.do(f"off = {apply}({plain})")
        s.equal("(off.requires_grad, off.grad_fn)", (False, None), "no argument requires grad")
    if s.flip():
        s.do(INTEGERS)
        s.do(f"parts = Split.apply({top.name}, 3.0)")
        s.equal("[p.requires_grad for p in parts]", [True, False, False], "floating outputs do, integer ones never")
    s.do(f"z = {apply}({top.name})")
    s.equal("(z.requires_grad, z.is_leaf)", (True, False), "the argument requires grad")
    s.true("isinstance(z.grad_fn, torch.autograd.graph.Node)", "it was recorded")
    seed = s.numbers(top.shape)
    s.do(f"v = {s.tensor(seed, top.dtype)}")
    if s.flip():
        s.do("v = torch.stack([v, -v], -1)[..., 0]")  # memory with gaps
    grads = s.grads((top, seed * SLOPES[name](top.value)))
    times = s.number(1, 2)
    for i in range(times):
        s.do("z.backward(v, retain_graph=True)" if i < times - 1 else "z.backward(v)")
        check_leaves(s, grads, "as of the built-in ops", times=i + 1)
    if TWINS[name].saves:
        s.raises("z.backward(v)", "RuntimeError", "what it had saved is freed", fragment=FREED)


WITHIN = """
log = []
class Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *xs):
        inner = [x * 2.0 for x in xs] + [x.exp() for x in xs]
        log.append((torch.is_grad_enabled(), [y.requires_grad or y.grad_fn is not None for y in inner]))
        log.append([(x is y, x.requires_grad, x.grad_fn is y.grad_fn) for x, y in zip(xs, given)])
        return inner[0].clone()
    @staticmethod
    def backward(ctx, g):
        return (g * factor, *[None] * (len(given) - 1))
class Deeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *xs):
        y = Within.apply(x, *xs)
        log.append((torch.is_grad_enabled(), [y.requires_grad]))
        return y + 1.0
    @staticmethod
    def backward(ctx, g):
        return (g * factor, *[None] * (len(given) - 1))
""".strip()


@scene("function.forward-untracked")
def test_forward_untracked(s: Stage) -> None:
    """forward sees the caller's tensors, records nothing, and whatever it computes, backward alone is the gradient."""
    s.require(not s.added)  # None goes on as None through torch's own ops alone; Functions make zeros of it
    s.play()
    first = filled(s)
    others = [s.choose([t for t in s.tensors if np.size(t.value)]) for _ in range(s.number(0, 2))]
    given = [first, *others]
    factor = s.factor()
    s.do(f"given, factor = [{', '.join(t.name for t in given)}], {factor}")
    s.do(WITHIN)
    rounds = s.number(1, 2)
    seed = s.numbers(first.shape)
    s.do(f"v = {s.tensor(seed, first.dtype)}")
    grads = s.grads((first, seed * factor))
    for i in range(rounds):
        which = s.choose(("Within", "Deeper"))
        off = s.number(0, 3) == 3
        call = f"z = {which}.apply(*given)"
        s.block("with torch.no_grad():", call) if off else s.do(call)
        s.true("torch.is_grad_enabled()", "that was for forward alone")
        s.equal("(z.requires_grad, z.grad_fn is None)", (not off, off), "the result is recorded as any other")
        s.equal("log[0]", (False, [False] * (2 * len(given))), "forward runs with grad mode off")
        s.equal("log[1]", [(True, t.requires_grad, True) for t in given], "its arguments are those of the caller")
        if which == "Deeper":
            s.equal("log[2]", (False, [False]), "no Function within is recorded either")
        s.do("log.clear()")
        if not off:
            s.do("z.backward(v, retain_graph=True)")
            check_leaves(s, grads, "backward alone defines the gradient")
            s.do("\n".join(f"{t.name}.grad = None" for t in s.leaves if t.requires_grad))
        if i < rounds - 1 and s.flip():
            s.may("Within.apply(*given, 'no tensor')")
            s.true("torch.is_grad_enabled()", "grad mode is on again, whatever forward raised")
            s.do("log.clear()")


NEEDS = """
needs = []
class Needs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        return sum(a.sum() for a in args if isinstance(a, torch.Tensor)) * 1.0
    @staticmethod
    def backward(ctx, g):
        needs.append(ctx.needs_input_grad)
        return tuple(torch.ones_like(a) * g if give and isinstance(a, torch.Tensor) and a.is_floating_point() or n
                     else None for give, a, n in zip(gives, args, ctx.needs_input_grad))
""".strip()


@scene("function.needs-input-grad")
def test_needs_input_grad(s: Stage) -> None:  # noqa: PLR0912, PLR0915 - a scene, told in order
    """One bool for each of up to six arguments, tensors or not; gradients for those that need none go nowhere."""
    s.play()
    s.do(NEEDS)
    parts, due, gives, tensors = [], [], [], []
    tracked = [t for t in s.tracked[::-1] if np.size(t.value)]
    for _ in range(s.number(1, 5)):
        kind = s.choose(("tracked", "plain", "other", "tensor", "off"))
        if kind == "tracked":
            t = s.choose(tracked)
            tensors.append(t)
            parts.append(t.name)
        elif kind == "plain":
            t = s.choose([t for t in s.tensors if np.size(t.value)])
            tensors += [t] if t.requires_grad else []
            parts.append(t.name)
        else:
            name = s.name("p")
            if kind == "other":
                parts.append(s.choose(("2", "2.5", "None", "'text'", "[1.0]", "True", "torch.float32", "{}")))
            elif kind == "tensor":
                made = s.choose(("torch.tensor([1, 2]{o})", "{t}.detach()", "torch.zeros_like({t})", "{t} > 0"))
                s.do(f"{name} = {made.format(t=s.choose(tracked).name, o=s.on)}")
                parts.append(name)
            else:
                s.do(f"{name} = {s.tensor(s.numbers((2,)))}")
                parts.append(name)
        due.append(kind == "tracked" or (kind == "plain" and t.requires_grad))
        gives.append(s.flip())
    at = s.number(0, len(parts))
    last = s.choose(tracked)
    parts.insert(at, last.name)
    due.insert(at, True)
    gives.insert(at, True)
    tensors.append(last)
    s.do(f"args = [{', '.join(parts)}]\ngives = {gives}")
    separate = s.flip()
    if separate:
        s.do(_separated(NEEDS))
    s.do("z = Needs.apply(*args)")
    late = [p for p in parts if p.startswith("p")]
    if late and s.flip():
        s.do("\n".join(f"{p}.requires_grad_() if {p}.is_floating_point() else None" for p in dict.fromkeys(late)))
    grads = s.grads(*((t, np.ones(t.shape)) for t in tensors))
    times = s.number(1, 2)
    for i in range(times):
        asked = s.choose(tensors)
        if s.number(0, 3) == 3:
            s.do(f"got = torch.autograd.grad(z, [{asked.name}], retain_graph=True)")
        else:
            s.do("z.backward(retain_graph=True)")
            check_leaves(s, grads, "a gradient for each argument that needs one")
            s.do("\n".join(f"{t.name}.grad = None" for t in s.leaves if t.requires_grad))
        s.equal(f"needs[{i}]", tuple(due), "True for the tensors that required grad when forward ran")
        plain = [t for t in s.leaves if not t.requires_grad]
        for name in [*(t.name for t in plain), *dict.fromkeys(late)]:
            s.true(f"{name}.grad is None", "it needed no gradient")


def _separated(text: str) -> str:
    """The same class with setup_context."""
    extra = "    @staticmethod\n    def setup_context(ctx, inputs, output):\n        pass\n"
    text = text.replace("def forward(ctx, *args)", "def forward(*args)").replace("needs = []\n", "")
    head, line, tail = text.partition("    @staticmethod\n    def backward")
    return f"{head}{extra}{line}{tail}"


CONTRACT = """
class Gives(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, y):
        return x * k + y.sum()
    @staticmethod
    def backward(ctx, g):
        return give(g)
""".strip()
COUNT = "returned an incorrect number of gradients"


@scene("function.backward-contract")
def test_contract(s: Stage) -> None:
    """Backward may return as many values as forward got arguments, and more if they are None; each must fit."""
    s.play()
    x, y = filled(s), filled(s)
    s.do(CONTRACT)
    k = s.choose((2.0, 3.0, -1.0))
    s.do(f"z = Gives.apply({x.name}, {k}, {y.name})")
    seed = s.numbers(x.shape)
    s.do(f"v = {s.tensor(seed, x.dtype)}.to(z.dtype)")
    gx, gy = f"g.to({x.name}.dtype) * {k}", f"(g.sum() * torch.ones_like({y.name})).to({y.name}.dtype)"
    good = [
        (f"({gx}, None, {gy})", 1.0, 1.0),
        (f"({gx}, None, {gy}, None)", 1.0, 1.0),
        (f"({gx}, None, {gy}, None, None, None)", 1.0, 1.0),
        (f"(({gx}).expand(2, *g.shape), None, {gy})", 2.0, 1.0),
        (f"({gx}, None, ({gy}).unsqueeze(0).expand(3, *{y.name}.shape))", 1.0, 3.0),
        (f"(torch.stack([{gx}] * 3).unsqueeze(0), None, {gy})", 3.0, 1.0),
    ]
    ones = f"torch.ones((), dtype={x.name}.dtype{s.on})"
    size = "returned an invalid gradient at index"
    alien = "returned a gradient different than None at position 2"
    bad = [
        (f"({gx}, None)", COUNT), (f"({gx}, None, {gy}, {gy})", COUNT), (f"({gx}, None, {gy}, None, {ones})", COUNT),
        (f"{gx}", COUNT), ("()", COUNT), (f"({gx},)", COUNT), ("None", COUNT),
        (f"({gx}, {ones}, {gy})", alien), (f"({gx}, {gx}, {gy})", alien), (f"({gx}, 2.0, {gy})", ""),
        (f"(1.0, None, {gy})", ""), (f"({gx}, None, 'text')", ""), (f"({gx}, None, [{gy}])", ""), (f"(({gx},), None, {gy})", ""),
    ]  # fmt: skip
    if np.size(x.value) > 1:
        bad.append((f"(g.new_zeros((17, 19)).to({x.name}.dtype), None, {gy})", size))
        bad.append((f"(({gx}).sum() * 0.0, None, {gy})", size))
    if np.size(y.value) > 1:
        bad.append((f"({gx}, None, torch.zeros((23, 29), dtype={y.name}.dtype{s.on}))", size))
    text, seed_sum = s.choose(("z.backward(v, retain_graph=True)", _asked(x, y))), np.sum(seed)
    for _ in range(s.number(1, 3)):
        if s.flip():
            source, fx, fy = s.choose(good)
            s.do(f"give = lambda g: {source}")
            s.do("z.backward(v, retain_graph=True)")
            grads = s.grads((x, seed * k * fx), (y, np.full(y.shape, seed_sum * fy)))
            check_leaves(s, grads, "one gradient for each argument, summed to its shape")
        else:
            source, fragment = s.choose(bad)
            s.do(f"give = lambda g: {source}")
            s.raises(text, "RuntimeError", "backward returned what its arguments do not allow", fragment=fragment)
        s.do("\n".join(f"{t.name}.grad = None" for t in s.leaves if t.requires_grad))
    s.do(f"give = lambda g: {good[0][0]}")
    s.do("z.backward(v)")
    grads = s.grads((x, seed * k), (y, np.full(y.shape, seed_sum)))
    check_leaves(s, grads, "a pass that raised leaves the next one alone")


def _asked(x: Paper, y: Paper) -> str:
    return f"torch.autograd.grad(z, [{x.name}, {y.name}], v, retain_graph=True)"


SAVES = """
class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, others, direct):
        if direct:
            ctx.kept = (x, *others)
        else:
            ctx.save_for_backward(x, *others)
        return x * 2.0
    @staticmethod
    def backward(ctx, g):
        read.append([None if t is None else t.shape for t in (ctx.kept if hasattr(ctx, 'kept') else ctx.saved_tensors)])
        return g * 2.0, None, None
read, packed, unpacked = [], [], []
def pack(t):
    packed.append(t.shape)
    return len(packed), t
def unpack(pair):
    unpacked.append(pair[0])
    return pair[1]
""".strip()
CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"


@scene("function.save-for-backward")
def test_save_for_backward(s: Stage) -> None:
    """What save_for_backward takes, packs, checks and frees, and that it does nothing of that for attributes of ctx."""
    s.play()
    t = filled(s)
    s.do(SAVES)
    s.do(f"x = {t.name}.clone()")
    kind = s.choose(("refused", "packed", "checked", "freed"))
    if kind == "refused":
        for _ in range(s.number(1, 3)):
            bad = s.choose(("3", "2.0", "'text'", "[x]", "(x,)", "True", "x.shape", "x.dtype", "{}", "object()"))
            before = s.choose(("", "x.detach(), ", "None, "))
            text = f"Saves.apply(x, [{before}{bad}], False)"
            s.raises(
                text,
                "TypeError",
                "only tensors and None can be saved",
                fragment="save_for_backward can only save variables",
            )
    others = [
        "None",
        f"x.detach() * {s.factor()}",
        f"torch.ones(3{s.on})",
        f"torch.tensor([1]{s.on})",
        "x",
    ]
    chosen = [s.choose(others) for _ in range(s.number(0, 3))]
    s.do(f"others = [{', '.join(chosen)}]")
    sizes = {others[0]: None, others[2]: (3,), others[3]: (1,)}
    due = [t.shape, *(sizes.get(text, t.shape) for text in chosen)]
    direct = kind != "refused" and s.number(0, 3) == 3
    call = f"z = Saves.apply(x, others, {direct})"
    s.block(f"with {HOOKS}(pack, unpack):", call) if kind == "packed" else s.do(call)
    count = 0 if direct or kind != "packed" else sum(shape is not None for shape in due)
    s.equal("len(packed)", count, "what is saved goes through the hooks, what is put on ctx does not")
    s.do("v = torch.ones_like(z)")
    if kind == "checked":
        tensors = ["x", *[f"others[{i}]" for i, text in enumerate(chosen) if text != "None"]]
        written = s.choose(tensors)
        s.block(
            "with torch.no_grad():", s.choose(("{}.mul_(2)", "{}.add_(1)", "{}.zero_()", "{}[...] = 1")).format(written)
        )
    passes = s.number(1, 2)
    for i in range(passes):
        keep = kind != "freed" or i < passes - 1
        ask = "z.backward(v, retain_graph=True)" if keep else "z.backward(v)"
        if kind == "checked" and not direct:
            s.raises(ask, "RuntimeError", "a saved tensor was written to", fragment=CHANGED)
            continue
        s.do(ask)
        s.equal("[list(map(tuple, [[] if t is None else t for t in row])) for row in read]",
                [[() if shape is None else shape for shape in due]] * (i + 1), "ctx gives what was saved")  # fmt: skip
        s.equal("[[t is None for t in row] for row in read]", [[d is None for d in due]] * (i + 1), "None stays None")
        s.equal("len(unpacked)", count * (i + 1), "what is saved goes through the hooks, what is put on ctx does not")
    if kind == "freed":
        if direct:
            s.equal("len(z.grad_fn.kept)", len(due), "what is put on ctx is not freed")
        else:
            s.raises("z.backward(v)", "RuntimeError", "what is saved is freed by backward", fragment=FREED)


DIRTY = """
class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, factor, mark, back):
        x.mul_(factor)
        if mark:
            ctx.mark_dirty(x)
        ctx.factor = factor
        return x if back else x.clone()
    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None, None, None, None
""".strip()


@scene("function.mark-dirty")
def test_mark_dirty(s: Stage) -> None:
    """A Function that writes to its input gives that input back, with a node and a version; else it must raise."""
    s.play()
    t = filled(s)
    s.do(DIRTY)
    if s.flip():
        made = s.choose(("{} * 1.0", "{}.detach().clone()"))
        s.do(f"bad = {made.format(t.name)}")
        s.raises(
            "Dirty.apply(bad, None, 2.0, True, False)",
            "RuntimeError",
            "what is marked dirty must be returned",
            fragment="Some elements marked as dirty during the forward method were not returned as output",
        )
    leaves = [leaf for leaf in s.leaves if leaf.requires_grad and np.size(leaf.value)]
    if leaves and s.flip():
        s.do(
            f"leaf = {s.choose((s.tensor(s.numbers(t.shape), requires_grad=True), 'torch.nn.Parameter(' + t.name + '.detach().clone())'))}"
        )
        s.raises(
            "Dirty.apply(leaf, None, 2.0, True, True)",
            "RuntimeError",
            "it is a leaf that requires grad",
            fragment="leaf Variable that requires grad",
        )
    if s.flip():
        s.do(f"plain = {t.name}.detach().clone()\nversion = plain._version")
        s.do("back = Dirty.apply(plain, None, 2.0, True, True)")
        s.equal(
            "(back is plain, plain._version > version, plain.requires_grad)", (True, True, False), "the same object"
        )
    s.do(f"u = {t.name} * 1.0\nsquare = u * u")
    factors: list[float] = []
    s.do("old, version = u.grad_fn, u._version")
    for _ in range(s.number(1, 3)):
        f = s.factor()
        other = s.choose(("None", f"{t.name}", "u.detach()", "[u]"))
        s.do(f"back = Dirty.apply(u, {other}, {f}, True, True)")
        factors.append(f)
        s.equal("(back is u, u.requires_grad, u.is_leaf)", (True, True, False), "apply gives the input back")
        s.true("u.grad_fn is not old and u._version > version", "with a new node and a higher version")
        s.do("old, version = u.grad_fn, u._version")
        if s.number(0, 3) == 3:
            s.do("u = u * 1.0\nold, version = u.grad_fn, u._version")
    seed = s.numbers(t.shape)
    s.do(f"v = {s.tensor(seed, t.dtype)}")
    if s.device.has("values"):
        s.close("u", t.value * np.prod(factors), "forward wrote to it")
    s.raises(
        "square.backward(v, retain_graph=True)", "RuntimeError", "it saved what was written to since", fragment=CHANGED
    )
    s.do("\n".join(f"{leaf.name}.grad = None" for leaf in leaves))
    s.do("u.backward(v)")
    check_leaves(s, s.grads((t, seed * np.prod(factors))), "the gradient of all that was done to it")


PARTS = """
got = []
class Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, marked, fill):
        outs = [x * (i + 1.0) for i in range(count)] + [(x > 0).to(torch.int64)] * with_integer
        if marked:
            ctx.mark_non_differentiable(*[outs[i] for i in marked])
        if not fill:
            ctx.set_materialize_grads(False)
        return tuple(outs)
    @staticmethod
    def backward(ctx, *gs):
        got.append([None if g is None else g.clone() for g in gs])
        return sum(g * (i + 1.0) for i, g in enumerate(gs[:count]) if g is not None), None, None
""".strip()


@scene("function.non-differentiable-and-materialize")
def test_materialize(s: Stage) -> None:
    """Of up to four outputs some are marked, some unused: what backward gets for each is zeros, None or the gradient."""
    s.play()
    t = filled(s)
    count = s.number(2, 4)
    integer = s.flip()
    marked = [i for i in range(count) if s.number(0, 3) == 3][: count - 1]
    fill = not s.flip()
    s.do(f"count, with_integer = {count}, {integer}")
    s.do(PARTS)
    s.do(f"outs = Parts.apply({t.name}, {marked}, {fill})")
    for i in range(count):
        s.equal(f"outs[{i}].requires_grad", i not in marked, "outputs require grad unless they are marked")
    if integer:
        s.false(f"outs[{count}].requires_grad", "integers cannot require grad")
    free = [i for i in range(count) if i not in marked]
    passes = s.number(1, 3)
    for _ in range(passes):
        used = s.some(free)
        seeds = [s.numbers(t.shape) for _ in used]
        vs = []
        for seed in seeds:
            vs.append(s.name("v"))
            s.do(f"{vs[-1]} = {s.tensor(seed, t.dtype)}")
        roots = ", ".join(f"outs[{i}]" for i in used)
        s.do(f"torch.autograd.backward([{roots}], [{', '.join(vs)}], retain_graph=True)")
        total = np.zeros(t.shape)
        s.equal("len(got[-1])", count + integer, "a gradient for each output")
        for i in range(count):
            if i in used:
                s.close(f"got[-1][{i}]", seeds[used.index(i)], "the gradient of this output")
                total = total + seeds[used.index(i)] * (i + 1.0)
            elif fill:
                shape = list(t.shape)
                s.true(
                    f"got[-1][{i}] is not None and list(got[-1][{i}].shape) == {shape} and not got[-1][{i}].any()",
                    "zeros of its shape",
                )
            elif i not in marked:
                s.true(f"got[-1][{i}] is None", "gradients that do not come are not materialized")
        check_leaves(s, s.grads((t, total)), "from what the outputs got")
        s.do("\n".join(f"{leaf.name}.grad = None" for leaf in s.leaves if leaf.requires_grad))


# --- higher derivatives -----------------------------------------------------------------------------------------------


TINY = 1e-4  # what is left of numbers that cancel says nothing


@scene("function.double-backward")
def test_double_backward(s: Stage) -> None:
    """Second derivatives through custom twins are those of the built-in ops, unless they are differentiable once only."""
    top = modest(s)
    name = s.choose(_steep(top)[:5])
    if s.number(0, 2) == 2:
        _once(s, top, name)
        return
    used = play_twins(s)
    if name not in used:
        s.do(twin_source(name, separate=s.flip()))
    s.do(f"z = {name.title()}.apply({top.name})")
    traced = s.differentiable
    z = traced_op(name, traced[top.name])
    seed, again = s.numbers(top.shape), s.numbers((24,))
    s.do(f"v = {s.tensor(seed, top.dtype)}")
    leaves = [t for t in s.above(top, root_too=True) if t.node is None and np.size(t.value)][:2]
    s.require(leaves)
    wrt = s.choose(leaves)
    s.do(f"(g,) = torch.autograd.grad(z, [{wrt.name}], v, create_graph=True)")
    (g,) = s.derivative(z, Traced(seed), [traced[wrt.name]])
    s.close("g", g.value, "the first derivative")
    s.require(np.any(g.value))  # a gradient that went through no number may have no graph
    size = int(np.size(wrt.value))
    s.require(size <= 24)
    w = again[:size].reshape(wrt.shape)
    s.do(f"w = {s.tensor(w, wrt.dtype)}")
    seconds = s.derivative(g, Traced(w), [traced[t.name] for t in leaves])
    names = ", ".join(t.name for t in leaves)
    for _ in range(s.number(1, 2)):
        s.do(f"seconds = torch.autograd.grad(g, [{names}], w, retain_graph=True, allow_unused=True)")
        for i, second in enumerate(seconds):
            if np.max(abs(second.value)) > TINY:
                s.close(f"seconds[{i}]", second.value, "the second derivative")


def _once(s: Stage, top: Paper, name: str) -> None:
    """A backward that can be differentiated once only."""
    s.play()
    s.do(twin_source(name, separate=s.flip(), once=True))
    s.do(f"z = {name.title()}.apply({top.name})")
    seed = s.numbers(top.shape)
    s.do(f"v = {s.tensor(seed, top.dtype)}")
    tracked = s.flip()
    if tracked:
        s.do("v.requires_grad_()")
    leaves = [t for t in s.above(top, root_too=True) if t.node is None and np.size(t.value)]
    s.require(leaves)
    wrt = s.choose([top, *leaves])
    s.do(f"(g,) = torch.autograd.grad(z, [{wrt.name}], v, create_graph=True)")
    grads = s.grads((top, seed * SLOPES[name](top.value)))
    s.close("g", grads[wrt.name], "the first derivative is as ever")
    if wrt is top or (tracked and np.any(grads[wrt.name])):  # a gradient that went through no number may have no graph
        fragment = "marked with @once_differentiable" if tracked else "does not require grad"
        asks = [("g.sum().backward(retain_graph=True)", fragment)]
        if wrt is top:
            asks.append((f"torch.autograd.grad(g.sum(), [{top.name}], retain_graph=True)", ""))
        if tracked:
            asks.append(("torch.autograd.grad(g.sum(), [v], retain_graph=True)", ""))
        for ask, words in s.some(asks):
            s.raises(ask, "RuntimeError", "its backward can be differentiated once only", fragment=words)
    s.do("\n".join(f"{t.name}.grad = None" for t in s.leaves if t.requires_grad))
    s.do("z.backward(v)")
    check_leaves(s, grads, "a plain pass is as ever")


# --- how they are written ---------------------------------------------------------------------------------------------

BROKEN = """
class NoForward(torch.autograd.Function):
    @staticmethod
    def backward(ctx, g):
        return g
class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0
class Both(NoBackward):
    @staticmethod
    def backward(ctx, g):
        return g * 2.0
    @staticmethod
    def vjp(ctx, g):
        return g * 2.0
class Vjp(NoBackward):
    @staticmethod
    def vjp(ctx, g):
        return g * 2.0
""".strip()
NESTED = """
class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xs, d, extra=None):
        out = sum(xs) + sum(d.values())
        return out if extra is None else out + extra
    @staticmethod
    def backward(ctx, g):
        return None, None, g
""".strip()
STYLES = """
class One(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, p):
        ctx.save_for_backward(x)
        ctx.k, ctx.p = k, p
        return k * x ** p
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.k * ctx.p * x ** (ctx.p - 1), None, None
class Two(torch.autograd.Function):
    @staticmethod
    def forward(x, k=2.0, p=2):
        return k * x ** p
    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.k, ctx.p = inputs
        ctx.save_for_backward(x)
    backward = One.backward
""".strip()


@scene("function.api-errors")
def test_api(s: Stage) -> None:
    """Functions that are incomplete or called wrongly raise, nested tensors are not tracked, both styles do the same."""
    s.play()
    t = modest(s)
    for kind in s.some(("styles", "nested", "forward", "backward", "both", "instance"))[:3]:
        if kind in ("forward", "backward", "both", "instance"):
            _broken(s, t, kind)
        elif kind == "nested":
            s.do(NESTED)
            many = ", ".join([t.name] * s.number(1, 3))
            s.do(f"hidden = Nested.apply([{many}], {{'y': {t.name}}})")
            s.equal(
                "(hidden.requires_grad, hidden.grad_fn)", (False, None), "tensors in lists and dicts are not tracked"
            )
            s.do(f"shown = Nested.apply([{many}], {{'y': {t.name}}}, {t.name})")
            s.true("shown.requires_grad", "an argument of its own is")
            seed = s.numbers(t.shape)
            s.do(f"shown.backward({s.tensor(seed, t.dtype)}, retain_graph=True)")
            check_leaves(s, s.grads((t, seed)), "by the argument alone")
            _forget(s)
        else:
            s.do(STYLES)
            k, power = s.choose(((2.0, 2), (3.0, 2), (2.0, 3), (0.5, 3)))
            ways = [[str(k), str(power)], [f"p={power}", f"k={k}"], [f"k={k}", f"p={power}"], [str(k), f"p={power}"]]
            ways += [[]] if (k, power) == (2.0, 2) else [[str(k)], [f"k={k}"]] if power == 2 else []
            short = [t.name, *s.choose(ways)]
            two = f"Two.apply({', '.join(short)})"
            if "=" in two:  # no release says since when; 2.4 knows no keywords
                two = f"{two} if torch.__version__ >= (2, 13) else Two.apply({t.name}, {k}, {power})"
            s.do(f"one = One.apply({t.name}, {k}, {power})\ntwo = {two}")
            s.same("one", "two", "forward is the same in both styles")
            seed = s.numbers(t.shape)
            s.do(f"v = {s.tensor(seed, t.dtype)}")
            grads = s.grads((t, seed * k * power * t.value ** (power - 1)))
            for name in ("two", "one"):
                s.do(f"{name}.backward(v, retain_graph=True)")
                check_leaves(s, grads, "backward is the same in both styles")
                _forget(s)


def _forget(s: Stage) -> None:
    s.do("\n".join(f"{leaf.name}.grad = None" for leaf in s.leaves if leaf.requires_grad))


def _broken(s: Stage, t: Paper, kind: str) -> None:
    s.do(BROKEN)
    if kind == "forward":
        s.raises(
            f"NoForward.apply({t.name})",
            "NotImplementedError",
            "it has no forward",
            fragment="You must implement the forward",
        )
    elif kind == "instance":
        cls = s.choose(("NoBackward", "Vjp", "NoForward"))
        s.raises(
            f"{cls}()({t.name})",
            "RuntimeError",
            "it is called through an instance",
            fragment="Legacy autograd function",
        )
    elif kind == "backward":
        s.do(f"z = NoBackward.apply({t.name})")
        s.true("z.requires_grad", "as of any other op")
        for ask in s.some(
            ["z.backward(torch.ones_like(z), retain_graph=True)", f"torch.autograd.grad(z.sum(), [{t.name}])"]
        ):
            s.raises(
                ask,
                "NotImplementedError",
                "it has no backward",
                fragment="You must implement either the backward or vjp method",
            )
        s.do(f"z = Vjp.apply({t.name})\nz.backward(torch.ones_like(z), retain_graph=True)")
        check_leaves(s, s.grads((t, np.full(t.shape, 2.0))), "vjp is another name of backward")
        _forget(s)
    else:
        s.do(f"z = Both.apply({t.name})")
        s.raises(
            "z.sum().backward(retain_graph=True)",
            "RuntimeError",
            "it has both backward and vjp",
            fragment="not allowed",
        )
        _forget(s)


MEMORY = """
seen = []
class Memory(torch.autograd.Function):
    clear_saved_tensors_on_access = {clear}
    boxed_grads_call = {boxed}
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * 2.0, y * 3.0, (x * 5.0).sum() + (y * 7.0).sum()
    @staticmethod
    def backward(ctx, *gs):
        if {boxed}:
            (grads,) = gs
            seen.append((type(grads), len(grads)))
            gs = tuple(grads)
            grads.clear()
        tensors = ctx.saved_tensors
        for _ in range(reads - 1):
            ctx.saved_tensors
        g, h, k = gs
        return g * 2.0 + k * 5.0 * torch.ones_like(tensors[0]), h * 3.0 + k * 7.0 * torch.ones_like(tensors[1])
""".strip()


@scene("function.memory-flags")
def test_memory_flags(s: Stage) -> None:
    """With saved tensors that can be read once, with gradients in one list, with both or neither: the same gradients."""
    s.play()
    x = filled(s)
    y = s.choose([t for t in s.tracked[::-1] if np.size(t.value) and t.dtype == x.dtype])
    clear, boxed = s.choose(((True, True), (True, False), (False, True), (False, False)))
    s.do(MEMORY.format(clear=clear, boxed=boxed))
    reads = s.number(1, 2)
    s.do(f"reads = {reads}\nouts = Memory.apply({x.name}, {y.name})")
    seeds = [s.numbers(x.shape), s.numbers(y.shape), s.numbers(())]
    names = []
    for seed in seeds:
        names.append(s.name("v"))
        s.do(f"{names[-1]} = {s.tensor(seed, x.dtype)}")
    used = s.some([0, 1, 2])
    roots, vs = ", ".join(f"outs[{i}]" for i in used), ", ".join(names[i] for i in used)
    ask = f"torch.autograd.backward([{roots}], [{vs}], retain_graph=True)"
    if clear and reads > 1:
        s.raises(
            ask,
            "RuntimeError",
            "the saved tensors were read already",
            fragment="saved_tensors can only be accessed once",
        )
        return
    s.do(ask)
    if boxed:
        s.true("seen == [(list, 3)]", "backward gets one list of all gradients")
    g, h, k = (seed if i in used else np.zeros(seed.shape) for i, seed in enumerate(seeds))
    grads = s.grads((x, g * 2.0 + k * 5.0), (y, h * 3.0 + k * 7.0))
    check_leaves(s, grads, "the flags change no gradient")
    if not clear and s.flip():
        _forget(s)
        s.do(ask)
        check_leaves(s, grads, "the flags change no gradient")
