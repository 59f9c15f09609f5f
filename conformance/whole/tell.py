"""The author of whole programs: each slot of eight dials is a statement, or nothing. No torch.

A slot says what to do and refers to tensors by keys on a ring, so that a slot can go without changing what the others
mean. Whatever it says is done if the state allows it; what must raise is done too, and the program goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from autograd_conformance.ops import Op
from autograd_conformance.program import Constant, Layout, Leaf
from autograd_conformance.reports.statements import constant_source, statement_source
from autograd_conformance.strategies.leaves import SIZES, numbers
from autograd_conformance.whole.state import UNKNOWN, Hook, Memory, Packs, State, Tensor
from autograd_conformance.whole.words import Flags, Numbers, Plainly, Told, Whole

SLOT, LEAVES, STEPS = 8, 3, 27
DIALS = SLOT * (1 + LEAVES + STEPS)
LARGEST = 30.0


class Skip(Exception):
    """The state does not allow what the slot says."""


class Dials(NamedTuple):
    """One slot, and the key of what it makes."""

    key: int
    kind: int
    x: int
    y: int
    z: int
    p: int
    q: int
    r: int
    flags: int


class Author:
    """Writes one program, line by line, and keeps the state up to date.

    Args:
        dials: what to write.
        packs: asks torch what an op saves for backward.
        device: torch's device string.
        wide: the widest floating dtype there.

    """

    def __init__(self, dials: Sequence[int], packs: Packs, device: str = "cpu", wide: str = "float64") -> None:
        self.dials, self.packs, self.device, self.wide = dials, packs, device, wide
        self.state, self.whole = State(), Whole()
        self.counts: dict[str, int] = {}
        self.hooks: list[tuple[str, Tensor, Hook]] = []
        self.read: list[tuple[Told, list[tuple[str, Memory, int]]]] = []
        self.layers: list[Any] = []
        self.optimizers: list[Any] = []
        self.dtype = wide

    # --- dials ----------------------------------------------------------------------------------------------------

    def slot(self, i: int) -> Dials:
        """The i-th slot; zeros beyond the dials."""
        dials = tuple(self.dials[i * SLOT : (i + 1) * SLOT])
        return Dials((i * 97 + 13) % 256, *dials, *([0] * (SLOT - len(dials))))

    def name(self, stem: str) -> str:
        """A name that is new: the stem and a number."""
        count = self.counts[stem] = self.counts.get(stem, 0) + 1
        return f"{stem}{count}"

    def pick(self, reference: int, fits: Callable[[Tensor], bool]) -> Tensor:
        """The first tensor at or after a reference on the ring of keys that fits; low references try the newest first.

        Tensors that were made in inference mode are left out: few statements may do anything with them.

        Raises:
            Skip: none does.

        """
        tensors = list(self.state.live.values())
        ordered = tensors[::-1] if reference < 80 else sorted(tensors, key=lambda t: (t.key < reference, t.key))
        for t in ordered:
            if not t.inference and fits(t):
                return t
        raise Skip

    # --- the program ----------------------------------------------------------------------------------------------

    def write(self, themes: Sequence[Sequence[Callable[[Author, Dials], None]]]) -> Whole:
        """All slots in order; the first says of which theme."""
        base = self.slot(0)
        moves = themes[base.kind % len(themes)]
        self.dtype = "float32" if base.flags >= 208 else self.wide
        self.whole.narrow = self.dtype == "float32"
        for i in range(LEAVES):
            d = self.slot(1 + i)
            if d.kind or not i:
                self._leaf(d, base, "abc"[i], tracked=d.flags < 180 or not i)
        for i in range(1 + LEAVES, 1 + LEAVES + STEPS):
            d = self.slot(i)
            if d.kind:
                try:
                    moves[(d.kind - 1) * len(moves) // 255](self, d)
                except Skip:
                    continue
        if not self.state.recording:
            self.state.recording = True
            self.say("torch.set_grad_enabled(True)", "mode")
        for told, operands in self.read:
            if all(memory.version == version for _, memory, version in operands):
                told.reads = tuple(dict.fromkeys(name for name, *_ in operands))
        return self.whole

    def say(self, text: str, what: str, head: str = "") -> Told:
        """Add a line, in a block if there is a head, and what every tensor must look like after it."""
        told = Told(within(head, text), what, flags={t.name: flags_of(t) for t in self.state.live.values()})
        told.plain.append(
            Plainly("torch.is_grad_enabled()", self.state.recording, "no-grad.nesting-restores", "the mode out here")
        )
        self.whole.lines.append(told)
        self.whole.features.add(what)
        return told

    def refused(self, text: str, what: str, claim: str, because: str, head: str = "") -> Told:
        """Add a line that must raise RuntimeError and change nothing."""
        told = self.say(text, what, head)
        told.raises, told.claim, told.because = "must", claim, because
        self.whole.features.add("error")
        return told

    def shows(self, told: Told, t: Tensor, claim: str, because: str) -> None:
        """The numbers of a tensor are due."""
        size = float(np.max(np.abs(t.values), initial=1e-3))
        told.numbers.append(Numbers(t.name, t.values, claim, because, size))

    def shows_grad(self, told: Told, t: Tensor, claim: str, because: str) -> None:
        """Its ``.grad`` is due, if anybody knows it."""
        if t.grad is not UNKNOWN:
            told.numbers.append(Numbers(f"{t.name}.grad", t.grad, claim, because, 1.0, t.name))

    @property
    def on(self) -> str:
        """What a call that makes a tensor says of the device; empty for cpu."""
        return "" if self.device == "cpu" else f", device={self.device!r}"

    def constant(self, shape: tuple[int, ...], seed: int) -> tuple[str, np.ndarray]:
        """The source of a constant tensor of exact numbers, and the numbers."""
        values = numbers(prod(shape), seed)
        source = constant_source(Constant(shape, self.dtype, values), self.device)
        return source, np.array(values).reshape(shape)

    def _leaf(self, d: Dials, base: Dials, name: str, *, tracked: bool) -> None:
        rank = (1, 2, 2, 0, 1, 3, 2, 1)[base.x % 8]
        sizes = [SIZES[byte % 8] for byte in (base.y, base.z, base.p)][:rank]
        if rank and d.x >= 216:
            sizes[d.y % rank] = 1
        elif d.x >= 190:
            sizes = sizes[1:]
        shape = tuple(sizes)
        layouts: tuple[Layout, ...] = ("contiguous", "contiguous", "contiguous", "permuted", "strided", "offset")
        layout = layouts[d.p % 6] if shape else "contiguous"
        leaf = Leaf(name, Constant(shape, self.dtype, numbers(prod(shape), d.q)), tracked, layout)
        values = np.array(leaf.data.values).reshape(shape)
        made = self.state.leaf(name, d.key, values, self.dtype, requires_grad=tracked)
        made.memory.hidden = layout != "contiguous"
        self.say(statement_source(leaf, self.device), "leaf")


def within(head: str, text: str) -> str:
    """Lines in a block, if there is a head."""
    if "{}" in head:
        return head.format("\n".join(f"        {line}" for line in text.splitlines()))
    return "\n".join([head, *(f"    {line}" for line in text.splitlines())]) if head else text


_OFF = (
    "with torch.no_grad():",
    "with torch.set_grad_enabled(False):",
    "with torch.enable_grad(), torch.no_grad():",
    "with torch.no_grad(), torch.enable_grad(), torch.set_grad_enabled(False):",
)
_LEFT = "try:\n    with {}:\n{{}}\n        raise KeyError\nexcept KeyError:\n    pass"
_HEADS_OFF = (*_OFF, _LEFT.format("torch.no_grad()"), _LEFT.format("torch.set_grad_enabled(False)"))
_ON = ("with torch.no_grad(), torch.enable_grad():", "with torch.no_grad(), torch.set_grad_enabled(True):")


def mode_of(author: Author, d: Dials) -> tuple[str, bool]:
    """The block around a statement, and whether it records."""
    recording = author.state.recording
    if d.flags < 208:
        return "", recording
    if d.flags < 232:
        author.whole.features.add("mode block")
        return _HEADS_OFF[d.r % len(_HEADS_OFF)], False
    author.whole.features.update(("mode block", "nested modes"))
    return _ON[d.r % len(_ON)], True


def flags_of(t: Tensor) -> Flags:
    """What torch must say of a tensor."""
    return t.requires_grad, t.leaf, not t.leaf, t.retains, t.shape


def usable(op: Op, tensors: Sequence[Tensor]) -> bool:
    """Is the op smooth and moderate on these numbers?"""
    ranges = []
    for t in tensors:
        values = t.values
        ranges.append((float(values.min()), float(values.max())) if values.size else (1.0, 1.0))
    return op.domain(ranges)
