"""The plug-in as its users meet it: every test starts pytest or the console command in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autograd_conformance.claims import is_whole, register
from autograd_conformance.program import Program
from autograd_conformance.reports.document import SCHEMA_FILE

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
CLAIMS = (*PYTEST, "--pyargs", "autograd_conformance", "--conformance-device=cpu", "--conformance-profile=smoke")
CONSOLE = ("-m", "autograd_conformance.cli")
CHEAP = "leaf.iff-no-grad-fn"
LIMIT = 300

Done = subprocess.CompletedProcess[str]


def _environment() -> dict[str, str]:
    """Ours, without what pytest and its workers put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def _python(folder: Path, *arguments: str, **extra: str) -> Done:
    command = [sys.executable, *arguments]
    environment = _environment() | extra
    return subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=LIMIT
    )


def _report(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "conformance-report" / "report.json").read_text())
    return body


def _validate(report: dict[str, Any]) -> None:
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))


# --- in a run of somebody else ----------------------------------------------------------------------------------------

FOREIGN = """
import sys

def test_theirs(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("autograd_conformance.plugin")
    assert not {"torch", "numpy", "hypothesis", "autograd_conformance.session"} & set(sys.modules)
"""


@pytest.mark.parametrize("xdist", [(), ("-p", "no:xdist")], ids=["xdist", "alone"])
def test_foreign_run_is_left_alone(tmp_path: Path, xdist: tuple[str, ...]) -> None:
    """Whoever installs us finds nothing imported, collected or written in a run that did not ask for us."""
    (tmp_path / "test_theirs.py").write_text(FOREIGN)
    plugins = (*xdist, "-p", "no:hypothesispytest")
    done = _python(tmp_path, *PYTEST, *plugins)
    assert (done.returncode, done.stdout.splitlines()[-1].split(" in ")[0]) == (0, "1 passed"), done.stdout
    assert "conformance" not in done.stdout
    assert not (tmp_path / "conformance-report").exists()


# --- mistakes ---------------------------------------------------------------------------------------------------------

ENTRY = '[[expectation]]\nclaim = "leaf.iff-no-grad-fn"\nreason = "r"\nlink = "l"\nwitness = "w"\n'
MISTAKES = [
    pytest.param("--conformance-device=cqu", "", ("unknown device 'cqu'", "nearest: cpu"), id="device"),
    pytest.param(
        "--conformance-claims=leaf.iff-nograd-fn",
        "",
        ("unknown claim 'leaf.iff-nograd-fn'", "leaf.iff-no-grad-fn"),
        id="claim",
    ),
    pytest.param("--conformance-profile=smok", "", ("unknown profile 'smok'", "nearest: smoke"), id="profile"),
    pytest.param("--conformance-report-dir=/dev/null/x", "", ("cannot write to /dev/null/x",), id="folder"),
    pytest.param("", ENTRY + 'reasn = "r"\n', ("unknown expectation key 'reasn'", "nearest: reason"), id="key"),
    pytest.param("", ENTRY.replace("iff", "if"), ("unknown claim 'leaf.if-no", "nearest: leaf.iff"), id="entry-claim"),
    pytest.param("", ENTRY, ("witness: not JSON", "known.toml, entry 1"), id="witness"),
    pytest.param("", "[[expectation]\n", ("cannot read expectations in", "known.toml", "line 1"), id="damaged"),
    pytest.param("", None, ("no expectations file", "known.toml"), id="missing"),
]


@pytest.mark.parametrize(("option", "entry", "parts"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, option: str, entry: str | None, parts: tuple[str, ...]
) -> None:
    """A wrong option or file is named together with what was probably meant, before anything runs."""
    known = tmp_path / "known.toml"
    if entry:
        known.write_text(entry)
    asked = option or f"--conformance-expectations={known}"
    done = _python(tmp_path, *PYTEST, "-p", "no:xdist", "--pyargs", "autograd_conformance", asked)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert done.returncode == 2, lines
    assert len(lines) == 1
    for part in parts:
        assert part in lines[0]
    assert not (tmp_path / "conformance-report" / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("list", "leaf.iff-nograd-fn"), "unknown claim 'leaf.iff-nograd-fn'; nearest: leaf.iff-no-grad-fn"),
        (("list", "--devise=cpu"), "unknown argument '--devise=cpu'"),
        (("replay", "none.json"), "cannot read none.json"),
        (("run", "--profile=smok", "-n0"), "unknown profile 'smok'; nearest: smoke"),
        (("run", "--report-dir=/dev/null/x", "-n0"), "cannot write to /dev/null/x: Not a directory; name another"),
    ],
)
def test_a_mistake_on_the_console_is_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    """The console command names the value at fault, without a traceback."""
    done = _python(tmp_path, *CONSOLE, *arguments)
    told = done.stdout + done.stderr
    assert (done.returncode, part in told, "Traceback" in told) == (2, True, False), told


# --- some claims ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leaf_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run without xdist of the claims of one area, in a folder where an earlier run left a badge."""
    folder = tmp_path_factory.mktemp("leaf")
    (folder / "conformance-report").mkdir()
    (folder / "conformance-report" / "badge.json").write_text("{}")
    return folder, _python(folder, *CLAIMS, "-p", "no:xdist", "--conformance-claims=leaf.*", "--junitxml=junit.xml")


