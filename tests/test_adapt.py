"""The rewriting of programs for devices that lack something, and the traits that it goes by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autograd_conformance.adapt import adapt
from autograd_conformance.claims import TRAITS
from autograd_conformance.compare import Case
from autograd_conformance.devices import Device, discover
from autograd_conformance.errors import UsageError
from autograd_conformance.oracle import predict
from autograd_conformance.program import Apply, Leaf, Program
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.programs import decode

FULL = Device("cpu", "", tuple(TRAITS))
NO_FLOAT64 = Device("half", "", ("values", "storage"), {"float64": "no"})
NO_VALUES = Device("meta", "", ("float64",), {"values": "no"})


def programs(count: int = 100) -> list[Program]:
    """Some programs."""
    return [decode(payload) for payload in draw(count, 77)]


def test_nothing_changes_where_nothing_lacks() -> None:
    """A device with all traits gets the very program that was drawn."""
    for program in programs():
        assert adapt(program, FULL) == (program, ())


def test_no_float64_is_left() -> None:
    """For a device without float64 everything is float32, and the program still makes sense."""
    changed = 0
    for program in programs():
        rewritten, changes = adapt(program, NO_FLOAT64)
        with np.errstate(all="ignore"):
            assert all(t.dtype != "float64" for t in predict(rewritten).tensors.values())
        assert all(s.data.dtype == "float32" for s in rewritten if isinstance(s, Leaf))
        changed += bool(changes)
    assert changed > 90


def test_float32_programs_are_judged_without_alarm() -> None:
    """Programs rewritten to float32 agree with the reference model on the CPU."""
    with np.errstate(all="ignore"):
        for program in programs():
            assert Case(adapt(program, NO_FLOAT64)[0], "cpu").differences == []


def test_masks_become_positions() -> None:
    """For a device without values a mask is replaced by the positions it selects: shapes and numbers stay."""
    found = 0
    for program in programs(300):
        rewritten, changes = adapt(program, NO_VALUES)
        assert not any(isinstance(s, Apply) and s.op == "masked_select" for s in rewritten)
        if changes:
            found += 1
            with np.errstate(all="ignore"):
                before, after = predict(program).tensors, predict(rewritten).tensors
            assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
            assert all(np.array_equal(before[n].value, after[n].value, equal_nan=True) for n in before)
    assert found > 5


def test_rewriting_is_deterministic() -> None:
    """The same program is rewritten to the same program."""
    for program in programs(20):
        assert adapt(program, NO_FLOAT64) == adapt(program, NO_FLOAT64)


def test_cpu_and_meta_are_found() -> None:
    """The CPU comes first and has every trait but streams; meta has no values."""
    found = {device.name: device for device in discover()}
    assert next(iter(found)) == "cpu"
    assert set(TRAITS) - set(found["cpu"].traits) == set(found["cpu"].missing) == {"streams"}
    assert not found["meta"].has("values")
    assert "values" in found["meta"].missing


def test_an_unknown_device_is_named() -> None:
    """A device that is not there is an error that names it and what is near."""
    with pytest.raises(UsageError, match=r"unknown device 'cpux'; nearest: cpu"):
        discover(["cpux"])


def test_the_default_dtype_is_left_alone() -> None:
    """Looking for devices changes no mode."""
    before = (torch.get_default_dtype(), torch.is_grad_enabled())
    discover()
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before
