"""Mistakes of the person who runs the suite, told in one line each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NEAREST = 3
_LISTED = 8


class UsageError(Exception):
    """One line for people about something they wrote or asked for; the command line prints it and exits 2."""


def unknown(kind: str, value: str, choices: Iterable[str], where: str = "") -> UsageError:
    """The error for a name that does not exist.

    Args:
        kind: what the name was meant to be, such as ``claim``.
        value: the name as written.
        choices: the names that exist; up to three close ones are shown, else up to eight of all.
        where: the file that holds the name, if any.

    """
    place = f" in {where}" if where else ""
    return UsageError(f"unknown {kind} '{value}'{place}; {_hint(value, list(choices))}")


def _hint(value: str, choices: list[str]) -> str:
    if close := difflib.get_close_matches(value, choices, n=_NEAREST):
        return f"nearest: {', '.join(close)}"
    if not choices:
        return "there is nothing to choose from"
    more = f" and {len(choices) - _LISTED} more" if len(choices) > _LISTED else ""
    return f"choices: {', '.join(choices[:_LISTED])}{more}"


class DeviceGoneError(Exception):
    """A device that was there when the run began answers no more."""
