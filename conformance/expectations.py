"""Known deviations: a violation that an entry recognises is expected, and an entry that has healed fails the run."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autograd_conformance.claims import Claim
from autograd_conformance.errors import UsageError, unknown
from autograd_conformance.program import Program, ProgramError
from autograd_conformance.scene import Scene, parse
from autograd_conformance.verdicts import Violation

_LISTS = ("ops", "lines", "also")
PACKAGED = Path(__file__).with_name("expectations.toml")


@dataclass(frozen=True, slots=True)
class Expectation:
    """One known deviation of an implementation.

    Attributes:
        claim: id of the claim that is broken.
        reason: why, in a sentence or two.
        link: where it is reported, or ``"no report found"``.
        witness: the smallest program, or scene, that shows it.
        mark: the mark of the violations that it recognises; empty for any.
        check: which check they fail: ``equal``, ``close`` or ``raises``; empty for any.
        ops: at least one of these ops occurs in the program, if any are given.
        lines: at least one of these texts occurs in the lines of the script, if any are given.
        seen: a part of what was seen; empty for anything.
        also: further claims, or globs of claims, that the same cause may break; the witness need not show them.
        device: glob of device names.
        since: first torch version concerned, or empty.
        until: last torch version concerned, or empty.

    """

    claim: str
    reason: str
    link: str
    witness: Program | Scene
    mark: str = ""
    check: str = ""
    ops: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    seen: str = ""
    also: tuple[str, ...] = ()
    device: str = "*"
    since: str = ""
    until: str = ""

    def concerns(self, claim: str, device: str, torch_version: str) -> bool:
        """Is this about that claim, there?"""
        return (
            any(fnmatch.fnmatchcase(claim, known) for known in (self.claim, *self.also))
            and fnmatch.fnmatchcase(device, self.device)
            and within(torch_version, self.since, self.until)
        )

    def recognises(self, program: Program | Scene, violation: Violation) -> bool:
        """Is this violation the known deviation?"""
        if self.mark not in ("", violation.mark) or self.check not in ("", violation.check):
            return False
        if self.seen not in violation.seen:
            return False
        lines = "\n".join(getattr(program, "lines", ()))
        if self.lines and not any(text in lines for text in self.lines):
            return False
        ops = {getattr(s, "op", None) for s in program}
        return not self.ops or any(op in ops or f".{op}(" in lines for op in self.ops)


def within(version: str, since: str, until: str) -> bool:
    """``since <= version <= until``; an empty bound is none, and ``2.13`` as upper bound includes ``2.13.1``."""
    number = _numbers(version)
    if since and number < _numbers(since):
        return False
    bound = _numbers(until)
    return not until or number[: len(bound)] <= bound


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def load(paths: Sequence[Path], claims: dict[str, Claim]) -> tuple[Expectation, ...]:
    """All entries of some files.

    Raises:
        UsageError: a file cannot be read, or an entry is not as it must be.

    """
    return tuple(entry for path in paths for entry in _entries(path, claims))


def _entries(path: Path, claims: dict[str, Claim]) -> list[Expectation]:
    try:
        body = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"no expectations file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read expectations in {path}: {error}") from None
    for key in body:
        if key != "expectation":
            raise unknown("table", key, ["expectation"], str(path))
    rows = body.get("expectation", [])
    if not isinstance(rows, list):
        raise UsageError(f"{path}: write each entry as [[expectation]]")
    return [_entry(path, i + 1, row, claims) for i, row in enumerate(rows)]


def _entry(path: Path, number: int, row: dict[str, Any], claims: dict[str, Claim]) -> Expectation:
    known = {f.name for f in fields(Expectation)}
    for key in row:
        if key not in known:
            raise unknown("expectation key", key, known, f"{path}, entry {number}")
    for key in ("claim", "reason", "link", "witness"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise UsageError(f"{path}, entry {number}: {key!r} is missing")
    for key in _LISTS:
        if not isinstance(row.get(key, []), list) or not all(isinstance(value, str) for value in row.get(key, [])):
            raise UsageError(f"{path}, entry {number}: {key!r} has to be a list of strings")
    if row["claim"] not in claims:
        raise unknown("claim", row["claim"], claims, f"{path}, entry {number}")
    for glob in row.get("also", ()):
        if not fnmatch.filter(claims, glob):
            raise unknown("claim", glob, claims, f"{path}, entry {number}, also")
    try:
        witness = parse(row["witness"])
    except ProgramError as error:
        raise UsageError(f"{path}, entry {number}: witness: {error}") from None
    return Expectation(**row | {key: tuple(row.get(key, ())) for key in _LISTS} | {"witness": witness})
