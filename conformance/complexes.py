"""Complex programs on paper: numpy values that remember how they were made, and the gradient of a real loss. No torch.

The gradient of a real loss by z = x + iy is dL/dx + i dL/dy. So a holomorphic f turns g into g conj(f'), and parts,
absolute values and conjugates have the rules that are written below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autograd_conformance.paper import Array, Noise
from autograd_conformance.program import Shape

MOST = 1e3  # results that are larger are not used: float32 would drown in cancellation
Pull = Callable[[Any], Sequence[Any]]


class Number:
    """A real or complex array, with its parents and what makes their gradients of its own."""

    def __init__(self, name: str, value: Any, parents: Sequence[Number] = (), pull: Pull | None = None) -> None:
        self.name, self.value = name, np.asarray(value)
        self.parents, self.pull = tuple(parents), pull

    @property
    def shape(self) -> Shape:
        """Shape of the value."""
        shape: Shape = self.value.shape
        return shape

    @property
    def usable(self) -> bool:
        """Is every number finite and of moderate size?"""
        return bool(np.all(np.isfinite(self.value)) and np.max(np.abs(self.value), initial=0.0) <= MOST)


def gradients(root: Number, seed: Any, noise: Noise | None = None, dtype: str = "float64") -> dict[str, Array]:
    """The gradient of everything that the root was made from, by name."""
    found: dict[int, Any] = {id(root): np.asarray(seed)}
    named: dict[str, Array] = {}
    for node in reversed(_sorted(root)):
        if id(node) not in found:
            continue
        g = rounded(found[id(node)], noise, dtype)
        named[node.name] = g = g if np.iscomplexobj(node.value) else np.real(g)
        for parent, part in zip(node.parents, node.pull(g) if node.pull else (), strict=True):
            known = found.get(id(parent))
            found[id(parent)] = part if known is None else known + part
    return named


def _sorted(root: Number) -> list[Number]:
    """Parents before children."""
    order: list[Number] = []
    seen: set[int] = set()

    def visit(node: Number) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            for parent in node.parents:
                visit(parent)
            order.append(node)

    visit(root)
    return order


def rounded(x: Any, noise: Noise | None, dtype: str) -> Any:
    """Random rounding, of both parts if there are two."""
    if noise is None:
        return x
    if not np.iscomplexobj(x):
        return noise(np.asarray(x), dtype)
    return noise(np.real(x), dtype) + 1j * noise(np.imag(x), dtype)


# Each rule: source, value, and the gradient of the operand from that of the result, the operand and the result.
Rule = tuple[str, Callable[[Any], Any], Callable[[Any, Any, Any], Any]]


def _holomorphic(text: str, value: Callable[[Any], Any], derivative: Callable[[Any, Any], Any]) -> Rule:
    return text, value, lambda g, z, f: g * np.conj(derivative(z, f))


HOLOMORPHIC: tuple[Rule, ...] = (
    _holomorphic("{z} * {z}", lambda z: z * z, lambda z, f: 2 * z),
    _holomorphic("{z} * (2.0 - 1.0j)", lambda z: z * (2 - 1j), lambda z, f: 2 - 1j),
    _holomorphic("{z}.sin()", np.sin, lambda z, f: np.cos(z)),
    _holomorphic("{z}.exp()", np.exp, lambda z, f: f),
    _holomorphic("{z} + (0.5 + 1.0j)", lambda z: z + (0.5 + 1j), lambda z, f: 1.0),
    _holomorphic("{z} ** 3", lambda z: z**3, lambda z, f: 3 * z**2),
    _holomorphic("-{z}", np.negative, lambda z, f: -1.0),
    _holomorphic("1.0 / ({z} + 4.0)", lambda z: 1 / (z + 4), lambda z, f: -f * f),
    _holomorphic("{z}.cos()", np.cos, lambda z, f: -np.sin(z)),
    _holomorphic("({z} - 1.0j) ** 2", lambda z: (z - 1j) ** 2, lambda z, f: 2 * (z - 1j)),
    _holomorphic("{z}.clone()", lambda z: z, lambda z, f: 1.0),
    _holomorphic("(1.0j - {z}) * 0.5", lambda z: (1j - z) * 0.5, lambda z, f: -0.5),
    _holomorphic("torch.addcmul({z}, {z}, {z})", lambda z: z + z * z, lambda z, f: 1 + 2 * z),
    _holomorphic("({z} / 4.0 + 4.0).log()", lambda z: np.log(z / 4 + 4), lambda z, f: 0.25 / (z / 4 + 4)),
    _holomorphic("({z} / 4.0 + 4.0).sqrt()", lambda z: np.sqrt(z / 4 + 4), lambda z, f: 0.125 / f),
    _holomorphic("{z}.sinh()", np.sinh, lambda z, f: np.cosh(z)),
    _holomorphic("{z}[...] * 1.0j", lambda z: z * 1j, lambda z, f: 1j),
)
OTHERS: tuple[Rule, ...] = (
    ("{z}.conj()", np.conj, lambda g, z, f: np.conj(g)),
    ("torch.conj_physical({z})", np.conj, lambda g, z, f: np.conj(g)),
    ("torch.complex({z}.imag, {z}.real)", lambda z: z.imag + 1j * z.real, lambda g, z, f: np.imag(g) + 1j * np.real(g)),
    ("torch.view_as_complex(torch.view_as_real({z}.resolve_conj()))", lambda z: z, lambda g, z, f: g),
    ("{z} * {z}.real", lambda z: z * z.real, lambda g, z, f: g * z.real + np.real(g * np.conj(z))),
    ("{z} - {z}.conj() * 2.0", lambda z: z - 2 * np.conj(z), lambda g, z, f: g - 2 * np.conj(g)),
    ("{z}.imag * {z}", lambda z: z.imag * z, lambda g, z, f: g * z.imag + 1j * np.real(g * np.conj(z))),
)
TO_REAL: tuple[Rule, ...] = (
    ("({z} * {z}.conj()).real", lambda z: np.abs(z) ** 2, lambda g, z, f: 2 * g * z),
    ("{z}.abs()", np.abs, lambda g, z, f: g * z / np.abs(z)),
    ("{z}.real", np.real, lambda g, z, f: g + 0j),
    ("{z}.imag", np.imag, lambda g, z, f: 1j * g),
    ("{z}.abs() ** 2", lambda z: np.abs(z) ** 2, lambda g, z, f: 2 * g * z),
    ("torch.view_as_real({z}.resolve_conj()).sum(-1)", lambda z: z.real + z.imag, lambda g, z, f: g * (1 + 1j)),
    ("torch.view_as_real({z}.resolve_conj())[..., 1]", np.imag, lambda g, z, f: 1j * g),
    ("{z}.real * {z}.imag", lambda z: z.real * z.imag, lambda g, z, f: g * (z.imag + 1j * z.real)),
    ("{z}.angle()", np.angle, lambda g, z, f: g * 1j * z / np.abs(z) ** 2),
    ("{z}.conj().imag", lambda z: -z.imag, lambda g, z, f: -1j * g),
)
NEEDS_NONZERO = ("{z}.abs()", "{z}.angle()")


def applied(rule: Rule, z: Number, name: str, noise: Noise | None, dtype: str) -> Number:
    """The result of a rule."""
    _, value, pull = rule
    f = rounded(value(z.value), noise, dtype)
    return Number(name, f, [z], lambda g: [pull(g, z.value, f)])


def fits(rule: Rule, z: Number) -> bool:
    """May the rule be applied, away from where it is not smooth or not continuous?"""
    return rule[0] not in NEEDS_NONZERO or bool(
        np.all(np.abs(z.value) > 0.1) and np.all(np.abs(np.angle(z.value)) < 3.0)
    )


Both = tuple[str, Callable[[Any, Any], Any], Callable[[Any, Any, Any], Sequence[Any]]]
BINARY: tuple[Both, ...] = (
    ("{z} * {w}", lambda z, w: z * w, lambda g, z, w: (g * np.conj(w), g * np.conj(z))),
    ("{z} + {w}", lambda z, w: z + w, lambda g, z, w: (g, g)),
    ("{z} - {w}", lambda z, w: z - w, lambda g, z, w: (g, -g)),
    ("torch.mul({w}, {z})", lambda z, w: z * w, lambda g, z, w: (g * np.conj(w), g * np.conj(z))),
    ("torch.add({z}, {w}, alpha=2.0)", lambda z, w: z + 2 * w, lambda g, z, w: (g, 2 * g)),
    (
        "{z} / ({w} + 5.0)",
        lambda z, w: z / (w + 5),
        lambda g, z, w: (g / np.conj(w + 5), -g * np.conj(z / (w + 5) ** 2)),
    ),
)


def combined(rule: Both, z: Number, w: Number, name: str, noise: Noise | None, dtype: str) -> Number:
    """The result of a rule of two operands of one shape, perhaps the same one."""
    _, value, pull = rule
    f = rounded(value(z.value, w.value), noise, dtype)
    return Number(name, f, [z, w], lambda g: pull(g, z.value, w.value))
