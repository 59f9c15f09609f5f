"""Two notes of 2017: every statement in two languages, checked by claims that exist, and shown by one command."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autograd_conformance import cli
from autograd_conformance.claims import register
from autograd_conformance.errors import UsageError
from autograd_conformance.reports.document import ABOUT, document, encode
from autograd_conformance.reports.seeds import page
from autograd_conformance.seeds import VERDICTS, Statement, load, seeds
from autograd_conformance.verdicts import Result, Run, Verdict

GOOD = """
[[note]]
id = "A"
title = "On leaves"
date = "2017"
about = "leaves"

[[statement]]
note = "A"
en = "Only leaves get a grad."
zh = "只有叶子得到梯度。"
claims = ["grad.leaf-only"]
verdict = "right"
"""
CHINESE = re.compile(r"[\u4e00-\u9fff]")

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a text to a file named ``some.toml`` and returns its path."""

    def to_file(text: str) -> Path:
        path = tmp_path / "some.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def result(claim: str, device: str, verdict: Verdict) -> Result:
    """A verdict with nothing behind it."""
    return Result(claim, device, verdict)


def run_of(*results: Result) -> Run:
    """A run on a torch that has a version."""
    about: dict[str, Any] = dict.fromkeys(ABOUT, "") | {"torch": {"version": "2.99.0"}}
    return Run(about, {}, [], results)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_good_file_loads(write: Write) -> None:
    """Notes come by id, statements in order, and what may be left out is empty."""
    found = load(write(GOOD), ["grad.leaf-only"])
    assert found.notes["A"].title == "On leaves"
    assert found.statements == (
        Statement("A", "Only leaves get a grad.", "只有叶子得到梯度。", ("grad.leaf-only",), "right"),
    )


