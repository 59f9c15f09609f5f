"""Area no-grad: what is not recorded, and how far a mode reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autograd_conformance import modes
from autograd_conformance.modes import GRAD_MANAGERS, INFERENCE_HEADS, INFERENCE_MANAGERS, OFF_HEADS, Mode, Nest
from autograd_conformance.oracle import predict
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Apply, Leaf, Program, Rewrap, Statement
from autograd_conformance.reverse import cotangents
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

ALL_MANAGERS = (*GRAD_MANAGERS, *INFERENCE_MANAGERS)
INTO = ("{y}.add_({x})", "{y}.copy_({x})", "torch.mul({x}, {x}, out={y})", "{y}[...] = {x}")
VIEWS = ("{x}[...]", "{x}.view_as({x})", "{x}.unsqueeze(0)", "{x}.unbind(0)[0]", "{x}.expand_as({x})")


@scene("no-grad.outputs")
def test_outputs(s: Stage) -> None:
    """What ops make under no_grad has no grad_fn and does not require grad, and no gradient flows through a view."""
    parts = modes.cut(s)
    x = s.choose(parts.tracked)
    s.play(parts.before)
    lines: list[str | Statement] = [f"y = {s.choose(modes.PROBES).format(x=x.name)}", *parts.ops]
    filled = s.flip()
    if filled:
        s.do(f"u = torch.zeros_like({x.name})")
        lines.append(s.choose(INTO).format(y="u", x=x.name))
    view = s.choose(["", *VIEWS[: 3 if not x.shape or not x.shape[0] else None]]).format(x=x.name)
    if view:
        lines.append(f"w = {view}")
    s.block(s.choose(OFF_HEADS), *lines)
    _unrecorded(s, "y")
    if filled:
        _unrecorded(s, "u")
    for op in parts.ops:
        for name in op.outs:
            if modes.in_memory_of(op):
                s.true(f"{name}.grad_fn is None", f"{name} was made under no_grad")
            else:
                _unrecorded(s, name)
    if view:
        s.true("w.grad_fn is None", "w was made under no_grad")
        s.do(f"g, = torch.autograd.grad((w * 3.0).sum() + {x.name}.sum(), {x.name})")
        s.close("g", np.ones(x.shape), f"w was made under no_grad, so that only {x.name}.sum() counts")


def _unrecorded(s: Stage, name: str) -> None:
    s.equal(f"({name}.requires_grad, {name}.grad_fn)", (False, None), f"{name} was made under no_grad")


@scene("no-grad.later-use")
def test_later_use(s: Stage) -> None:
    """Results of parts that ran under no_grad are constants for what is made of them later."""
    kept = [t for t in s.scene.graph if isinstance(t, Leaf | Apply | Rewrap)]
    program = Program(tuple(_switched_off(s, t) for t in kept))
    due = predict(program, s.noise)
    off = [t for t in program if isinstance(t, Apply) and t.no_grad]
    _play_in_blocks(s, list(program))
    leaves = [due.tensors[t.name] for t in program if isinstance(t, Leaf)]
    tracked = [t for t in due.tensors.values() if t.requires_grad and np.size(t.value)]
    t = s.choose(tracked[::-1])
    constants = [due.tensors[n] for op in off for n in op.outs if due.tensors[n].dtype.startswith("float")]
    constants = [c for c in constants if np.size(c.value) and np.all(np.isfinite(c.value))]
    if not constants or s.flip():
        own = s.choose([t for t in tracked if np.all(np.isfinite(t.value))])
        s.block(s.choose(OFF_HEADS), f"k = {own.name} * {s.factor()} + {own.name}")
        c = Paper("k", own.shape, own.dtype, own.value * (1.0 + _last_factor(s)), False, own.storage)
    else:
        c = s.choose(constants)
    how, seed_of = s.choose(LATER)
    s.do(f"z = {how.format(t=t.name, c=c.name)}")
    values = [v.value if s.noise is None else s.noise(v.value, v.dtype) for v in (t, c)]
    grads = cotangents([(t, seed_of(*values))], noise=s.noise)
    passes = s.number(1, 2)
    for i in range(passes):
        s.do(f"z.backward({'retain_graph=True' if i + 1 < passes else ''})")
        for leaf in leaves:
            if leaf.requires_grad:
                g = grads.get(leaf.name)
                s.close(f"{leaf.name}.grad", None if g is None else g * (i + 1.0), f"{c.name} is a constant")
    if c.name != "k":
        s.true(f"{c.name}.grad is None", "a constant gets no gradient")


def _last_factor(s: Stage) -> float:
    """The factor in the line that the stage has just added."""
    line = s.script.items[-1]
    assert not isinstance(line, Leaf | Apply)
    return float(str(getattr(line, "text", "")).rpartition(" * ")[2].partition(" + ")[0])


# Uses of a constant ``c`` together with a tracked ``t``, and the cotangent that ``t`` gets.
LATER: tuple[tuple[str, Callable[[Array, Array], Array]], ...] = (
    ("{t}.sum() * {c}.sum()", lambda t, c: np.full(t.shape, c.sum())),
    ("({t} * {c}.sum()).sum()", lambda t, c: np.full(t.shape, c.sum())),
    ("({c} * {t}.sum() + {c}).sum()", lambda t, c: np.full(t.shape, c.sum())),
    ("({c} - {t}.sum()).sum()", lambda t, c: np.full(t.shape, -1.0 * c.size)),
    ("({t}.sum() * {c} * {c}).sum()", lambda t, c: np.full(t.shape, (c * c).sum())),
    ("({t} * {t}).sum() * {c}.sum()", lambda t, c: 2.0 * t * c.sum()),
)


def _switched_off(s: Stage, statement: Statement) -> Statement:
    """The statement, some of them under no_grad; views are left alone, for nobody says what their flag is."""
    if not isinstance(statement, Apply) or modes.in_memory_of(statement) or not s.flip():
        return statement
    return Apply(statement.outs, statement.op, statement.args, statement.params, no_grad=True)


def _play_in_blocks(s: Stage, statements: list[Statement]) -> None:
    """Add statements, those of no_grad that follow each other in one block."""
    group: list[Statement] = []
    for statement in [*statements, None]:
        if isinstance(statement, Apply) and statement.no_grad:
            group.append(Apply(statement.outs, statement.op, statement.args, statement.params))
            continue
        if group:
            s.block(s.choose(OFF_HEADS), *group)
            group = []
        if statement is not None:
            s.play([statement])


# --- what requires grad all the same ----------------------------------------------------------------------------------

FACTORIES = (
    "torch.zeros({shape}, requires_grad=True{o})",
    "torch.ones({shape}, requires_grad=True{o})",
    "torch.full({shape}, 0.5, requires_grad=True{o})",
    "torch.empty({shape}, requires_grad=True{o})",
    "torch.rand({shape}, requires_grad=True{o})",
    "torch.randn({shape}, requires_grad=True{o})",
    "torch.tensor([1.0, 2.0], requires_grad=True{o})",
    "torch.tensor(1.0, requires_grad=True{o})",
    "torch.arange(3.0, requires_grad=True{o})",
    "torch.linspace(0.0, 1.0, 3, requires_grad=True{o})",
    "torch.eye(2, requires_grad=True{o})",
    "torch.empty_strided((2, 2), (1, 2), requires_grad=True{o})",
    "torch.zeros_like({t}, requires_grad=True)",
    "torch.ones_like({t}, requires_grad=True)",
    "torch.full_like({t}, 2.0, requires_grad=True)",
    "torch.empty_like({t}, requires_grad=True)",
    "torch.rand_like({t}, requires_grad=True)",
    "torch.randn_like({t}, requires_grad=True)",
    "{t}.new_zeros({shape}, requires_grad=True)",
    "{t}.new_ones({shape}, requires_grad=True)",
    "{t}.new_full({shape}, 2.0, requires_grad=True)",
    "{t}.new_empty({shape}, requires_grad=True)",
    "{t}.new_tensor([1.0], requires_grad=True)",
)
PARAMETERS = (
    "torch.nn.Parameter(torch.zeros({shape}{o}))",
    "torch.nn.Parameter({t}.detach())",
    "torch.nn.Parameter({t})",
    "torch.nn.Parameter({t}, requires_grad=True)",
    "torch.nn.Parameter({t} * 2.0)",
)
SWITCHED = (
    "({t} * 2.0).requires_grad_()",
    "{t}.detach().requires_grad_()",
    "{t}.detach().clone().requires_grad_(True)",
    "torch.zeros({shape}{o}).requires_grad_()",
    "({t} + {t}).sum().requires_grad_()",
)
MODULES = (
    "torch.nn.Linear(2, 3{o})",
    "torch.nn.Linear(2, 1, bias=False{o})",
    "torch.nn.LayerNorm(2{o})",
    "torch.nn.BatchNorm1d(2{o})",
    "torch.nn.Conv1d(1, 2, 1{o})",
    "torch.nn.Embedding(2, 2{o})",
    "torch.nn.PReLU({o1})",
    "torch.nn.Sequential(torch.nn.Linear(2, 2{o}), torch.nn.Linear(2, 1{o}))",
)


@scene("no-grad.factory-exception")
def test_factory_exception(s: Stage) -> None:
    """Factories, Parameters, modules and requires_grad_() give tensors that require grad, and collect gradients."""
    s.play()
    t = s.choose(s.tracked)
    options = f", dtype=torch.{s.wide}{s.on}"
    lines: list[str] = []
    made: list[tuple[str, bool]] = []
    for _ in range(s.number(1, 4)):
        kind = s.choose((FACTORIES, PARAMETERS, SWITCHED, MODULES, FACTORIES))
        shape = s.choose(((), (1,), (2,), (2, 3), (0,), (1, 2, 1)))
        text = s.choose(kind).format(shape=shape, t=t.name, o=options, o1=options[2:])
        name = s.name("net" if kind is MODULES else "p")
        lines.append(f"{name} = {text}")
        made.append((name, kind is MODULES))
    s.block(s.choose(OFF_HEADS), *lines)
    for name, is_module in made:
        if is_module:
            s.true(f"all(p.requires_grad and p.is_leaf for p in {name}.parameters())", "a Parameter requires grad")
            s.do(f"sum(p.sum() * 2.0 for p in {name}.parameters()).backward()")
            s.true(f"all(p.grad is not None for p in {name}.parameters())", "the parameters are leaves of this graph")
        else:
            s.equal(f"({name}.requires_grad, {name}.is_leaf)", (True, True), f"{name} asked for it, whatever the mode")
            s.do(f"({name} * 2.0).sum().backward()")
            s.true(f"{name}.grad is not None", f"{name} is a leaf of this graph")
            if s.device.has("values"):
                s.true(f"bool(({name}.grad == 2.0).all())", "the derivative of twice the sum")


# --- how far a mode reaches -------------------------------------------------------------------------------------------


@scene("no-grad.nesting-restores")
def test_nesting_restores(s: Stage) -> None:
    """The innermost block decides, and whichever way a block is left, the mode from before is back."""
    x = _looked_at(s)
    log = modes.look(s, x)
    nest = Nest(s, GRAD_MANAGERS)
    lines: list[str] = []
    for _ in range(s.number(1, 2)):
        lines += nest.block(Mode(), s.number(1, 3))
        lines += nest.look(Mode())
    s.do("\n".join(lines))
    s.equal(log, nest.seen, "a stack of modes, the innermost on top")


def _looked_at(s: Stage) -> str:
    """Plays the graph; returns the name of a tensor that requires grad."""
    s.play()
    return s.choose(s.tracked).name


DECORATORS = (
    "torch.no_grad()",
    "torch.no_grad",
    "torch.enable_grad()",
    "torch.enable_grad",
    "torch.inference_mode()",
    "torch.inference_mode",
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "torch.inference_mode(False)",
    "torch.no_grad()",
    "torch.no_grad()",
)
FUNCTION = """def f{i}(n, fails=False):
    look()
    if n:
        assert f{i}(n - 1) == n - 1
        look()
    if fails:
        raise KeyError
    return n"""
GENERATOR = """def f{i}(n):
    got = []
    try:
        for j in range(n):
            look()
            got.append((yield j))
        return got
    finally:
        if ending:  # not where a generator that was left alone is collected
            look()"""


@scene("no-grad.decorators")
def test_decorators(s: Stage) -> None:
    """A decorated function runs in its mode, a decorated generator too, and their callers keep their own."""
    modes.look(s, _looked_at(s))
    nest = Nest(s, ALL_MANAGERS)
    kinds = [s.choose((False, True, True)) for _ in range(s.number(1, 2))]
    words: list[list[str]] = []
    for i, generates in enumerate(kinds):
        words.append([s.choose(DECORATORS) for _ in range(s.choose((1, 1, 2)))])
        text = (GENERATOR if generates else FUNCTION).format(i=i)
        s.do("\n".join([*(f"@{word}" for word in words[-1]), text]))
    lines = ["ending = False", *nest.look(Mode())]
    alive: dict[int, int] = {}
    for step in range(s.number(1, 4)):
        i = s.choose(range(len(kinds)))
        outer = s.choose(("", "", "torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()"))
        mode = Mode().under(outer) if outer else Mode()
        inner = _inner(s, mode, words[i])
        body = _step(s, nest, i, inner, alive) if kinds[i] else _call(s, nest, i, inner)
        body += nest.look(mode)
        lines += [f"with {outer}:", *modes.indented(body)] if outer else body
        if outer and step % 2:
            lines += nest.look(Mode())
    for i in list(alive):
        lines += _end(s.choose(("close", "throw", "drain")), nest, i, _inner(s, Mode(), words[i]), alive)
        lines += nest.look(Mode())
    lines += nest.look(Mode())
    s.do("\n".join(lines))
    s.equal("list(log)", nest.seen, "the mode of the decorator within, that of the caller outside")


def _inner(s: Stage, mode: Mode, words: Sequence[str]) -> Mode:
    """The mode within decorators that are called in a mode."""
    for word in words:
        s.require(mode.allows(word))
        mode = mode.under(word)
    return mode


def _call(s: Stage, nest: Nest, i: int, inner: Mode) -> list[str]:
    """A call of a decorated function, which may call itself and may raise."""
    depth, fails = s.choose((0, 0, 1, 2)), s.number(0, 2) == 2
    nest.seen += [inner.seen()] * (2 * depth + 1)
    if fails:
        return ["try:", f"    f{i}({depth}, fails=True)", "except KeyError:", "    pass"]
    return [f"assert f{i}({depth}) == {depth}"]


def _step(s: Stage, nest: Nest, i: int, inner: Mode, alive: dict[int, int]) -> list[str]:
    """Some event in the life of a decorated generator; ``alive`` knows how many values are still to come."""
    if i not in alive:
        alive[i] = s.number(1, 3)
        made = [f"it{i} = f{i}({alive[i]})", *nest.look_of(inner, f"next(it{i})")]
        alive[i] -= 1
        return made
    way = s.choose(("next", "send", "close", "throw", "drain"))
    if way in ("next", "send") and alive[i]:
        alive[i] -= 1
        return nest.look_of(inner, f"next(it{i})" if way == "next" else f"it{i}.send(1)")
    return _end(way, nest, i, inner, alive)


def _end(way: str, nest: Nest, i: int, inner: Mode, alive: dict[int, int]) -> list[str]:
    """The end of a generator: it is closed, gets an exception, or is asked for all that it has left."""
    left = alive.pop(i)
    nest.seen.append(inner.seen())
    if way == "throw":
        return _ending("try:", f"    it{i}.throw(KeyError())", "except KeyError:", "    pass")
    if way == "close":
        return _ending(f"it{i}.close()")
    nest.seen += [inner.seen()] * left
    return _ending(f"assert len(list(it{i})) == {left}")


def _ending(*lines: str) -> list[str]:
    """The end of a generator."""
    return ["ending = True", *lines, "ending = False"]


@scene("no-grad.set-grad-enabled-function")
def test_set_grad_enabled_function(s: Stage) -> None:
    """Plain calls of set_grad_enabled hold until the next one, or until a block around them ends."""
    x = _looked_at(s)
    modes.look(s, x)
    nest = Nest(s, GRAD_MANAGERS, calls=True)
    mode = Mode()
    for _ in range(s.number(1, 4)):
        if s.number(0, 2) < 2:
            flag = s.flip()
            s.do(s.choose(("torch.set_grad_enabled({})", "torch.set_grad_enabled(mode={})", CALLED)).format(flag))
            mode = Mode(flag)
        else:
            s.do("\n".join(nest.block(mode, s.number(1, 2))))
        s.equal("torch.is_grad_enabled()", mode.grad, "as the last call said")
        s.do("\n".join(nest.look(mode)))
        s.equal("list(log)", list(nest.seen), "calls hold until a block around them ends")
    s.do("torch.set_grad_enabled(True)")


CALLED = "def switch(): torch.set_grad_enabled({})\nswitch()"


@scene("no-grad.thread-local")
def test_thread_local(s: Stage) -> None:
    """A thread begins in grad mode, whatever the mode where it was started, and keeps its modes to itself."""
    x = _looked_at(s)
    s.do("import threading, concurrent.futures")
    modes.look(s, x)
    nest = Nest(s, ALL_MANAGERS)
    outer: list[str] = []
    mode = Mode()
    for _ in range(s.number(1, 3)):
        outer.append(s.choose([m for m in ALL_MANAGERS if mode.allows(m)]))
        mode = mode.under(outer[-1])
    lines: list[str] = []
    for _ in range(s.number(1, 2)):
        lines += s.choose((_looking, _entering, _switching, _pooled))(s, nest, mode)
        lines += nest.look(mode)
    for manager in reversed(outer):
        lines = [f"with {manager}:", *modes.indented(lines)]
    s.do("\n".join([*lines, *nest.look(Mode())]))
    s.equal("list(log)", nest.seen, "modes belong to their thread, and a thread begins in grad mode")


def _looking(s: Stage, nest: Nest, mode: Mode) -> list[str]:
    """Threads that only look."""
    del s, mode
    return [*nest.look_of(Mode(), "thread = threading.Thread(target=look)"), "thread.start()", "thread.join()"]


def _entering(s: Stage, nest: Nest, mode: Mode) -> list[str]:
    """A thread that is in a block of its own while its starter looks."""
    manager = s.choose(ALL_MANAGERS)
    text = ENTERS.format(manager=manager).splitlines()
    nest.seen += [Mode().seen(), Mode().under(manager).seen(), mode.seen(), Mode().under(manager).seen(), Mode().seen()]
    return text


ENTERS = """inside, leave = threading.Event(), threading.Event()
def work():
    look()
    with {manager}:
        look()
        inside.set()
        leave.wait(60)
        look()
    look()
