"""Families: claims that share what they are judged on. Some are judged on whole programs, the others on scenes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from autograd_conformance.adapt import Changes, adapt
from autograd_conformance.blame import GENERAL
from autograd_conformance.census import graph_words, words
from autograd_conformance.compare import Case
from autograd_conformance.devices import Device
from autograd_conformance.judge import ClaimCheck, judge, violations_of
from autograd_conformance.oracle import InvalidProgram, predict
from autograd_conformance.profiles import Profile
from autograd_conformance.program import Program
from autograd_conformance.reduce import Reducer
from autograd_conformance.scene import Scene
from autograd_conformance.scenes import SceneCheck, printed, reduced, stage, written
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.programs import decode
from autograd_conformance.strategies.scenes import PAYLOAD, decode_scene
from autograd_conformance.verdicts import Violation
from autograd_conformance.whole import family as whole

AnyCheck = ClaimCheck | SceneCheck
Work = Program | Scene
Found = dict[str, tuple[int, list[Violation]]]
Wanted = Callable[[Work, Violation], bool]
Telling = Callable[[str], None]


def deaf(_claim: str) -> None:
    """For whoever need not know for which claim a program is run."""


@dataclass(slots=True)
class Judged:
    """One program or scene, judged by all claims of a family.

    Attributes:
        found: per claim the comparisons made, and those that came out wrong.
        words: what it contains, for the counters of the report.
        excluded: comparisons left out because something else spoils them.
        leaks: modes that were not restored.
        differs: gradients differ, so that finding the claims took experiments.
        shown: per claim what shows its violations, if it is not just what was judged.

    """

    found: Found
    words: Iterable[str] = ()
    excluded: int = 0
    leaks: list[str] = field(default_factory=list)
    differs: bool = False
    shown: dict[str, Work] = field(default_factory=dict)


class Kind(Protocol):
    """What a family is judged on."""

    def shards(self, profile: Profile) -> tuple[int, int]:
        """Shards of a family, and programs in each."""

    def draw(self, family: str, count: int, seed: int) -> list[Work]:
        """The programs of a shard."""

    def adapt(self, work: Any, device: Device) -> tuple[Work, Changes]:
        """A program as a device can run it, and what was changed."""

    def judge(
        self, work: Any, device: Device, checks: Sequence[Any], *, examine: bool, telling: Telling = deaf
    ) -> Judged:
        """Run one program and judge it by all claims of a family; ``telling`` hears a claim that it is run for alone."""

    def fatal(self, check: Any, work: Any, device: Device) -> Work:
        """A program that ends the process, as it is to be shown; it is not run."""

    def violations(self, check: Any, work: Any, device: Device) -> tuple[Work, Sequence[Violation], tuple[int, ...]]:
        """Judge by one claim: the program as it ran, what it breaks, and the statements that raised."""

    def reduce(
        self, check: Any, work: Any, device: Device, violation: Violation, wanted: Wanted, budget: int
    ) -> tuple[Work, Violation]:
        """A small program that shows the same kind of violation."""


def kind_of(name: str) -> Kind:
    """What the family of a name is judged on."""
    known: dict[str, Kind] = {"graphs": GRAPHS, whole.NAME: WHOLES}
    return known.get(name, SCENES)


def families_of(check: AnyCheck) -> tuple[str, ...]:
    """The families that say something about a claim: its own, and perhaps the one of programs of every kind."""
    return (check.family, whole.NAME) if check.claim in whole.CLAIMS else (check.family,)


def check_of(function: Any) -> AnyCheck | None:
    """The check that a test function reads, if it is one of ours."""
    found = getattr(function, "claim_check", None)
    return found if isinstance(found, ClaimCheck | SceneCheck) else None


class Graphs:
    """Families that are judged on whole programs of the oracle's words."""

    def shards(self, profile: Profile) -> tuple[int, int]:
        """As the profile says."""
        return profile.shards, profile.size

    def draw(self, family: str, count: int, seed: int) -> list[Work]:
        """One program a payload; all such families share them."""
        del family
        return [decode(payload) for payload in draw(count, seed)]

    def adapt(self, work: Program, device: Device) -> tuple[Work, Changes]:
        """See :mod:`autograd_conformance.adapt`."""
        return adapt(work, device)

    def judge(
        self, work: Program, device: Device, checks: Sequence[ClaimCheck], *, examine: bool, telling: Telling = deaf
    ) -> Judged:
        """Run once, then let every claim look at what was seen."""
        del telling
        with np.errstate(all="ignore"):
            case = Case(work, device.name, values=device.has("values"), trusted=True)
            counted = words(work, case.due)
            found = judge(case, checks, examine=examine)
            return Judged(found, counted, case.excluded, case.seen.leaks, examine and bool(case.differences))

    def fatal(self, check: ClaimCheck, work: Program, device: Device) -> Work:
        """As it is."""
        del check, device
        return work

    def violations(
        self, check: ClaimCheck, work: Program, device: Device
    ) -> tuple[Work, Sequence[Violation], tuple[int, ...]]:
        """Run and judge by one claim."""
        case, found = violations_of(work, device.name, check, values=device.has("values"))
        return work, found, tuple(sorted(case.seen.errors))

    def reduce(
        self, check: ClaimCheck, work: Program, device: Device, violation: Violation, wanted: Wanted, budget: int
    ) -> tuple[Work, Violation]:
        """First by the bare difference, which is cheap; if that led to another claim, by the claim itself."""

        def like(program: Program) -> Violation | None:
            _, found, _ = self.violations(check, program, device)
            first = next((v for v in found if wanted(program, v)), None)
            alike = first is not None and (first.mark, first.check) == (violation.mark, violation.check)
            return first if alike else None

        if violation.mark in GENERAL:
            shows = partial(_same_difference, check.claim, device, violation)
            small, _ = Reducer(shows, budget).reduce(work, violation)
            again = like(small)
            if again is not None:
                return small, again
        return Reducer(like, budget).reduce(work, violation)


