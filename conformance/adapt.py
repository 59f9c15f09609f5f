"""The same program for a device that lacks something: a rewriting that is deterministic and told in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autograd_conformance.devices import Device
from autograd_conformance.program import Apply, Backward, Constant, Grad, Leaf, Program, SetData, SetGrad, Statement

Changes = tuple[str, ...]


def adapt(program: Program, device: Device) -> tuple[Program, Changes]:
    """The program as the device can run it, and what was changed."""
    changes: dict[str, None] = {}
    rows = list(program.statements)
    if not device.has("values"):
        rows = [_without_data_dependence(s, changes) for s in rows]
    if not device.has("float64"):
        rows = [_in_float32(s, changes) for s in rows]
    return (Program(tuple(rows)), tuple(changes)) if changes else (program, ())


def _without_data_dependence(s: Statement, changes: dict[str, None]) -> Statement:
    """A mask decides the shape of the result by its values; the positions it selects do not."""
    if not (isinstance(s, Apply) and s.op == "masked_select"):
        return s
    mask = np.ravel(np.array(dict(s.params)["mask"], dtype=bool))
    changes["masked_select became take of the same positions: the device has no values"] = None
    positions = tuple(int(i) for i in np.flatnonzero(mask))
    return replace(s, op="take", params=(("index", positions),))


def _in_float32(s: Statement, changes: dict[str, None]) -> Statement:
    """All of float64 in float32."""

    def narrow(c: Constant | None) -> Constant | None:
        return c if c is None or c.dtype != "float64" else replace(c, dtype="float32")

    changes["float64 became float32: the device has no float64"] = None
    match s:
        case Leaf():
            return replace(s, data=narrow(s.data) or s.data)
        case SetData():
            return replace(s, value=narrow(s.value) or s.value)
        case SetGrad():
            return replace(s, value=narrow(s.value))
        case Backward() | Grad():
            return replace(s, seeds=tuple(map(narrow, s.seeds)))
        case Apply(op="to_float64"):
            return replace(s, op="clone")
        case Apply(op="to_float32"):
            return replace(s, op="clone")
        case _:
            return s
