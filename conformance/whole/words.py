"""What a whole program says and what is due after each of its lines. Plain data. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Array = np.ndarray
Flags = tuple[bool, bool, bool, bool, tuple[int, ...]]
"""requires_grad, is_leaf, has a grad_fn, retains_grad, shape."""


@dataclass(slots=True)
class Numbers:
    """A tensor has these numbers, or is None. ``grad_of`` names the tensor whose ``.grad`` it is, if it is one."""

    probe: str
    due: Array | None
    claim: str
    because: str
    size: float
    grad_of: str = ""


@dataclass(slots=True)
class Plainly:
    """A probe is equal to a plain value."""

    probe: str
    due: Any
    claim: str
    because: str


@dataclass(slots=True)
class Told:
    """One line with what is due after it.

    Attributes:
        text: the line, or lines of a block.
        what: the kind of statement, for counting and for finding claims.
        raises: must it raise RuntimeError?
        claim: the claim that says whether it raises.
        features: what else is to be said of it, for counting and for finding claims.
        flags: per tensor with a name.
        numbers, plain: what else to look at.
        wrote: names of tensors whose version it raises.
        shares: two names that must look at the same memory.
        cleared: tensors whose ``.grad`` is new from here on.
        reads: operands of an op whose memory nobody writes to.
        bare: lines that do the same without what the statement is about, where there are such.

    """

    text: str
    what: str
    raises: Literal["must", "never", "may"] = "never"
    claim: str = ""
    because: str = ""
    features: tuple[str, ...] = ()
    flags: dict[str, Flags] = field(default_factory=dict)
    numbers: list[Numbers] = field(default_factory=list)
    plain: list[Plainly] = field(default_factory=list)
    wrote: tuple[str, ...] = ()
    shares: tuple[str, str] | None = None
    cleared: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    bare: str = ""


@dataclass(slots=True)
class Whole:
    """A whole program and what it contains; of another reading, the claim that it comes to the same."""

    lines: list[Told] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    narrow: bool = False
    reading: str = ""
