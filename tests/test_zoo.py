"""The zoo of faults: every witness passes on a healthy torch and fails under its fault; null faults change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from autograd_conformance import claims
from autograd_conformance.faults import base
from autograd_conformance.faults.words import FAULTS, Fault, plant

pytestmark = pytest.mark.fast

AREAS = set(claims.AREAS)
REAL = [fault for fault in FAULTS.values() if not fault.null]
NULLS = [fault for fault in FAULTS.values() if fault.null]
PASSED = "passed"
# Faults that make torch raise where it should not.
RAISING = {
    "frees-neighbour-graph",
    "grad-frees-everything",
    "retain-ignored",
    "second-retain-ignored",
    "inputs-retain-ignored",
    "third-pair-raises",
    "shared-leaf-frees",
    "create-graph-frees",
    "transposed-root-raises",
}


def endings(names: Iterable[str], planted: Fault | None) -> dict[str, str]:
    """How witnesses end in one child process: planting is for good, so it must not happen in this one."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            if planted:
                planted.install()
            os.write(writing, json.dumps({name: _ending(FAULTS[name].witness) for name in names}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else dict.fromkeys(names, "died")


def _ending(witness: str) -> str:
    try:
        exec(compile(witness, "witness", "exec"), {})  # noqa: S102 - the zoo's own text
    except SystemExit as end:
        return "exit" if end.code else PASSED
    except Exception as error:  # noqa: BLE001 - whatever a fault makes torch raise
        return type(error).__name__
    return PASSED


@pytest.mark.parametrize("fault", REAL, ids=lambda fault: fault.name)
def test_witness_fails_under_its_fault(fault: Fault) -> None:
    seen = endings([fault.name], fault)[fault.name]
    assert seen in ({"RuntimeError"} if fault.name in RAISING else {"exit", "AssertionError"})


def test_witnesses_pass_clean() -> None:
    assert set(endings(FAULTS, None).items()) == {(name, PASSED) for name in FAULTS}


@pytest.mark.parametrize("null", NULLS, ids=lambda fault: fault.name)
def test_null_passes_every_witness(null: Fault) -> None:
    assert set(endings(FAULTS, null).items()) == {(name, PASSED) for name in FAULTS}


def test_names_are_the_keys() -> None:
    assert [fault.name for fault in FAULTS.values()] == list(FAULTS)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="two faults named 'overwrites'"):
        base.add("overwrites", "Doc.", (), lambda: None, "", rare=False)


def test_enough_faults_and_half_of_them_rare() -> None:
    rare = [fault for fault in REAL if fault.rare]
    assert len(REAL) >= 52
    assert len(rare) * 2 >= len(REAL)


def test_every_area_has_a_fault() -> None:
    tested = {claim.area for claim in claims.register().values() if not claim.untestable}
    assert {area for fault in REAL for area in fault.areas} == tested


def test_claims_are_in_the_register() -> None:
    known = claims.register()
    named = {claim for fault in REAL for claim in fault.claims}
    assert named <= set(known)
    assert {claim.id for claim in known.values() if not claim.untestable} <= named


def test_every_fault_says_what_is_wrong_in_one_sentence() -> None:
    for fault in FAULTS.values():
        assert fault.sentence.endswith(".")
        assert ". " not in fault.sentence


def test_nulls_break_no_claim() -> None:
    assert all(null.claims == () and null.areas == () and not null.rare for null in NULLS)
    assert len(NULLS) >= 5


def test_unknown_fault() -> None:
    errors: Any = pytest.importorskip("autograd_conformance.errors")
    with pytest.raises(errors.UsageError, match="overwrites"):
        plant("overwrite")


# --- as a user meets it -------------------------------------------------------------------------------------------


def _python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, *args], check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def test_script_under_a_fault(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAULTS["overwrites"].witness)
    faulty = _python("-m", "autograd_conformance.faults", "overwrites", str(script), cwd=tmp_path)
    healthy = _python("-m", "autograd_conformance.faults", "null-engine", str(script), cwd=tmp_path)
    assert (faulty.returncode, healthy.returncode) == (1, 0)
    assert "AssertionError" in faulty.stderr


def test_list(tmp_path: Path) -> None:
    listed = _python("-m", "autograd_conformance.faults", cwd=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(FAULTS)


@pytest.mark.parametrize("workers", [(), ("-n1", "-pxdist.plugin")], ids=["alone", "xdist"])
def test_plug_in_plants_in_every_process(tmp_path: Path, workers: tuple[str, ...]) -> None:
    body = FAULTS["overwrites"].witness.replace("import torch\n", "").strip().replace("\n", "\n    ")
    (tmp_path / "test_it.py").write_text(f"import torch\n\n\ndef test_it():\n    {body}\n")
    common = ("-m", "pytest", "-q", "-pno:cacheprovider", "-pautograd_conformance.faults.plant", *workers)
    faulty = _python(*common, "--conformance-fault=overwrites", cwd=tmp_path)
    healthy = _python(*common, cwd=tmp_path)
    assert (faulty.returncode, healthy.returncode) == (1, 0), faulty.stdout + healthy.stdout
    assert "1 failed" in faulty.stdout


def test_plug_in_refuses_an_unknown_name(tmp_path: Path) -> None:
    common = ("-m", "pytest", "-q", "-pno:cacheprovider", "-pautograd_conformance.faults.plant")
    refused = _python(*common, "--conformance-fault=overwrite", cwd=tmp_path)
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown fault 'overwrite'" in refused.stderr
