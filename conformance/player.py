"""Runs scripts on torch, item by item, and notes what the probes see. Judges nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from autograd_conformance.ops.added import bound
from autograd_conformance.runner import Runner, modes, numbers, quiet, restore
from autograd_conformance.scene import Check, Item, Line, Script


@dataclass(slots=True)
class Played:
    """What was seen of a script.

    Attributes:
        seen: per check that was reached: a plain value, nested lists of numbers, or None; for ``raises`` the exception
            or None. An exception also where a probe raised.
        errors: per item that raised: the exception.
        stopped: index of the item after which nothing ran, for it raised and had not to; or None.
        leaks: modes that the script left changed.

    """

    seen: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    stopped: int | None = None
    leaks: list[str] = field(default_factory=list)


@lru_cache(maxsize=8192)
def code(text: str) -> CodeType:
    """Lines of Python, compiled; most lines turn up again and again."""
    return compile(text, "<script>", "exec")


@lru_cache(maxsize=8192)
def probe(text: str) -> CodeType:
    """An expression, compiled."""
    return compile(text, "<probe>", "eval")


def play(script: Script, device: str) -> Played:
    """Run a script, and leave no trace."""
    before = modes()
    with quiet():
        player = _Player(device)
        try:
            player.run(script)
        finally:
            player.leave()
    player.played.leaks = restore(before)
    return player.played


class _Player:
    """One run of one script; ``names`` is what its lines see."""

    def __init__(self, device: str) -> None:
        self.runner = Runner(device, values=False)  # only probes read numbers
        self.names: dict[str, Any] = {"torch": torch, "__name__": "script", **bound()}
        self.runner.live = self.names
        self.played = Played()

    def run(self, script: Script) -> None:
        checks: dict[int, list[tuple[int, Check]]] = {}
        for number, check in enumerate(script.checks):
            checks.setdefault(check.at, []).append((number, check))
        for at, item in enumerate(script.items):
            error = self._do(at, item)
            if error is not None:
                self.played.errors[at] = error
            self._look(at, checks.get(at, ()), due=isinstance(item, Line) and item.raises == "must")
            if error is not None and (not isinstance(item, Line) or item.raises == "never"):
                self.played.stopped = at
                return

    def _do(self, at: int, item: Item) -> Exception | None:
        try:
            if isinstance(item, Line):
                exec(code(item.text), self.names)  # noqa: S102 - the text is that of our own claims
            else:
                self.runner.perform(at, item)
        except Exception as error:  # noqa: BLE001 - whatever torch raises is an observation
            return error.with_traceback(None)
        return None

    def _look(self, at: int, checks: Any, *, due: bool) -> None:
        """Look at what is due after an item; if it raised and that was not due, only at the error."""
        for number, check in checks:
            if check.kind == "raises":
                self.played.seen[number] = self.played.errors.get(at)
            elif due or at not in self.played.errors:
                self.played.seen[number] = self._see(check)

    def _see(self, check: Check) -> Any:
        try:
            value = eval(probe(check.probe), self.names)  # noqa: S307 - as above
            return numbers(value) if check.kind == "close" and isinstance(value, torch.Tensor) else value
        except Exception as error:  # noqa: BLE001 - a probe that raises has seen something
            return error.with_traceback(None)

    def leave(self) -> None:
        """Break the cycles that gradients with a graph make."""
        for value in self.names.values():
            with contextlib.suppress(RuntimeError):  # some views cannot even be asked after a write to their base
                if isinstance(value, torch.Tensor) and value.is_leaf:
                    value.grad = None
