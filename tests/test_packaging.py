"""The wheel: what is in it, and that it judges the same programs as a bare checkout, however pytest is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")  # with --dist=loadgroup the wheel is built once

ROOT = Path(__file__).parents[1]
NAME = "autograd_conformance"
SOURCES = ("conformance", "strategies", "reports", "pyproject.toml", "conftest.py", "README.md", "LICENSE")
CHEAP = ("-q", "-p", "no:cacheprovider", "--conformance-claims=leaf.iff-no-grad-fn")
SMOKE = ("--conformance-profile=smoke", "--conformance-device=cpu")
LIMIT = 300


def _clean(**extra: str) -> dict[str, str]:
    """The environment without what pytest put there and without paths to the package."""
    dropped = ("PYTEST_", "PYTHONPATH", "CI")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)} | extra


def _call(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, as a fresh clone has them."""
    folder = tmp_path_factory.mktemp("checkout")
    skipped = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once from a second copy: the build leaves folders behind."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(checkout, folder / "source")
    _call([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), "source"], folder, _clean())
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel alone is installed."""
    folder = tmp_path_factory.mktemp("target")
    options = ("--quiet", "--no-deps", "--no-index", "--target", str(folder))
    _call([sys.executable, "-m", "pip", "install", *options, str(wheel)], folder, _clean())
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment that has everything that is installed here, except this package.

    Its ``site-packages`` holds links to what lies in ours, so it costs nothing to make.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    names = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=names))
    for origin in {Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")}:
        for entry in origin.iterdir():
            if NAME not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


def test_wheel_holds_what_is_needed_and_no_more(wheel: Path) -> None:
    """Data files and the claims' tests are in, the project's own tests and tools are not."""
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        *("py.typed", "claims.toml", "seeds.toml", "expectations.toml", "suite.ini", "plugin.py", "cli.py"),
        *("reports/schema.json", "reports/templates/index.html.jinja", "reports/templates/index.js"),
        *("reports/templates/index.css", "strategies/programs.py", "ops/__init__.py", "faults/__main__.py"),
        *(path.name for path in (ROOT / "conformance").glob("test_*.py")),
    }
    assert {f"{NAME}/{name}" for name in needed} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {NAME, f"{NAME}-0.1.0.dist-info"}
    assert any(name.endswith("/LICENSE") for name in names)


def test_every_module_is_in_the_wheel(wheel: Path, checkout: Path) -> None:
    """No module of the checkout is left out."""
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"conformance": NAME, "strategies": f"{NAME}/strategies", "reports": f"{NAME}/reports"}
    for folder, package in folders.items():
        for path in (checkout / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(checkout / folder).as_posix()}" in names


def test_installed_package_has_a_version_and_a_command(bare: str, target: Path, tmp_path: Path) -> None:
    """``autograd-conformance --version`` runs from the installed wheel."""
    command = target / "bin" / "autograd-conformance"
    told = _call([bare, str(command), "--version"], tmp_path, _clean(PYTHONPATH=str(target)))
    assert told.strip() == "0.1.0"


@dataclass(frozen=True)
class Start:
    """One way to start the suite."""

    installed: bool
    arguments: tuple[str, ...]
    ci: bool = False


STARTS = {
    "wheel-alone": Start(True, ("-p", "no:xdist")),
    "wheel-n0": Start(True, ("-n0",)),
    "wheel-n2-ci": Start(True, ("-n2",), ci=True),
    "checkout-alone": Start(False, ("-p", "no:xdist")),
    "checkout-n1": Start(False, ("-n1",)),
    "checkout-n2-ci": Start(False, ("-n2",), ci=True),
}
_digests: dict[str, str] = {}


@pytest.mark.parametrize("start", STARTS)
def test_programs_do_not_depend_on_how_pytest_is_started(
    start: str, bare: str, target: Path, checkout: Path, tmp_path: Path
) -> None:
    """The digest over all programs is the same from the wheel and the checkout, with any workers, and under CI."""
    how = STARTS[start]
    environment = _clean(**({"CI": "1"} if how.ci else {}), **({"PYTHONPATH": str(target)} if how.installed else {}))
    what = ("--pyargs", NAME) if how.installed else ()
    arguments = [*CHEAP, *SMOKE, *how.arguments, f"--conformance-report-dir={tmp_path / 'report'}", *what]
    _call([bare, "-m", "pytest", *arguments], tmp_path if how.installed else checkout, environment)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    (family,) = report["families"]
    assert family["programs"] == 240
    _digests[start] = family["digest"]
    assert len(set(_digests.values())) == 1, _digests


def test_whole_suite_runs_from_the_wheel(bare: str, target: Path, tmp_path: Path) -> None:
    """All claims hold, or break as expected, from an empty folder with nothing but the wheel."""
    arguments = ["--pyargs", NAME, *SMOKE, "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    told = _call([bare, "-m", "pytest", *arguments], tmp_path, _clean(PYTHONPATH=str(target)))
    report = json.loads((tmp_path / "conformance-report" / "report.json").read_text())
    assert report["complete"], told
    assert (tmp_path / "conformance-report" / "badge.json").exists()
    assert not [result["claim"] for result in report["results"] if not result["expected"]]


def test_checkout_is_not_installed_in_the_bare_environment(bare: str, tmp_path: Path) -> None:
    """The environment of the tests above really lacks the package, so the checkout ran by its own shim."""
    code = f"import importlib.util; print(importlib.util.find_spec({NAME!r}))"
    assert _call([bare, "-c", code], tmp_path, _clean()).strip() == "None"
