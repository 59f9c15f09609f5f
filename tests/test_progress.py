"""How far a run is: lines between the dots, one that lives on a terminal, and none for who wants quiet."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autograd_conformance.journal import write_json
from autograd_conformance.live import PERIOD, Live
from autograd_conformance.progress import Progress, note

LINE = re.compile(r"^leaf on cpu: 20 programs, [\d,]+ a second; \d+ of [34] claims judged, (about \d+ s left|done)$")
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


def test_what_is_at_work_is_told(tmp_path: Path) -> None:
    """Programs of shards that are done and of those that are not, together; nothing before and after."""
    progress = Progress(tmp_path)
    write_json(tmp_path / "collected.json", [["a.b", "cpu"]])
    assert progress.now() == ""
    folder = tmp_path / "cpu" / "graphs"
    folder.mkdir(parents=True)
    (folder / "shard-000.programs").write_text("{}\n" * 100)
    write_json(folder / "shard-000.json", {})
    (folder / "shard-001.programs").write_text("{}\n" * 100)
    (folder / "shard-001.running").write_bytes((35).to_bytes(8, "little") + bytes(120))
    assert re.fullmatch(r"0 of 1 claims judged, about 0 s left; graphs on cpu: 135, [\d,]+ a second", progress.now())
    note(folder, "graphs", "cpu", 200)
    assert progress.now() == ""


def test_a_live_line_gives_way(tmp_path: Path) -> None:
    """It is written again and again, and is gone while something else is printed, and at the end."""
    terminal = tmp_path / "terminal"
    terminal.touch()
    live = Live(lambda: "three of four", str(terminal))
    while terminal.read_bytes().count(b"three of four") < 2:
        time.sleep(PERIOD / 10)
    with live.aside():
        before = terminal.read_bytes()
        assert before.endswith(b"\r\x1b[2K")
        time.sleep(2 * PERIOD)
        assert terminal.read_bytes() == before
    live.stop()
    assert terminal.read_bytes().endswith(b"\r\x1b[2K")


@pytest.mark.parametrize("workers", ["-n2", "-n0"])
def test_on_a_terminal_one_line_is_written_over(tmp_path: Path, workers: str) -> None:
    """No dots; lines that stay have a line of their own, a broken claim too, and the summary is whole."""
    command = [sys.executable, "-m", "autograd_conformance.cli", "run", "--profile=smoke", "--device=cpu", workers]
    command += ["-p", "autograd_conformance.faults.plant", "--conformance-fault=scalar-result-is-leaf"]
    command += [f"--claims={claim}" for claim in (*CLAIMS, "leaf.iff-no-grad-fn")]
    shown = _on_a_terminal(command, tmp_path)
    lines = [line.split("\x1b[2K")[-1] for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).split("\r\n")]
    assert "\r\x1b[2K" in shown
    assert any(LINE.match(line) for line in lines), shown
    assert not any(re.match(r"[.FxsE]+ *(\[|$)", line) for line in lines), shown
    assert "broken: leaf.iff-no-grad-fn on cpu" in lines, shown
    assert any(re.fullmatch(r"devices     cpu with torch .*", line) for line in lines), shown


def _on_a_terminal(command: list[str], folder: Path) -> str:
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(command[0], command, os.environ | {"COLUMNS": "100"})  # noqa: S606 - ours
    shown = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # its other end is closed
            break
        if not part:
            break
        shown += part
    os.waitpid(child, 0)
    os.close(terminal)
    return shown.decode()
