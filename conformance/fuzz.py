"""Fresh programs for as long as one likes, and a folder that remembers what they were good for.

A round is a seed: each family draws one shard of programs with it, in a process of its own. What breaks a claim, and is
not expected, is made small and kept in the folder as JSON and as a script; so are programs that brought two ops
together that never met before. Both are run first the next time.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autograd_conformance import expectations
from autograd_conformance.claims import Claim, register
from autograd_conformance.devices import Device
from autograd_conformance.engine import Engine, Example, ShardWork
from autograd_conformance.errors import UsageError
from autograd_conformance.families import Work, families_of
from autograd_conformance.forks import forked
from autograd_conformance.profiles import PROFILES
from autograd_conformance.program import Apply, Program, ProgramError
from autograd_conformance.replay import all_checks
from autograd_conformance.reports.folder import put
from autograd_conformance.reports.script import repro
from autograd_conformance.scene import parse
from autograd_conformance.settle import smallest
from autograd_conformance.verdicts import Counterexample, Violation

LIMIT = 600.0  # seconds for a round
KEPT = 3  # counterexamples of a claim
REMEMBERED = "interesting.jsonl"

Meeting = tuple[str, str]


@dataclass(slots=True)
class Round:
    """What one seed brought: programs per family, comparisons, examples per claim, and ops that met in a program."""

    programs: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    examples: dict[str, list[Example]] = field(default_factory=dict)
    meetings: dict[Meeting, str] = field(default_factory=dict)

    def add(self, family: str, work: ShardWork, programs: Sequence[Work]) -> None:
        """Add a shard that was judged."""
        self.programs[family] += len(programs)
        for claim, tally in work.claims.items():
            self.checks += tally["checks"]
            for text, violation in tally["examples"]:
                self.examples.setdefault(claim, []).append((text, Violation(**violation)))
        for program in programs:
            if isinstance(program, Program):
                for pair in met(program):
                    self.meetings.setdefault(pair, program.to_json())


Jobs = Iterable[tuple[str, Callable[[], Round]]]


def seeds_for(minutes: float, first: int) -> Iterator[int]:
    """Seeds from ``first`` on, at least one, until so many minutes are over."""
    end = time.monotonic() + 60 * minutes
    yield first
    yield from itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first + 1))


class Soak:
    """A fuzzing run on one device."""

    def __init__(self, device: Device, corpus: Path, setup: str = "") -> None:
        self.device, self.corpus, self.setup = device, corpus, setup
        self.claims: Mapping[str, Claim] = register()
        self.known = expectations.load([expectations.PACKAGED], self.claims)
        self.checks = all_checks()
        self.families = sorted({family for check in self.checks for family in families_of(check)})
        self.done = Round()
        self.rounds = 0
        self.kept: Counter[str] = Counter()
        self.deaths: list[str] = []

    def run(self, seeds: Iterable[int], workers: int, say: Callable[[str], None]) -> None:
        """Run what the folder remembers, then a round for each seed."""
        torch.set_num_threads(1)
        remembered = self.remembered()
        first: Jobs = [("what is remembered", partial(self.again, remembered))] if remembered else []
        rounds: Jobs = ((f"seed {number}", partial(self.round, number)) for number in seeds)
        for name, found in forked(itertools.chain(first, rounds), workers, LIMIT):
            if isinstance(found, Round):
                self._take(name, found, say)
            else:
                self.deaths.append(f"{name} {found}")
                say(f"{name}: the process {found}")

    def engine(self, seed: int) -> Engine:
        """Draws and judges the programs of a seed."""
        return Engine(self.corpus, PROFILES["fuzz"], seed, self.checks, self.known, torch.__version__)

    def round(self, seed: int) -> Round:
        """One shard of each family."""
        engine = self.engine(seed)
        return self._judged((family, engine.programs(family, 0)) for family in self.families)

    def again(self, programs: Sequence[Work]) -> Round:
        """Programs that are remembered, each judged by the claims of its kind."""
        graphs: list[Work] = [program for program in programs if isinstance(program, Program)]
        scenes = [program for program in programs if not isinstance(program, Program)]
        families: list[tuple[str, list[Work]]] = [("graphs", graphs)]
        for check in self.checks:
            mine: list[Work] = [scene for scene in scenes if scene.claim == check.claim]
            families += [(check.family, mine)] if mine else []
        return self._judged(families)

    def _judged(self, families: Iterable[tuple[str, Sequence[Work]]]) -> Round:
        warnings.simplefilter("ignore")
        engine, found = self.engine(0), Round()
        for family, programs in families:
            work = ShardWork(engine, family, self.device)
            for program in programs:
                work.judge(program)
            found.add(family, work, programs)
        return found

    def _take(self, name: str, found: Round, say: Callable[[str], None]) -> None:
        self.rounds += 1
        self.done.programs += found.programs
        self.done.checks += found.checks
        fresh = {pair: text for pair, text in found.meetings.items() if pair not in self.done.meetings}
        self.done.meetings |= fresh
        with (self.corpus / REMEMBERED).open("a", encoding="utf-8") as file:
            file.writelines(f"{text}\n" for text in dict.fromkeys(fresh.values()))
        for claim, examples in found.examples.items():
            if self.kept[claim] < KEPT:
                self.kept[claim] += 1
                say(f"{name}: {claim} is broken: {self._keep(claim, examples)}")

    def _keep(self, claim: str, examples: Sequence[Example]) -> Path:
        """Make a counterexample small, in a process of its own, and store it."""
        ((_, found),) = forked([("", partial(self._smallest, claim, examples))], 1, LIMIT)
        if not isinstance(found, Counterexample):
            return put(self.corpus / f"{claim}-{found}.json", examples[0][0])
        stem = self.corpus / f"{claim}-{found.program.digest()}"
        sources = "; ".join(self.claims[claim].sources)
        put(
            stem.with_name(f"{stem.name}.py"),
            repro(found, self.claims[claim].sentence, sources, self.device.name, self.setup),
        )
        return put(stem.with_name(f"{stem.name}.json"), found.program.to_json())

    def _smallest(self, claim: str, examples: Sequence[Example]) -> Counterexample:
        (check,) = [check for check in self.checks if check.claim == claim]
        return smallest(check, self.device, [e for e in self.known if e.claim == claim], examples)

    def remembered(self) -> list[Work]:
        """What is in the folder: counterexamples, then interesting programs, whose meetings count as known.

        Raises:
            UsageError: a file in it is none of ours.

        """
        self.corpus.mkdir(parents=True, exist_ok=True)
        texts = [(path, path.read_text(encoding="utf-8")) for path in sorted(self.corpus.glob("*.json"))]
        path = self.corpus / REMEMBERED
        if path.exists():
            texts += [(path, line) for line in path.read_text(encoding="utf-8").splitlines()]
        programs = [_parsed(text, path) for path, text in texts]
        for program in programs:
            if isinstance(program, Program):
                self.done.meetings |= dict.fromkeys(met(program), "")
        return programs

    def summary(self) -> dict[str, Any]:
        """Programs per family, comparisons, rounds, pairs of ops that met, broken claims, and processes that died."""
        return {
            "programs": sum(self.done.programs.values()),
            "families": dict(self.done.programs),
            "checks": self.done.checks,
            "rounds": self.rounds,
            "meetings": len(self.done.meetings),
            "broken": sorted(self.kept),
            "deaths": self.deaths,
        }


def met(program: Program) -> Iterator[Meeting]:
    """Pairs of ops of which the second uses what the first made."""
    maker = {name: s.op for s in program if isinstance(s, Apply) for name in s.outs}
    return ((maker[arg], s.op) for s in program if isinstance(s, Apply) for arg in s.args if arg in maker)


def _parsed(text: str, path: Path) -> Work:
    try:
        return parse(text)
    except (ProgramError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is no program: {error}; remove it, or name another folder") from None
