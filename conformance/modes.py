"""Grad mode and inference mode on paper: what blocks, calls and decorators make of them, and lines that look. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autograd_conformance.ops import FLOATS, OPS
from autograd_conformance.oracle import predict
from autograd_conformance.paper import Paper
from autograd_conformance.program import Apply, Leaf, Program, Statement
from autograd_conformance.stage import Stage

OFF_HEADS = (
    "with torch.no_grad():",
    "with torch.set_grad_enabled(False):",
    "with torch.enable_grad(), torch.no_grad():",
    "with torch.inference_mode(False), torch.no_grad():",
    "with torch.no_grad(), torch.no_grad():",
)
INFERENCE_HEADS = (
    "with torch.inference_mode():",
    "with torch.inference_mode(True):",
    "with torch.inference_mode(mode=True):",
    "with torch.no_grad(), torch.inference_mode():",
    "with torch.inference_mode(), torch.enable_grad():",
    "with torch.inference_mode(False), torch.inference_mode():",
)
PLAIN_HEADS = ("", "", "with torch.no_grad():", "with torch.enable_grad():", "with torch.inference_mode(False):")
# What makes a result that surely lies in the memory of its operand, and what may do so or not.
ALIASING = ("unbind", "split", "chunk", *(name for name, op in OPS.items() if op.kind == "view"))
DOUBTFUL = ("reshape", "flatten", "squeeze", "contiguous", "slice")


# Inference mode, is a result an inference tensor, grad mode, does a result require grad, does it have a grad_fn.
Seen = tuple[bool, bool, bool | None, bool, bool]


@dataclass(frozen=True, slots=True)
class Mode:
    """The modes of a thread.

    Attributes:
        grad: what the innermost grad mode block or call said.
        inference: is inference mode on?

    """

    grad: bool = True
    inference: bool = False

    @property
    def records(self) -> bool:
        """Are ops recorded?"""
        return self.grad and not self.inference

    def under(self, manager: str) -> Mode:
        """The modes in a block of a manager, ``"torch.no_grad()"`` say."""
        if "inference_mode" in manager:
            on = "False" not in manager
            return Mode(not on, on)
        return replace(self, grad="enable_grad" in manager or "True" in manager)

    def allows(self, manager: str) -> bool:
        """Does anybody say what a block of the manager means here?

        Left out is ``inference_mode(False)`` where grad mode alone is off: it switches recording on, which is not
        documented.
        """
        return "False" not in manager or "inference" not in manager or self.grad or self.inference

    def seen(self) -> Seen:
        """What ``look()`` must see; nobody says what is_grad_enabled() is in inference mode."""
        return self.inference, self.inference, None if self.inference else self.grad, self.records, self.records


GRAD_MANAGERS = (
    "torch.no_grad()",
    "torch.enable_grad()",
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "torch.set_grad_enabled(mode=False)",
)
# What blocks are left by.
ERRORS = ("KeyError", "ValueError", "RuntimeError", "KeyboardInterrupt", "StopIteration")
INFERENCE_MANAGERS = ("torch.inference_mode()", "torch.inference_mode(False)", "torch.inference_mode(True)")

PROBES = (
    "{x} * 2.0",
    "{x}.sin()",
    "{x} + {x}",
    "torch.stack([{x}, {x}])",
    "{x}.clone()",
    "{x}.sum()",
    "{x}.exp() - 1.0",
)


def look(s: Stage, x: str) -> str:
    """Add the function ``look()``, which says what the modes are and whether an op on tracked ``x`` is recorded.

    Returns the source of what it has seen so far.
    """
    s.do(f"x, log = {x}, []")
    s.do(
        "def look():\n"
        f"    y = {s.choose(PROBES).format(x='x')}\n"
        "    off = torch.is_inference_mode_enabled()\n"
        "    grad = None if off else torch.is_grad_enabled()\n"
        "    log.append((off, y.is_inference(), grad, y.requires_grad, y.grad_fn is not None))"
    )
    return "list(log)"


def indented(lines: Sequence[str], by: int = 1) -> list[str]:
    """Lines within a block."""
    return [f"{'    ' * by}{line}" for line in lines]


class Nest:
    """A random tree of blocks, with ``look()`` at each level and after each exit, and what it must see.

    Args:
        s: the stage whose dials are turned.
        managers: what the blocks may be of, as far as the mode around them allows.
        calls: may there be plain calls of ``torch.set_grad_enabled``?

    """

    def __init__(self, s: Stage, managers: Sequence[str], *, calls: bool = False) -> None:
        self.s, self.managers, self.calls = s, managers, calls
        self.seen: list[Seen] = []

    def body(self, mode: Mode, depth: int) -> tuple[list[str], Mode]:
        """Lines that run in a mode, and the mode after them."""
        lines = self.look(mode)
        for _ in range(self.s.number(1, 2) if depth else 0):
            if self.calls and self.s.number(0, 2) == 2:
                flag = self.s.flip()
                lines.append(f"torch.set_grad_enabled({flag})")
                mode = replace(mode, grad=flag)
            else:
                lines += self.block(mode, depth - 1)
            lines += self.look(mode)
        return lines, mode

    def block(self, mode: Mode, depth: int) -> list[str]:
        """One block, left in one of several ways, and whatever it holds."""
        s = self.s
        manager = s.choose([m for m in self.managers if mode.allows(m)])
        inner = mode.under(manager)
        head = f"with {manager}:"
        if s.number(0, 3) == 3:
            further = s.choose([m for m in self.managers if inner.allows(m)])
            inner, head = inner.under(further), f"with {manager}, {further}:"
        body, _ = self.body(inner, depth)
        way = s.choose(("end", "end", "raise", "break", "raise deeper"))
        if way == "raise":
            error = s.choose(ERRORS)
            return ["try:", *indented([head, *indented([*body, f"raise {error}"])]), f"except {error}:", "    pass"]
        if way == "raise deeper":
            error = s.choose(ERRORS)
            last = s.choose([m for m in self.managers if inner.allows(m)])
            deeper = [f"with {last}:", *indented([*self.look(inner.under(last)), f"raise {error}"])]
            return ["try:", *indented([head, *indented([*body, *deeper])]), f"except {error}:", "    pass"]
        if way == "break":
            return ["for _ in range(3):", *indented([head, *indented([*body, "break"])])]
        return [head, *indented(body)]

    def look(self, mode: Mode) -> list[str]:
        """The line that looks, in a mode."""
        return self.look_of(mode, "look()")

    def look_of(self, mode: Mode, line: str) -> list[str]:
        """A line that looks once."""
        self.seen.append(mode.seen())
        return [line]


# --- graphs, part of which runs in another mode -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """A graph in two parts: statements that run in grad mode, and ops for another mode.

    Attributes:
        before: statements that run in grad mode.
        ops: ops of the rest, as far as their operands are there.
        there: floating tensors that are there in between.

    """

    before: list[Statement]
    ops: list[Apply]
    there: list[Paper]

    @property
    def tracked(self) -> list[Paper]:
        """Those of the tensors in between that require grad."""
        return [t for t in self.there if t.requires_grad]


def cut(s: Stage) -> Cut:
    """Cut the graph at a random place; the whole of it may be on one side."""
    leaves, rest = [t for t in s.scene.graph if isinstance(t, Leaf)], s.rest()
    at = s.choose(range(len(rest) + 1))
    before = [*leaves, *rest[:at]]
    due = s.due if at == len(rest) else predict(Program(tuple(before)), s.noise, trusted=True)
    there = {id(t): t for t in due.tensors.values() if t.dtype in FLOATS}
    return Cut(before, _runnable(rest[at:], due.tensors), list(there.values()))


def _runnable(statements: Sequence[Statement], names: Iterable[str]) -> list[Apply]:
    """Those ops whose operands are there."""
    known, kept = set(names), []
    for statement in statements:
        if isinstance(statement, Apply) and known.issuperset(statement.args):
            kept.append(statement)
            known.update(statement.outs)
    return kept


def in_memory_of(statement: Apply) -> bool:
    """May the results of an op lie in the memory of an operand?"""
    return statement.op in ALIASING or statement.op in DOUBTFUL or statement.op.startswith("to_float")


def is_view(statement: Apply) -> bool:
    """Do they surely?"""
    return statement.op in ALIASING and statement.op not in DOUBTFUL
