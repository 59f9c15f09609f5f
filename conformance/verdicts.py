"""The words for what was seen and what it means: violations, counterexamples, verdicts. Plain frozen data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from autograd_conformance.program import Program
from autograd_conformance.scene import Scene, parse


class Verdict(StrEnum):
    """What a run says about one claim on one device."""

    HOLDS = "holds"
    BROKEN = "broken"
    CRASHED = "crashed"
    HUNG = "hung"
    UNSUPPORTED = "unsupported"
    UNPROVEN = "unproven"
    NOT_RUN = "not-run"


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise seen broken by one program, with all that a script needs to show it again.

    Attributes:
        claim: id of the claim.
        at: index of the statement after which the fault shows.
        probe: Python source over the program's names that gives what was seen, such as ``a.grad``;
            empty when what counts is whether the statement raises.
        due: Python literal of what was due; for ``raises``: ``None``, or the name of the exception class, or several
            with ``|`` between them, and after a colon perhaps a part that its message has.
        seen: Python literal, or the text of what was seen instead.
        check: how the two are compared: ``equal`` (``==``), ``close`` (within ``tolerance``), ``raises``.
        tolerance: absolute, per element, for ``close``.
        before: Python source to run before the statement, such as ``held = a.grad``.
        because: one sentence, from general to particular: why this was due.
        mark: a word for expectations to recognise this kind of violation by.

    """

    claim: str
    at: int
    probe: str
    due: str
    seen: str
    check: Literal["equal", "close", "raises"] = "equal"
    tolerance: float = 0.0
    before: str = ""
    because: str = ""
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A program that breaks a promise.

    Attributes:
        program: the smallest one found, or scene, with the lines of its script.
        violation: what it shows.
        raised: indices of the statements that raised when it ran, as they should or not.
        found: digest of the program as it was drawn.
        seen: how many times out of ``tried`` the fault showed when the drawn program was run again.
        tried: see ``seen``.
        changes: how the program was rewritten for its device, in words.

    """

    program: Program | Scene
    violation: Violation
    raised: tuple[int, ...] = ()
    found: str = ""
    seen: int = 1
    tried: int = 1
    changes: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready form; the inverse of :meth:`from_plain`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        violation = dataclasses.asdict(self.violation)
        return plain | {"program": self.program.to_json(), "violation": violation}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Counterexample:
        """The counterexample that :meth:`to_plain` wrote."""
        return cls(
            **plain
            | {
                "program": parse(plain["program"]),
                "violation": Violation(**plain["violation"]),
                "raised": tuple(plain["raised"]),
                "changes": tuple(plain["changes"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The verdict on one claim on one device, and what it rests on.

    Attributes:
        claim: id of the claim.
        device: name of the device.
        verdict: what the run says.
        expected: True for ``holds`` and ``unsupported``, and for what an expectation foretold.
        reason: why, for anything but ``holds``; the expectation's reason where there is one.
        link: where the reason is documented, if anywhere.
        family: the programs that it was judged on.
        digest: chain over the digests of these programs.
        programs: how many were run for it.
        evidence: in how many of them a wrong result would have shown.
        checks: single comparisons made.
        violations: how many programs broke it.
        expected_violations: how many of those an expectation recognised.
        excluded: comparisons left out because another claim's known deviation spoils them.
        counterexample: the smallest program that breaks it.

    """

    claim: str
    device: str
    verdict: Verdict
    expected: bool = True
    reason: str = ""
    link: str = ""
    family: str = ""
    digest: str = ""
    programs: int = 0
    evidence: int = 0
    checks: int = 0
    violations: int = 0
    expected_violations: int = 0
    excluded: int = 0
    counterexample: Counterexample | None = None

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready form; the inverse of :meth:`from_plain`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["verdict"] = str(self.verdict)
        plain["counterexample"] = self.counterexample.to_plain() if self.counterexample else None
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Result:
        """The result that :meth:`to_plain` wrote."""
        example = plain["counterexample"]
        return cls(
            **plain
            | {
                "verdict": Verdict(plain["verdict"]),
                "counterexample": Counterexample.from_plain(example) if example else None,
            }
        )


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run leaves behind: who ran what where, and the results.

    Attributes:
        about: what was run: torch and package versions, platform, profile, seed, seconds, threads (JSON-ready).
        devices: per device name: how it was found, traits, and why anything was left out (JSON-ready).
        families: per family and device: programs, digest, and the counters of what was generated (JSON-ready).
        results: one per selected claim and device.
        complete: every claim was selected; only then is there a badge.
        failure: why the run itself failed, or empty.

    """

    about: dict[str, Any]
    devices: dict[str, dict[str, Any]]
    families: list[dict[str, Any]]
    results: tuple[Result, ...]
    complete: bool = True
    failure: str = ""
    notes: tuple[str, ...] = field(default=())
