"""The devices of a machine as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autograd_conformance.reports.text import labelled, one_line

COLUMN = 12


def table(devices: Sequence[Mapping[str, Any]], failures: Mapping[str, str]) -> list[str]:
    """Per device how it was found, how many of its kind there are, its traits, and what it lacks and why."""
    lines: list[str] = []
    for device in devices:
        lines += [*_rows(device), ""]
    for name, reason in failures.items():
        lines += [*labelled("no device", f"{name}: {one_line(reason)}", column=COLUMN), ""]
    return lines[:-1]


def _rows(device: Mapping[str, Any]) -> Iterator[str]:
    yield one_line(str(device["name"]))
    yield from _row("found", device["found"])
    yield from _row("setup", device["setup"])
    if device["left_out"]:
        yield from _row("left out", device["left_out"])
        return
    yield from _row("count", device["count"])
    yield from _row("traits", ", ".join(device["traits"]))
    for trait, reason in device["missing"].items():
        yield from _row("lacks", f"{trait}: {reason}")
    yield from _row("seen", "; ".join(f"{fact}: {answer}" for fact, answer in device["facts"].items()))


def _row(label: str, value: object) -> list[str]:
    return [f"  {line}" for line in labelled(label, one_line(str(value), 1000), column=COLUMN)] if value else []
