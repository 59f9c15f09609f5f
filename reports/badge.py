"""The badge: how many claims hold, as a shields endpoint and as our own SVG."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from autograd_conformance.reports.text import one_line
from autograd_conformance.verdicts import Result, Run, Verdict

LABEL = "autograd conformance"
SKIPPED = {Verdict.UNSUPPORTED, Verdict.NOT_RUN}
FAULTS = {Verdict.BROKEN, Verdict.CRASHED, Verdict.HUNG}
# Names that shields knows; shades of our own, dark enough for white text (contrast of 4.5 and more).
SHADES = {"green": "#2f7d0b", "yellowgreen": "#687000", "orange": "#b45309", "red": "#b42318", "lightgrey": "#6b6b6b"}


@dataclass(frozen=True, slots=True)
class Score:
    """Claims, each counted once over all devices of the run."""

    holds: int
    judged: int
    unsupported: int


def score(results: Iterable[Result]) -> Score:
    """How the claims fared: a claim holds if it holds on every device where it was judged.

    A claim that no device supports is counted as unsupported, one that was not run is not counted at all.
    """
    verdicts: dict[str, set[Verdict]] = {}
    for result in results:
        verdicts.setdefault(result.claim, set()).add(result.verdict)
    judged = [seen - SKIPPED for seen in verdicts.values() if seen - SKIPPED]
    return Score(
        holds=sum(seen == {Verdict.HOLDS} for seen in judged),
        judged=len(judged),
        unsupported=sum(seen == {Verdict.UNSUPPORTED} for seen in verdicts.values()),
    )


def badge(run: Run, label: str = LABEL) -> dict[str, Any]:
    """The badge as a shields endpoint: ``schemaVersion``, ``label``, ``message``, ``color``, ``isError``."""
    total = score(run.results)
    message = f"{total.holds}/{total.judged} claims"
    message += f", {total.unsupported} unsupported" if total.unsupported else ""
    message += ", run failed" if run.failure else ""
    return {
        "schemaVersion": 1,
        "label": label,
        "message": message,
        "color": _color(run),
        "isError": bool(run.failure),
    }


def svg(shown: dict[str, Any]) -> str:
    """The badge as a flat SVG that needs no font, script or network; its title says what it shows."""
    label, message = one_line(str(shown["label"]), 80), one_line(str(shown["message"]), 80)
    left, right = _width(label), _width(message)
    title = escape(f"{label}: {message}")
    fill = SHADES.get(str(shown["color"]), SHADES["lightgrey"])
    font = 'fill="#fff" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11" text-anchor="middle"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{title}">\n'
        f"  <title>{title}</title>\n"
        f'  <clipPath id="round"><rect width="{left + right}" height="20" rx="3"/></clipPath>\n'
        f'  <g clip-path="url(#round)">\n'
        f'    <rect width="{left}" height="20" fill="#444"/>\n'
        f'    <rect x="{left}" width="{right}" height="20" fill="{fill}"/>\n'
        f"  </g>\n"
        f"  <g {font}>\n"
        f"    {_text(label, left / 2, left)}\n"
        f"    {_text(message, left + right / 2, right)}\n"
        f"  </g>\n"
        f"</svg>\n"
    )


def _color(run: Run) -> str:
    """The worst verdict decides."""
    judged = [result for result in run.results if result.verdict not in SKIPPED]
    faults = [result for result in judged if result.verdict in FAULTS]
    if run.failure or not all(fault.expected for fault in faults):
        return "red"
    if not judged:
        return "lightgrey"
    if any(result.verdict == Verdict.UNPROVEN for result in judged):
        return "orange"
    return "yellowgreen" if faults else "green"


def _text(text: str, middle: float, room: int) -> str:
    return f'<text x="{middle:g}" y="14" textLength="{room - 12}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'


def _width(text: str) -> int:
    """Pixels that the text takes in 11 px Verdana, about, and six on each side; ``textLength`` evens out the rest."""
    return round(sum(4.0 if char in " ,./:;il|'" else 7.0 for char in text)) + 12