thread = threading.Thread(target=work)
thread.start()
inside.wait(60)
look()
leave.set()
thread.join()"""


def _switching(s: Stage, nest: Nest, mode: Mode) -> list[str]:
    """A thread that switches its mode by a plain call and ends, and one that comes after it."""
    del mode
    flag = s.flip()
    nest.seen += [Mode(flag).seen(), Mode().seen()]
    return SWITCHES.format(flag=flag).splitlines()


SWITCHES = """def work():
    torch.set_grad_enabled({flag})
    look()
for target in (work, look):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()"""


def _pooled(s: Stage, nest: Nest, mode: Mode) -> list[str]:
    """A thread that lives on between its tasks."""
    del mode
    flag = s.flip()
    nest.seen += [Mode().seen(), Mode(flag).seen()]
    return POOLED.format(flag=flag).splitlines()


POOLED = """with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(look).result()
    pool.submit(torch.set_grad_enabled, {flag}).result()
    pool.submit(look).result()"""


# --- what is allowed there, and what is saved -------------------------------------------------------------------------

Write = Callable[[Array, float], Array]
WRITES: tuple[tuple[str, Write], ...] = (
    ("{p}.add_({k})", lambda v, k: v + k),
    ("{p}.mul_({k})", lambda v, k: v * k),
    ("{p}.sub_({k})", lambda v, k: v - k),
    ("{p} -= {k}", lambda v, k: v - k),
    ("{p} *= {k}", lambda v, k: v * k),
    ("{p}.zero_()", lambda v, k: v * 0.0),
    ("{p}.fill_({k})", lambda v, k: v * 0.0 + k),
    ("{p}.neg_()", lambda v, k: -v),
    ("{p}[...] = {k}", lambda v, k: v * 0.0 + k),
    ("{p}.copy_(torch.full_like({p}, {k}))", lambda v, k: v * 0.0 + k),
    ("{p}.add_({p}, alpha={k})", lambda v, k: v + k * v),
    ("torch.mul({p}, {k}, out={p})", lambda v, k: v * k),
    ("{p}.view_as({p}).mul_({k})", lambda v, k: v * k),
    ("{p}.clamp_(max=0.5)", lambda v, k: np.minimum(v, 0.5)),
    ("torch.nn.init.constant_({p}, {k})", lambda v, k: v * 0.0 + k),
)


@scene("no-grad.leaf-inplace-allowed")
def test_leaf_inplace_allowed(s: Stage) -> None:
    """Leaves are written to under no_grad, stay leaves, count the write, and what follows uses the new numbers."""
    fitting = [t for t in s.scene.graph if isinstance(t, Leaf) and t.requires_grad and t.data.values]
    fitting = [t for t in fitting if t.layout != "expanded"]  # which shares memory between elements: not to be written
    leaves = s.some(fitting)
    s.play_leaves()
    now = {t.name: np.array(t.data.values, dtype=np.float64).reshape(t.data.shape) for t in leaves}
    total = {name: np.zeros(v.shape) for name, v in now.items()}
    for _ in range(s.number(1, 3)):
        names = [t.name for t in leaves]
        s.do(f"versions = [{', '.join(f'{n}._version' for n in names)}]")
        lines: list[str] = []
        for name in names:
            for _ in range(s.number(1, 2)):
                text, paper = s.choose(WRITES)
                k = s.factor()
                lines.append(text.format(p=name, k=k))
                now[name] = paper(now[name], k)
        s.block(s.choose(OFF_HEADS), *lines)
        for i, name in enumerate(names):
            flags = f"({name}.is_leaf, {name}.requires_grad, {name}.grad_fn)"
            s.equal(flags, (True, True, None), "the write was not recorded")
            s.true(f"{name}._version > versions[{i}]", "it was written to")
            s.close(name, now[name], "these numbers were written")
        s.do("\n".join(f"({n} * {n}).sum().backward()" for n in names))
        for name in names:
            total[name] = total[name] + 2.0 * now[name]
            s.close(f"{name}.grad", total[name], "the derivative of the squares of what was written")


SAVING = (
    "{x} * {x}",
    "{x}.exp()",
    "{x}.sin()",
    "{x}.tanh() * 2.0",
    "{x} ** 3",
    "{x} / ({x} * {x} + 1.0)",
    "torch.sigmoid({x})",
    "torch.nn.functional.gelu({x})",
    "torch.where({x} > 0, {x}, {x} * {x})",
    "torch.dot({x}.reshape(-1), {x}.reshape(-1))",
    "torch.nn.functional.linear({x}.reshape(1, -1), {x}.reshape(1, -1))",
    "Squared.apply({x})",
)
SQUARED = """class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, g):
        return 2.0 * ctx.saved_tensors[0] * g"""


@scene("no-grad.saves-nothing")
def test_saves_nothing(s: Stage) -> None:
    """No hook for saved tensors is called under no_grad or in inference mode."""
    parts = modes.cut(s)
    x = s.choose(parts.tracked)
    s.play(parts.before)
    own = [s.choose(SAVING).format(x=x.name) for _ in range(s.number(1, 2))]
    if any("Squared" in text for text in own):
        s.do(SQUARED)
    s.do("saved = []\nhooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)")
    head = s.choose(s.choose((OFF_HEADS, INFERENCE_HEADS)))
    if "inference_mode(), torch.enable_grad" in head:  # where a custom Function is recorded: a claim of its own
        s.require(not s.added)
        own = [text.replace("Squared.apply", "torch.square") for text in own]
    lines = [*(f"y = {text}" for text in own), *map(s.source, parts.ops)]
    within = s.flip()
    heads = (head, "with hooks:") if within else ("with hooks:", head)
    s.block(heads[0], s.block_source(heads[1], *lines))
    s.equal("len(saved)", 0, "nothing is recorded, so that nothing is saved")
    if s.flip():
        s.block(
            "with hooks:",
            s.block_source(head, f"y = {x.name} * {x.name}"),
            f"recorded = {x.name}.exp()",
            s.block_source(head, f"y = {x.name}.exp()"),
            "count = len(saved)",
        )
        s.block(head, s.block_source("with hooks:", f"y = {x.name} * {x.name}"))
        s.equal("len(saved) - count", 0, "only what was recorded between is saved")


LAYERS = (
    "torch.nn.Linear({n}, {n}{o})",
    "torch.nn.Dropout(0.5)",
    "torch.nn.BatchNorm1d({n}{o})",
    "torch.nn.LayerNorm({n}{o})",
    "torch.nn.ReLU()",
    "torch.nn.Sequential(torch.nn.Linear({n}, {n}{o}), torch.nn.Dropout())",
)
TOGGLES = (
    "net.eval()",
    "net.train()",
    "net.train(False)",
    "net.train(True)",
    "net[-1].eval()",
    "net[0].train()",
    "for module in net.modules(): module.eval()",
    "net.eval().train()",
)


@scene("no-grad.eval-orthogonal")
def test_eval_orthogonal(s: Stage) -> None:
    """train() and eval() leave the grad mode, the flags of parameters, and what is recorded as they were."""
    x = s.choose([t for t in s.tensors if np.size(t.value)])
    s.play()
    options = f", dtype=torch.{x.dtype}{s.on}"
    n = int(np.size(x.value))
    s.require(n <= 24)
    layers = [s.choose(LAYERS).format(n=n, o=options) for _ in range(s.number(1, 3))]
    s.do(f"net = torch.nn.Sequential(torch.nn.Linear({n}, {n}{options}), {', '.join(layers)})")
    s.do(f"h = {x.name}.reshape(1, -1).repeat(3, 1){s.choose(('.detach()', ''))}")
    frozen = s.choose(
        ("", "net.requires_grad_(False)", "net[0].requires_grad_(False)", "net[0].bias.requires_grad = False")
    )
    if frozen:
        s.do(frozen)
    s.do("flags = [p.requires_grad for p in net.parameters()]\ndue = h.requires_grad or any(flags)")
    for _ in range(s.number(1, 4)):
        manager = s.choose(("", "torch.no_grad()", "", "torch.enable_grad()"))
        grad = manager != "torch.no_grad()"
        lines = [*(s.choose(TOGGLES) for _ in range(s.number(1, 2))), "mode = torch.is_grad_enabled()", "y = net(h)"]
        s.do("\n".join([f"with {manager}:", *modes.indented(lines)] if manager else lines))
        s.equal("mode", grad, "modules have nothing to do with the grad mode")
        s.true("flags == [p.requires_grad for p in net.parameters()]", "nor with the flags of their parameters")
        due = "due" if grad else "False"
        s.true(f"y.requires_grad is {due} and (y.grad_fn is not None) is {due}", "nor with what is recorded")
        s.true("torch.is_grad_enabled()", "the mode outside")
    s.do("params = [p for p in net.parameters() if p.requires_grad]")
    s.do("found = torch.autograd.grad(net.eval()(h).sum(), params) if params else []")
    s.true("all(g is not None and g.shape == p.shape for g, p in zip(found, params))", "eval() is no no_grad()")
