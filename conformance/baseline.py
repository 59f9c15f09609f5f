"""A run held against the report of an earlier one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autograd_conformance.errors import UsageError
from autograd_conformance.reports.diff import changes, newly_broken, told
from autograd_conformance.reports.document import read
from autograd_conformance.verdicts import Run

LABEL = f"{'baseline':<12}"


def held(baseline: str, report: Path) -> tuple[list[str], int]:
    """Lines on what has changed, and the exit code that follows from it: 1 newly broken, 2 not to be compared, else 0."""
    try:
        new = read(report)
        old = _asked(read(baseline), new)
        found = changes(old, new)
    except UsageError as error:
        return [f"{LABEL}{error}"], 2
    lines = [line for line in told(old, new, found)[3:] if line]
    return [f"{LABEL}{lines[0]}", *(f"{'':<12}{line}" for line in lines[1:])], int(newly_broken(found))


def _asked(old: Run, new: Run) -> Run:
    """The old run without the claims and devices that the new one was not asked for."""
    claims, devices = {result.claim for result in new.results}, {result.device for result in new.results}
    return replace(old, results=tuple(r for r in old.results if r.claim in claims and r.device in devices))
