"""How strong the suite is: each planted fault in a process of its own, against the programs of a profile.

A process is forked for each fault from one that has drawn all programs. It plants the fault, judges the families of the
claims that the fault may rightly be called by, makes the first rightful counterexample small, and runs torch's own
gradcheck on graphs of the same kind, to compare with.
"""

from __future__ import annotations

import fnmatch
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autograd_conformance import expectations
from autograd_conformance.claims import register
from autograd_conformance.devices import Device, discover
from autograd_conformance.engine import Engine, Example, ShardWork
from autograd_conformance.errors import unknown
from autograd_conformance.families import Work, families_of, kind_of
from autograd_conformance.faults.words import FAULTS, Fault
from autograd_conformance.forks import forked
from autograd_conformance.gradchecked import followed, passes
from autograd_conformance.profiles import Profile
from autograd_conformance.program import Program
from autograd_conformance.replay import all_checks
from autograd_conformance.settle import smallest
from autograd_conformance.verdicts import Violation

LIMIT = 900.0  # seconds for a fault; null faults are judged by everything
GRADCHECKED = 60  # graphs that gradcheck looks at


@dataclass(frozen=True, slots=True)
class Kill:
    """What became of a fault.

    Attributes:
        fault: its name.
        broken: claims that broke and no expectation explains.
        claim: the first of them by which the fault may rightly be called; empty if there is none.
        programs: programs judged until that one broke first.
        seconds: CPU seconds until then.
        size: statements of the reduced counterexample, without leaves and repeated passes.
        gradcheck: torch's own gradcheck, on graphs of the same kind, noticed the fault.
        ended: how the process ended, if it did not return: ``crashed`` or ``hung``.

    """

    fault: str
    broken: tuple[str, ...] = ()
    claim: str = ""
    programs: int = 0
    seconds: float = 0.0
    size: int = 0
    gradcheck: bool = False
    ended: str = ""


@dataclass(slots=True)
class Hunt:
    """All that is the same for each fault: programs that are drawn, graphs with which gradcheck is content."""

    profile: Profile
    device: Device = field(default_factory=lambda: discover(["cpu"])[0])
    drawn: dict[str, list[list[Work]]] = field(default_factory=dict)
    graphs: list[Program] = field(default_factory=list)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        """Draw nothing yet."""
        known = expectations.load([expectations.PACKAGED], register())
        self.engine = Engine(Path(), self.profile, 0, all_checks(), known, torch.__version__)

    def prepare(self, faults: Iterable[Fault]) -> None:
        """Draw the programs that these faults meet, and find graphs with which gradcheck is content while torch is."""
        for family in sorted({family for fault in faults for family in self.families(fault)}):
            shards, _ = kind_of(family).shards(self.profile)
            self.drawn[family] = [self.engine.programs(family, number) for number in range(shards)]
        candidates = (followed(p) for p in self.engine.programs("graphs", 0) if isinstance(p, Program))
        self.graphs = [p for p in candidates if passes(p)][:GRADCHECKED]

    def families(self, fault: Fault) -> list[str]:
        """Those of the claims that the fault may rightly be called by; all for a null fault."""
        checks = [c for c in self.engine.checks if c.claim in fault.claims or fault.null]
        return list(dict.fromkeys(family for check in checks for family in families_of(check)))

    def kill(self, fault: Fault) -> Kill:
        """Plant the fault, for good, and see what breaks, up to the shard in which the first rightful claim does."""
        warnings.simplefilter("ignore")
        fault.install()
        trail = _Trail(fault)
        for family in self.families(fault):
            for programs in self.drawn[family]:
                trail.follow(ShardWork(self.engine, family, self.device), programs)
                if trail.found:
                    break
            if trail.found:
                break
        claim = next((claim for claim in fault.claims if claim in trail.broken), "")
        size = self._size(claim, trail.broken[claim]) if claim else 0
        return Kill(fault.name, tuple(trail.broken), claim, *(trail.found or (0, 0.0)), size, self._gradcheck())

    def _size(self, claim: str, examples: Sequence[Example]) -> int:
        (check,) = [check for check in self.engine.checks if check.claim == claim]
        entries = [e for e in self.engine.expectations if e.claim == claim]
        return smallest(check, self.device, entries, examples[:8]).program.size()

    def _gradcheck(self) -> bool:
        try:
            return not all(passes(graph) for graph in self.graphs)
        except Exception:  # noqa: BLE001 - whatever a fault makes torch raise, it is noticed
            return True


class _Trail:
    """What breaks under a fault, shard after shard."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.judged, self.start = fault, 0, time.process_time()
        self.broken: dict[str, list[Example]] = {}
        self.found: tuple[int, float] | None = None

    def follow(self, work: ShardWork, programs: Iterable[Work]) -> None:
        """Judge a shard; note programs and seconds when the first rightful claim breaks."""
        rightful = [claim for claim in self.fault.claims if claim in work.claims]
        for program in programs:
            self.judged += 1
            work.judge(program)
            if self.found is None and any(work.claims[claim]["examples"] for claim in rightful):
                self.found = self.judged, round(time.process_time() - self.start, 3)
        for claim, tally in work.claims.items():
            examples = [(text, Violation(**violation)) for text, violation in tally["examples"]]
            if examples:
                self.broken.setdefault(claim, []).extend(examples)


def about(profile: Profile) -> dict[str, Any]:
    """What the faults were tried against."""
    return {"torch": torch.__version__, "profile": profile.name, "graphs": GRADCHECKED}


def chosen(globs: Sequence[str]) -> list[Fault]:
    """The faults whose names match a glob; all without one.

    Raises:
        UsageError: a glob matches no fault.

    """
    for glob in globs:
        if not fnmatch.filter(FAULTS, glob):
            raise unknown("fault", glob, FAULTS)
    return [f for f in FAULTS.values() if not globs or any(fnmatch.fnmatchcase(f.name, glob) for glob in globs)]


def kills(faults: Sequence[Fault], profile: Profile, workers: int, limit: float = LIMIT) -> Iterator[Kill]:
    """What becomes of each fault, in the order in which they are done."""
    torch.set_num_threads(1)
    hunt = Hunt(profile)
    hunt.prepare(faults)
    for name, found in forked([(fault.name, partial(hunt.kill, fault)) for fault in faults], workers, limit):
        yield found if isinstance(found, Kill) else Kill(name, ended=found)
