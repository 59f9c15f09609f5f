"""Two runs compared, several runs merged, and a run held against a baseline."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from runs import ABOUT, HOSTILE, RAW, broken, run_of

from autograd_conformance import cli
from autograd_conformance.baseline import held
from autograd_conformance.errors import UsageError
from autograd_conformance.reports.diff import KINDS, changes, newly_broken, plain, told
from autograd_conformance.reports.document import SCHEMA_FILE, document, encode
from autograd_conformance.reports.folder import write
from autograd_conformance.reports.merge import merged
from autograd_conformance.verdicts import Result, Run, Verdict

H, B, C, U = Verdict.HOLDS, Verdict.BROKEN, Verdict.CRASHED, Verdict.UNPROVEN


def _run(*results: Result) -> Run:
    return run_of(*results)[0]


def _one(verdict: Verdict, **changes: Any) -> Result:
    return Result("grad.adds", "cpu", verdict, **{"digest": "d", "evidence": 5} | changes)


PAIRS = {
    "newly broken": [
        (_one(H), _one(B, expected=False)),
        (_one(B), _one(C)),
        (_one(U), _one(B)),
        (_one(B, expected=True), _one(B, expected=False)),
    ],
    "healed": [(_one(B), _one(H)), (_one(C), _one(H))],
    "changed": [(_one(H), _one(U)), (_one(C), _one(B)), (_one(B), _one(Verdict.UNSUPPORTED))],
    "evidence": [(_one(H), _one(H, evidence=6))],
}


@pytest.mark.parametrize(("kind", "pair"), [(kind, pair) for kind, pairs in PAIRS.items() for pair in pairs])
def test_every_change_has_its_kind(kind: str, pair: tuple[Result, Result]) -> None:
    """From one verdict to another."""
    (change,) = changes(_run(pair[0]), _run(pair[1]))
    assert change.kind == kind
    assert newly_broken([change]) == (kind == "newly broken")


def test_what_is_the_same_is_no_change() -> None:
    """Two equal runs differ in nothing."""
    run = _run(_one(B), Result("leaf.x", "cpu", H))
    assert changes(run, run) == ()
    assert told(run, run, ())[-1] == "no verdict has changed"


def test_claims_of_one_run_only_are_told_apart() -> None:
    """They are compared with nothing, so they are not newly broken."""
    old, new = _run(_one(H), Result("leaf.x", "cpu", H)), _run(_one(H), Result("leaf.y", "cpu", B, expected=False))
    assert [change.kind for change in changes(old, new)] == ["only in new", "only in old"]
    assert not newly_broken(changes(old, new))


def test_runs_of_other_programs_are_refused_unless_told() -> None:
    """A difference would say nothing about torch."""
    old, new = _run(_one(H)), _run(_one(B, digest="e"))
    with pytest.raises(UsageError, match=r"other programs, such as grad\.adds"):
        changes(old, new)
    assert newly_broken(changes(old, new, anyway=True))


def test_runs_with_nothing_in_common_are_refused() -> None:
    """Reports of different devices are merged, not compared."""
    with pytest.raises(UsageError, match="in common"):
        changes(_run(_one(H)), _run(Result("grad.adds", "lazy", H)))


def test_difference_is_told_in_words_and_as_data() -> None:
    """Old and new, claim by claim; JSON has the same, and both are harmless."""
    bad = dataclasses.replace(broken("grad.adds", seen=HOSTILE), digest="d")
    old, new = _run(_one(H), Result("leaf.x", "cpu", H)), _run(bad, Result("leaf.y", "cpu", H, reason=HOSTILE))
    found = changes(old, new)
    lines = told(old, new, found)
    assert "    grad.adds on cpu: holds -> broken, not as expected" in lines
    assert all(line.isprintable() for line in lines)
    body = plain(old, new, found)
    assert body["newly_broken"] is True
    assert {row["kind"] for row in body["changes"]} <= set(KINDS)
    assert not RAW & set(json.dumps(body, ensure_ascii=False))


def test_diff_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 if something is newly broken, 0 if it has healed, 2 for what is no report."""
    for name, result in (("good", _one(H)), ("bad", _one(B))):
        (tmp_path / name).write_text(encode(document(*run_of(result))))
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    assert cli.main(["diff", good, bad]) == 1
    assert cli.main(["diff", bad, good]) == 0
    assert "healed: 1" in capsys.readouterr().out
    assert cli.main(["diff", "--json", good, bad]) == 1
    assert json.loads(capsys.readouterr().out)["changes"][0]["new"]["verdict"] == "broken"
    assert cli.main(["diff", good, str(tmp_path)]) == 2


