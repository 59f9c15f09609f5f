"""From bytes to programs: pure functions of one fixed-length payload.

Each leaf, op and closing statement has eight bytes at a fixed place; a first byte of 0 means that it is absent, and
zeros everywhere are the simplest program. A reference takes the tensor whose key follows it on a ring, and the key
belongs to the place in the payload: when a statement goes, the references of all others keep their meaning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from autograd_conformance.program import Shape

FIELD = 8


class Slot(NamedTuple):
    """Eight drawn bytes and the key of what they make."""

    key: int
    kind: int
    more: int
    first: int
    second: int
    third: int
    p: int
    q: int
    flags: int


def slot(payload: bytes, index: int) -> Slot:
    """The ``index``-th field of a payload."""
    start = index * FIELD
    return Slot((index * 97 + 13) % 256, *payload[start : start + FIELD])


@dataclass(eq=False, slots=True)
class Sketch:
    """What the decoder knows of a tensor: enough to choose ops that fit, and no value."""

    name: str
    key: int
    shape: Shape
    dtype: str
    low: float
    high: float
    tracked: bool = False
    leaf: bool = False
    view: bool = False
    writable: bool = True
    tied: bool = False  # elements may be equal, or exactly zero
    op: str = ""
    uses: int = 0
    depth: int = 0


class Pool:
    """Tensors made so far, on a ring of keys."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.ring: list[Sketch] = []
        self.newest: Sketch | None = None
        self.made: list[Sketch] = []

    def add(self, sketch: Sketch) -> None:
        """Put a tensor on the ring; one that a recorded op made is now the newest."""
        where = bisect_left(self.keys, sketch.key)
        self.keys.insert(where, sketch.key)
        self.ring.insert(where, sketch)
        self.made.append(sketch)
        if self.newest is None or sketch.depth:
            self.newest = sketch

    def pick(self, reference: int, fits: Callable[[Sketch], bool]) -> Sketch | None:
        """The first tensor at or after ``reference`` on the ring that fits; low references try the newest first."""
        for sketch in self.candidates(reference):
            if fits(sketch):
                return sketch
        return None

    def candidates(self, reference: int) -> list[Sketch]:
        """All tensors in the order in which a reference tries them."""
        start = bisect_left(self.keys, reference)
        around = self.ring[start:] + self.ring[:start]
        return [self.newest, *around] if reference < 112 and self.newest is not None else around
