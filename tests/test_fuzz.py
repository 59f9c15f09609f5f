"""Fuzzing: rounds of fresh programs, and the folder that remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import apart, exit_code

from autograd_conformance import fuzz
from autograd_conformance.cli import main
from autograd_conformance.devices import discover
from autograd_conformance.faults.words import plant
from autograd_conformance.fuzz import REMEMBERED, Round, Soak

(CPU,) = discover(["cpu"])
FEW = ("graphs", "detach")


def _soak(corpus: Path, fault: str = "") -> tuple[list[str], dict[str, object]]:
    """A round over few families, under a fault or without."""
    if fault:
        plant(fault)
    soak, told = Soak(CPU, corpus), list[str]()
    soak.families = list(FEW)
    soak.run([7], 1, told.append)
    return told, soak.summary()


def test_a_healthy_round_is_counted_and_remembered(tmp_path: Path) -> None:
    """Programs and checks are counted; programs in which ops met first are kept and run again, and none is kept twice."""
    told, found = apart(_soak, tmp_path)
    assert told == []
    assert (found["families"], found["rounds"], found["broken"]) == ({"graphs": 200, "detach": 20}, 1, [])
    lines = (tmp_path / REMEMBERED).read_text().splitlines()
    assert len(lines) == len(set(lines)) > 50
    _, again = apart(_soak, tmp_path)
    assert again["rounds"] == 2
    assert again["families"] == {"graphs": 200 + len(lines), "detach": 20}
    assert again["meetings"] == found["meetings"]


def test_a_fault_leaves_small_scripts_that_are_run_first(tmp_path: Path) -> None:
    """They end with 1 under the fault and 0 without; without it, the next round says nothing."""
    told, found = apart(_soak, tmp_path, "overwrites-third")
    assert "grad.accumulates-sum" in found["broken"]
    assert any(line.startswith("seed 7: grad.accumulates-sum is broken: ") for line in told)
    scripts = sorted(tmp_path.glob("grad.accumulates-sum-*.py"))
    assert scripts
    for script in scripts:
        assert (apart(exit_code, str(script)), apart(exit_code, str(script), "overwrites-third")) == (0, 1)
        assert script.with_suffix(".json").exists()
    told, found = apart(_soak, tmp_path, "overwrites-third")
    assert told[0].startswith("what is remembered: ")
    told, found = apart(_soak, tmp_path)
    assert (told, found["broken"]) == ([], [])


def _dying(corpus: Path) -> tuple[list[str], dict[str, object]]:
    soak, told = Soak(CPU, corpus), list[str]()
    soak.round = lambda number: _die() if number == 7 else Round()  # type: ignore[method-assign]
    soak.run([7], 1, told.append)
    return told, soak.summary()


def _die() -> Round:
    import os

    os._exit(9)


def test_a_round_that_dies_is_told(tmp_path: Path) -> None:
    """And has its seed."""
    told, found = apart(_dying, tmp_path)
    assert told == ["seed 7: the process crashed"]
    assert found["deaths"] == ["seed 7 crashed"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Says its seed and what it did; a folder with a file that is no program is a mistake of the user's."""
    monkeypatch.setattr(fuzz.Soak, "round", lambda _, number: Round(checks=number))
    assert main(["fuzz", "--minutes=0.0005", "--seed=3", f"--corpus={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("from seed 3 on\n")
    assert "on cpu\n" in out
    (tmp_path / "x.json").write_text("no program")
    assert main(["fuzz", f"--corpus={tmp_path}"]) == 2
    assert f"{tmp_path / 'x.json'} is no program" in capsys.readouterr().err
