"""``summary.md``: the run in short, for the summary of a step on GitHub and for pasting into an issue."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from autograd_conformance.reports.badge import score
from autograd_conformance.reports.document import script_path
from autograd_conformance.reports.matrix import counted_verdicts, device_names
from autograd_conformance.reports.rerun import script
from autograd_conformance.reports.sources import web_link
from autograd_conformance.reports.text import counted, harmless, one_line, shortened
from autograd_conformance.verdicts import Result, Run, Verdict

if TYPE_CHECKING:
    from autograd_conformance.claims import Claim

LISTED = 25  # rows of a table, the others are counted
ARGUED = 5  # counterexamples that are shown with their script
SHOWN = 120  # characters of due and of seen in a table
LONGEST = 6000  # characters of a script


def page(run: Run, claims: Mapping[str, Claim]) -> str:
    """The summary: the answer, verdicts by device, what is unexpected and why, known deviations."""
    torch = run.about["torch"].get("version", run.about["version"])
    total = score(run.results)
    lines = [f"# Autograd conformance: {plain(run.about['name'])} {plain(torch)}", "", f"**{_answer(run)}**", ""]
    lines += [f"{total.holds:,} of {total.judged:,} claims hold, {total.unsupported:,} are unsupported.", ""]
    lines += [*_verdicts(run), "", *_unexpected(run, claims), *_known(run)]
    lines += [f"Note: {plain(note)}\n" for note in run.notes]
    programs = sum(int(family.get("programs", 0)) for family in run.families)
    facts = f"profile {plain(run.about['profile'])}, seed {plain(run.about['seed'])}, {counted(programs, 'program')}"
    return "\n".join([*lines, f"{facts}, {plain(run.about['timestamp'])}, {plain(run.about['platform'])}", ""])


def plain(text: object, limit: int = 400) -> str:
    """Text that Markdown takes as it stands, on one line; no mention of anybody, no link, no tag."""
    return re.sub(r"([\\`*_{}\[\]()#!|<>~&$])", r"\\\1", one_line(str(text), limit)).replace("@", "&#64;")


def code(text: object, limit: int = SHOWN) -> str:
    """Text as a span of code that can stand in a table; blanks if there is none."""
    shown = one_line(str(text), limit)
    if not shown:
        return ""
    fence = "`" * (max(map(len, re.findall(r"`+", shown)), default=0) + 1)
    pad = " " if "`" in shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}".replace("|", "\\|")


def block(text: str, language: str, limit: int = LONGEST) -> list[str]:
    """Lines of a block of code that nothing in the text can end."""
    shown = harmless(shortened(text, limit))
    fence = "`" * max(3, max(map(len, re.findall(r"`+", shown)), default=0) + 1)
    return [f"{fence}{language}", *shown.rstrip("\n").split("\n"), fence]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table with at most LISTED rows, then how many more there are."""
    every = list(rows)
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *every[:LISTED])]
    return lines + ([f"\nand {len(every) - LISTED:,} more"] if len(every) > LISTED else [])


def _answer(run: Run) -> str:
    if run.failure:
        return f"The run itself failed: {plain(run.failure)}"
    if not run.results:
        return "Nothing ran."
    strange = sum(not result.expected for result in run.results)
    if not strange:
        return "Every verdict is as expected."
    return f"{strange:,} {'verdict is' if strange == 1 else 'verdicts are'} not as expected."


def _verdicts(run: Run) -> list[str]:
    counts = {name: dict(counted_verdicts(r for r in run.results if r.device == name)) for name in device_names(run)}
    there = [verdict for verdict in Verdict if any(verdict in found for found in counts.values())]
    rows = [[plain(name), *(f"{found.get(v, 0):,}" for v in there)] for name, found in counts.items()]
    return table(["device", *there], rows)


def _unexpected(run: Run, claims: Mapping[str, Claim]) -> Iterator[str]:
    found = [result for result in run.results if not result.expected]
    if not found:
        return
    yield from ("## Not as expected", "")
    yield from table(["claim", "device", "verdict", "due", "seen"], map(_row, found))
    yield ""
    for result in [result for result in found if result.counterexample is not None][:ARGUED]:
        yield from _argued(run, result, claims)


def _row(result: Result) -> list[str]:
    example = result.counterexample
    sides = [code(example.violation.due), code(example.violation.seen)] if example else [plain(result.reason, 200), ""]
    return [code(result.claim), plain(result.device), str(result.verdict), *sides]


def _argued(run: Run, result: Result, claims: Mapping[str, Claim]) -> Iterator[str]:
    assert result.counterexample is not None  # noqa: S101 - the caller has looked
    violation = result.counterexample.violation
    claim = claims.get(result.claim)
    yield f"<details><summary>{_tag(result.claim)} on {_tag(result.device)}</summary>"
    yield from ("", plain(claim.sentence, 1000) if claim else "", "")
    yield f"Looked at {code(violation.probe or 'the call')}: due {code(violation.due)}, seen {code(violation.seen)}"
    yield from (f"because {plain(violation.because)}." if violation.because else "", "")
    yield from block(script(run, result, claims), "python")
    yield from ("", code(f"python {script_path(result)}", 400), "", "</details>", "")


def _tag(text: str) -> str:
    """Text between tags, where Markdown is not read."""
    return escape(one_line(text, 200)).replace("@", "&#64;")


def _known(run: Run) -> Iterator[str]:
    found = [result for result in run.results if result.expected and result.verdict is Verdict.BROKEN]
    if found:
        yield from ("## Known deviations", "")
        rows = [[code(r.claim), plain(r.device), plain(r.reason), _link(r.link)] for r in found]
        yield from table(["claim", "device", "why", "link"], rows)
        yield ""


def _link(link: str) -> str:
    return f"<{link}>" if web_link(link) and "|" not in link else plain(link)