def test_selected_claims_are_judged_and_no_others(leaf_run: tuple[Path, Done]) -> None:
    """A glob selects, the exit code is 0, and each collected claim is in the report once."""
    folder, done = leaf_run
    assert done.returncode == 0, done.stdout
    judged = [result["claim"] for result in _report(folder)["results"]]
    assert sorted(judged) == sorted(claim for claim in register() if claim.startswith("leaf."))


def test_selected_claims_give_no_badge(leaf_run: tuple[Path, Done]) -> None:
    """A badge counts all claims or is not there; an old one is taken away."""
    folder, _ = leaf_run
    assert not list((folder / "conformance-report").glob("badge.*"))
    assert _report(folder)["complete"] is False


def test_report_follows_its_schema(leaf_run: tuple[Path, Done]) -> None:
    """The report of a real run is what the published schema says."""
    _validate(_report(leaf_run[0]))


def test_working_folder_is_removed(leaf_run: tuple[Path, Done]) -> None:
    """Journal and locks are gone once the report is written."""
    work = leaf_run[0] / "conformance-report" / ".work"
    assert not work.exists() or not list(work.iterdir())


def test_junit_has_claim_device_and_verdict(leaf_run: tuple[Path, Done]) -> None:
    """Every test case of junit.xml says what it judged where, and how that ended."""
    for case in ET.parse(leaf_run[0] / "junit.xml").iter("testcase"):
        properties = {found.get("name"): found.get("value") for found in case.iter("property")}
        assert properties == {"claim": properties["claim"], "device": "cpu", "verdict": "holds"}
        assert properties["claim"] in register()


def test_summary_stands_in_the_terminal(leaf_run: tuple[Path, Done]) -> None:
    """Five lines: devices, verdicts, what is unexpected, what was checked, where the report lies."""
    _, done = leaf_run
    for word in ("devices     cpu", "verdicts    10 holds", "unexpected  nothing", "checked     10 of", "report      "):
        assert f"\n{word}" in done.stdout


# --- when things go wrong ---------------------------------------------------------------------------------------------

CRASH = """
import os
import pathlib

def pytest_configure():
    import torch

    sin, deaths = torch.Tensor.sin, pathlib.Path(__file__).with_name("deaths")

    def crash(tensor, *args):
        died = deaths.stat().st_size if deaths.exists() else 0
        if died < MOST:
            with deaths.open("a") as file:
                file.write("x")
            os.abort()
        return sin(tensor, *args)

    torch.Tensor.sin = crash
"""


def _sines(result: dict[str, Any]) -> bool:
    return any(getattr(s, "op", "") == "sin" for s in Program.from_json(result["counterexample"]["program"]))


@pytest.mark.parametrize("most", [1, 1000], ids=["once", "always"])
def test_crash_has_its_program_and_the_run_goes_on(tmp_path: Path, most: int) -> None:
    """An op that kills the process, once or each time: the verdict is crashed, the report has the program."""
    (tmp_path / "crash.py").write_text(CRASH.replace("MOST", str(most)))
    arguments = (*CLAIMS, "-n2", "-p", "crash", f"--conformance-claims={CHEAP}", "--conformance-claims=leaf.clone*")
    done = _python(tmp_path, *arguments, PYTHONPATH=str(tmp_path))
    report = _report(tmp_path)
    _validate(report)
    verdicts = {result["claim"]: result["verdict"] for result in report["results"]}
    assert verdicts == {CHEAP: "crashed", "leaf.clone-is-differentiable": "crashed"}, done.stdout
    assert all(map(_sines, report["results"])), report["results"]
    assert done.returncode == 1, done.stdout


def test_crash_without_xdist_is_taken_up_again(tmp_path: Path) -> None:
    """The console command starts pytest again where a program killed it."""
    (tmp_path / "crash.py").write_text(CRASH.replace("MOST", "1"))
    options = ("--profile=smoke", "--device=cpu", f"--claims={CHEAP}", "-n0", "-p", "crash")
    done = _python(tmp_path, *CONSOLE, "run", *options, PYTHONPATH=str(tmp_path))
    (result,) = _report(tmp_path)["results"]
    assert (result["verdict"], done.returncode) == ("crashed", 1), done.stdout + done.stderr
    assert _sines(result)


# A shell without a terminal starts what runs in its background with SIGINT ignored, and children inherit that.
HEED = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"


@contextlib.contextmanager
def _started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process at the head of a group of its own, as a terminal would start it."""
    child = subprocess.Popen(
        [sys.executable, "-c", HEED, sys.executable, *arguments],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_interrupt_leaves_a_report(tmp_path: Path, workers: str) -> None:
    """Ctrl-C in the middle of a run: the report is there, and says that the claims were not run."""
    arguments = ("run", "--profile=thorough", "--device=cpu", workers)
    with _started(tmp_path, *CONSOLE, *arguments) as child:
        work = tmp_path / "conformance-report" / ".work"
        _until(lambda: list(work.rglob("shard-*.running")))
        time.sleep(0.5)
        os.killpg(child.pid, signal.SIGINT)
        told, _ = child.communicate(timeout=120)
    report = _report(tmp_path)
    _validate(report)
    assert {result["verdict"] for result in report["results"]} == {"not-run"}
    assert is_whole(result["claim"] for result in report["results"])
    assert (child.returncode, report["failure"] != "") == (3, True), told
