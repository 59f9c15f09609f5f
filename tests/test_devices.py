"""Devices that misbehave, and the two of our own: what is found, what each can do, and that their faults are noticed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from autograd_conformance.claims import TRAITS
from autograd_conformance.devices import KNOWN, Device, Survey, shared, survey
from autograd_conformance.errors import UsageError
from autograd_conformance.reports.devices import table
from autograd_conformance.traits import FACTS

SLOW = pytest.mark.slow  # much time, or a compiler; by name: pytest tests -m slow
HAS_NPY = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
LIMIT = 500
NPY = "import autograd_conformance.examples.npy as npy; npy.init({})"
TWIN = "import autograd_conformance.examples.twin as twin; twin.init({})"

JUDGE = """
import sys
from pathlib import Path
import torch
from autograd_conformance import expectations
from autograd_conformance.claims import TRAITS, register
from autograd_conformance.devices import Device
from autograd_conformance.engine import Engine, unsupported
from autograd_conformance.families import kind_of
from autograd_conformance.profiles import PROFILES
from autograd_conformance.replay import all_checks

name, setup, family, count = sys.argv[1:]
torch.set_num_threads(1)
exec(setup)
torch.ones(1, device=name)
device = Device(name, "", tuple(t for t in TRAITS if t != "streams"), {"streams": "none"})
known = expectations.load([expectations.PACKAGED], register())
engine, broken = Engine(Path(), PROFILES["default"], 0, (), (), torch.__version__), set()
checks = [c for c in all_checks() if c.family == family and not unsupported(register()[c.claim], device, "2.13.0")]
for program in engine.programs(family, 0)[: int(count)]:
    adapted, _ = kind_of(family).adapt(program, device)
    for claim, (_, found) in kind_of(family).judge(adapted, device, checks, examine=len(broken) < 3).found.items():
        entries = [e for e in known if e.claim == claim]
        if any(not any(e.recognises(adapted, v) for e in entries) for v in found):
            broken.add(claim)
            print("broken", claim, flush=True)
import os
os._exit(0)
"""


def broken(device: str, setup: str, family: str, count: int) -> set[str]:
    """Claims that some programs break on a device, found in a process of its own."""
    command = [sys.executable, "-c", JUDGE, device, setup, family, str(count)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return {line.split()[1] for line in done.stdout.splitlines() if line.startswith("broken ")}


# --- the two devices of our own ---------------------------------------------------------------------------------------

NUMBERS = {"backward", "grad", "agrad", "requires-grad", "free", "create-graph"}  # areas that a wrong kernel may break


def _fault(device: str, fault: str, family: str, areas: set[str], *, slow: bool = True) -> Any:
    marks = [SLOW] if slow else []
    setup = NPY if device == "npy" else TWIN
    return pytest.param(device, setup, fault, family, areas, id=f"{device.partition(':')[0]}-{fault}", marks=marks)


FAULTS = [
    _fault("npy", "strides-ignored", "graphs", NUMBERS, slow=False),
    _fault("npy", "offset-ignored", "graphs", NUMBERS),
    _fault("npy", "empty-refused", "graphs", NUMBERS),
    _fault("npy", "broadcast-once", "graphs", NUMBERS),
    _fault("npy", "detach-leaks", "graphs", {"detach", *NUMBERS}),
    _fault("npy", "version-kept", "inplace", {"inplace"}),
    _fault("npy", "stale-second-pass", "graphs", NUMBERS),
    _fault("twin:1", "strides-ignored", "graphs", NUMBERS),
    _fault("twin:1", "offset-ignored", "graphs", NUMBERS),
    _fault("twin:1", "empty-refused", "graphs", NUMBERS),
    _fault("twin:1", "wrong-index", "graphs", NUMBERS),
]
SETUPS = [
    pytest.param("npy", NPY, id="npy", marks=pytest.mark.skipif(not HAS_NPY, reason="it needs torch 2.10")),
    pytest.param("twin:1", TWIN, id="twin", marks=SLOW),
]


@pytest.mark.parametrize(("device", "setup", "fault", "family", "areas"), FAULTS)
def test_fault_of_a_device_is_noticed(device: str, setup: str, fault: str, family: str, areas: set[str]) -> None:
    """A device that is broken on purpose breaks a claim of a sensible area within a few programs."""
    if device == "npy" and not HAS_NPY:
        pytest.skip("it needs torch 2.10")
    found = broken(device, setup.format(f"fault={fault!r}"), family, 60 if family == "graphs" else 15)
    assert found
    assert {claim.partition(".")[0] for claim in found} & areas, found


@pytest.mark.parametrize(
    "family", ["graphs", "detach", *(pytest.param(name, marks=SLOW) for name in ("inplace", "hook"))]
)
@pytest.mark.parametrize(("device", "setup"), SETUPS)
def test_own_device_breaks_nothing(device: str, setup: str, family: str) -> None:
    """Without a fault the same programs break no claim."""
    assert broken(device, setup.format(""), family, 15) == set()


LAZY = """
import torch
from autograd_conformance.devices import discover
from autograd_conformance.settle import kind_of_work
from autograd_conformance.replay import all_checks
from autograd_conformance import expectations
from autograd_conformance.claims import register
from pathlib import Path
import os, sys

