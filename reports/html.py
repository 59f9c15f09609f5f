"""``index.html``: the run as one page that needs no network, no other file and no script to be complete."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from autograd_conformance.claims import TRAITS, Claim
from autograd_conformance.reports.badge import score
from autograd_conformance.reports.difference import Pieces, compared
from autograd_conformance.reports.document import script_path
from autograd_conformance.reports.drawing import drawn
from autograd_conformance.reports.matrix import counted_verdicts, device_names, matrix
from autograd_conformance.reports.picture import picture
from autograd_conformance.reports.rerun import script, torch_name
from autograd_conformance.reports.sources import source_link, web_link
from autograd_conformance.reports.statements import line_source
from autograd_conformance.reports.text import harmless, shortened
from autograd_conformance.scene import Scene
from autograd_conformance.seeds import VERDICTS, seeds
from autograd_conformance.verdicts import Counterexample, Result, Run, Verdict

FOLDER = Path(__file__).with_name("templates")
LONGEST = 20_000  # characters of one text on the page; scripts lie in files of their own as well
MARKS = {
    Verdict.HOLDS: "\N{CHECK MARK}",
    Verdict.BROKEN: "\N{BALLOT X}",
    Verdict.CRASHED: "\N{DOUBLE EXCLAMATION MARK}",
    Verdict.HUNG: "\N{INFINITY}",
    Verdict.UNSUPPORTED: "\N{EN DASH}",
    Verdict.UNPROVEN: "?",
    Verdict.NOT_RUN: "\N{WHITE CIRCLE}",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the program that breaks a claim."""

    number: int
    text: str
    judged: bool
    raised: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """A counterexample as the page shows it."""

    example: Counterexample
    graph: Markup
    lines: tuple[Line, ...]
    due: Pieces
    seen: Pieces
    script: str
    path: str


@dataclass(frozen=True, slots=True)
class Bars:
    """What the programs of a family contained, as lengths of bars; ops apart from the rest."""

    family: str
    devices: tuple[str, ...]
    programs: int
    words: tuple[tuple[str, int, float], ...]
    ops: tuple[tuple[str, int, float], ...]
    same: bool


def index(run: Run, claims: Mapping[str, Claim]) -> str:
    """The page. Whatever comes from outside is escaped, harmless to print, and cut if it is very long."""
    names = device_names(run)
    style = (FOLDER / "index.css").read_text(encoding="utf-8").replace("/*devices*/1", str(max(1, len(names))))
    code = (FOLDER / "index.js").read_text(encoding="utf-8")
    return (
        _environment()
        .get_template("index.html.jinja")
        .render(
            run=run,
            about=run.about,
            torch=run.about["torch"].get("version", run.about["version"]),
            names=names,
            areas=matrix(run, claims),
            score=score(run.results),
            unexpected=[result for result in run.results if not result.expected],
            counts=[(name, counted_verdicts(r for r in run.results if r.device == name)) for name in names],
            total=counted_verdicts(run.results),
            programs=sum(int(family.get("programs", 0)) for family in run.families),
            checks=sum(result.checks for result in run.results),
            shown=_shown(run, claims),
            claims=claims,
            traits=TRAITS,
            seeds=seeds(),
            meanings=VERDICTS,
            verdicts_of=_by_claim(run),
            bars_of=list(_bars(run)),
            style=Markup(style),  # noqa: S704 - our own file
            code=Markup(code),  # noqa: S704 - our own file
            policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(code)}'; base-uri 'none'; form-action 'none'",
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_safe,
    )
    environment.globals |= {
        "marks": MARKS,
        "source_link": source_link,
        "web_link": web_link,
        "key": _key,
        "torch_name": torch_name,
    }
    environment.filters["thousands"] = "{:,}".format
    environment.filters["device_says"] = _device_says
    return environment


def _safe(value: Any) -> Any:
    """Every text on the page goes through here, before it is escaped."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return harmless(shortened(value, LONGEST))


def _device_says(name: str, run: Run, field: str) -> str:
    return str(run.devices.get(name, {}).get(field) or "")


def _key(text: str) -> str:
    """A text as an id: ids have no blanks."""
    return re.sub(r"\s", "_", harmless(text)) or "_"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _by_claim(run: Run) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in run.results:
        found.setdefault(result.claim, []).append(result)
    return found


# --- counterexamples --------------------------------------------------------------------------------------------------


def _shown(run: Run, claims: Mapping[str, Claim]) -> dict[tuple[str, str], Shown]:
    """By claim and device."""
    return {
        (result.claim, result.device): _example(run, claims, result, result.counterexample, f"graph-{number}")
        for number, result in enumerate(run.results)
        if result.counterexample is not None
    }


def _example(run: Run, claims: Mapping[str, Claim], result: Result, example: Counterexample, name: str) -> Shown:
    violation = example.violation
    due, seen = compared(replace(violation, due=_cut(violation.due), seen=_cut(violation.seen)))
    graph = picture(example.program, violation.at, violation.probe)
    return Shown(
        example,
        Markup(drawn(graph, name) if graph else ""),  # noqa: S704 - texts in it are escaped where they are put in
        tuple(_lines(example, torch_name(run, result.device))),
        due,
        seen,
        script(run, result, claims),
        script_path(result),
    )


def _cut(text: str) -> str:
    return shortened(harmless(text), LONGEST)


def _lines(example: Counterexample, device: str) -> Iterator[Line]:
    work, at = example.program, example.violation.at
    texts = work.lines if isinstance(work, Scene) else [line_source(i, s, device) for i, s in enumerate(work)]
    for number, text in enumerate(texts):
        yield Line(number, text, number == at, number in example.raised)


# --- what was generated -----------------------------------------------------------------------------------------------


def _bars(run: Run) -> Iterator[Bars]:
    """One chart a family: programs are the same on every device, so the first device stands for all."""
    families: dict[str, list[dict[str, Any]]] = {}
    for family in run.families:
        families.setdefault(str(family["family"]), []).append(family)
    for name, rows in families.items():
        counters = rows[0].get("generated") or {}
        programs = int(rows[0]["programs"])
        scaled = [(word, int(n), 100 * int(n) / max(programs, int(n), 1)) for word, n in counters.items()]
        scaled.sort(key=lambda bar: (-bar[1], bar[0]))
        yield Bars(
            name,
            tuple(str(row["device"]) for row in rows),
            programs,
            tuple(bar for bar in scaled if not bar[0].startswith("op ")),
            tuple((word.removeprefix("op "), n, share) for word, n, share in scaled if word.startswith("op ")),
            all(row["digest"] == rows[0]["digest"] for row in rows),
        )
