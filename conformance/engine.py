"""A run: families of programs are drawn, then judged shard by shard, and each claim reads its verdict.

Every process of a run has an engine, and all share one working folder. A worker that needs the judgement of a family
takes the next free shard until none is left, so no program is judged twice and no worker idles.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autograd_conformance import progress
from autograd_conformance.census import total
from autograd_conformance.claims import Claim, register
from autograd_conformance.devices import Device
from autograd_conformance.errors import DeviceGoneError
from autograd_conformance.expectations import Expectation, within
from autograd_conformance.families import AnyCheck, Telling, Work, deaf, families_of, kind_of
from autograd_conformance.journal import Death, Shard, known_deaths, slug
from autograd_conformance.patience import Patience
from autograd_conformance.profiles import PROFILES, Profile
from autograd_conformance.traits import unusable
from autograd_conformance.verdicts import Violation

KEPT = 4  # examples kept of each kind of violation, per shard and claim
EXAMINED = 8  # programs whose gradients differ, per shard; after them only flags, errors and memory are judged
PRICE = {"crashed": 1, "hung": 2}  # a program that hangs costs a minute
LIVES = 4  # what a family may cost on a device before the rest of it is given up
ALL_LIVES = 40  # the same for all families of a device

Example = tuple[str, Violation]


@dataclass(slots=True)
class Judgement:
    """What all programs of a family say about one claim on one device."""

    evidence: int = 0
    checks: int = 0
    violations: int = 0
    expected: int = 0
    examples: list[Example] = field(default_factory=list)
    foretold: list[Example] = field(default_factory=list)

    def joined(self, other: Judgement) -> Judgement:
        """This and what another family found."""
        return Judgement(
            self.evidence + other.evidence,
            self.checks + other.checks,
            self.violations + other.violations,
            self.expected + other.expected,
            self.examples + other.examples,
            self.foretold + other.foretold,
        )

    def add(self, part: dict[str, Any]) -> None:
        """Add what a shard found."""
        for word in ("evidence", "checks", "violations", "expected"):
            setattr(self, word, getattr(self, word) + part[word])
        self.examples += [(text, Violation(**violation)) for text, violation in part["examples"]]
        self.foretold += [(text, Violation(**violation)) for text, violation in part["foretold"]]


@dataclass(slots=True)
class Family:
    """A family on a device, judged."""

    name: str
    device: str
    programs: int = 0
    digests: list[str] = field(default_factory=list)
    claims: dict[str, Judgement] = field(default_factory=dict)
    generated: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    excluded: int = 0
    unexamined: int = 0
    deaths: list[tuple[str, str, str]] = field(default_factory=list)
    missing: int = 0
    leaks: list[str] = field(default_factory=list)

    def killed(self, claim: str) -> list[tuple[str, str]]:
        """Programs that ended a process while a claim was judged, alone or with others, and how."""
        return [(text, how) for text, how, alone in self.deaths if alone in ("", claim)]

    @property
    def digest(self) -> str:
        """The chain over all shards."""
        return chain(self.digests)

    def to_plain(self) -> dict[str, Any]:
        """What the report says of it."""
        return {
            "family": self.name,
            "device": self.device,
            "programs": self.programs,
            "digest": self.digest,
            "shards": self.digests,
            "generated": self.generated,
            "changed": self.changed,
            "excluded": self.excluded,
            "unexamined": self.unexamined,
        }


def unsupported(claim: Claim, device: Device, torch_version: str) -> str:
    """Why a claim cannot be judged on a device; empty if it can."""
    if not within(torch_version, claim.since, claim.until):
        return f"torch {torch_version} is outside {claim.since or '...'} to {claim.until or '...'}"
    missing = [trait for trait in claim.needs if not device.has(trait)]
    if missing:
        return f"{device.name} lacks {', '.join(missing)} ({device.missing.get(missing[0], '')})"
    return ""


def chain(digests: Iterable[str]) -> str:
    """One digest of several in order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _check_presence(device: Device) -> None:
    reason = unusable(device.name)
    if reason:
        raise DeviceGoneError(f"{device.name} answers no more: {reason}")


