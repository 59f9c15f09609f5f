"""The badge: what it counts, which colour it takes, and an SVG that stays well-formed."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from autograd_conformance.reports.badge import SHADES, badge, score, svg
from autograd_conformance.verdicts import Result, Run, Verdict

SVG = "{http://www.w3.org/2000/svg}"


def _run(*rows: tuple[str, str, str, bool], failure: str = "") -> Run:
    results = tuple(Result(claim, device, Verdict(verdict), expected) for claim, device, verdict, expected in rows)
    return Run(about={}, devices={}, families=[], results=results, failure=failure)


# verdict of one claim beside one that holds, expected or not -> message, color
VERDICTS = [
    ("holds", True, "2/2 claims", "green"),
    ("broken", True, "1/2 claims", "yellowgreen"),
    ("broken", False, "1/2 claims", "red"),
    ("crashed", True, "1/2 claims", "yellowgreen"),
    ("crashed", False, "1/2 claims", "red"),
    ("hung", False, "1/2 claims", "red"),
    ("unproven", False, "1/2 claims", "orange"),
    ("unsupported", True, "1/1 claims, 1 unsupported", "green"),
    ("not-run", False, "1/1 claims", "green"),
]


@pytest.mark.parametrize(("verdict", "expected", "message", "color"), VERDICTS)
def test_verdict_decides_message_and_color(verdict: str, expected: bool, message: str, color: str) -> None:
    """Everything that was judged is in the denominator, and the worst verdict gives the colour."""
    shown = badge(_run(("a", "cpu", "holds", True), ("b", "cpu", verdict, expected)))
    assert (shown["message"], shown["color"], shown["isError"]) == (message, color, False)


def test_claim_holds_only_if_it_holds_on_every_device() -> None:
    """A claim is counted once over all devices, by its worst verdict where it was judged."""
    run = _run(
        ("a", "cpu", "holds", True),
        ("a", "lazy", "broken", True),
        ("b", "cpu", "holds", True),
        ("b", "lazy", "unsupported", True),
        ("c", "cpu", "unsupported", True),
        ("c", "lazy", "unsupported", True),
        ("d", "cpu", "unsupported", True),
        ("d", "lazy", "not-run", True),
    )
    total = score(run.results)
    assert (total.holds, total.judged, total.unsupported) == (1, 2, 1)


def test_unexpected_fault_outweighs_unproven_and_expected() -> None:
    """Red wins over orange, orange over yellowgreen."""
    rows = [("a", "cpu", "broken", True), ("b", "cpu", "unproven", False)]
    assert badge(_run(*rows))["color"] == "orange"
    assert badge(_run(*rows, ("c", "cpu", "hung", False)))["color"] == "red"


def test_nothing_ran_is_grey() -> None:
    """Without a judged claim the badge is grey, also if all are unsupported."""
    assert badge(_run())["color"] == "lightgrey"
    assert badge(_run(("a", "cpu", "unsupported", True)))["color"] == "lightgrey"


def test_failed_run_is_an_error_and_says_so() -> None:
    """A run that failed is never green, however many claims held until then."""
    shown = badge(_run(("a", "cpu", "holds", True), failure="lost a worker"))
    assert (shown["isError"], shown["color"], shown["message"]) == (True, "red", "1/1 claims, run failed")


def test_badge_is_a_shields_endpoint() -> None:
    """The names and types are those of the endpoint schema, version 1."""
    shown = badge(_run(("a", "cpu", "holds", True)))
    types = {"schemaVersion": int, "label": str, "message": str, "color": str, "isError": bool}
    assert {name: type(value) for name, value in shown.items()} == types
    assert shown["schemaVersion"] == 1
    assert shown["label"]


def _shown(**changes: Any) -> dict[str, Any]:
    return badge(_run(("a", "cpu", "holds", True))) | changes


def test_svg_says_in_words_what_it_shows() -> None:
    """Title and label carry label and message, for those who do not see the picture."""
    root = ET.fromstring(svg(_shown()))
    assert root.get("role") == "img"
    assert root.get("aria-label") == "autograd conformance: 1/1 claims"
    assert root.findtext(f"{SVG}title") == "autograd conformance: 1/1 claims"
    assert [text.text for text in root.iter(f"{SVG}text")] == ["autograd conformance", "1/1 claims"]


@pytest.mark.parametrize("hostile", ["</title><script>x()</script>", '"><a href="x">', "&lt;\x00\x1b[31m\ud800\u202e"])
def test_svg_escapes_what_it_is_given(hostile: str) -> None:
    """No label can add an element or break the file."""
    text = svg(_shown(label=hostile, message=hostile))
    root = ET.fromstring(text.encode())
    kinds = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert kinds == {"svg", "title", "clipPath", "rect", "g", "text"}


def test_svg_needs_nothing_from_elsewhere() -> None:
    """The only address in the file is the name space."""
    assert svg(_shown()).count("http") == 1


@pytest.mark.parametrize("color", SHADES)
def test_white_text_is_readable_on_every_shade(color: str) -> None:
    """White on each shade has a contrast of 4.5 or more (WCAG AA)."""
    channels = [int(SHADES[color][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    assert 1.05 / (luminance + 0.05) >= 4.5
    assert SHADES[color] in svg(_shown(color=color))
