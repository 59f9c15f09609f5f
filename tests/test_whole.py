"""Whole programs: what they contain, that paper and torch agree, and that a fault is made small and given its claim."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted import apart, exit_code

from autograd_conformance.claims import register
from autograd_conformance.devices import discover
from autograd_conformance.faults import mixtures
from autograd_conformance.faults.words import FAULTS, Fault, plant
from autograd_conformance.reports.script import program_source, repro
from autograd_conformance.scene import Scene, parse
from autograd_conformance.verdicts import Counterexample
from autograd_conformance.whole import family
from autograd_conformance.whole.play import play
from autograd_conformance.whole.readings import READINGS, Reading
from autograd_conformance.whole.words import Whole

torch.set_num_threads(1)
(CPU,) = discover(["cpu"])

# Share of programs that have it at least.
FLOORS = {
    "write on a view": 0.10,
    "hook": 0.20,
    "error": 0.30,
    "higher order": 0.10,
    "nested modes": 0.15,
    "function": 0.10,
    "checkpoint": 0.10,
    "retain_grad": 0.20,
    "step": 0.20,
    "detach": 0.20,
    "view": 0.30,
    "write": 0.50,
    "reset": 0.10,
    "grad": 0.15,
    "del": 0.20,
    "flag": 0.10,
    "module": 0.20,
    "inference": 0.20,
    "node hook": 0.15,
    "multi-grad hook": 0.05,
    "interrupted": 0.03,
}


@cache
def programs(count: int = 200) -> list[tuple[Scene, Whole]]:
    """The first programs of the family."""
    return [(scene, family.written(scene, CPU)) for scene in family.drawn(count, 0)]


def test_programs_contain_everything() -> None:
    """The floors of what occurs, two passes and more in many, and a median length of twelve lines at least."""
    counts: Counter[str] = Counter()
    for _, whole in programs():
        counts.update(whole.features)
        counts["two passes"] += sum(told.what == "backward" for told in whole.lines) >= 2
    missed = {
        word: counts[word] for word, least in {**FLOORS, "two passes": 0.40}.items() if counts[word] < least * 200
    }
    assert not missed
    assert statistics.median(len(whole.lines) for _, whole in programs()) >= 12


def test_a_program_is_its_dials() -> None:
    """The same dials give the same program, and JSON keeps them."""
    scene, whole = programs()[7]
    back = parse(scene.to_json())
    assert back == scene
    assert isinstance(back, Scene)
    assert [told.text for told in family.written(back, CPU).lines] == [told.text for told in whole.lines]


def test_no_dials_is_one_leaf() -> None:
    """What everything shrinks to."""
    whole = family.written(Scene(programs()[0][0].graph, (), family.NAME), CPU)
    assert [told.what for told in whole.lines] == ["leaf"]


def test_claims_are_in_the_register() -> None:
    """Every claim that a difference may be given to is one."""
    assert set(register()) >= family.CLAIMS
    named = {claim for _, whole in programs() for claim in family.counted(whole)}
    assert named <= family.CLAIMS
    assert len(named) > 25


def test_healthy_torch_differs_nowhere() -> None:
    """Paper and torch agree after each statement."""
    with np.errstate(all="ignore"):
        assert not [found for scene, _ in programs() for found in family.examined(scene, CPU)[1]]


def test_a_printed_program_is_a_script() -> None:
    """Its lines run with torch alone; those that must raise do."""
    scene, whole = next(p for p in programs() if "error" in p[1].features)
    shown = family.printed(scene, whole)
    names: dict[str, Any] = {"torch": torch}
    for i, line in enumerate(shown.lines):
        guard = contextlib.suppress(RuntimeError) if i in shown.raising else contextlib.nullcontext()
        with guard:
            exec(compile(line, "line", "exec"), names)  # noqa: S102 - our own text
    assert program_source(scene.graph) == "import torch\n\n"


def _first(name: str, count: int = 200) -> tuple[str, int, str]:
    """Under a fault: the claim of the first difference, the size of its smallest program, and the script."""
    torch.set_num_threads(1)
    plant(name)
    with np.errstate(all="ignore"):
        for scene, _ in programs(count):
            _, found = family.examined(scene, CPU)
            if found:
                small, _ = family.small(scene, CPU, found[0])
                whole, again = family.examined(small, CPU)
                shown = family.printed(small, whole)
                text = repro(Counterexample(shown, again[0], shown.raising), "", "", "cpu")
                return again[0].claim, shown.size(), text
    return "", 0, ""


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("overwrites-third", "grad.accumulates-sum"),
        ("detach-keeps-scalar", "detach.never-requires-grad"),
        ("sin-one-percent", "backward.chain-rule"),
        ("self-sum-counts-once", "backward.chain-rule"),
    ],
)
def test_a_fault_is_made_small_and_given_its_claim(fault: str, claim: str, tmp_path: Path) -> None:
    """Few statements are left, which say what is broken, in a script that tells fault from health."""
    programs()  # drawn before the fault is there
    named, size, text = apart(_first, fault)
    assert (named, size <= 6) == (claim, True)
    script = tmp_path / "repro.py"
    script.write_text(text)
    assert (apart(exit_code, str(script)), apart(exit_code, str(script), fault)) == (0, 1)


MIXTURES = [FAULTS[name] for name in re.findall(r"fault\(\s+\"([a-z-]+)\"", Path(mixtures.__file__).read_text())]


@pytest.mark.parametrize("fault", MIXTURES, ids=lambda fault: fault.name)
def test_what_shows_only_where_things_meet_is_found(fault: Fault, tmp_path: Path) -> None:
    """Within as many programs as a run has, under a rightful claim, with a script that tells fault from health."""
    programs(300)
    named, size, text = apart(_first, fault.name, 300)
    assert named in fault.claims
    assert size <= 12
    script = tmp_path / "repro.py"
    script.write_text(text)
    assert (apart(exit_code, str(script)), apart(exit_code, str(script), fault.name)) == (0, 1)


# --- other readings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [r for r in READINGS if r], ids=lambda read: read.__name__)
def test_other_readings_come_to_the_same(read: Reading) -> None:
    """Whatever the program, all that is due of it is due of its readings; most programs have each."""
    others = [other for _, whole in programs() if (other := read(whole)) is not None]
    assert len(others) > 100
    assert not [found for other in others for found in play(other, "cpu", values=True)]
    assert not torch.is_anomaly_enabled()


def test_a_fault_of_a_reading_is_found() -> None:
    """What is packed in no other way than as it is comes back wrong: plain programs do not notice, two readings do."""
    found = apart(_of_readings, "strided-unpacked-by-memory")
    assert found == {"saved.identity-neutral", "checkpoint.same-gradients"}


def _of_readings(name: str) -> set[str]:
    wholes = [whole for _, whole in programs(300)]
    plant(name)
    return {
        other.reading
        for whole in wholes
        if not play(whole, "cpu", values=True)
        for read in READINGS
        if read and (other := read(whole)) and play(other, "cpu", values=True)
    }


def test_programs_in_threads_do_not_meet() -> None:
    """Independent programs on four threads at once come out as they do one after the other.

    Without checkpoints: two threads that ask for the state of the random number generator, as a checkpoint does, may
    wait for each other for good (see docs/findings.md).
    """
    wholes = [whole for _, whole in programs() if not any("checkpoint" in told.text for told in whole.lines)]
    assert len(wholes) > 50
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda whole: play(whole, "cpu", values=True), wholes))
    assert not [violation for several in found for violation in several]