torch.set_num_threads(1)
(device,) = discover(["lazy"])
for entry in expectations.load([Path(sys.argv[1])], register()):
    (check,) = [check for check in all_checks() if check.claim == entry.claim]
    shown, found, _ = kind_of_work(entry.witness, check).violations(check, entry.witness, device)
    print("broken" if any(entry.recognises(shown, v) for v in found) else "healed", entry.claim, flush=True)
os._exit(0)
"""


@SLOW
def test_known_deviations_of_lazy_are_there() -> None:
    """Each witness in the file of expectations still shows what its entry says."""
    path = Path(__file__).parents[1] / "expectations" / "lazy.toml"
    command = [sys.executable, "-c", LAZY, str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)
    told = [line.split() for line in done.stdout.splitlines()]
    assert [word for word, _ in told] == ["broken"] * path.read_text().count("[[expectation]]"), (
        done.stdout + done.stderr
    )


# --- what is found ----------------------------------------------------------------------------------------------------


@SLOW
def test_own_devices_are_found_with_their_traits() -> None:
    """Both come in the order asked for, with every trait but streams, and hooks on a thread of the device."""
    found = survey(["npy", "twin:0", "twin:1", "cpu"])
    assert [device.name for device in found.devices] == ["npy", "twin:0", "twin:1", "cpu"]
    for device in found.devices:
        assert set(device.missing) == {"streams"}, device
        assert set(device.facts) == set(FACTS)
        assert device.facts["hooks run on thread"] == ("the caller's" if device.name == "cpu" else "another")
    assert found.devices[1].count == 2


def test_what_kills_the_process_is_a_missing_trait() -> None:
    """On lazy, forward mode ends the process: it is missing, and all else is still measured."""
    (device,) = survey(["lazy"]).devices
    assert "SIGSEGV" in device.missing["forward_ad"]
    assert device.has("values")
    assert set(device.traits) | set(device.missing) == set(TRAITS)


@SLOW
def test_a_count_that_lies_is_told() -> None:
    """A backend that announces more devices than it has: what is there is usable, what is not says why."""
    found = survey(["cpu", "twin:0", "twin:1"], TWIN.format("fault='count-lies'"))
    assert [device.name for device in found.usable] == ["cpu", "twin:0"]
    assert "says there are 4, but: RuntimeError: twin has no device 1" in found.devices[2].left_out


BAD = [
    pytest.param(
        "import no_such_backend", "", "raised ModuleNotFoundError: No module named 'no_such_backend'", id="raises"
    ),
    pytest.param("import os; os.kill(os.getpid(), 11)", "crashed", "died of SIGSEGV", id="segfault"),
    pytest.param(
        "import ctypes; ctypes.PyDLL(None).pause()", "hung", "did not come to an end within 20 s", id="hang", marks=SLOW
    ),
]


@pytest.mark.parametrize(("setup", "ended", "text"), BAD)
def test_a_bad_setup_leaves_the_others_alone(setup: str, ended: str, text: str) -> None:
    """A setup that raises is the user's mistake; one that kills or never ends is a verdict on its device alone."""
    if not ended:
        with pytest.raises(UsageError, match=text):
            survey(["cpu", "mine"], setup, (20, 20))
        return
    found = survey(["cpu", "mine"], setup, (20, 20))
    assert [device.name for device in found.usable] == ["cpu"]
    mine = found.devices[1]
    assert (mine.name, mine.ended, text in mine.left_out) == ("mine", ended, True), mine


def test_a_device_that_may_be_missing_is_noted() -> None:
    """A name with a question mark is no mistake if nothing answers to it; without one it is."""
    found = survey(["cpu", "mine?"])
    assert ([device.name for device in found.devices], list(found.failures)) == (["cpu"], ["mine"])
    with pytest.raises(UsageError, match=r"unknown device 'mine'.*cpu"):
        survey(["cpu", "mine"])


def test_devices_that_cannot_share_are_told_apart() -> None:
    """PrivateUse1 has one name a process: the first has it, lazy and cpu share with it, others need another process."""
    devices = [
        Device(name, "", setup=KNOWN[name].setup if name in KNOWN else "") for name in ("cpu", "npy", "lazy", "twin")
    ]
    assert [bool(device.left_out) for device in shared(devices)] == [False, False, False, True]


def test_a_survey_can_be_written_down() -> None:
    """What a child found reaches the processes that run programs."""
    found = Survey(
        [Device("a", "b", ("values",), {"float64": "no"}, "s", 2, {"views alias": "yes"})], {"x": "y"}, {"k": None}
    )
    assert Survey.from_plain(json.loads(json.dumps(found.to_plain()))) == found


def test_the_table_says_all() -> None:
    """Name, how found, count, traits, what it lacks, what else was seen, and why something was left out."""
    devices = [
        Device("a:0", "somewhere", ("values",), {"float64": "RuntimeError: no"}, "import a", 2, {"views alias": "yes"}),
        Device("b", "elsewhere", left_out="it died"),
    ]
    text = "\n".join(table([device.to_plain() for device in devices], {"torch_c": "ImportError: no c"}))
    for part in ("a:0", "somewhere", "import a", "2", "values", "float64: RuntimeError: no", "views alias: yes"):
        assert part in text
    for part in ("left out", "it died", "torch_c: ImportError: no c"):
        assert part in text


