"""The picture of all verdicts: one square for each claim and device, and nothing that harms."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter

from runs import HOSTILE, RAW, broken, run_of

from autograd_conformance.reports.overview import COLOURS, overview
from autograd_conformance.verdicts import Result, Verdict

SVG = "{http://www.w3.org/2000/svg}"


def _squares(text: str) -> dict[str, str]:
    """Title and colour of each square; those of the legend are named by their verdict alone."""
    found = ET.fromstring(text).iter(f"{SVG}rect")
    return {str(rect.findtext(f"{SVG}title")): str(rect.get("fill")) for rect in found}


def test_each_claim_has_a_square_in_its_colour_for_each_device() -> None:
    """A claim that a device was not asked about has an empty one."""
    results = [
        Result("leaf.flag", "cpu", Verdict.HOLDS),
        broken("grad.adds"),
        Result("grad.own", "cpu", Verdict.BROKEN, reason="known"),
        Result("grad.own", "meta", Verdict.UNSUPPORTED),
        Result("hook.order", "meta", Verdict.HUNG, expected=False),
    ]
    squares = _squares(overview(*run_of(*results)))
    named = {title: COLOURS[title.partition(": ")[2]] for title in squares if ": " in title}
    assert {title: colour for title, colour in squares.items() if ": " in title} == named
    assert Counter(title for title in named) == Counter(
        [
            "leaf.flag: holds", "leaf.flag: not judged", "grad.adds: broken", "grad.adds: not judged",
            "grad.own: broken, as expected", "grad.own: unsupported", "hook.order: not judged",
            "hook.order: crashed or hung",
        ]
    )  # fmt: skip
    assert set(COLOURS) <= set(squares)


def test_the_label_says_how_many_hold() -> None:
    """For those who do not see it."""
    run, claims = run_of(Result("leaf.flag", "cpu", Verdict.HOLDS), Result("leaf.is", "cpu", Verdict.HOLDS))
    assert ET.fromstring(overview(run, claims)).get("aria-label") == "cpu: 2 claims hold"


def test_hostile_names_do_no_harm() -> None:
    """It stays XML, and invisible characters are spelled out."""
    text = overview(*run_of(Result("leaf.flag", HOSTILE, Verdict.HOLDS)))
    assert not RAW & set(text)
    assert not list(ET.fromstring(text).iter(f"{SVG}script"))
