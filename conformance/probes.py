"""Questions that take a run of their own: what nodes save, and what values come out.

Packing saved tensors switches the version check off, so it must not happen in the run that is judged.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from autograd_conformance.program import Backward, DetachInPlace, Grad, Program, SetGrad, Write, reads, writes
from autograd_conformance.runner import Runner, quiet, readable, storage_of


def forward_values(program: Program, device: str, *, record: bool = True) -> dict[str, Any]:
    """Numbers of all tensors of a program that only builds a graph, recorded or not."""
    runner = Runner(device, values=False)
    with quiet(), torch.set_grad_enabled(record):
        for at, statement in enumerate(program):
            runner.step(at, statement)
    return {name: readable(t) for name, t in runner.live.items()}


@dataclass(slots=True)
class Saved:
    """Storages that each op packed, and the storage of each tensor, from a run of its own."""

    packed: dict[int, set[int]] = field(default_factory=dict)
    storage: dict[int, int] = field(default_factory=dict)


def saved(program: Program, device: str, asked: Collection[int]) -> Saved:
    """Ask torch which of some statements save tensors for backward.

    A run of its own, without passes: packing switches the version check off, so it must not happen in the judged run.
    """
    found = Saved()
    runner = _Blind(device, values=False)
    packs: set[int] = set()

    def pack(t: torch.Tensor) -> torch.Tensor:
        packs.add(storage_of(t))
        return t

    with quiet(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for at in _leading_to(program, asked):
            statement = program.statements[at]
            runner.step(at, statement)
            if packs:
                found.packed[at] = set(packs)
                packs.clear()
            if isinstance(statement, Write | DetachInPlace) and statement.arg in runner.live:
                found.storage[at] = storage_of(runner.live[statement.arg])
    return found


class _Blind(Runner):
    """Keeps tensors without looking at them."""

    def _keep(self, name: str, t: torch.Tensor) -> None:
        self.live[name] = t


def _leading_to(program: Program, asked: Collection[int]) -> list[int]:
    """Some statements, what they are made from, and all that changes tensors; passes and resets are left out."""
    wanted: set[str] = set()
    kept: list[int] = []
    for at in range(len(program) - 1, -1, -1):
        statement = program.statements[at]
        if isinstance(statement, Backward | Grad | SetGrad):
            continue
        made = writes(statement)
        if not made or at in asked or not wanted.isdisjoint(made):
            wanted.update(reads(statement))
            kept.append(at)
    return kept[::-1]