# --- merge ------------------------------------------------------------------------------------------------------------


def _on(version: str, *results: Result) -> Run:
    return dataclasses.replace(_run(*results), about=ABOUT | {"torch": {"version": version}, "seed": 0})


def test_devices_of_several_runs_come_together() -> None:
    """Results, devices and families of all; seconds are added."""
    whole = merged([_run(_one(H)), _run(Result("grad.adds", "lazy", B), Result("leaf.x", "lazy", H))])
    assert [(r.claim, r.device) for r in whole.results] == [
        ("grad.adds", "cpu"),
        ("grad.adds", "lazy"),
        ("leaf.x", "lazy"),
    ]
    assert list(whole.devices) == ["cpu", "lazy"]
    assert whole.about["wall_seconds"] == 3.0


def test_one_device_on_several_versions() -> None:
    """Named by version; scripts still name the device as torch does."""
    whole = merged([_on("2.4.1", broken("grad.adds", "lazy")), _on("2.13.0", broken("grad.adds", "lazy"))])
    assert list(whole.devices) == ["lazy (torch 2.4.1)", "lazy (torch 2.13.0)"]
    assert whole.about["torch"]["version"] == "2.4.1, 2.13.0"
    assert [family["device"] for family in whole.families] == list(whole.devices)


def test_one_device_on_several_machines() -> None:
    """Told apart by a number."""
    whole = merged([_run(_one(H)), _run(_one(H)), _run(_one(H))])
    assert list(whole.devices) == ["cpu", "cpu (2)", "cpu (3)"]
    assert len({(r.claim, r.device) for r in whole.results}) == 3


def test_merge_command_leaves_a_report(tmp_path: Path) -> None:
    """Valid, with everything that is derived from it; and it can be merged again."""
    write(*run_of(broken("grad.adds", "lazy")), tmp_path / "a")
    write(*run_of(broken("grad.adds", "lazy"), notes=(HOSTILE,)), tmp_path / "b")
    files = [str(tmp_path / name / "report.json") for name in "ab"]
    assert cli.main(["merge", *files, "--out", str(tmp_path / "c")]) == 0
    body = json.loads((tmp_path / "c" / "report.json").read_text())
    jsonschema.validate(body, json.loads(SCHEMA_FILE.read_text()))
    assert (tmp_path / "c" / "index.html").exists()
    scripts = list((tmp_path / "c" / "repro").rglob("*.py"))
    assert len(scripts) == 2
    assert all("device='lazy'" in path.read_text() for path in scripts)
    assert cli.main(["merge", files[0], str(tmp_path / "c" / "report.json"), "--out", str(tmp_path / "d")]) == 0


# --- baseline ---------------------------------------------------------------------------------------------------------


def _pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["--pyargs", "autograd_conformance", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["--conformance-device=cpu", "--conformance-profile=smoke", "--conformance-claims=leaf.iff-no-grad-fn"]
    command = [sys.executable, "-m", "pytest", *words, *options]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=300)


def test_run_is_held_against_a_baseline(tmp_path: Path) -> None:
    """What is the same is said; what is newly broken fails the run; a baseline that is none is a usage error."""
    first = _pytest(tmp_path)
    assert first.returncode == 0, first.stdout
    report = tmp_path / "conformance-report" / "report.json"
    (tmp_path / "base.json").write_text(report.read_text())
    again = _pytest(tmp_path, "--conformance-baseline=base.json")
    assert again.returncode == 0, again.stdout
    assert "baseline    no verdict has changed" in again.stdout
    (tmp_path / "none.json").write_text("{}")
    wrong = _pytest(tmp_path, "--conformance-baseline=none.json")
    assert wrong.returncode == 2
    assert "not a report of this suite" in wrong.stdout + wrong.stderr


def test_baseline_decides_the_exit_code(tmp_path: Path) -> None:
    """1 if something is newly broken, 0 if not, 2 if the runs cannot be compared; claims not asked for are left out."""
    runs = {"good": [_one(H), Result("leaf.x", "cpu", H)], "bad": [_one(B)], "other": [_one(B, digest="e")]}
    for name, results in runs.items():
        (tmp_path / name).write_text(encode(document(*run_of(*results))))
    good, bad = str(tmp_path / "good"), tmp_path / "bad"
    lines, code = held(good, bad)
    assert (lines[0], code) == ("baseline    newly broken: 1", 1)
    assert held(str(bad), bad) == (["baseline    no verdict has changed"], 0)
    assert held(good, tmp_path / "other")[1] == 2