def _same_difference(claim: str, device: Device, violation: Violation, program: Program) -> Violation | None:
    try:
        case = Case(program, device.name, values=device.has("values"))
    except InvalidProgram:
        return None
    same = [d for d in case.differences if d.kind == violation.mark]
    return same[0].violation(claim, violation.because) if same else None


class Scenes:
    """Families whose claims each write a script of their own for a scene."""

    def shards(self, profile: Profile) -> tuple[int, int]:
        """As the profile says."""
        return profile.scene_shards, profile.scene_size

    def draw(self, family: str, count: int, seed: int) -> list[Work]:
        """Scenes of the family's own: the seed is mixed with its name."""
        payloads = draw(count, seed ^ zlib.crc32(family.encode()), PAYLOAD)
        return [decode_scene(payload) for payload in payloads]

    def adapt(self, work: Scene, device: Device) -> tuple[Work, Changes]:
        """The graph is rewritten as any program; the claim's own lines ask the device."""
        graph, changes = adapt(work.graph, device)
        return (replace(work, graph=graph), changes) if changes else (work, changes)

    def judge(
        self, work: Scene, device: Device, checks: Sequence[SceneCheck], *, examine: bool, telling: Telling = deaf
    ) -> Judged:
        """Each claim writes its script and runs it."""
        del examine
        with np.errstate(all="ignore"):
            due = predict(work.graph, trusted=True)
            judged = Judged({}, graph_words(work.graph, due))
            for check in checks:
                telling(check.claim)
                staged = stage(check, work, device, due)
                judged.found[check.claim] = staged.count, list(staged.violations)
                judged.shown[check.claim] = staged.scene
                judged.excluded += staged.excluded
                judged.leaks += staged.leaks
        return judged

    def fatal(self, check: SceneCheck, work: Scene, device: Device) -> Work:
        """With the lines of the script."""
        script = written(check, work, device)
        return work if script is None else printed(check, work, script, device)

    def violations(
        self, check: SceneCheck, work: Scene, device: Device
    ) -> tuple[Work, Sequence[Violation], tuple[int, ...]]:
        """Write the script, run it and compare."""
        with np.errstate(all="ignore"):
            staged = stage(check, work, device)
        return staged.scene, staged.violations, staged.scene.raising

    def reduce(
        self, check: SceneCheck, work: Scene, device: Device, violation: Violation, wanted: Wanted, budget: int
    ) -> tuple[Work, Violation]:
        """A smaller graph and simpler dials."""
        with np.errstate(all="ignore"):
            return reduced(check, work, device, violation, wanted, 3 * budget)  # scripts are quick to run


class Wholes:
    """Programs with statements of every kind; each difference is given to the claim that it breaks."""

    def shards(self, profile: Profile) -> tuple[int, int]:
        """As the profile says."""
        return profile.whole_shards, profile.whole_size

    def draw(self, family: str, count: int, seed: int) -> list[Work]:
        """See :func:`autograd_conformance.whole.family.drawn`."""
        del family
        return list(whole.drawn(count, seed))

    def adapt(self, work: Scene, device: Device) -> tuple[Work, Changes]:
        """Nothing: the author of the program asks the device."""
        del device
        return work, ()

    def judge(
        self, work: Scene, device: Device, checks: Sequence[AnyCheck], *, examine: bool, telling: Telling = deaf
    ) -> Judged:
        """Run it; a program that differs is made small at once, for what is left of it tells which claim is broken."""
        del telling
        with np.errstate(all="ignore"):
            program, found = whole.examined(work, device)
            known = {check.claim for check in checks}
            counts = whole.counted(program, found[0].at if found else None)
            judged = Judged({claim: (count, []) for claim, count in counts.items() if claim in known}, program.features)
            if found and examine:
                small, violation = whole.small(work, device, found[0])
                judged.differs, judged.shown[violation.claim] = True, small
                if violation.claim in known:
                    judged.found[violation.claim] = (counts.get(violation.claim, 0) + 1, [violation])
        return judged

    def fatal(self, check: AnyCheck, work: Scene, device: Device) -> Work:
        """With the lines of the program."""
        del check
        return whole.printed(work, whole.written(work, device, packing="cpu"))

    def violations(
        self, check: AnyCheck, work: Scene, device: Device
    ) -> tuple[Work, Sequence[Violation], tuple[int, ...]]:
        """Run it; what it breaks counts if it is the claim in question."""
        with np.errstate(all="ignore"):
            program, found = whole.examined(work, device)
        shown = whole.printed(work, program)
        return shown, [v for v in found if v.claim == check.claim], shown.raising

    def reduce(
        self, check: AnyCheck, work: Scene, device: Device, violation: Violation, wanted: Wanted, budget: int
    ) -> tuple[Work, Violation]:
        """Fewer and simpler statements."""
        del check, wanted
        with np.errstate(all="ignore"):
            return whole.small(work, device, violation, budget)


GRAPHS, SCENES, WHOLES = Graphs(), Scenes(), Wholes()
