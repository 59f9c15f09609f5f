"""One claim explained: its sentence, where it is promised, and the smallest program found that it speaks about."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autograd_conformance.claims import Claim, register
from autograd_conformance.devices import Device
from autograd_conformance.engine import unsupported
from autograd_conformance.errors import unknown
from autograd_conformance.expectations import PACKAGED, Expectation, load
from autograd_conformance.families import AnyCheck, Work, kind_of
from autograd_conformance.oracle import InvalidProgram
from autograd_conformance.program import Leaf, Program
from autograd_conformance.reduce import Reducer
from autograd_conformance.replay import all_checks
from autograd_conformance.reports.script import program_source
from autograd_conformance.reports.sources import source_link
from autograd_conformance.reports.text import labelled
from autograd_conformance.scene import Scene
from autograd_conformance.scenes import SceneCheck, printed, written
from autograd_conformance.verdicts import Violation

COLUMN = 12
DRAWN = 60  # programs among which the smallest is looked for
KEPT = 3  # scenes whose scripts are compared in length
BUDGET = 400  # programs that may be run to make one small


def explained(name: str, device: Device, torch_version: str) -> list[str]:
    """The claim as lines of text, its example last.

    Raises:
        UsageError: there is no such claim.

    """
    claims = register()
    if name not in claims:
        raise unknown("claim", name, claims)
    claim = claims[name]
    lines = [f"{claim.id}{'  (core)' if claim.core else ''}", "", *_about(claim)]
    for entry in load([PACKAGED], claims):
        if entry.concerns(name, device.name, torch_version):
            lines += _deviation(entry)
    reason = unsupported(claim, device, torch_version)
    check = next((check for check in all_checks() if check.claim == name), None)
    if reason or check is None:
        return [*lines, *_row("example", f"none here: {reason or 'no test of it is possible'}")]
    work = _smallest(check, device)
    return [*lines, "", *(["# --- example", *_source(check, work, device), "# ---"] if work else ["no example found"])]


def _about(claim: Claim) -> Iterator[str]:
    yield from _row("promised", claim.sentence)
    for source in claim.sources:
        link = source_link(source)
        yield from _row("source", f"{source}  {link}" if link.startswith("https") else source)
    rows = [
        ("needs", ", ".join(claim.needs)),
        ("implies", ", ".join(claim.implies)),
        ("message", claim.error),
        ("since", claim.since),
        ("until", claim.until),
        ("instead of", claim.old),
    ]
    for label, text in rows:
        yield from _row(label, text) if text else []


def _deviation(entry: Expectation) -> list[str]:
    return [*_row("deviation", entry.reason), *_row("", entry.link)]


def _row(label: str, text: str) -> list[str]:
    return labelled(label, text, column=COLUMN)


def _smallest(check: AnyCheck, device: Device) -> Work | None:
    """The smallest of some programs in which a wrong result would show; whole programs are made smaller still."""
    kind = kind_of(check.family)
    found: list[Work] = []
    with np.errstate(all="ignore"):
        for drawn in sorted(kind.draw(check.family, DRAWN, 0), key=lambda work: work.size()):
            work, _ = kind.adapt(drawn, device)
            if not _speaks(check, work, device):
                continue
            if isinstance(work, Program):
                return _reduced(check, work, device)
            found.append(work)
            if len(found) == KEPT:
                break
    return min(found, key=lambda work: len(_source(check, work, device)), default=None)


def _speaks(check: AnyCheck, work: Work, device: Device) -> bool:
    """Would a wrong result show in this program, and is there none?"""
    try:
        judged = kind_of(check.family).judge(work, device, [check], examine=False)
    except (InvalidProgram, ValueError, IndexError):  # what the reducer tries need not be a program
        return False
    count, broken = judged.found.get(check.claim, (0, []))
    return count > 0 and not broken


def _reduced(check: AnyCheck, program: Program, device: Device) -> Program:
    def shows(smaller: Program) -> Violation | None:
        return Violation(check.claim, len(smaller) - 1, "", "", "") if _speaks(check, smaller, device) else None

    return Reducer(shows, BUDGET).reduce(program, Violation(check.claim, len(program) - 1, "", "", ""))[0]


def _source(check: AnyCheck, work: Work, device: Device) -> list[str]:
    """The script of a scene with what is due after each line, or a program that prints its gradients."""
    if isinstance(work, Scene):
        return _scene_source(check, work, device)
    _, _, raised = kind_of(check.family).violations(check, work, device)
    lines = program_source(work, device.name).splitlines()
    for at in sorted(raised, reverse=True):
        lines[at + 2 : at + 3] = _caught(lines[at + 2])  # two lines of import come first
    grads = [f"print({s.name!r}, {s.name}.grad)" for s in work if isinstance(s, Leaf) and s.requires_grad]
    return [*lines, *grads]


def _caught(line: str) -> list[str]:
    """A line that raises, with what its error says."""
    indented = [f"    {part}" for part in line.splitlines()]
    return ["try:", *indented, "except Exception as error:", "    print(type(error).__name__, error)"]


def _scene_source(check: AnyCheck, scene: Scene, device: Device) -> list[str]:
    if not isinstance(check, SceneCheck):
        return []
    script = written(check, scene, device)
    if script is None:
        return []
    lines = ["import torch", ""]
    shown = printed(check, scene, script, device)
    for at, line in enumerate(shown.lines):
        due = [c for c in script.checks if c.at == at]
        must_raise = [c for c in due if c.kind == "raises" and c.due]
        lines += [f"# must raise {c.due}" for c in must_raise]
        lines += _caught(line) if at in shown.raising else line.splitlines()
        lines += [f"print({c.probe})  # due: {_value(c.due)}" for c in due if c.probe]
    return lines


def _value(due: object) -> str:
    text = repr(np.round(due, 6).tolist() if isinstance(due, np.ndarray) else due)
    return " ".join(text.split()) if len(text) < 200 else f"{text[:200]} ..."
