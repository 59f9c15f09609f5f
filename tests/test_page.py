"""index.html: complete, valid, self-contained, and harmless whatever stands in the report."""

from __future__ import annotations

import dataclasses
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from runs import HOSTILE, PROGRAM, RAW, SCENE, VIOLATION, broken, large, run_of

from autograd_conformance import cli
from autograd_conformance.claims import TRAITS, Claim, register
from autograd_conformance.program import Apply, Backward, Program
from autograd_conformance.reports.difference import Piece, compared
from autograd_conformance.reports.document import document, encode
from autograd_conformance.reports.drawing import drawn
from autograd_conformance.reports.folder import write
from autograd_conformance.reports.html import index
from autograd_conformance.reports.picture import Box, Picture, picture
from autograd_conformance.reports.sources import source_link, web_link
from autograd_conformance.seeds import seeds
from autograd_conformance.verdicts import Counterexample, Result, Verdict, Violation

VOID = {"meta", "br", "input", "img", "link", "hr"}
LISTS = {"ol": {"li"}, "ul": {"li"}, "tr": {"td", "th"}, "tbody": {"tr"}, "select": {"option"}}


class Checker(HTMLParser):
    """Tags are balanced, ids unique, links within the page lead somewhere, lists hold what they may."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open
        assert len(self.ids) == len(set(self.ids))
        assert {link[1:] for link in self.links if link.startswith("#")} <= set(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag has."""
        assert tag in LISTS.get(self.open[-1] if self.open else "", {tag})
        self.tags.add(tag)
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            self.links += [value or ""] if name in ("href", "src", "xlink:href") else []
            self.handlers += [name] if name.startswith("on") or name == "style" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Only within SVG."""
        del attrs
        assert "svg" in self.open
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        """It closes what was opened last."""
        assert self.open.pop() == tag


def _page(*results: Result, **changes: str) -> str:
    return index(*run_of(*results, **changes))


# --- the page ---------------------------------------------------------------------------------------------------------


def test_page_is_valid_and_needs_nothing_else() -> None:
    """Balanced, unique ids, every link within it leads somewhere, and nothing is loaded from elsewhere."""
    page = _page(broken("grad.adds"), broken("grad.adds", "lazy"), *(Result("leaf.x", "cpu", v) for v in Verdict))
    checked = Checker(page)
    assert not checked.handlers
    assert not {"img", "link", "iframe", "object"} & checked.tags
    assert all(link.startswith(("#", "https://docs.pytorch.org/")) for link in checked.links)


def test_page_says_what_is_due_to_a_broken_claim() -> None:
    """Sentence, source, evidence, due and seen with the difference marked, why, program, drawing, script, commands."""
    page = _page(broken("grad.adds"))
    for part in (
        "Promise grad.adds holds.",
        'href="https://docs.pytorch.org/docs/stable/notes/autograd.html"',
        '<pre class="due">[<mark>4.0</mark>, 6.0]</pre>',
        '<pre class="seen">[<mark>2.0</mark>, 6.0]</pre>',
        "The sum of the gradients of both passes.",
        '<li value="8" class="here"><code>c.backward()</code>',
        '<svg class="graph" role="img"',
        "raise SystemExit(far)",
        "python repro/cpu/repro_grad_adds_",
        "autograd-conformance run --profile default --seed 0 --device cpu --claims grad.adds",
        "torch 2.13.0+cpu keeps 0 of 1 promises",
        "1 verdict is not as expected",
    ):
        assert part in page, part


def test_page_tells_of_an_expectation() -> None:
    """A known deviation has its reason and its link, and is not among the unexpected."""
    known = dataclasses.replace(broken("grad.adds"), expected=True, reason="See there.", link="https://example.org/1")
    page = _page(known)
    assert 'See there. <span class="link"><a href="https://example.org/1"' in page
    assert "Every verdict is as expected." in page
    assert "broken, known" in page


def test_page_shows_all_statements_of_the_notes() -> None:
    """In both languages; claims that the run has are links, the others are words."""
    page = _page(Result("grad.leaf-only", "cpu", Verdict.HOLDS))
    assert all(s.zh in page for s in seeds().statements)
    assert page.count('lang="zh"') >= len(seeds().statements)
    assert '<a href="#grad.leaf-only">grad.leaf-only</a>' in page


def test_page_shows_devices_and_traits() -> None:
    """Each trait with its meaning, and why it is missing."""
    run, claims = run_of(broken("grad.adds"))
    run.devices["cpu"]["missing"] = {"streams": "RuntimeError: none"}
    page = index(run, claims)
    assert all(meaning.replace("'", "&#39;") in page for meaning in TRAITS.values())
    assert "RuntimeError: none" in page


def test_page_of_a_failed_or_empty_run() -> None:
    """It says so at the top; a run without anything has a page as well."""
    assert "worker lost" in _page(broken("grad.adds"), failure="worker lost")
    assert "Nothing ran." in _page()
    Checker(_page())


def test_page_of_a_scene_shows_its_script() -> None:
    """The line after which it differs is marked; the graph notes the hook."""
    violation = Violation("hook.order", 2, "a.grad", "[2.0, 2.0]", "[1.0, 1.0]", "close")
    result = Result("hook.order", "cpu", Verdict.BROKEN, False, counterexample=Counterexample(SCENE, violation))
    page = _page(result)
    assert '<li value="2" class="here"><code>a.sum().backward()</code>' in page
    assert ">hook (line 1)</text>" in page


def test_hostile_texts_do_no_harm() -> None:
    """Wherever text comes from outside it is escaped and its invisible characters are spelled out."""
    bad = broken("grad.adds", HOSTILE, seen=HOSTILE, due=HOSTILE, because=HOSTILE, probe=HOSTILE)
    bad = dataclasses.replace(bad, reason=HOSTILE, link=f"javascript:{HOSTILE}", family=HOSTILE, digest=HOSTILE)
    run, claims = run_of(bad, notes=(HOSTILE,), failure=HOSTILE)
    claims["grad.adds"] = Claim("grad.adds", HOSTILE, (HOSTILE,), HOSTILE, False, (HOSTILE,))
    run.devices[HOSTILE] = {"found": HOSTILE, "traits": [HOSTILE], "missing": {"values": HOSTILE}, "setup": HOSTILE}
    run.families[0]["generated"] = {HOSTILE: 3, f"op {HOSTILE}": 2}
    run = dataclasses.replace(run, about=run.about | dict.fromkeys(("name", "profile", "python", "platform"), HOSTILE))
    page = index(run, claims)
    assert not RAW & set(page)
    assert "49" not in page.partition("</style>")[2].partition("{{ 7")[0][-20:]
    checked = Checker(page)
    assert "img" not in checked.tags
    assert not checked.handlers
    assert not any(link.startswith("javascript") for link in checked.links)
    assert page.count("<script>") == 1


def test_huge_texts_are_cut() -> None:
    """A message of a megabyte does not make a page of megabytes."""
    huge = "<&'\u202e" * 250_000
    page = _page(broken("grad.adds", seen=huge, due=huge, because=huge), failure=huge)
    assert len(page) < 2_000_000
    assert "more characters)" in page


def test_large_report_is_small_and_quick() -> None:
    """300 claims on 10 devices with 200 counterexamples: under 10 MB."""
    began = time.perf_counter()
    page = index(*large())
    assert len(page.encode()) < 10_000_000
    assert time.perf_counter() - began < 60
    Checker(page)


def test_page_is_made_again_from_the_report_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``report`` writes byte for byte what the run wrote."""
    write(*run_of(broken("grad.adds"), notes=(HOSTILE,)), tmp_path / "a")
    assert cli.main(["report", str(tmp_path / "a" / "report.json"), "--out", str(tmp_path / "b")]) == 0
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert files == sorted(path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*.*"))
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert "files in" in capsys.readouterr().out


def test_report_of_no_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign file, and a folder that cannot be made, end with exit code 2."""
    (tmp_path / "x.json").write_text("[1]")
    assert cli.main(["report", str(tmp_path / "x.json")]) == 2
    (tmp_path / "r.json").write_text(encode(document(*run_of(broken("grad.adds")))))
    assert cli.main(["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


# --- due and seen -----------------------------------------------------------------------------------------------------


def _marks(due: str, seen: str, check: str = "close", tolerance: float = 0.1) -> tuple[list[str], list[str]]:
    pieces = compared(Violation("x", 0, "", due, seen, check, tolerance))  # type: ignore[arg-type]
    one, other = ([piece.text for piece in side if piece.differs] for side in pieces)
    return one, other


def test_numbers_differ_beyond_the_tolerance_only() -> None:
    """Element by element, nan equal to nan."""
    assert _marks("[1.0, 2.0, nan]", "[1.05, -2.5e-3, nan]") == (["2.0"], ["-2.5e-3"])
    assert _marks("[inf, 1.0]", "[-inf, 1.0]") == (["inf"], ["-inf"])


def test_texts_of_different_form_are_aligned() -> None:
    """What both have is not marked."""
    assert _marks("None", "[1.0]") == (["None"], ["[1.0]"])
    assert _marks("[1.0, 2.0]", "[1.0]", "equal") == ([", 2.0"], [])


def test_nothing_is_lost_by_the_comparison() -> None:
    """The pieces put together are the texts."""
    for due, seen in ((HOSTILE, "1"), ("[1]" * 900, "x" * 9), ("", "")):
        for text, pieces in zip((due, seen), compared(Violation("x", 0, "", due, seen)), strict=True):
            assert "".join(piece.text for piece in pieces) == text
    assert compared(VIOLATION)[0][1] == Piece("4.0", True)


# --- the drawing ------------------------------------------------------------------------------------------------------


def _boxes(shown: Picture | None) -> dict[str, Box]:
    assert shown is not None
    return {box.key: box for column in shown.columns for box in column}


def test_picture_has_a_box_for_everything() -> None:
    """Leaves, ops, views, detached tensors and passes, with shapes and flags."""
    boxes = _boxes(picture(PROGRAM, 8, "a.grad"))
    kinds = {key: box.kind for key, box in boxes.items()}
    assert kinds == dict.fromkeys("ak", "leaf") | {
        "b": "op",
        "v": "view",
        "d": "detach",
        "c": "op",
        "pass of c": "pass",
    }
    assert boxes["v"].lines == ("float64 [2, 1]", "requires grad")
    assert boxes["d"].lines == ("float64 [2]", "no grad", "written in place (line 6)")
    assert boxes["pass of c"].title == "backward x 2"


def test_picture_marks_the_path() -> None:
    """From the pass to the leaf that was looked at; what lies beside is not marked."""
    boxes = _boxes(picture(PROGRAM, 8, "a.grad"))
    assert [key for key, box in boxes.items() if box.matters] == ["a", "b", "v", "c", "pass of c"]


def test_edges_lead_to_the_right() -> None:
    """Each edge goes from a column to a later one."""
    shown = picture(PROGRAM, 8, "a.grad")
    assert shown is not None
    column = {box.key: number for number, boxes in enumerate(shown.columns) for box in boxes}
    assert all(column[edge.source] < column[edge.target] for edge in shown.edges)
    assert [edge.target for edge in shown.edges if edge.cut] == ["d"]


def test_what_makes_no_sense_is_drawn_or_left_out() -> None:
    """Unknown ops and names, a circle and an empty program raise nothing."""
    assert picture(Program(()), 0, "") is None
    circle = Program((Apply(("a",), "neg", ("b",)), Apply(("b",), "neg", ("a",)), Apply(("a",), "neg", ("b",))))
    assert picture(circle, 0, "a") is None
    odd = Program((Apply((HOSTILE,), "no such op", ("x",)), Backward((HOSTILE,))))
    shown = picture(odd, 99, "(")
    assert shown is not None
    assert "<script" not in drawn(shown, "g")


def test_drawing_is_told_in_words() -> None:
    """The title says what is made from what; a graph that nobody could read is not drawn."""
    shown = picture(PROGRAM, 8, "a.grad")
    assert shown is not None
    assert "b mul from a, k (float64 [2], requires grad)" in drawn(shown, "g")
    assert drawn(Picture((tuple(Box(str(i), "leaf", "x") for i in range(99)),), ()), "g") == ""


# --- links ------------------------------------------------------------------------------------------------------------


def test_every_source_has_a_link() -> None:
    """Each source of the register leads to a page or to a note, error messages apart."""
    sources = [source for claim in register().values() for source in claim.sources]
    assert [s for s in sources if not source_link(s) and not s.startswith("error message")] == []
    assert source_link("docstring torch.Tensor.backward: x").endswith("/generated/torch.Tensor.backward.html")
    assert source_link("note B (2017): x") == "#seeds-B"


@pytest.mark.parametrize("link", ["javascript:alert(1)", "no report found", "data:text/html,x", 'https://x"><b>', ""])
def test_only_links_to_the_web_are_links(link: str) -> None:
    """Anything else is shown as text."""
    assert web_link(link) == ""
