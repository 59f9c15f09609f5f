"""The kill matrix as JSON and as a page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

from autograd_conformance.faults.base import Fault
from autograd_conformance.zoo import Kill

HEAD = """# How strong the suite is

Each fault of the zoo, planted in a process of its own, against the programs of the {profile} profile (torch {torch},
cpu). A fault is *noticed* if a claim that it may rightly be called by breaks and no expectation explains it. Each is
judged by the families of its own claims, up to the shard in which the first rightful claim breaks; a null fault, which
is the machinery of a fault without the fault, by all of them. gradcheck is torch's own, in its fast mode, on {graphs}
graphs of the same kind: it checks formulas and no rule of the graph, and most faults of the zoo are about such rules.

Made by `autograd-conformance zoo --out DIR`; one row a fault is in the `zoo.json` beside it.
"""


def encoded(kills: Iterable[Kill], about: Mapping[str, Any]) -> str:
    """What ``zoo.json`` says: a line for each fault."""
    rows = ",\n".join(json.dumps(asdict(kill)) for kill in kills)
    return f'{{"about": {json.dumps(dict(about))}, "faults": [\n{rows}\n]}}\n'


def page(kills: Sequence[Kill], zoo: Mapping[str, Fault], claims: Iterable[str], about: Mapping[str, Any]) -> str:
    """The page: figures, a row for each area, survivors, and claims that no fault is caught by alone."""
    real = [kill for kill in kills if not zoo[kill.fault].null]
    nulls = [kill for kill in kills if zoo[kill.fault].null]
    lines = [HEAD.format(**about), *_figures(real, nulls, zoo), "", *_areas(real, zoo), ""]
    lines += _named("Not noticed", [f"`{k.fault}`: {zoo[k.fault].sentence}{_how(k)}" for k in real if not k.claim])
    lines += _named(
        "Null faults that break a claim", [f"`{k.fault}`: {', '.join(k.broken)}" for k in nulls if k.broken]
    )
    if {kill.fault for kill in kills} == set(zoo):
        alone = {kill.broken[0] for kill in real if len(kill.broken) == 1}
        others = [f"`{claim}`" for claim in claims if claim not in alone]
        lines += _named("Claims that no fault is noticed by alone", [", ".join(others)] if others else [])
    return "\n".join(lines).rstrip() + "\n"


def told(kill: Kill, fault: Fault) -> str:
    """One line about a fault that was tried."""
    if fault.null:
        return f"{kill.fault}: null, " + (f"yet {', '.join(kill.broken)} broke" if kill.broken else "nothing broke")
    if not kill.claim:
        return f"{kill.fault}: NOT noticed{_how(kill)}"
    return f"{kill.fault}: {kill.claim} after {kill.programs} programs, {kill.size} statements"


def _how(kill: Kill) -> str:
    if kill.ended:
        return f" (the process {kill.ended})"
    return f" (only {', '.join(kill.broken)} broke)" if kill.broken else ""


def _figures(real: Sequence[Kill], nulls: Sequence[Kill], zoo: Mapping[str, Fault]) -> list[str]:
    noticed = [kill for kill in real if kill.claim]
    rare = [kill for kill in real if zoo[kill.fault].rare]
    rows = [
        ("faults", str(len(real))),
        ("noticed", _share(len(noticed), len(real))),
        ("rare faults noticed", _share(sum(bool(kill.claim) for kill in rare), len(rare))),
        ("null faults that break nothing", _share(sum(not kill.broken for kill in nulls), len(nulls))),
        ("noticed by gradcheck", _share(sum(kill.gradcheck for kill in real), len(real))),
    ]
    if len(noticed) > 1:
        rows += [
            ("programs until then, median and 90 %", _spread([kill.programs for kill in noticed])),
            ("CPU seconds until then, median and 90 %", _spread([kill.seconds for kill in noticed])),
            ("statements of the counterexample, median and 80 %", _spread([k.size for k in noticed], 8)),
        ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def _spread(values: Sequence[float], tenth: int = 9) -> str:
    return f"{median(values):.4g} and {quantiles(values, n=10, method='inclusive')[tenth - 1]:.4g}"


def _areas(real: Sequence[Kill], zoo: Mapping[str, Fault]) -> list[str]:
    rows = ["| area | faults | noticed | by gradcheck |", "|---|---|---|---|"]
    areas: dict[str, list[Kill]] = {}
    for kill in real:
        areas.setdefault(zoo[kill.fault].areas[0], []).append(kill)
    for area, mine in areas.items():
        rows.append(f"| {area} | {len(mine)} | {sum(bool(k.claim) for k in mine)} | {sum(k.gradcheck for k in mine)} |")
    return rows


def _named(title: str, entries: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {entry}" for entry in entries or ["none"]), ""]
