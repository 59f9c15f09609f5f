"""The same program for a device that lacks something: a rewriting that is deterministic and told in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autograd_conformance.devices import Device
from autograd_conformance.ops import FLOATS, OPS
from autograd_conformance.program import Apply, Backward, Constant, Grad, Leaf, Program, SetData, SetGrad, Statement

Changes = tuple[str, ...]


def adapt(program: Program, device: Device) -> tuple[Program, Changes]:
    """The program as the device can run it, and what was changed."""
    changes: dict[str, None] = {}
    rows = list(program.statements)
    if not device.has("values"):
        rows = [_without_data_dependence(s, changes) for s in rows]
    if not device.has("float64"):
        changes["float64 became float32: the device has no float64"] = None
        rows = list(map(_Narrow(), rows))
    return (Program(tuple(rows)), tuple(changes)) if changes else (program, ())


def _without_data_dependence(s: Statement, changes: dict[str, None]) -> Statement:
    """A mask decides the shape of the result by its values; the positions it selects do not."""
    if not (isinstance(s, Apply) and s.op == "masked_select"):
        return s
    mask = np.ravel(np.array(dict(s.params)["mask"], dtype=bool))
    changes["masked_select became take of the same positions: the device has no values"] = None
    positions = tuple(int(i) for i in np.flatnonzero(mask))
    return replace(s, op="take", params=(("index", positions),))


class _Narrow:
    """Rewrites all of float64 to float32, and keeps track of what is not floating."""

    def __init__(self) -> None:
        self.integral: set[str] = set()

    def __call__(self, s: Statement) -> Statement:
        match s:
            case Leaf():
                return replace(s, data=_narrow(s.data))
            case SetGrad() | SetData():
                return s if s.value is None else replace(s, value=_narrow(s.value))
            case Backward() | Grad():
                return replace(s, seeds=tuple(None if seed is None else _narrow(seed) for seed in s.seeds))
            case Apply():
                return self._apply(s)
            case _:
                return s

    def _apply(self, s: Apply) -> Apply:
        """A cast between the two float dtypes becomes a clone: casting to the dtype it has would do nothing."""
        op = OPS[s.op]
        dtypes = op.dtypes([("float32", ())] * len(s.args))
        several = (dtypes,) * len(s.outs) if isinstance(dtypes, str) else dtypes
        self.integral.update(out for out, dtype in zip(s.outs, several, strict=True) if dtype not in FLOATS)
        if op.kind != "cast":
            return s
        return replace(s, op="to_float32" if s.args[0] in self.integral else "clone")


def _narrow(c: Constant) -> Constant:
    return replace(c, dtype="float32") if c.dtype == "float64" else c
