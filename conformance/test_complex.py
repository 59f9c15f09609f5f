"""Area complex: gradients of complex tensors, and of real ones by way of complex numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograd_conformance.complexes import (
    BINARY,
    HOLOMORPHIC,
    OTHERS,
    TO_REAL,
    Number,
    Rule,
    applied,
    combined,
    fits,
    gradients,
    rounded,
)
from autograd_conformance.paper import Array, Paper
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

SHAPES = ((), (2,), (1,), (2, 2), (), (1, 3), (3, 1, 2))
WAYS = ("plain", "parts", "permuted", "strided", "conjugate", "expanded")


class Program:
    """A complex program in the making: lines for the script, and the same on paper."""

    def __init__(self, s: Stage, real: str) -> None:
        self.s, self.real = s, real
        self.complex = "complex128" if real == "float64" else "complex64"
        if real != "float64":
            s.narrow = True

    def leaf(self, shape: tuple[int, ...]) -> Number:
        """A complex leaf, its memory in one of several orders."""
        s, name = self.s, self.s.name("z")
        way = s.choose([w for w in WAYS if shape or w not in ("permuted", "strided", "expanded")])
        if way == "expanded" and shape[0] == 1:
            way = "plain"
        given = shape[::-1] if way == "permuted" else (1, *shape[1:]) if way == "expanded" else shape
        re, im = s.numbers(given), s.numbers(given)
        text = f"torch.complex({s.tensor(re, self.real)}, {s.tensor(im, self.real)})"
        value = re + 1j * im
        if way == "parts":
            text = f"torch.view_as_complex({s.tensor(np.stack([re, im], -1), self.real)})"
        elif way == "permuted":
            text, value = f"{text}.permute({tuple(reversed(range(len(shape))))})", np.transpose(value)
        elif way == "strided":
            text = f"torch.stack([{text}, {text}], -1)[..., 0]"
        elif way == "conjugate":
            text, value = f"{text}.conj()", np.conj(value)
        elif way == "expanded":
            text, value = f"{text}.expand({shape})", np.broadcast_to(value, shape).copy()
        s.do(f"{name} = {text}.requires_grad_()")
        return Number(name, value)

    def steps(self, numbers: list[Number], rules: Sequence[Rule], most: int) -> Number:
        """Some steps, each of one or two of the complex numbers so far; returns the newest."""
        s = self.s
        for _ in range(s.number(1, most)):
            z = s.choose(numbers[::-1])
            if s.number(0, 2) == 2:
                w = s.choose([n for n in numbers if n.shape == z.shape])
                both = s.choose(BINARY)
                made = combined(both, z, w, s.name("f"), s.noise, self.real)
                text = both[0].format(z=z.name, w=w.name)
            else:
                rule = s.choose(rules)
                made = applied(rule, z, s.name("f"), s.noise, self.real)
                text = rule[0].format(z=z.name)
            if made.usable:
                s.do(f"{made.name} = {text}")
                numbers.append(made)
        return numbers[-1]

    def to_real(self, z: Number) -> Number:
        """A real tensor made from a complex one."""
        rule = self.s.choose([rule for rule in TO_REAL if fits(rule, z)])
        made = applied(rule, z, self.s.name("r"), self.s.noise, self.real)
        self.s.do(f"{made.name} = {rule[0].format(z=z.name)}")
        return made

    def backward(self, root: Number, *options: str) -> Array:
        """Backward with a gradient of the root's kind; returns it."""
        s = self.s
        seed = s.numbers(root.shape)
        if not np.iscomplexobj(root.value):
            text = s.tensor(seed, self.real)
        else:
            imaginary = s.numbers(root.shape) if s.flip() else -seed[..., ::-1] if root.shape else -seed
            text = f"torch.complex({s.tensor(seed, self.real)}, {s.tensor(imaginary, self.real)})"
            seed = seed + 1j * imaginary
        s.do(f"{root.name}.backward({', '.join([text, *options])})")
        return seed


def _close(s: Stage, name: str, due: Array | None, because: str) -> None:
    """A complex gradient, by its two parts."""
    if due is None:
        s.close(f"{name}.grad", None, because)
    else:
        parts = np.stack([np.real(due), np.imag(due)], -1)
        s.close(f"torch.view_as_real({name}.grad.resolve_conj())", parts, because)


def _options(s: Stage, *, last: bool) -> list[str]:
    """Options of a pass: it retains the graph unless it is the last one, and may record itself."""
    return s.choose((["create_graph=True"], [] if last else ["retain_graph=True"])[::-1])