@dataclass(slots=True)
class Engine:
    """Judges families in a working folder; results are kept there and in memory.

    ``shares`` says of slow devices that they run only the first of so many parts of the programs, and no less than the
    profile ``smoke`` has.
    """

    folder: Path
    profile: Profile
    seed: int
    checks: Sequence[AnyCheck]
    expectations: Sequence[Expectation]
    torch_version: str
    done: dict[tuple[str, str], Family] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)

    def family(self, name: str, device: Device) -> Family:
        """The judgement of a family on a device; works on what is left of it first."""
        known = self.done.get((name, device.name))
        if known is not None:
            return known
        shards = self._shards(name, device.name)
        for wait in (False, True):
            for shard in shards:
                self._take(shard, name, device, wait=wait)
        found = self.done[name, device.name] = self.collected(name, device.name)
        progress.note(self._folder(name, device.name), name, device.name, found.programs)
        return found

    def _folder(self, name: str, device: str) -> Path:
        return self.folder / slug(device) / name

    def _shards(self, name: str, device: str) -> list[Shard]:
        folder = self._folder(name, device)
        (count, _), (least, _) = (kind_of(name).shards(profile) for profile in (self.profile, PROFILES["smoke"]))
        wanted = -(-count // self.shares.get(device, 1))
        return [Shard(folder, i) for i in range(max(wanted, min(least, count)))]

    def evidence(self, device: str) -> int:
        """In how many programs a wrong result must have been able to show."""
        return -(-self.profile.evidence // self.shares.get(device, 1))

    def _take(self, shard: Shard, name: str, device: Device, *, wait: bool) -> None:
        if shard.result is not None:
            return
        with shard.lock(wait=wait) as ours:
            if ours and shard.result is None:
                self._judge_shard(shard, name, device)

    def _judge_shard(self, shard: Shard, name: str, device: Device) -> None:
        _check_presence(device)
        gc.collect()
        gc.freeze()  # cases are cyclic garbage; without what was there before they are quick to collect
        deaths = shard.deaths
        fatal = {death.number for death in deaths if not death.claim}
        programs = shard.programs(partial(self.programs, name, shard.number))
        spent = self._spent(name, device.name)
        killers = {death.claim for death in known_deaths(self._folder(name, device.name))}
        work = ShardWork(self, name, device, killers)
        work.deaths = [(programs[death.number].to_json(), death.how, death.claim) for death in deaths]
        with shard.journal() as pen, Patience(shard.last_words) as patience:
            try:
                for i, program in enumerate(programs):
                    work.digests.append(program.digest())
                    if spent:
                        work.missing += 1
                    elif i not in fatal:
                        pen.put(i)
                        work.judge(program, pen.name)
                        patience.renew()
            finally:  # an exception is a fault of ours; only a process that dies leaves its program standing here
                pen.put(None)
        _check_presence(device)  # or what was seen since it went would be taken for a broken promise
        shard.finish(work.to_plain())

    def _spent(self, name: str, device: str) -> bool:
        """Has a family, or have all, cost so many processes that the rest is given up?"""
        family, everything = self._folder(name, device), self.folder / slug(device)
        return _price(known_deaths(family)) >= LIVES or _price(known_deaths(everything)) >= ALL_LIVES

    def lost(self, name: str, device: str) -> list[tuple[str, str, str]]:
        """Programs, how they ended, and for which claim, of shards that nobody finished because a process died."""
        found = []
        for shard in self._shards(name, device):
            deaths = shard.deaths if shard.result is None else ()
            if deaths:
                programs = shard.programs(partial(self.programs, name, shard.number))
                found += [(programs[death.number].to_json(), death.how, death.claim) for death in deaths]
        return found

    def first_time(self, claim: str, device: str) -> bool:
        """Is this the first process that runs programs for the result of a claim? If not, the last one died of it."""
        path = self.folder / slug(device) / f"{claim}.settling"
        if path.exists():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return True

    def last_words(self, claim: str, device: str) -> Path:
        """Where the traceback goes of a process that hangs over the result of a claim."""
        return self.folder / slug(device) / f"{claim}.hang"

    def programs(self, name: str, number: int) -> list[Work]:
        """The programs of a shard, the same on every device: all are drawn before the first is run."""
        kind = kind_of(name)
        _, size = kind.shards(self.profile)
        return kind.draw(name, size, self.seed * 1_000_003 + number)

    def collected(self, name: str, device: str) -> Family:
        """What the shards that are done say."""
        family = Family(name, device)
        counters, changes = [], []
        for shard in self._shards(name, device):
            part = shard.result
            if part is None:
                family.missing += kind_of(name).shards(self.profile)[1]
                continue
            family.programs += part["programs"]
            family.digests.append(part["digest"])
            family.excluded += part["excluded"]
            family.unexamined += part["unexamined"]
            family.deaths += [(text, how, claim) for text, how, claim in part["deaths"]]
            family.missing += part["missing"]
            family.leaks += part["leaks"]
            counters.append(part["generated"])
            changes.append(part["changed"])
            for claim, found in part["claims"].items():
                family.claims.setdefault(claim, Judgement()).add(found)
        family.generated, family.changed = total(counters), total(changes)
        return family


class ShardWork:
    """Judging the programs of one shard."""

    def __init__(self, engine: Engine, name: str, device: Device, killers: Container[str] = ()) -> None:
        self.device, self.engine, self.kind = device, engine, kind_of(name)
        claims, version = register(), engine.torch_version
        family = [c for c in engine.checks if name in families_of(c) and c.claim not in killers]
        self.checks = [c for c in family if not unsupported(claims[c.claim], device, version)]
        self.expected = {
            c.claim: [e for e in engine.expectations if e.concerns(c.claim, device.name, version)] for c in self.checks
        }
        self.claims: dict[str, dict[str, Any]] = {c.claim: _empty() for c in self.checks}
        self.digests: list[str] = []
        self.deaths: list[tuple[str, str, str]] = []
        self.leaks: list[str] = []
        self.counts: dict[str, int] = {}
        self.changed: dict[str, int] = {}
        self.programs = self.excluded = self.examined = self.unexamined = self.missing = 0

    def judge(self, program: Work, telling: Telling = deaf) -> None:
        """Run and judge one program; ``telling`` hears the claim that it is run for, if for one alone."""
        adapted, changes = self.kind.adapt(program, self.device)
        for change in changes:
            self.changed[change] = self.changed.get(change, 0) + 1
        self.programs += 1
        examine = self.examined < EXAMINED
        judged = self.kind.judge(adapted, self.device, self.checks, examine=examine, telling=telling)
        for word in judged.words:
            self.counts[word] = self.counts.get(word, 0) + 1
        self.unexamined += not examine
        self.examined += judged.differs
        self.excluded += judged.excluded
        self.leaks += judged.leaks
        for claim, (count, violations) in judged.found.items():
            if count:
                self._note(claim, judged.shown.get(claim, adapted), count, violations)

    def _note(self, claim: str, program: Work, count: int, violations: list[Violation]) -> None:
        tally = self.claims[claim]
        tally["evidence"] += 1
        tally["checks"] += count
        if not violations:
            return
        strange = [v for v in violations if not any(e.recognises(program, v) for e in self.expected[claim])]
        tally["violations"] += 1
        tally["expected"] += not strange
        kind = "examples" if strange else "foretold"
        if len(tally[kind]) < KEPT:
            first = (strange or violations)[0]
            tally[kind].append((program.to_json(), {n: getattr(first, n) for n in first.__slots__}))

    def to_plain(self) -> dict[str, Any]:
        """The result of the shard."""
        return {
            "programs": self.programs,
            "digest": chain(self.digests),
            "claims": self.claims,
            "generated": self.counts,
            "changed": self.changed,
            "excluded": self.excluded,
            "unexamined": self.unexamined,
            "deaths": self.deaths,
            "missing": self.missing,
            "leaks": sorted(set(self.leaks)),
        }


def _price(deaths: Iterable[Death]) -> int:
    return sum(PRICE[death.how] for death in deaths)


def _empty() -> dict[str, Any]:
    return {"evidence": 0, "checks": 0, "violations": 0, "expected": 0, "examples": [], "foretold": []}
