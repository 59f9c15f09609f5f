"""Two notes of 2017 as a document: what each says, which claims check it, and what has become of it.

Knows no torch: the statements lie in ``seeds.toml`` beside this file, and :func:`load` checks them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from autograd_conformance.claims import register
from autograd_conformance.errors import UsageError, unknown

VERDICTS = {
    "right": "It holds today.",
    "outdated": "It held when it was written, or nearly, and does not now.",
    "wrong": "It never held.",
    "context": "It says nothing of autograd that could be checked.",
}
"""The closed list of what a statement may be found to be."""


@dataclass(frozen=True, slots=True)
class Note:
    """Where statements come from.

    Attributes:
        id: what statements call it.
        title: as it stands above the note.
        date: when it was written, as far as is known.
        about: what it treats.

    """

    id: str
    title: str
    date: str
    about: str


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that a note says, in our own words.

    Attributes:
        note: id of the note.
        en: the statement in English.
        zh: the same in Chinese.
        claims: ids of the claims that check it; empty only for context.
        verdict: one of :data:`VERDICTS`.
        now: what to know today; never empty if the statement is outdated or wrong.

    """

    note: str
    en: str
    zh: str
    claims: tuple[str, ...]
    verdict: str
    now: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """Notes by id, and their statements in the order of the notes."""

    notes: dict[str, Note]
    statements: tuple[Statement, ...]


def load(path: Path, claims: Iterable[str]) -> Document:
    """The notes and statements of a TOML file.

    Args:
        path: the file.
        claims: ids of the claims that there are.

    Raises:
        UsageError: the file cannot be read, or breaks a rule; the first problem is named.

    """
    tables = _tables(path)
    notes = [Note(**_entry("note", entry, Note, str(path))) for entry in tables["note"]]
    known, ids = tuple(claims), tuple(note.id for note in notes)
    statements = []
    for number, entry in enumerate(tables["statement"], 1):
        place = f"statement {number} in {path}"
        statement = Statement(**_entry(f"statement {number}", entry, Statement, str(path)))
        _check(statement, known, ids, place)
        statements.append(statement)
    return Document({note.id: note for note in notes}, tuple(statements))


@cache
def seeds() -> Document:
    """The document that comes with this package; read once."""
    return load(Path(__file__).with_name("seeds.toml"), register())


def _tables(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The two arrays of tables, and nothing else at the top of the file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the statements in {path}: {error}") from error
    for name in tables:
        _known("table", name, ("note", "statement"), str(path))
    for name in ("note", "statement"):
        entries = tables.setdefault(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UsageError(f"'{name}' in {path} must be an array of tables, each under [[{name}]]")
    return tables


def _entry(what: str, entry: dict[str, Any], kind: type[Note | Statement], where: str) -> dict[str, Any]:
    """The fields of a table, once their names and types are known to be right."""
    place = f"{what} in {where}"
    names = tuple(field.name for field in fields(kind))
    for name in entry:
        _known("field", name, names, place)
    for name in names:
        if name not in entry and name != "now":
            raise UsageError(f"missing field '{name}' in {place}")
    for name, value in entry.items():
        if name == "claims":
            due, fits = "an array of non-empty texts", isinstance(value, list) and all(map(_is_text, value))
        else:
            due, fits = "a non-empty text", _is_text(value)
        if not fits:
            raise UsageError(f"field '{name}' is {value!r} in {place}; it must be {due}")
    return {name: tuple(value) if name == "claims" else value for name, value in entry.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _check(statement: Statement, claims: tuple[str, ...], notes: tuple[str, ...], place: str) -> None:
    _known("note", statement.note, notes, place)
    _known("verdict", statement.verdict, tuple(VERDICTS), place)
    for claim in statement.claims:
        _known("claim", claim, claims, place)
    if not statement.claims and statement.verdict != "context":
        raise UsageError(f"no claim in {place}; 'claims' must name at least one that checks it")
    if not statement.now and statement.verdict in ("outdated", "wrong"):
        raise UsageError(f"missing field 'now' in {place}; what is {statement.verdict} must say what is true today")


def _known(kind: str, value: str, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise unknown(kind, value, choices, where)
