"""Other readings of the same program, which must come to the same: each is a program again. No torch.

They are chosen by a dial, and played once the plain program is right. Where the reading makes a difference that nobody
promises away, the program has no such reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from autograd_conformance.whole.words import Told, Whole

Reading = Callable[[Whole], Whole | None]
_PASSES = ("backward", "grad", "second")


def packed(whole: Whole) -> Whole:
    """All that is saved is packed and unpacked as it is. Packing switches the version check off."""
    part = _before(whole, lambda told: told.raises == "may" or told.claim == "inplace.saved-modified-error")
    return _around(part, "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)", "saved.identity-neutral")


def watched(whole: Whole) -> Whole:
    """Anomaly mode looks for nan, of which there is none."""
    return _around(whole, "torch.autograd.set_detect_anomaly(True)", "anomaly.nan-detection")


def checkpointed(whole: Whole) -> Whole | None:
    """Ops run in a checkpoint each, but for those whose operands are written to; what is freed is another matter."""
    part = _before(whole, lambda told: told.raises != "never")
    rows = [_in_checkpoint(told) for told in part.lines]
    if rows == part.lines:
        return None
    rows.insert(0, _first(whole, "from torch.utils.checkpoint import checkpoint"))
    return replace(whole, lines=rows, reading="checkpoint.same-gradients")


READINGS: tuple[Reading | None, ...] = (None, packed, watched, checkpointed)


def reading(whole: Whole, dial: int) -> Whole | None:
    """The other reading that a dial chooses, if the program has it."""
    chosen = READINGS[dial % len(READINGS)]
    return None if chosen is None else chosen(whole)


def _before(whole: Whole, ends: Callable[[Told], bool]) -> Whole:
    """The program as far as a pass whose outcome the reading may change."""
    last = next((i for i, told in enumerate(whole.lines) if told.what in _PASSES and ends(told)), None)
    return replace(whole, lines=whole.lines[:last])


def _first(whole: Whole, text: str) -> Told:
    """A line before all others."""
    return Told(text, "import", plain=whole.lines[0].plain[:1])


def _around(whole: Whole, manager: str, claim: str) -> Whole:
    """All of it in a block; who plays it, or ends, leaves the block."""
    head = _first(whole, f"around = {manager}\naround.__enter__()")
    return replace(whole, lines=[head, *whole.lines], reading=claim)


def _in_checkpoint(told: Told) -> Told:
    if told.what != "op" or not told.reads or "\n" in told.text:
        return told
    names, _, call = told.text.partition(" = ")
    held = ", ".join(f"{name}={name}" for name in told.reads)
    return replace(told, text=f"{names} = checkpoint(lambda {held}: {_as_tuple(names, call)}, use_reentrant=False)")


def _as_tuple(names: str, call: str) -> str:
    return call if re.fullmatch(r"\w+", names) else f"tuple({call})"
