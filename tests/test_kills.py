"""A sample of the zoo against the suite: each fault is noticed, in its area, by a small script that tells it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from planted import apart, exit_code

from autograd_conformance import expectations
from autograd_conformance.claims import register
from autograd_conformance.devices import discover
from autograd_conformance.engine import Engine
from autograd_conformance.families import kind_of
from autograd_conformance.faults.words import FAULTS, plant
from autograd_conformance.profiles import PROFILES
from autograd_conformance.program import Program
from autograd_conformance.replay import all_checks
from autograd_conformance.reports.script import repro
from autograd_conformance.scene import Scene
from autograd_conformance.settle import smallest
from autograd_conformance.verdicts import Counterexample

(CPU,) = discover(["cpu"])
SHARDS = 6
# The first two of each area, in the order of the zoo, and the rarest kinds that a run must not miss.
SAMPLE = (
    "overwrites-scalar", "overwrites-third", "overwrites-strided", "equal-grads-shared", "permuted-leaf-contiguous-grad",
    "sin-one-percent", "self-sum-counts-once", "broadcast-middle-not-summed", "implicit-seed-of-1x1-is-two", "inputs-ignored",
    "always-retains", "second-retain-ignored", "grad-accumulates", "unused-input-is-zero", "second-operand-untracked",
    "sum-of-one-untracked", "nonleaf-off-swallowed", "cast-is-leaf", "tensor-shares-memory", "detach-keeps-scalar",
    "detach-own-version",
)  # fmt: skip


@cache
def known() -> tuple[expectations.Expectation, ...]:
    """The packaged expectations."""
    return expectations.load([expectations.PACKAGED], register())


@cache
def programs(family: str) -> list[Program | Scene]:
    """The first programs of a family in the default profile."""
    engine = Engine(Path(), PROFILES["default"], 0, (), (), torch.__version__)
    return [program for shard in range(SHARDS) for program in engine.programs(family, shard)]


def noticed(name: str) -> tuple[str, Counterexample] | None:
    """Plant a fault and look for a violation that is not expected: its claim and the smallest counterexample."""
    torch.set_num_threads(1)
    plant(name)
    checks = [check for check in all_checks() if check.claim in FAULTS[name].claims or FAULTS[name].null]
    for family in sorted({check.family for check in checks}):
        mine = {check.claim: check for check in checks if check.family == family}
        for program in programs(family):
            judged = kind_of(family).judge(program, CPU, list(mine.values()), examine=True)
            for claim, (_, found) in judged.found.items():
                entries = [e for e in known() if e.claim == claim]
                strange = [v for v in found if not any(e.recognises(program, v) for e in entries)]
                if strange:
                    return claim, smallest(mine[claim], CPU, entries, [(program.to_json(), strange[0])])
    return None


@pytest.mark.parametrize("name", SAMPLE)
def test_fault_is_noticed_for_the_right_reason(name: str, tmp_path: Path) -> None:
    """The right claim breaks, in at most four statements, and the script exits 1 under the fault and 0 without it."""
    found = apart(noticed, name)
    assert found is not None
    _, example = found
    assert example.program.size() <= 4
    script = tmp_path / "repro.py"
    script.write_text(repro(example, "", "", "cpu"))
    assert (apart(exit_code, str(script)), apart(exit_code, str(script), name)) == (0, 1)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.null][:2])
def test_null_fault_is_not_noticed(name: str) -> None:
    """The machinery of faults alone breaks no claim."""
    assert apart(noticed, name) is None
