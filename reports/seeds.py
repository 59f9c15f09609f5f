"""The statements of the notes as text: in both languages, with the claims that check each and what a run saw of them."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autograd_conformance.reports.text import WIDTH, counted, labelled, one_line
from autograd_conformance.verdicts import Run

COLUMN = 15


def page(
    notes: Mapping[str, Mapping[str, Any]], statements: Sequence[Mapping[str, Any]], run: Run | None = None
) -> list[str]:
    """All lines: note by note its statements, then a count of the verdicts.

    Args:
        notes: by id their title, date and what they are about.
        statements: each with note, en, zh, claims, verdict and now.
        run: if given, every claim is followed by its verdict there.

    """
    lines = [] if run is None else [f"After each claim its verdict on torch {_version(run)}", ""]
    for name, note in notes.items():
        lines += [f"Note {name}  {one_line(note['title'])} ({note['date']}; {note['about']})", ""]
        for number, statement in enumerate((s for s in statements if s["note"] == name), 1):
            lines += [*_statement(f"{name}{number}", statement, run), ""]
    return [*lines, _total(statements)]


def _statement(name: str, statement: Mapping[str, Any], run: Run | None) -> list[str]:
    lines = [*_row(f"{name:<4}{statement['verdict']}", statement["en"]), *_wide(statement["zh"])]
    lines += _row("    now", statement["now"]) if statement["now"] else []
    claims = statement["claims"]
    rows = [", ".join(claims)] if run is None else [f"{claim}: {_seen(claim, run)}" for claim in claims]
    for index, text in enumerate(filter(None, rows)):
        lines += _row("" if index else "    claims", text)
    return lines


def _row(label: str, text: str) -> list[str]:
    return labelled(label, text, column=COLUMN)


def _seen(claim: str, run: Run) -> str:
    """The verdict on each device, those that agree together."""
    devices: dict[str, list[str]] = {}
    for result in run.results:
        if result.claim == claim:
            devices.setdefault(str(result.verdict), []).append(result.device)
    return ", ".join(f"{verdict} on {', '.join(names)}" for verdict, names in devices.items()) or "not in the report"


def _wide(text: str) -> list[str]:
    """Lines of a script that puts no blanks between words and whose characters are two columns wide."""
    lines, room = [""], 0
    for char in one_line(text):
        width = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if room + width > WIDTH - COLUMN and char not in "，。、；：）":  # noqa: RUF001 - punctuation that begins no line
            lines.append("")
            room = 0
        lines[-1] += char
        room += width
    return [" " * COLUMN + line for line in lines]


def _version(run: Run) -> str:
    torch = run.about.get("torch", {})
    return one_line(str(torch.get("version", "") if isinstance(torch, dict) else torch))


def _total(statements: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(statement["verdict"] for statement in statements)
    return f"{counted(len(statements), 'statement')}: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}"
