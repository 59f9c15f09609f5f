"""What people read first: the summary of a run, and the argument that a failing test prints."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autograd_conformance.reports.text import counted, labelled, one_line
from autograd_conformance.verdicts import Counterexample, Result, Run, Verdict, Violation

if TYPE_CHECKING:
    from autograd_conformance.claims import Claim

NAMED = 5  # unexpected claims named in the summary, the others are counted
SHOWN = 600  # characters of due and of seen
COLUMN = 12
PLAIN = (Verdict.HOLDS, Verdict.UNSUPPORTED)  # always expected: not worth a word


def summary(run: Run, claims: Mapping[str, Claim], where: str) -> list[str]:
    """Five lines: devices, verdicts, what is unexpected, how much was run, where the report lies; then any notes."""
    rows = [
        ("devices", _devices(run)),
        ("verdicts", _verdicts(run)),
        ("unexpected", _unexpected(run)),
        ("checked", _checked(run, claims)),
        ("report", where),
    ]
    lines = [f"{label:<{COLUMN}}{one_line(text)}" for label, text in rows]
    if run.failure:
        lines.append(f"{'RUN FAILED':<{COLUMN}}{one_line(run.failure)}")
    return lines + [f"{'note':<{COLUMN}}{one_line(note)}" for note in run.notes]


def argument(result: Result, claim: Claim, script_path: str, script: str) -> str:
    """Why the claim is said to be broken: due and seen, the reason, the script to paste, the command to run."""
    lines = [f"{result.claim} {_said(result)} on {result.device}", "", *_row("promised", claim.sentence)]
    lines += [line for source in claim.sources for line in _row("source", source)]
    example = result.counterexample
    if example is None:
        return "\n".join([*lines, *_row("because", result.reason)])
    lines += ["", *_evidence(example.violation), "", *_tally(result, example), ""]
    lines += ["# --- script", *_body(script), "# ---", "", *_row("run again", f"python {script_path}")]
    return "\n".join([*lines, *_row("known", result.link)])


def _said(result: Result) -> str:
    words = {Verdict.BROKEN: "is broken", Verdict.HUNG: "hung", Verdict.NOT_RUN: "was not run"}
    said = words.get(result.verdict, str(result.verdict) if result.verdict != Verdict.UNPROVEN else "is unproven")
    return f"{said}, as expected," if result.expected and result.verdict != Verdict.HOLDS else said


def _evidence(violation: Violation) -> list[str]:
    """Due and seen, one below the other so that the eye finds the difference, then why it was due."""
    near = f"   (within {violation.tolerance:g})" if violation.check == "close" and violation.tolerance else ""
    what = violation.probe or "the exception that the last statement raises"
    return [
        f"{'looked at':<{COLUMN}}{one_line(what, SHOWN)}",
        f"{'due':<{COLUMN}}{one_line(violation.due, SHOWN)}{near}",
        f"{'seen':<{COLUMN}}{one_line(violation.seen, SHOWN)}",
        *_row("because", violation.because),
    ]


def _tally(result: Result, example: Counterexample) -> list[str]:
    programs = counted(result.programs, "program")
    text = f"{result.violations:,} of {programs}"
    text += f", {result.expected_violations:,} of them as expected" if result.expected_violations else ""
    text += f"; the smallest found has {counted(len(example.program), 'statement')}"
    rows = _row("broken by", text)
    if example.seen < example.tried:
        rows += _row("unsteady", f"the fault showed {example.seen} times out of {example.tried}")
    return rows + _row("changed", "; ".join(example.changes)) + _row("reason", result.reason)


def _row(label: str, text: str) -> list[str]:
    return labelled(label, text, column=COLUMN) if text else []


def _body(script: str) -> list[str]:
    """The script without the comment at its head, which says what the argument has said already."""
    lines = script.strip("\n").splitlines()
    start = next((index for index, line in enumerate(lines) if line and not line.startswith("#")), 0)
    return lines[start:]


def _devices(run: Run) -> str:
    if not run.devices:
        return "none"
    torch = run.about.get("torch", {})
    version = torch.get("version", "") if isinstance(torch, dict) else torch
    return ", ".join(run.devices) + (f" with torch {version}" if version else "")


def _verdicts(run: Run) -> str:
    """Counts, per device when there are several."""
    if not run.results:
        return "none: nothing ran"
    devices = list(dict.fromkeys(result.device for result in run.results))
    parts = [(device, _counts([r for r in run.results if r.device == device])) for device in devices]
    return parts[0][1] if len(parts) == 1 else "; ".join(f"{device}: {counts}" for device, counts in parts)


def _counts(results: list[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    foretold = Counter(result.verdict for result in results if result.expected and result.verdict not in PLAIN)
    return ", ".join(
        f"{counts[verdict]:,} {verdict}" + (f" ({foretold[verdict]:,} expected)" if foretold[verdict] else "")
        for verdict in Verdict
        if counts[verdict]
    )


def _unexpected(run: Run) -> str:
    found = [result for result in run.results if not result.expected]
    if not found:
        return "nothing"
    several = len(run.devices) > 1
    named = [f"{r.claim} {r.verdict}" + (f" on {r.device}" if several else "") for r in found[:NAMED]]
    more = f", and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    return f"{len(found):,}: {', '.join(named)}{more}"


def _checked(run: Run, claims: Mapping[str, Claim]) -> str:
    judged = len({result.claim for result in run.results})
    programs = sum(int(family.get("programs", 0)) for family in run.families)
    checks = sum(result.checks for result in run.results)
    text = f"{judged:,} of {counted(len(claims), 'claim')}, {counted(programs, 'program')}, {counted(checks, 'check')}"
    return f"{text}, digest {_digest(run)}" if run.families else text


def _digest(run: Run) -> str:
    """One digest for all programs of the run: the same wherever the same programs ran."""
    rows = sorted({(str(family.get("family", "")), str(family.get("digest", ""))) for family in run.families})
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
