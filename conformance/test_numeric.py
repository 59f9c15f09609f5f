"""Area numeric: derivatives that torch checks or computes in other ways, and other devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autograd_conformance.modes import ERRORS
from autograd_conformance.oracle import predict
from autograd_conformance.paper import Array, Paper
from autograd_conformance.program import Apply, Leaf, Program, Statement
from autograd_conformance.reverse import cotangents
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

FUNCTION = """class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * x + x * y
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return {x}, {y}"""
RIGHT = ("g * (2.0 * x + y)", "g * x")
# Wrong gradients of x or y. The inputs have no zeros and are none of the numbers that would make one of these right.
WRONG_X = (
    "g * (x + y)",
    "g * (2.0 * x + y) * 1.25",
    "g * (2.0 * x - y)",
    "-g * (2.0 * x + y)",
    "g * (2.0 * x + y) + 0.5",
    "g * 2.0 * x",
    "torch.where(torch.arange(x.numel(){o}).reshape(x.shape) == x.numel() - 1, 0.0, g * (2.0 * x + y))",
)
WRONG_Y = ("g * x * 0.5", "g * y", "torch.zeros_like(y)", "-g * x", "g * x + 0.25")
# The first derivative is right, that of the derivative is not.
WRONG_SECOND = ("g * (2.0 * x.detach() + y)", "g.detach() * (2.0 * x + y)", "g * (2.0 * x + y.detach())")
MISMATCH = "Jacobian mismatch for output"
SHAPES = ((), (1,), (2,), (), (1, 2))


@scene("numeric.gradcheck")
def test_gradcheck(s: Stage) -> None:
    """gradcheck tells right gradients from wrong ones, first and second, and refuses what it cannot judge."""
    s.choose((_first, _wrong, _refused, _wrong, _second, _first, _wrong))(s)


def _inputs(s: Stage, flags: tuple[bool, bool] = (True, True), dtype: str = "float64") -> None:
    shape = s.choose(SHAPES)
    x = s.numbers(shape) * 0.5 + np.where(s.numbers(shape) > 0, 1.0, 1.5)
    y = s.numbers(shape) + 3.25
    s.do(f"x = {s.tensor(x, dtype, requires_grad=flags[0])}\ny = {s.tensor(y, dtype, requires_grad=flags[1])}")


def _function(s: Stage, x: str = RIGHT[0], y: str = RIGHT[1]) -> None:
    s.do(FUNCTION.format(name="F", x=x.format(o=s.on), y=y))


def _options(s: Stage) -> str:
    """Options of gradcheck that change nothing about its verdict here."""
    return s.choose(("", ", atol=1e-6", ", fast_mode=True", ", eps=1e-5", ", check_undefined_grad=False"))


def _first(s: Stage) -> None:
    _inputs(s, s.choose(((True, True), (True, False), (False, True))))
    _function(s)
    s.do(f"verdict = torch.autograd.gradcheck(F.apply, (x, y){_options(s)})")
    s.true("verdict", "the gradients are right")


def _wrong(s: Stage) -> None:
    _inputs(s)
    if s.flip():
        _function(s, y=s.choose(WRONG_Y))
    else:
        _function(s, x=s.choose(WRONG_X))
    options = s.choose(("", ", atol=1e-6", ", eps=1e-5", ", check_undefined_grad=False"))
    if s.flip():
        s.do(f"verdict = torch.autograd.gradcheck(F.apply, (x, y){options}, raise_exception=False)")
        s.false("verdict", "the gradients are wrong")
    else:
        call = f"torch.autograd.gradcheck(F.apply, (x, y){options})"
        s.raises(call, "GradcheckError", "the gradients are wrong", fragment=MISMATCH)


def _second(s: Stage) -> None:
    _inputs(s)
    wrong = s.flip()
    _function(s, x=s.choose(WRONG_SECOND) if wrong else RIGHT[0])
    if not wrong:
        s.do("verdict = torch.autograd.gradgradcheck(F.apply, (x, y))")
        s.true("verdict", "the second derivatives are right")
        return
    if s.flip():
        s.true("torch.autograd.gradcheck(F.apply, (x, y))", "the first derivatives are right")
    if s.flip():
        s.do("verdict = torch.autograd.gradgradcheck(F.apply, (x, y), raise_exception=False)")
        s.false("verdict", "the second derivatives are wrong")
    else:
        call = "torch.autograd.gradgradcheck(F.apply, (x, y))"
        s.raises(call, "GradcheckError", "the second derivatives are wrong", fragment=MISMATCH)


def _refused(s: Stage) -> None:
    what = s.choose(("untracked", "single", "overlapping"))
    _function(s)
    if what == "untracked":
        _inputs(s, (False, False))
        call = f"torch.autograd.gradcheck(F.apply, (x, y){_options(s)})"
        s.raises(call, "ValueError", "no input requires grad")
    elif what == "single":
        _inputs(s, dtype="float32")
        s.do("import warnings")
        s.block(
            "with warnings.catch_warnings(record=True) as caught:",
            "warnings.simplefilter('always')",
            "torch.autograd.gradcheck(F.apply, (x, y), raise_exception=False)",
        )
        s.true("any(issubclass(w.category, UserWarning) for w in caught)", "it warns of single precision")
    else:
        _inputs(s)
        s.do(f"x = x.detach().expand({s.number(2, 3)}, *x.shape).requires_grad_()")
        call = f"torch.autograd.gradcheck(F.apply, (x, y){_options(s)})"
        s.raises(call, "RuntimeError", "elements of an expanded input share memory")


# --- functional -------------------------------------------------------------------------------------------------------

Smooth = tuple[str, Callable[[Array], Array], Callable[[Array], Array], Callable[[Array], Array]]
SMOOTH: tuple[Smooth, ...] = (
    ("x * x", lambda v: v * v, lambda v: 2 * v, lambda v: np.full(v.shape, 2.0)),
    ("x.sin()", np.sin, np.cos, lambda v: -np.sin(v)),
    ("x.exp()", np.exp, np.exp, np.exp),
    ("x ** 3", lambda v: v**3, lambda v: 3 * v**2, lambda v: 6 * v),
    ("x * x * 0.5 + x", lambda v: v * v / 2 + v, lambda v: v + 1, lambda v: np.ones(v.shape)),
)


@scene("numeric.functional-api")
def test_functional_api(s: Stage) -> None:
    """The functions of autograd.functional agree with Jacobian and Hessian on paper, tracked only if asked."""
    fitting = [t for t in s.tensors if 0 < np.size(t.value) <= 8 and np.max(np.abs(t.value)) <= 2.5]
    x = s.choose(fitting)
    s.play()
    s.do("from torch.autograd import functional")
    for _ in range(s.number(1, 2)):
        s.choose((_jacobian, _vjp, _jvp, _hessian, _hvp, _vhp, _independent, _independent))(s, x)


def _vector(s: Stage, x: Paper) -> tuple[Array, Array, tuple[int, ...]]:
    """Define f, of as many outputs as ``w`` has rows, and g, of one.

    Returns the Jacobian of f, a row for each output; the Hessian of g; the shape of what f returns.

    f(x) = W p(x), and g(x) = sum(p(x)) + sum(x)^2 / 2, with p elementwise.
    """
    text, _, first, second = s.choose(SMOOTH)
    value, n = _rounded(s, x.value, x).reshape(-1), int(np.size(x.value))
    rows = s.choose((1, 2, 3, min(n, 4)))
    w = s.numbers((rows, n))
    shapes: tuple[tuple[int, ...], ...] = ((rows,), (rows,), (1, rows), (rows, 1))
    shape = s.choose(((1,), (), (1, 1)) if rows == 1 else shapes)
    out = f"w @ ({text}).reshape(-1)" + (f".reshape({shape})" if shape != (rows,) else "")
    if shape == ():
        out = f"(w @ ({text}).reshape(-1)).sum()"
    elif shape != (rows,):
        out = f"(w @ ({text}).reshape(-1)).reshape({shape})"
    s.do(f"w = {s.tensor(w, x.dtype)}")
    s.do(f"def f(x):\n    return {out}\ndef g(x):\n    return ({text}).sum() + x.sum() ** 2 * 0.5")
    return _rounded(s, w * first(value), x), _rounded(s, np.diag(second(value)) + 1.0, x), shape


def _rounded(s: Stage, value: Array, x: Paper) -> Array:
    """Random rounding, if asked for."""
    return value if s.noise is None else s.noise(value, x.dtype)


def _create(s: Stage) -> tuple[str, bool]:
    """The option create_graph, and whether it is on; strict, which changes nothing here."""
    return s.choose(
        ((", create_graph=False", False), ("", False), (", create_graph=True", True), (", strict=True", False))
    )


def _result(s: Stage, name: str, due: Array, tracked: bool, because: str) -> None:
    s.close(name, due, because)
    s.equal(f"{name}.requires_grad", tracked, "tracked if create_graph asks for it")


def _jacobian(s: Stage, x: Paper) -> None:
    jacobian, _, shape = _vector(s, x)
    option, tracked = s.choose(
        ((", create_graph=False", False), ("", False), (", create_graph=True", True), (", vectorize=True", False))
    )
    s.do(f"found = functional.jacobian(f, {x.name}{option})")
    whole = jacobian.reshape((*shape, *x.shape))
    _result(s, "found", whole, tracked, "a row for each output")
    if s.flip():
        s.do(f"both = functional.jacobian(lambda x, y: (f(x) + f(y) * 2.0, y * 3.0), ({x.name}, {x.name}))")
        s.close("both[0][0]", whole, "the first output by the first input")
        s.close("both[0][1]", 2.0 * whole, "the first output by the second input")
        s.close("both[1][0]", np.zeros((*x.shape, *x.shape)), "the second output has nothing of the first input")
        eye = 3.0 * np.eye(int(np.size(x.value))).reshape((*x.shape, *x.shape))
        s.close("both[1][1]", eye, "the second output by the second input")


def _vjp(s: Stage, x: Paper) -> None:
    jacobian, _, shape = _vector(s, x)
    v = s.numbers(shape)
    option, tracked = _create(s)
    product = (v.reshape(-1) @ jacobian).reshape(x.shape)
    if s.flip():
        s.do(f"out, found = functional.vjp({_TWO_F}, ({x.name}, {x.name}), {s.tensor(v, x.dtype)}{option})")
        _result(s, "found[1]", 2.0 * product, tracked, "v times the Jacobian by the second input")
        _result(s, "found[0]", product, tracked, "v times the Jacobian by the first input")
    else:
        s.do(f"out, found = functional.vjp(f, {x.name}, {s.tensor(v, x.dtype)}{option})")
        _result(s, "found", product, tracked, "v times the Jacobian")
    s.equal("out.requires_grad", tracked, "tracked if create_graph asks for it")


def _jvp(s: Stage, x: Paper) -> None:
    jacobian, _, shape = _vector(s, x)
    v = s.numbers(x.shape)
    option, tracked = _create(s)
    if s.flip():
        u = s.numbers(x.shape)
        vectors = f"({s.tensor(v, x.dtype)}, {s.tensor(u, x.dtype)})"
        s.do(f"out, found = functional.jvp({_TWO_F}, ({x.name}, {x.name}), {vectors}{option})")
        v = v + 2.0 * u
    else:
        s.do(f"out, found = functional.jvp(f, {x.name}, {s.tensor(v, x.dtype)}{option})")
    _result(s, "found", (jacobian @ v.reshape(-1)).reshape(shape), tracked, "the Jacobian times v")
    s.equal("out.requires_grad", tracked, "tracked if create_graph asks for it")


# Functions of two inputs: the Jacobian by the second is twice that by the first, and likewise the Hessians, whose mixed
# parts are the identity.
_TWO_F = "lambda x, y: f(x) + f(y) * 2.0"
_TWO_G = "lambda x, y: g(x) + g(y) * 2.0 + (x * y).sum()"


def _hessian(s: Stage, x: Paper) -> None:
    _, hessian, _ = _vector(s, x)
    option, tracked = s.choose((("", False), (", create_graph=True", True), (", vectorize=True", False)))
    shape = (*x.shape, *x.shape)
    if not s.flip():
        s.do(f"found = functional.hessian(g, {x.name}{option})")
        _result(s, "found", hessian.reshape(shape), tracked, "second derivatives of g")
        return
    s.do(f"found = functional.hessian({_TWO_G}, ({x.name}, {x.name}){option})")
    _result(s, "found[0][0]", hessian.reshape(shape), tracked, "second derivatives by the first input")
    _result(s, "found[1][1]", 2.0 * hessian.reshape(shape), tracked, "second derivatives by the second input")
    eye = np.eye(int(np.size(x.value))).reshape(shape)
    s.close("found[0][1]", eye, "mixed derivatives")
    s.close("found[1][0]", eye, "mixed derivatives")


def _hvp(s: Stage, x: Paper) -> None:
    _product(s, x, "hvp")


def _vhp(s: Stage, x: Paper) -> None:
    _product(s, x, "vhp")


def _product(s: Stage, x: Paper, word: str) -> None:
    _, hessian, _ = _vector(s, x)
    v = s.numbers(x.shape)
    option, tracked = s.choose((("", False), (", create_graph=True", True)))
    due = (hessian @ v.reshape(-1)).reshape(x.shape)
    why = "the Hessian, which is symmetric, times v"
    if not s.flip():
        s.do(f"out, found = functional.{word}(g, {x.name}, {s.tensor(v, x.dtype)}{option})")
        _result(s, "found", due, tracked, why)
        return
    u = s.numbers(x.shape)
    vectors = f"({s.tensor(v, x.dtype)}, {s.tensor(u, x.dtype)})"
    s.do(f"out, found = functional.{word}({_TWO_G}, ({x.name}, {x.name}), {vectors}{option})")
    _result(s, "found[0]", due + u, tracked, why)
    _result(s, "found[1]", 2.0 * (hessian @ u.reshape(-1)).reshape(x.shape) + v, tracked, why)


INDEPENDENT = "of the user-provided function"


def _independent(s: Stage, x: Paper) -> None:
    """An output that has nothing to do with the input."""
    outs = s.number(1, 3)
    s.do(f"def f(x):\n    return torch.ones({outs}, dtype={x.name}.dtype{s.on})")
    v, u = s.tensor(s.numbers((outs,)), x.dtype), s.tensor(s.numbers(x.shape), x.dtype)
    call, due = s.choose(
        (
            (f"functional.jacobian(f, {x.name}%s)", np.zeros((outs, *x.shape))),
            (f"functional.vjp(f, {x.name}, {v}%s)[1]", np.zeros(x.shape)),
            (f"functional.jvp(f, {x.name}, {u}%s)[1]", np.zeros((outs,))),
            (
                f"functional.jacobian(lambda x, y: (x * y, f(x)), ({x.name}, {x.name})%s)[1][1]",
                np.zeros((outs, *x.shape)),
            ),
            (f"functional.vjp(lambda x, y: f(x), ({x.name}, {x.name}), {v}%s)[1][1]", np.zeros(x.shape)),
            (f"functional.hvp(lambda x: f(x).sum(), {x.name}, {u}%s)[1]", np.zeros(x.shape)),
            (f"functional.vhp(lambda x: f(x).sum(), {x.name}, {u}%s)[1]", np.zeros(x.shape)),
            (f"functional.hessian(lambda x: f(x).sum(), {x.name}%s)", np.zeros((*x.shape, *x.shape))),
        )
    )
    if s.flip():
        s.raises(call % ", strict=True", "RuntimeError", "strict: no output is independent", fragment=INDEPENDENT)
    else:
        s.do(f"found = {call % ''}")
        s.equal("(tuple(found.shape), bool(found.any()))", (due.shape, False), "an independent output gives zeros")


# --- forward and reverse ----------------------------------------------------------------------------------------------


@scene("numeric.forward-reverse-dual")
def test_forward_reverse_dual(s: Stage) -> None:
    """u times the tangent along v is v times the gradient for u; levels do not nest, and tangents end with them."""
    s.require(not s.added)  # whose formulas are for backward
    program = _plain_program(s)
    due = predict(program, s.noise)
    leaves = [due.tensors[t.name] for t in program if isinstance(t, Leaf) and t.requires_grad]
    inner = {id(t): t for t in due.tensors.values() if t.node is not None and np.size(t.value)}
    root = s.choose([*inner.values()][::-1])
    seed = s.numbers(root.shape)
    grads = cotangents([(root, seed)], noise=s.noise)
    s.do("import torch.autograd.forward_ad as fwad")
    s.play(t for t in program if isinstance(t, Leaf))
    product, lines = 0.0, []
    for leaf in leaves:
        tangent = s.numbers(leaf.shape)
        product += float((grads.get(leaf.name, np.zeros(())) * tangent).sum())
        s.do(f"v_{leaf.name} = {s.tensor(tangent, leaf.dtype)}")
        lines.append(f"{leaf.name} = fwad.make_dual({leaf.name}.detach().clone(), v_{leaf.name})")
    s.do(f"u = {s.tensor(seed, root.dtype)}")
    body: list[str | Statement] = [*lines, *(t for t in program if isinstance(t, Apply))]
    body.append(f"tangent = fwad.unpack_dual({root.name}).tangent")
    nested = s.flip()
    if nested:
        body.append(NESTED)
    head = s.choose(("with fwad.dual_level():", "with torch.no_grad(), fwad.dual_level():"))
    if s.number(0, 3) == 3:  # left by an error
        error = s.choose(ERRORS)
        s.do(s.block_source("try:", s.block_source(head, *body, f"raise {error}")) + f"\nexcept {error}:\n    pass")
    else:
        s.block(head, *body)
    s.close("(u * tangent).sum()", np.asarray(product), "reverse mode along the same way")
    if nested:
        s.true("refused", "forward mode does not nest")
    s.true(f"fwad.unpack_dual({root.name}).tangent is None", "the level is over")
    name = leaves[0].name
    s.raises(f"fwad.make_dual({name}, v_{name})", "RuntimeError", "there is no level", fragment="no level exists")


NESTED = """refused = False
try:
    with fwad.dual_level():
        pass
