"""What was seen of a program on torch: plain records that the runner fills and the comparison reads. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autograd_conformance.program import Shape


class TensorSeen(NamedTuple):
    """A tensor right after the statement that made it."""

    requires_grad: bool
    is_leaf: bool
    has_grad_fn: bool
    shape: Shape
    dtype: str
    stride: tuple[int, ...] = ()
    grad_is_none: bool = True


class GradSeen(NamedTuple):
    """A gradient: in ``.grad`` after a statement, or returned by ``autograd.grad``. ``values`` is None without data."""

    values: Any
    shape: Shape
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool
    has_grad_fn: bool
    start: int
    same_object: bool


class Error(NamedTuple):
    """What a statement raised."""

    kind: str
    message: str


@dataclass(slots=True)
class Seen:
    """All that was seen of one program.

    Attributes:
        made: per tensor name what it was when made.
        changed: per statement that changes a tensor: the flags afterwards.
        errors: per statement that raised.
        grads: per pass or reset and per leaf name: its ``.grad`` afterwards.
        returned: per ``Grad`` statement: what it returned.
        overlaps: per pass: pairs of names, at least one a gradient, that share memory: ``a.grad`` (a gradient),
            ``gradient=0@5`` (the first seed of statement 5), ``a`` (a leaf itself).
        kept: names of tensors with a node whose ``.grad`` was set after the last backward.
        facts: yes-or-no observations by (statement, word).
        values: numbers of tensors by (statement, name), where a claim needs them.
        replaced: per create_graph backward and leaf: values of the old ``.grad`` object afterwards.
        written: per backward: tensors of the forward whose version it raised.
        skipped: statements that could not run because an earlier one failed.
        leaks: modes that were not restored.

    """

    made: dict[str, TensorSeen] = field(default_factory=dict)
    changed: dict[int, TensorSeen] = field(default_factory=dict)
    errors: dict[int, Error] = field(default_factory=dict)
    grads: dict[int, dict[str, GradSeen | None]] = field(default_factory=dict)
    returned: dict[int, list[GradSeen | None]] = field(default_factory=dict)
    overlaps: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    facts: dict[tuple[int, str], bool] = field(default_factory=dict)
    values: dict[tuple[int, str], Any] = field(default_factory=dict)
    replaced: dict[int, dict[str, Any]] = field(default_factory=dict)
    written: dict[int, list[str]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
