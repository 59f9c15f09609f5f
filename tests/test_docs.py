"""What README and docs show is true: Python runs, commands are known, links lead somewhere, numbers agree."""

from __future__ import annotations

import configparser
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from autograd_conformance import cli
from autograd_conformance.claims import register
from autograd_conformance.faults.base import ZOO
from autograd_conformance.verdicts import Verdict

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LAZY = ROOT / "docs" / "findings-lazy.md"  # its scripts share a process of their own
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        if page == LAZY and language == "python":
            continue
        found = [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]
        for number, text in enumerate(found, 1):
            yield pytest.param(text, id=f"{page.stem}-{number}")


def _commands() -> Iterator[Any]:
    for block in _blocks("console"):
        (text,) = block.values
        for number, part in enumerate(re.split(r"^\$ ", str(text), flags=re.MULTILINE)[1:], 1):
            command, _, output = part.partition("\n")
            yield pytest.param(command, output, id=f"{block.id}.{number}")


@pytest.mark.parametrize("code", list(_blocks("python")))
def test_python_runs(code: str) -> None:
    """Each block of Python runs by itself; a fault that it adds to the zoo is taken out again."""
    known = set(ZOO)
    try:
        exec(compile(code, "block", "exec"), {"__name__": "block"})  # noqa: S102 - our own documentation
    finally:
        for name in set(ZOO) - known:
            del ZOO[name]


@pytest.mark.parametrize("code", [b for b in _blocks("python") if str(b.id).startswith("findings-")])
def test_findings_are_as_told(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each script prints what its comments say that it prints."""
    exec(compile(code, "block", "exec"), {"__name__": "block"})  # noqa: S102 - our own documentation
    told = re.findall(r"# prints (.*)$", code, flags=re.MULTILINE)
    assert not told or capsys.readouterr().out.splitlines() == told


@pytest.mark.skipif(not version("torch").startswith("2.13."), reason="the page tells of 2.13")
def test_findings_on_lazy_tensors_are_as_told() -> None:
    """The scripts of the page, one after the other, print what its comments say that they print."""
    code = "\n".join(text for kind, text in BLOCK.findall(LAZY.read_text()) if kind == "python")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    told = re.findall(r"# prints (.*)$", code, flags=re.MULTILINE)
    assert told
    assert done.stdout.splitlines() == told


@pytest.mark.parametrize(("command", "output"), list(_commands()))
def test_command_is_known(command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cheap commands are run and print what the page shows; of others the options and environments are checked."""
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[0] == "autograd-conformance":
            _check_console(words[1:], output, tmp_path, monkeypatch)
        elif words[0] == "pytest":
            _check_options(words[1:])
        elif words[:4] == ["python", "-m", "tox", "-e"]:
            tox = configparser.ConfigParser()
            tox.read(ROOT / "tox.ini")
            assert f"testenv:{words[4]}" in tox
        else:
            assert words[:4] == ["python", "-m", "pip", "install"]


def _check_console(words: list[str], output: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] in ("run", "fuzz", "zoo"):  # minutes
        _, rest = cli._parser().parse_known_args(words)
        _check_options(rest)
        return
    (json,) = (text for kind, text in BLOCK.findall((ROOT / "docs" / "read-a-report.md").read_text()) if kind == "json")
    (folder / "program.json").write_text(json)
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(words) == 0
    if output.strip():
        assert printed.getvalue().strip() == output.strip()


def _check_options(words: list[str]) -> None:
    """Options of the suite that stand among pytest's own are options that it has."""
    plugins = ("plugin.py", "faults/plant.py")
    known = re.findall(r"--conformance-[a-z-]+", "".join((ROOT / "conformance" / name).read_text() for name in plugins))
    for word in words:
        if word.startswith("--") and word != "--pyargs":
            assert word.partition("=")[0] in known


def test_the_shown_run_passes(tmp_path: Path) -> None:
    """The run of a single claim that README shows is run as it stands."""
    command = "autograd-conformance run --profile smoke --device cpu --claims leaf.iff-no-grad-fn"
    assert f"$ {command}\n" in (ROOT / "README.md").read_text()
    words = [sys.executable, "-m", "autograd_conformance.cli", *command.split()[1:], "-n0"]
    done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"report.json", "junit.xml"} <= {path.name for path in (tmp_path / "conformance-report").iterdir()}


def test_readme_counts_the_claims() -> None:
    """The table of areas adds up to the register."""
    readme = (ROOT / "README.md").read_text()
    areas = Counter(claim.area for claim in register().values())
    assert f"\n{len(register())} claims in {len(areas)} areas" in readme
    for area, count in areas.items():
        assert f"\n| `{area}` | {count} |" in readme


def test_readme_explains_every_verdict() -> None:
    """No verdict is missing from the table."""
    readme = (ROOT / "README.md").read_text()
    for verdict in Verdict:
        assert f"\n| `{verdict}` |" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Each relative link names a file that is there."""
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_files_are_there(page: Path) -> None:
    """Paths of the repository that a page speaks of exist."""
    for name in re.findall(r"`((?:conformance|strategies|reports|docs|tests)/[\w./]*)`", page.read_text()):
        assert (ROOT / name).exists(), name
