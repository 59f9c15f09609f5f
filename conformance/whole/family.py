"""Whole programs as a family: drawn, judged, made small, and each difference given to the claim that it breaks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autograd_conformance.program import Program
from autograd_conformance.scene import Scene
from autograd_conformance.stage import DeviceLike
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.verdicts import Violation
from autograd_conformance.whole.moves import THEMES
from autograd_conformance.whole.play import Packing, play
from autograd_conformance.whole.readings import reading
from autograd_conformance.whole.tell import DIALS, LEAVES, SLOT, Author
from autograd_conformance.whole.words import Told, Whole

NAME = "programs"
REDUCTION = 160  # runs that may be spent on making one program small

# What a wrong gradient breaks, by what is left in the program when it is as small as it gets: the first that is there.
_BLAMED: tuple[tuple[str, str], ...] = (
    ("checkpoint", "checkpoint.same-gradients"),
    ("function", "function.acts-as-op"),
    ("second", "create-graph.second-order"),
    ("module", "module.split-equals-fused"),
    ("factor", "hook.return-replaces"),
    ("hook", "hook.observer-is-neutral"),
    ("retain_grad", "retain-grad.does-not-disturb"),
    ("write on a view", "inplace.view-rebase"),
    ("write", "inplace.out-of-place-equivalence"),
    ("step", "optim.separate-from-backward"),
    ("reset", "grad.reset-none-or-zero"),
    ("again", "grad.accumulates-sum"),
    ("inputs", "backward.inputs-restricts"),
    ("roots", "backward.list-of-roots"),
    ("mode", "no-grad.later-use"),
    ("detach", "detach.cuts"),
)
_READING = 6  # the dial that chooses another reading
_PASSES = ("backward", "grad", "second")
CHAIN_RULE = "backward.chain-rule"
_GENERAL = ("", "agrad.equals-backward", "create-graph.same-values")  # what else the program does may be at fault
CLAIMS = frozenset(
    (
        *(claim for _, claim in _BLAMED), CHAIN_RULE, "create-graph.result-tracks", "requires-grad.propagates-any", "requires-grad.propagates-none",
        "requires-grad.value-independent", "requires-grad.unset-nonleaf-error", "requires-grad.start-recording-later",
        "leaf.iff-no-grad-fn", "retain-grad.flag", "retain-grad.populates", "retain-grad.needs-requires-grad",
        "detach.never-requires-grad", "detach.storage-shared", "no-grad.outputs", "no-grad.nesting-restores",
        "inplace.leaf-error", "inplace.version-counter", "inplace.saved-modified-error", "free.second-backward-error",
        "agrad.equals-backward", "agrad.frees-executed-part", "create-graph.same-values", "hook.fires-once-with-total",
        "hook.post-accumulate", "hook.observer-is-neutral", "hook.remove", "hook.needs-requires-grad", "hook.node-hooks", "hook.multi-grad",
        "function.non-differentiable-and-materialize", "function.mark-dirty",
        "inference.outputs", "inference.save-error", "inference.inplace-outside-error", "inference.requires-grad-error",
        "inference.clone-rescues", "inference.normal-inplace-tracked",
        "create-graph.result-tracks", "saved.identity-neutral", "anomaly.nan-detection", "optim.sgd-formula", "optim.step-untracked", "optim.zero-grad-own-only", "module.output-requires-grad",
        "module.params-require-grad", "module.split-equals-fused", "module.zero-grad-default-none",
    )
)  # fmt: skip
"""The claims that whole programs say something about."""


def drawn(count: int, seed: int) -> list[Scene]:
    """Whole programs as plain data; the first is empty but for a leaf."""
    payloads = draw(count, seed ^ zlib.crc32(NAME.encode()), DIALS)
    return [Scene(Program(()), tuple(payload), NAME) for payload in payloads]


def written(scene: Scene, device: DeviceLike, packing: str = "") -> Whole:
    """The program that the dials describe; what its ops save is asked on another device if one is named."""
    wide = "float64" if device.has("float64") else "float32"
    with np.errstate(all="ignore"):
        return Author(scene.dials, Packing(packing or device.name), device.name, wide).write(THEMES)


def printed(scene: Scene, whole: Whole) -> Scene:
    """The scene with the lines of the program."""
    raising = tuple(i for i, told in enumerate(whole.lines) if told.raises != "never")
    return replace(scene, lines=tuple(told.text for told in whole.lines), raising=raising)


def examined(scene: Scene, device: DeviceLike) -> tuple[Whole, list[Violation]]:
    """Run a program, and perhaps another reading of it: what it says, and what differs after the first line where anything does."""
    whole = written(scene, device)
    values = device.has("values")
    found = play(whole, device.name, values=values)
    if found:
        return whole, [blamed(whole, v, device) if v.claim in _GENERAL else v for v in found]
    other = reading(whole, scene.dials[_READING] if scene.dials else 0)
    if other is None:
        return whole, []
    return other, [replace(v, claim=other.reading) for v in play(other, device.name, values=values)]


def blamed(whole: Whole, violation: Violation, device: DeviceLike) -> Violation:
    """A wrong gradient with the claim that it breaks, judged by what a small program is made of.

    What has a twin that does the same without it is at fault only if the program with the twin is right.
    """
    lines = whole.lines[: violation.at + 1]
    if any(told.raises != "never" for told in lines[:-1] if told.what in _PASSES):
        return replace(violation, claim=violation.claim or CHAIN_RULE)  # what a pass that raised left behind
    kinds = _kinds(lines)
    claim = next((claim for kind, claim in _BLAMED if kind in kinds and _at_fault(whole, lines, kind, device)), "")
    return replace(violation, claim=claim or violation.claim or CHAIN_RULE)


def _kinds(lines: Sequence[Told]) -> set[str]:
    """What a program contains."""
    kinds = {told.what for told in lines[:-1]} | {lines[-1].what} - {"second"}  # whose own numbers are of first order
    passes = [told.text for told in lines if told.what == "backward"]
    kinds.update({"factor"} if any(told.claim == "hook.return-replaces" for told in lines) else ())
    kinds.update({"again"} if len(passes) > 1 else ())
    kinds.update({"inputs"} if any("inputs=" in text for text in passes) else ())
    kinds.update({"roots"} if any(text.startswith("torch.autograd.backward([") for text in passes) else ())
    kinds.update({"write on a view"} if any("write on a view" in told.features for told in lines) else ())
    return kinds


def _at_fault(whole: Whole, lines: Sequence[Told], kind: str, device: DeviceLike) -> bool:
    """Is all right once the statements of this kind are exchanged for their twins?"""
    alike = [told for told in lines if told.what == kind]
    twins = [told for told in alike if told.bare]
    if not twins or (kind == "hook" and len(twins) < len(alike)):  # a hook that changes gradients has none
        return True
    rows = [_without_logs(replace(told, text=told.bare) if told in twins else told) for told in lines]
    return not play(replace(whole, lines=rows), device.name, values=device.has("values"))


def _without_logs(told: Told) -> Told:
    """Hooks and Functions that are not there note nothing."""
    return replace(told, plain=told.plain[:1], numbers=[n for n in told.numbers if "log" not in n.probe])


def counted(whole: Whole, until: int | None = None) -> dict[str, int]:
    """How many comparisons a program makes for each claim."""
    counts: dict[str, int] = {}
    backwards = 0
    for told in whole.lines[:until]:
        backwards += told.what == "backward"
        claims = [whole.reading] if whole.reading and told.numbers else []
        claims += [told.claim] if told.claim and told.raises != "may" else []
        claims += [number.claim or _evidence(number.due, backwards) for number in told.numbers]
        claims += [plain.claim for plain in told.plain[1:]]
        for claim in claims:
            counts[claim] = counts.get(claim, 0) + 1
    return {claim: count for claim, count in counts.items() if claim}


def _evidence(due: Any, backwards: int) -> str:
    if due is None or not np.any(due):
        return ""
    return "grad.accumulates-sum" if backwards > 1 else CHAIN_RULE


# --- making small -----------------------------------------------------------------------------------------------------

Shows = Callable[[tuple[int, ...]], Violation | None]


def small(scene: Scene, device: DeviceLike, known: Violation, budget: int = REDUCTION) -> tuple[Scene, Violation]:
    """A program with fewer and simpler statements that shows the same sort of difference."""

    def shows(dials: tuple[int, ...]) -> Violation | None:
        _, found = examined(replace(scene, dials=dials), device)
        return next((v for v in found if _sort(v) == _sort(known)), None)

    dials = _fewer(scene.dials, shows, budget)
    dials = _simpler(dials, shows, budget // 2)
    dials = _fewer(dials, shows, budget // 4)
    final = replace(scene, dials=dials)
    whole, found = examined(final, device)
    alike = next((v for v in found if _sort(v) == _sort(known)), known)
    return printed(final, whole), alike


def _sort(violation: Violation) -> tuple[str, str, bool, str]:
    """Lest the search slide into another fault: how it was seen, and where."""
    where = ".grad" if violation.probe.endswith(".grad") else violation.probe.rpartition(".")[2][:8]
    return violation.check, violation.mark, violation.due == "None", where


def _fewer(dials: tuple[int, ...], shows: Shows, budget: int) -> tuple[int, ...]:
    """Without halves, quarters ... single statements."""
    count = len(dials) // SLOT
    size = max(1, count // 2)
    while budget > 0:
        progress = False
        for start in range(count - size, 0, -size):
            candidate = _without(dials, start, size)
            if candidate != dials and budget > 0:
                budget -= 1
                if shows(candidate) is not None:
                    dials, progress = candidate, True
        if size == 1 and not progress:
            break
        size = max(1, size // 2)
    return dials


def _without(dials: tuple[int, ...], start: int, size: int) -> tuple[int, ...]:
    rows = list(dials)
    for i in range(start, start + size):
        rows[i * SLOT : (i + 1) * SLOT] = [0] * SLOT
    return tuple(rows)


def _simpler(dials: tuple[int, ...], shows: Shows, budget: int) -> tuple[int, ...]:
    """Bytes of the statements that are left turned to 0, or to 1 where 0 means that there is no statement."""
    for i in range(len(dials)):
        slot, byte = divmod(i, SLOT)
        least = 0 if byte or slot <= LEAVES else 1
        there = slot <= LEAVES or dials[slot * SLOT]
        if dials[i] > least and there and budget > 0:
            budget -= 1
            candidate = (*dials[:i], least, *dials[i + 1 :])
            if shows(candidate) is not None:
                dials = candidate
    return dials
