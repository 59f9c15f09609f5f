"""A picture of a graph as inline SVG: no script, no style attribute, colours from the style sheet of the page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from autograd_conformance.reports.picture import Box, Edge, Picture
from autograd_conformance.reports.text import one_line

WIDE, LINE, GAP, ROWS = 150, 15, 46, 16  # width of a box, height of a line, space between columns and rows
LONGEST = 24  # characters of a line in a box
MOST = 60  # boxes; a larger graph is not drawn, for nobody could read it

Place = tuple[float, float, float]  # left, top, height


def drawn(shown: Picture, name: str) -> str:
    """The picture as SVG with a text that tells the same; empty if it has too many boxes to be read.

    Args:
        shown: what to draw.
        name: a prefix for the ids in it, unique on the page.

    """
    if sum(map(len, shown.columns)) > MOST:
        return ""
    places, width, height = _places(shown)
    told = escape(described(shown))
    boxes = {box.key: box for column in shown.columns for box in column}
    return "\n".join(
        [
            f'<svg class="graph" role="img" aria-labelledby="{escape(name)}" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}">',
            f'<title id="{escape(name)}">{told}</title>',
            *[_edge(edge, places) for edge in sorted(shown.edges, key=lambda edge: edge.matters)],
            *[_box(box, places[key]) for key, box in boxes.items()],
            "</svg>",
        ]
    )


def described(shown: Picture) -> str:
    """The picture in words, for those who cannot see it."""
    made: dict[str, list[str]] = {}
    for edge in shown.edges:
        made.setdefault(edge.target, []).append(edge.source)
    parts = []
    for column in shown.columns:
        for box in column:
            origin = f" from {', '.join(made[box.key])}" if box.key in made else ""
            parts.append(f"{' '.join(box.title.split())}{origin} ({', '.join(box.lines)})")
    return "Graph: " + one_line("; ".join(parts), 1500)


def _places(shown: Picture) -> tuple[dict[str, Place], float, float]:
    """Where each box stands; columns are centred on the tallest."""
    tall = max(sum(_height(box) + ROWS for box in column) for column in shown.columns) - ROWS
    places: dict[str, Place] = {}
    for number, column in enumerate(shown.columns):
        top = 4 + (tall - sum(_height(box) + ROWS for box in column) + ROWS) / 2
        for box in column:
            places[box.key] = (4 + number * (WIDE + GAP), top, _height(box))
            top += _height(box) + ROWS
    return places, len(shown.columns) * (WIDE + GAP) - GAP + 8, tall + 8


def _height(box: Box) -> float:
    return LINE * (1 + len(box.lines)) + 12


def _edge(edge: Edge, places: dict[str, Place]) -> str:
    (x0, y0, h0), (x1, y1, h1) = places[edge.source], places[edge.target]
    x0, y0, y1 = x0 + WIDE, y0 + h0 / 2, y1 + h1 / 2
    bend = max(20.0, (x1 - x0) / 2)
    names = " ".join(["edge", *(["cut"] if edge.cut else []), *(["matters"] if edge.matters else [])])
    path = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1 - 7:g} {y1:g}"
    head = f"M{x1 - 8:g} {y1 - 4:g}L{x1 - 1:g} {y1:g}L{x1 - 8:g} {y1 + 4:g}z"
    bar = ""
    if edge.cut:
        middle, level = (x0 + x1) / 2, (y0 + y1) / 2
        bar = f'<path class="bar" d="M{middle - 3:g} {level - 8:g}v16M{middle + 3:g} {level - 8:g}v16"/>'
    return f'<g class="{names}"><path class="line" d="{path}"/><path class="head" d="{head}"/>{bar}</g>'


def _box(box: Box, place: Place) -> str:
    x, y, height = place
    flags = [box.kind, *(["tracked"] if box.tracked else []), *(["matters"] if box.matters else [])]
    corner = {"leaf": 3, "pass": 2}.get(box.kind, height / 2 if height < 40 else 16)
    shape = f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{height:g}" rx="{corner:g}"/>'
    return f'<g class="{" ".join(flags)}">{shape}{"".join(_texts(box, x + WIDE / 2, y))}</g>'


def _texts(box: Box, middle: float, top: float) -> Iterator[str]:
    for number, line in enumerate((box.title, *box.lines), 1):
        kind = ' class="name"' if number == 1 else ""
        text = escape(_cut(line))
        yield f'<text{kind} x="{middle:g}" y="{top + 3 + number * LINE:g}">{text}</text>'


def _cut(text: str) -> str:
    plain = one_line(text)
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