DAMAGES = {
    "verdict": (GOOD.replace('"right"', '"rihgt"'), ("unknown verdict 'rihgt'", "nearest: right")),
    "claim": (GOOD.replace('["grad.leaf-only"]', '["grad.leafonly"]'), ("unknown claim", "nearest: grad.leaf-only")),
    "note": (GOOD.replace('note = "A"', 'note = "C"'), ("unknown note 'C'", "choices: A")),
    "field": (GOOD.replace("claims =", "claim ="), ("unknown field 'claim'", "nearest: claims")),
    "missing": (GOOD.replace('en = "Only leaves get a grad."\n', ""), ("missing field 'en'",)),
    "blank": (GOOD.replace("只有叶子得到梯度。", " "), ("'zh' is ' '", "non-empty")),
    "list": (GOOD.replace('["grad.leaf-only"]', '"grad.leaf-only"'), ("'claims' is", "an array")),
    "unchecked": (GOOD.replace('["grad.leaf-only"]', "[]"), ("no claim", "at least one")),
    "outdated": (GOOD.replace('"right"', '"outdated"'), ("missing field 'now'", "outdated")),
    "wrong": (GOOD.replace('"right"', '"wrong"'), ("missing field 'now'", "wrong")),
    "table": (GOOD.replace("[[note]]", "[[nota]]"), ("unknown table 'nota'", "nearest: note")),
    "single": (GOOD.replace("[[statement]]", "[statement]"), ("'statement'", "[[statement]]")),
    "toml": (GOOD + 'en = "open', ("cannot read the statements",)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_in_one_line(write: Write, name: str) -> None:
    """Each broken rule is one line with the value, the file and what would be right."""
    text, parts = DAMAGES[name]
    with pytest.raises(UsageError) as caught:
        load(write(text), ["grad.leaf-only"])
    message = str(caught.value)
    assert "\n" not in message
    for part in (*parts, "some.toml"):
        assert part in message


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the statements in .*none\.toml"):
        load(tmp_path / "none.toml", [])


# --- what comes with the package --------------------------------------------------------------------------------------


def test_all_statements_are_there() -> None:
    """Two notes, 56 statements, read once; every verdict of the closed list occurs."""
    found = seeds()
    assert found is seeds()
    assert Counter(statement.note for statement in found.statements) == {"A": 44, "B": 12}
    assert {statement.verdict for statement in found.statements} == set(VERDICTS)


def test_statements_have_two_languages_and_say_nothing_twice() -> None:
    """English without a Chinese sign, Chinese with some; no text stands there twice."""
    statements = seeds().statements
    for statement in statements:
        assert statement.en.endswith(".")
        assert not CHINESE.search(statement.en + statement.now)
        assert statement.zh.endswith("。")
        assert CHINESE.search(statement.zh)
        assert len(set(statement.claims)) == len(statement.claims)
    for language in ("en", "zh"):
        texts = [getattr(statement, language) for statement in statements]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("note", ["A", "B"])
def test_claims_that_cite_a_note_are_named_by_it(note: str) -> None:
    """Whatever the register takes from a note is said by a statement of that note."""
    cited = {c.id for c in register().values() if any(source.startswith(f"note {note} (") for source in c.sources)}
    named = {claim for statement in seeds().statements if statement.note == note for claim in statement.claims}
    assert cited
    assert cited <= named


def test_a_claim_that_replaces_what_a_note_said_is_named_by_what_is_not_right() -> None:
    """Old sentences that come from a note belong to statements that are outdated or wrong, with few exceptions."""
    replaced = {
        claim.id
        for claim in register().values()
        if claim.old and any(source.startswith("note ") for source in claim.sources)
    }
    doubted = {
        c for statement in seeds().statements if statement.verdict in ("outdated", "wrong") for c in statement.claims
    }
    assert replaced - doubted == {
        "optim.frozen-not-updated",
        "legacy.uninitialised-floattensor",
        "module.apply-initialisation",
        "requires-grad.means-differentiable",
        "grad.accumulates-sum",
    }


def test_the_statements_need_no_torch() -> None:
    code = "import sys; from autograd_conformance import cli; cli.main(['seeds']);sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_shows_both_languages_and_the_claims(capsys: pytest.CaptureFixture[str]) -> None:
    """Every statement, what is true now, every claim, and at the end a count."""
    assert cli.main(["seeds"]) == 0
    shown = re.sub(r"\s+", "", capsys.readouterr().out)
    for statement in seeds().statements:
        for text in (statement.en, statement.zh, statement.now, *statement.claims):
            assert re.sub(r"\s+", "", text) in shown
    for note in seeds().notes.values():
        assert re.sub(r"\s+", "", f"{note.title} ({note.date}") in shown
    assert "56statements:" in shown


def test_the_command_shows_the_verdicts_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a report each claim is followed by its verdicts, equal ones together, and by a remark if there is none."""
    run = run_of(
        result("backward.chain-rule", "cpu", Verdict.HOLDS),
        result("backward.chain-rule", "meta", Verdict.UNSUPPORTED),
        result("grad.leaf-only", "cpu", Verdict.BROKEN),
        result("grad.leaf-only", "meta", Verdict.BROKEN),
    )
    path = tmp_path / "report.json"
    path.write_text(encode(document(run, register())))
    assert cli.main(["seeds", "--report", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "torch 2.99.0" in shown.splitlines()[0]
    assert "backward.chain-rule: holds on cpu, unsupported on meta\n" in shown
    assert "grad.leaf-only: broken on cpu, meta\n" in shown
    assert "detach.cuts: not in the report\n" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not a report"),
        ("[]", "not a report"),
        ('{"schema": 1, "results": 3}', "damaged"),
    ],
)
def test_a_report_that_cannot_be_read_is_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file, no JSON, no report, a damaged report: exit code 2 and one line with the path."""
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["seeds", "--report", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err
    assert str(path) in printed.err


def test_further_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["seeds", "--repost", "x"]) == 2
    assert "unknown argument '--repost'" in capsys.readouterr().err


def test_a_terminal_without_chinese_gets_the_english(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be shown is spelled as escapes; nothing is raised."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert cli.main(["seeds"]) == 0
    assert b"Only leaves get to keep a gradient." in raw.getvalue()
    assert b"\\u53ea" in raw.getvalue()


def test_lines_fit_the_page() -> None:
    """Chinese text is wrapped by the columns it takes, and no line begins with a closing mark."""
    statement = {
        "note": "A",
        "en": "Short.",
        "zh": "很" * 41 + "。" + "长" * 80,
        "claims": (),
        "verdict": "context",
        "now": "",
    }
    lines = page({"A": {"title": "T", "date": "2017", "about": "x"}}, [statement])
    wide = [line for line in lines if CHINESE.search(line)]
    assert len(wide) == 3
    assert all(line.startswith(" " * 15) and not line.strip().startswith("。") for line in wide)
    assert max(len(line.strip()) for line in wide) <= 43
    assert sum(len(line.strip()) for line in wide) == 122