# --- runs -------------------------------------------------------------------------------------------------------------


def _run(
    folder: Path, *arguments: str, claim: str = "leaf.iff-no-grad-fn"
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "autograd_conformance.cli", "run", "--profile=smoke", "-n0", *arguments]
    command += [f"--claims={claim}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=LIMIT
    )
    report = folder / "conformance-report" / "report.json"
    return done, json.loads(report.read_text()) if report.exists() else {}


@SLOW
def test_devices_that_cannot_share_come_into_one_report(tmp_path: Path) -> None:
    """Each has a process of its own; programs and verdicts are the same, and the report is one."""
    done, report = _run(tmp_path, "--device=cpu", "--device=npy", "--device=twin:1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(r["device"], r["verdict"]) for r in report["results"]] == [(d, "holds") for d in ("cpu", "npy", "twin:1")]
    shards = [family["shards"] for family in report["families"]]  # whoever has less time for a program judges fewer
    assert all(mine == theirs for mine, theirs in itertools.pairwise(own[:1] for own in shards))
    assert (tmp_path / "conformance-report" / "junit.xml").read_text().count("<testcase") == 3


@SLOW
def test_a_device_that_kills_leaves_the_others_their_verdicts(tmp_path: Path) -> None:
    """A segfault in the setup: the report is finished, says so, and cpu is judged."""
    done, report = _run(tmp_path, "--device=cpu", "--device=mine", "--setup=import os; os.kill(os.getpid(), 11)")
    assert done.returncode == 1, done.stdout + done.stderr
    assert {r["device"]: r["verdict"] for r in report["results"]} == {"cpu": "holds", "mine": "crashed"}


def test_a_device_alone_that_kills_has_its_report(tmp_path: Path) -> None:
    """Nothing else is there to be judged: the report is finished all the same."""
    done, report = _run(tmp_path, "--device=mine", "--setup=import os; os.kill(os.getpid(), 11)")
    assert done.returncode == 1, done.stdout + done.stderr
    (result,) = report["results"]
    assert (result["verdict"], result["reason"]) == ("crashed", "in its setup, the process died of SIGSEGV")


@pytest.mark.parametrize(("name", "near"), [("npi", "npy"), ("cuda:7", "cpu")])
def test_an_unknown_device_is_one_line(tmp_path: Path, name: str, near: str) -> None:
    """Exit code 2, and one line that names the device and what is like it."""
    done, report = _run(tmp_path, f"--device={name}")
    assert (done.returncode, report, done.stdout) == (2, {}, "")
    assert done.stderr.count("\n") == 1
    assert repr(name) in done.stderr
    assert near in done.stderr


def test_a_setup_that_raises_is_one_line(tmp_path: Path) -> None:
    """Exit code 2, and no report."""
    done, report = _run(tmp_path, "--device=mine", "--setup=import no_such_backend")
    assert (done.returncode, report, done.stdout) == (2, {}, "")
    assert done.stderr.count("\n") == 1
    assert "no_such_backend" in done.stderr


@SLOW
def test_a_device_that_vanishes_half_way_is_told(tmp_path: Path) -> None:
    """Its claims were not run, with the reason; nothing is taken for a broken promise."""
    setup = NPY.format("fault='vanishes'")
    done, report = _run(tmp_path, "--device=cpu", "--device=npy", f"--setup={setup}")
    assert done.returncode == 3, done.stdout + done.stderr
    assert {r["device"]: r["verdict"] for r in report["results"]} == {"cpu": "holds", "npy": "not-run"}
    assert "npy answers no more: RuntimeError: the device does not answer any more" in report["failure"]


HASTY = "import autograd_conformance.patience as patience\npatience.HANG = 8\n"
DEADLY = [("late-crash", "crashed", "leaf.iff-no-grad-fn"), ("late-crash", "crashed", "retain-grad.accumulates")]


@SLOW
@pytest.mark.parametrize(("fault", "verdict", "claim"), [*DEADLY, ("late-hang", "hung", "retain-grad.accumulates")])
def test_a_device_that_dies_in_a_program_has_the_program(tmp_path: Path, fault: str, verdict: str, claim: str) -> None:
    """A kernel that kills the process or never ends: the report names the program, and cpu has its verdict."""
    (tmp_path / "hasty.py").write_text(HASTY)
    setup = NPY.format(f"fault={fault!r}")
    done, report = _run(tmp_path, "--device=cpu", "--device=npy", f"--setup={setup}", "-p", "hasty", claim=claim)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {r["device"]: r for r in report["results"]}
    assert (found["cpu"]["verdict"], found["npy"]["verdict"]) == ("holds", verdict)
    script = (tmp_path / "conformance-report" / found["npy"]["script"]).read_text()
    assert setup in script
    assert ".sin()" in script or ".cos()" in script  # whose gradient is a sine