except RuntimeError:
    refused = True"""


def _plain_program(s: Stage) -> Program:
    """Leaves and ops of the graph, all of them recorded."""
    known: set[str] = set()
    kept: list[Statement] = []
    for t in s.scene.graph:
        if isinstance(t, Leaf):
            kept.append(t)
            known.add(t.name)
        elif isinstance(t, Apply) and known.issuperset(t.args):
            kept.append(replace(t, no_grad=False))
            known.update(t.outs)
    return Program(tuple(kept))


@scene("numeric.device-agreement")
def test_device_agreement(s: Stage) -> None:
    """Values, flags and gradients are those of the CPU, and a copy to another device sends the gradient back."""
    root = s.root()
    s.play()
    for t in (t for t in s.tensors if np.all(np.isfinite(t.value))):
        s.close(f"{t.name}.detach()", t.value, "the value on the CPU")
        s.equal(
            f"({t.name}.requires_grad, {t.name}.is_leaf)", (t.requires_grad, t.node is None), "the flags on the CPU"
        )
    name, factor = root.name, 1.0
    for _ in range(s.number(0, 2)):
        moved = s.name("moved")
        factor_now = s.factor()
        s.do(f"{moved} = {name}.to({s.choose(DEVICES).format(d=s.device.name)!r}) * {factor_now}")
        name, factor = moved, factor * factor_now
    seed = s.numbers(root.shape)
    s.do(f"{name}.backward({s.tensor(seed, root.dtype)}.to({name}.device))")
    grads = s.grads((root, seed * factor))
    for leaf in s.leaves:
        if leaf.requires_grad:
            s.close(f"{leaf.name}.grad", grads.get(leaf.name), "the gradient on the CPU")
            if leaf.name in grads:
                where = f"({leaf.name}.grad.device, {leaf.name}.grad.dtype) == ({leaf.name}.device, {leaf.name}.dtype)"
                s.true(where, "a gradient lies where its leaf does")
                s.equal(f"{leaf.name}.device.type", s.device.name.partition(":")[0], "it was made there")


DEVICES = ("cpu", "{d}")
