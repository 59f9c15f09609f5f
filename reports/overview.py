"""All verdicts of a run as one picture: a row for each area, a column for each device, a square for each claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from autograd_conformance.claims import Claim
from autograd_conformance.reports.matrix import Area, device_names, matrix
from autograd_conformance.reports.text import one_line
from autograd_conformance.verdicts import Result, Run, Verdict

SIDE, STEP, EACH = 7, 9, 13  # pixels of a square and from one to the next, squares in a line
LABEL, GAP, TOP, LEGEND = 110, 14, 34, 34
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="#57606a"'
COLOURS = {
    "holds": "#2da44e",
    "broken, as expected": "#d4a72c",
    "broken": "#cf222e",
    "crashed or hung": "#8250df",
    "unsupported": "#c8ced6",
    "not judged": "none",
}


def overview(run: Run, claims: Mapping[str, Claim]) -> str:
    """An SVG picture, readable on light and dark pages; each square tells its claim and verdict when pointed at."""
    names, areas = device_names(run), matrix(run, claims)
    width = LABEL + len(names) * (EACH * STEP + GAP)
    heights = [_lines(area) * STEP + GAP // 2 for area in areas]
    height = TOP + sum(heights) + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label={quoteattr(_said(names, areas))}>'
    ]
    parts += [_text(LABEL + i * (EACH * STEP + GAP), 18, name) for i, name in enumerate(names)]
    top = TOP
    for area, tall in zip(areas, heights, strict=True):
        parts.append(_text(0, top + SIDE + 1, area.name))
        for i in range(len(names)):
            parts += _squares(area, i, LABEL + i * (EACH * STEP + GAP), top)
        top += tall
    parts += _legend(top + LEGEND // 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines(area: Area) -> int:
    return -(-len(area.rows) // EACH)


def _said(names: Sequence[str], areas: Sequence[Area]) -> str:
    results = [[row.results[i] for area in areas for row in area.rows] for i in range(len(names))]
    held = [sum(r is not None and r.verdict is Verdict.HOLDS for r in column) for column in results]
    return "; ".join(f"{one_line(name)}: {count} claims hold" for name, count in zip(names, held, strict=True))


def _squares(area: Area, column: int, left: int, top: int) -> Iterator[str]:
    for number, row in enumerate(area.rows):
        result = row.results[column]
        said = _kind(result)
        x, y = left + number % EACH * STEP, top + number // EACH * STEP
        yield _square(x, y, said, f"{row.claim.id}: {said}")


def _square(x: int, y: int, said: str, title: str) -> str:
    colour = COLOURS[said]
    line = ' stroke="#8c959f"' if colour == "none" else ""
    shape = f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" rx="1" fill="{colour}"{line}>'
    return f"{shape}<title>{escape(one_line(title))}</title></rect>"


def _kind(result: Result | None) -> str:
    if result is None or result.verdict in (Verdict.NOT_RUN, Verdict.UNPROVEN):
        return "not judged"
    if result.verdict is Verdict.BROKEN and result.expected:
        return "broken, as expected"
    return "crashed or hung" if result.verdict in (Verdict.CRASHED, Verdict.HUNG) else str(result.verdict)


def _legend(y: int) -> Iterator[str]:
    x = LABEL
    for said in COLOURS:
        yield _square(x, y, said, said)
        yield _text(x + 12, y + SIDE, said)
        x += 28 + 6 * len(said)


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" {FONT}>{escape(one_line(text))}</text>'
