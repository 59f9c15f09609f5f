"""The kill matrix: what becomes of faults, and how that is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autograd_conformance.cli import main
from autograd_conformance.faults.base import Fault
from autograd_conformance.faults.words import FAULTS
from autograd_conformance.profiles import PROFILES
from autograd_conformance.strength import encoded, page, told
from autograd_conformance.zoo import Kill, kills

ABOUT = {"torch": "2.13.0", "profile": "smoke", "graphs": 60}


def _fault(name: str, install: object, *claims: str) -> Fault:
    return Fault(name, "Wrong.", ("detach",), claims, False, install, "", null=not claims)  # type: ignore[arg-type]


def _dies() -> None:
    import os

    os._exit(9)


def _hangs() -> None:
    while True:
        pass


def test_a_fault_that_kills_or_hangs_costs_itself_alone() -> None:
    """The others are tried all the same."""
    faults = [_fault("dies", _dies, "detach.cuts"), _fault("hangs", _hangs, "detach.cuts"), FAULTS["detach-copies"]]
    found = {kill.fault: kill for kill in kills(faults, PROFILES["smoke"], 2, limit=20)}
    assert (found["dies"].ended, found["hangs"].ended) == ("crashed", "hung")
    seen = found["detach-copies"]
    assert (seen.claim, seen.size, seen.gradcheck, seen.ended) == ("detach.storage-shared", 1, False, "")
    assert 1 <= seen.programs <= 240


def test_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each fault on the terminal and in the JSON; exit code 0 while all are as they should be."""
    assert main(["zoo", "self-sum-counts-once", "--profile=smoke", f"--out={tmp_path}"]) == 0
    assert "self-sum-counts-once: backward.fan-out-sums after" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "zoo.json").read_text())["faults"]
    assert (row["claim"], row["gradcheck"]) == ("backward.fan-out-sums", True)
    assert "| noticed | 1 of 1 |" in (tmp_path / "strength.md").read_text()


def test_unknown_faults_and_profiles_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the nearest names."""
    assert main(["zoo", "overwrite"]) == 2
    assert "unknown fault 'overwrite'; nearest: overwrites" in capsys.readouterr().err
    assert main(["zoo", "overwrites", "--profile=smok"]) == 2


def test_survivors_are_named() -> None:
    """With what broke instead, or how the process ended; and null faults that broke something."""
    zoo = {f.name: f for f in (_fault("one", _dies, "a.b"), _fault("two", _dies, "a.b"), _fault("null-x", _dies))}
    found = [Kill("one", ("c.d",)), Kill("two", ended="hung"), Kill("null-x", ("a.b",))]
    text = page(found, zoo, ["a.b"], ABOUT)
    assert "- `one`: Wrong. (only c.d broke)" in text
    assert "- `two`: Wrong. (the process hung)" in text
    assert "- `null-x`: a.b" in text
    assert "Claims that no fault is noticed by alone\n\n- `a.b`" in text
    assert [told(kill, zoo[kill.fault]) for kill in found] == [
        "one: NOT noticed (only c.d broke)",
        "two: NOT noticed (the process hung)",
        "null-x: null, yet a.b broke",
    ]
    assert [row["fault"] for row in json.loads(encoded(found, ABOUT))["faults"]] == ["one", "two", "null-x"]
