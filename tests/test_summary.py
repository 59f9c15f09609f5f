"""summary.md and explain: in short, and one claim at a time."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import HOSTILE, RAW, broken, large, run_of

from autograd_conformance import cli
from autograd_conformance.claims import Claim
from autograd_conformance.reports.folder import write
from autograd_conformance.reports.markdown import block, code, page, plain
from autograd_conformance.verdicts import Result, Verdict


def test_summary_says_what_is_broken_and_why() -> None:
    """The answer, verdicts by device, due and seen, the script."""
    text = page(*run_of(broken("grad.adds"), Result("leaf.x", "cpu", Verdict.HOLDS)))
    for part in (
        "**1 verdict is not as expected.**",
        "| device | holds | broken |\n| --- | --- | --- |\n| cpu | 1 | 1 |",
        "| `grad.adds` | cpu | broken | `[4.0, 6.0]` | `[2.0, 6.0]` |",
        "```python\n# Broken:   grad.adds, on cpu",
        "`python repro/cpu/repro_grad_adds_",
    ):
        assert part in text, part


def test_summary_lists_known_deviations_apart() -> None:
    """With reason and link; they are not unexpected."""
    known = dataclasses.replace(broken("grad.adds"), expected=True, reason="See there.", link="https://example.org/1")
    text = page(*run_of(known))
    assert "**Every verdict is as expected.**" in text
    assert "| `grad.adds` | cpu | See there. | <https://example.org/1> |" in text
    assert "Not as expected" not in text


def test_summary_of_a_failed_or_empty_run() -> None:
    """It says so first."""
    assert "**The run itself failed: lost\\_worker**" in page(*run_of(broken("grad.adds"), failure="lost_worker"))
    assert "**Nothing ran.**" in page(*run_of())


def test_long_lists_are_cut_with_a_count() -> None:
    """200 broken claims are 25 rows and five scripts; it fits into a step summary."""
    text = page(*large())
    assert "and 175 more" in text
    assert text.count("```python") == 5
    assert len(text) < 60_000


def test_hostile_texts_do_no_harm() -> None:
    """No tag, no table cell, no fence is ended or begun by a text from outside, and nobody is mentioned."""
    bad = broken("grad.adds", HOSTILE, seen=HOSTILE, due=f"```{HOSTILE}", because=f"@someone {HOSTILE}")
    run, claims = run_of(dataclasses.replace(bad, reason=HOSTILE), notes=(HOSTILE,), failure=HOSTILE)
    claims["grad.adds"] = Claim("grad.adds", HOSTILE, (HOSTILE,), "grad", False)
    text = page(run, claims)
    assert not RAW & set(text)
    outside = re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)<(?!/?details|/?summary)", outside)
    assert "@" not in outside
    assert "](" not in outside


def test_code_and_blocks_cannot_be_left() -> None:
    """The fence is longer than any in the text."""
    assert code("a`b``c|d") == "``` a`b``c\\|d ```"
    assert code("") == ""
    assert block("x\n````\ny", "python") == ["`````python", "x", "````", "y", "`````"]
    assert plain("a*b_[c](d) <e> @f") == "a\\*b\\_\\[c\\]\\(d\\) \\<e\\> &#64;f"


def test_summary_lies_in_the_folder(tmp_path: Path) -> None:
    """Beside the report."""
    write(*run_of(broken("grad.adds")), tmp_path)
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").startswith("# Autograd conformance: torch 2.13.0+cpu")


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", ["grad.own-memory", "hook.post-accumulate", "free.second-backward-error"])
def test_explained_claim_has_an_example_that_runs(
    claim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sentence, sources with links, and a script that needs torch alone."""
    assert cli.main(["explain", claim]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{claim}")
    assert "\npromised " in told
    assert "https://docs.pytorch.org/" in told
    script = told.partition("# --- example\n")[2].partition("# ---")[0]
    assert len(script.splitlines()) < 25
    (tmp_path / "example.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, script + done.stderr
    assert done.stdout


def test_unknown_claim_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It names the nearest."""
    assert cli.main(["explain", "grad.own-memry"]) == 2
    assert "nearest: grad.own-memory" in capsys.readouterr().err
