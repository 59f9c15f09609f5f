"""How far a run is: lines between the dots, and none for who wants quiet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autograd_conformance.journal import write_json
from autograd_conformance.progress import Progress, note

LINE = re.compile(r"^leaf on cpu: 20 programs, [\d,]+ a second; \d+ of 3 claims judged, (about \d+ s left|done)$")
CLAIMS = ("leaf.as-tensor-keeps-history", "leaf.deepcopy-leaves-only", "leaf.numpy-refused")


def test_a_family_is_told_once(tmp_path: Path) -> None:
    """With what is judged so far, and the time that is left at that pace."""
    progress = Progress(tmp_path)
    progress.started -= 10
    assert list(progress.lines()) == []
    write_json(tmp_path / "collected.json", [["a.b", "cpu"], ["a.c", "cpu"]])
    write_json(tmp_path / "results" / "cpu" / "a.b.json", {})
    for _ in range(2):  # by two workers
        note(tmp_path / "cpu" / "graphs", "graphs", "cpu", 2000)
    (line,) = progress.lines()
    assert re.fullmatch(r"graphs on cpu: 2,000 programs, .* a second; 1 of 2 claims judged, about 10 s left", line)
    assert list(progress.lines()) == []


@pytest.mark.parametrize(("workers", "quiet"), [("-n2", False), ("-n0", True)])
def test_lines_stand_between_the_dots(tmp_path: Path, workers: str, quiet: bool) -> None:
    """Each on a line of its own; under ``-q`` there is none."""
    command = [sys.executable, "-m", "autograd_conformance.cli", "run", "--profile=smoke", "--device=cpu", workers]
    command += [*(f"--claims={claim}" for claim in CLAIMS), *(["-q"] if quiet else [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "claims judged" in line]
    assert (told == []) if quiet else any(LINE.match(line) for line in told), done.stdout