@scene("complex.gradient-convention")
def test_gradient_convention(s: Stage) -> None:
    """The gradient of a real loss is dL/dx + i dL/dy for every complex leaf, pass after pass."""
    program = Program(s, s.choose((s.wide, s.wide, "float32")))
    shape = s.choose(SHAPES)
    leaves = [program.leaf(shape) for _ in range(s.number(1, 2))]
    numbers = list(leaves)
    end = program.steps(numbers, (*HOLOMORPHIC, *OTHERS), 6)
    total: dict[str, Array] = {}
    passes = s.number(1, 2)
    root = program.to_real(end)
    for i in range(passes):
        seed = program.backward(root, *_options(s, last=i + 1 == passes))
        found = gradients(root, seed, s.noise, program.real)
        for leaf in leaves:
            if leaf.name in found:
                total[leaf.name] = total[leaf.name] + found[leaf.name] if leaf.name in total else found[leaf.name]
            _close(s, leaf.name, total.get(leaf.name), "dL/dx + i dL/dy, x and y the parts of the leaf")
            if leaf.name in total:
                s.true(f"{leaf.name}.grad.dtype is torch.{program.complex}", "the gradient has the dtype of the leaf")


# Complex numbers from two real tensors of one shape, and what comes back to each.
FROM_REAL = (
    "torch.complex({x}, {y})",
    "{x} + 1.0j * {y}",
    "torch.view_as_complex(torch.stack([{x}, {y}], -1))",
    "{x} - {y} * -1.0j",
    "torch.complex({y}, -{x}) * 1.0j",
)


@scene("complex.real-through-complex")
def test_real_through_complex(s: Stage) -> None:
    """Real leaves get the real gradients of a function that goes by way of complex numbers."""
    x = s.choose([t for t in s.tracked[::-1] if _moderate(t)])
    y = s.choose([t for t in s.tracked if _moderate(t) and t.shape == x.shape and t.dtype == x.dtype])
    s.play()
    program = Program(s, x.dtype)
    s.do(f"z = {s.choose(FROM_REAL).format(x=x.name, y=y.name)}")
    s.true(f"z.dtype is torch.{program.complex}", "it is made of two real tensors of this precision")
    re, im = (Number(t.name, rounded(t.value, s.noise, program.real)) for t in (x, y))
    z = Number("z", re.value + 1j * im.value, [re, im], lambda g: (np.real(g), np.imag(g)))
    end = program.steps([z], (*HOLOMORPHIC, *OTHERS), 5)
    root = program.to_real(end)
    seed = program.backward(root)
    found = gradients(root, seed, s.noise, program.real)
    if x is y:  # one tensor in both parts: the tape has it twice under one name
        parts = gradients(root, seed, s.noise, program.real)["z"]
        grads = s.grads((x, np.real(parts) + np.imag(parts)))
    else:
        grads = s.grads((x, found[x.name]), (y, found[y.name]))
    for leaf in s.leaves:
        if leaf.requires_grad:
            s.close(f"{leaf.name}.grad", grads.get(leaf.name), "the gradient of a real function of real numbers")
            if leaf.name in grads:
                s.true(f"{leaf.name}.grad.dtype is {leaf.name}.dtype", "a real leaf has a real gradient")


def _moderate(t: Paper) -> bool:
    return bool(np.size(t.value) and np.all(np.isfinite(t.value)) and np.max(np.abs(t.value)) <= 4.0)


@scene("complex.holomorphic-vjp")
def test_holomorphic_vjp(s: Stage) -> None:
    """A holomorphic function turns the gradient v into v times the conjugate of its derivative."""
    program = Program(s, s.choose((s.wide, s.wide, "float32")))
    z = program.leaf(s.choose(SHAPES))
    s.do(f"f0 = {z.name} * (1.0 + 0.5j)")
    numbers = [z, Number("f0", z.value * (1 + 0.5j), [z], lambda g: [g * (1 - 0.5j)])]
    f = program.steps(numbers, HOLOMORPHIC, 6)
    derivative = np.conj(gradients(f, np.ones(f.shape) + 0j, s.noise, program.real)[z.name])
    total = np.zeros(z.shape) + 0j
    passes = s.number(1, 2)
    for i in range(passes):
        v = program.backward(f, *_options(s, last=i + 1 == passes))
        total = total + v * np.conj(derivative)
        _close(s, z.name, total, "v times the conjugate of f'(z)")
        s.true(f"{z.name}.grad.dtype is torch.{program.complex}", "the gradient has the dtype of the leaf")
