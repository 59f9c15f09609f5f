"""Does an entry of the op table agree with itself? Tried on numbers before anybody relies on it. No torch.

What torch makes of the call is not tried: whether that agrees with the entry is what programs are for.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from autograd_conformance.ops.entry import LIMIT, Op, Range
from autograd_conformance.program import Apply, Param, Shape

Array = np.ndarray
SHAPES: tuple[Shape, ...] = ((), (1,), (3,), (2, 3), (3, 2), (1, 3), (3, 3), (2, 3, 2), (2, 2, 3), (2, 1, 3), (2, 2, 2, 2))
BYTES = ((0, 0), (1, 1), (37, 90))
RANGES: tuple[Range, ...] = ((-1.5, 1.5), (0.25, 1.75))
MOST = 24
STEP = 1e-5


class _Broken(Exception):
    """What is wrong with the entry, in words."""


@dataclass(slots=True)
class _Trial:
    op: Op
    arrays: list[Array]
    params: dict[str, Param]
    ranges: list[Range]

    @property
    def shapes(self) -> list[Shape]:
        return [x.shape for x in self.arrays]


def problem(op: Op, names: Mapping[str, Any]) -> str:
    """What is wrong with an entry whose call may use these names; empty if nothing is."""
    try:
        if op.vjp is None:
            return "it has no vjp, without which there is nothing to check"
        trials = list(_trials(op))
        if not trials:
            return "fits, params and domain allow no operands at all"
        _check_call(op, trials[0], names)
        made = [_check_value(trial) for trial in trials]
        pulled = [_check_vjp(trial, values) for trial, values in zip(trials, made, strict=True)]
        for trial, (gs, parts) in zip(trials, pulled, strict=True):
            _check_again(trial, gs, parts)
        if all(_largest(trial) > LIMIT for trial in trials):
            return f"bounds says up to {_largest(trials[0]):.4g} for operands of size 1.5; at most {LIMIT:.0f} is drawn"
    except _Broken as found:
        return str(found)
    return ""


def _asked(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever the user's rule raises is told to the user
        raise _Broken(f"{what} raises {type(error).__name__}: {str(error).partition(chr(10))[0]}") from None


# --- the call ---------------------------------------------------------------------------------------------------------


def _check_call(op: Op, trial: _Trial, names: Mapping[str, Any]) -> None:
    """It is Python, and what it names is there."""
    operands = [f"x{i}" for i in range(len(trial.arrays))]
    text = _asked("call", lambda: op.source(operands, trial.params))
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise _Broken(f"call is no Python expression: {text}") from None
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = [name for name in operands if name not in used]
    if missing:
        raise _Broken(f"call does not use all of its {len(operands)} operands: {op.call}")
    strange = sorted(used - {*operands, *names, "torch"})
    if strange:
        known = " or ".join(["torch", *names])
        raise _Broken(f"call names '{strange[0]}', where programs know {known}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _check_attribute(node, names)


def _check_attribute(node: ast.Attribute, names: Mapping[str, Any]) -> None:
    parts: list[str] = []
    here: ast.expr = node
    while isinstance(here, ast.Attribute):
        parts.insert(0, here.attr)
        here = here.value
    if not (isinstance(here, ast.Name) and here.id in names):
        return
    owner = names[here.id]
    for i, part in enumerate(parts):
        if not hasattr(owner, part):
            raise _Broken(f"call names '{'.'.join([here.id, *parts[: i + 1]])}', which is not there")
        owner = getattr(owner, part)


# --- operands ---------------------------------------------------------------------------------------------------------


def _trials(op: Op) -> Iterator[_Trial]:
    """Operands and parameters that the rules allow: some of every rank."""
    count = 0
    rng = np.random.default_rng(7)
    for chosen in _operands(op, ()):
        for p, q in BYTES:
            params = _asked("params", partial(op.params, list(chosen), p, q))
            ranges = _range(op, len(chosen))
            if params is None or ranges is None or count >= MOST * len(SHAPES):
                continue
            count += 1
            yield _Trial(op, [rng.uniform(*ranges[0], shape) for shape in chosen], params, ranges)


def _operands(op: Op, chosen: tuple[Shape, ...]) -> Iterator[tuple[Shape, ...]]:
    if len(chosen) == (op.arity if op.arity > 0 else 2):
        yield chosen
        return
    for shape in SHAPES:
        if _asked("fits", partial(op.fits, list(chosen), shape)):
            yield from _operands(op, (*chosen, shape))


def _range(op: Op, count: int) -> list[Range] | None:
    """The first range that is in the domain."""
    found = (r for r in RANGES if _asked("domain", partial(op.domain, [r] * count)))
    first = next(found, None)
    return None if first is None else [first] * count


# --- agreement --------------------------------------------------------------------------------------------------------


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _check_value(trial: _Trial) -> list[Array]:
    """Shapes, number, dtypes and range; returns the values."""
    op, params = trial.op, trial.params
    shapes = [tuple(shape) for shape in _asked("shapes", lambda: op.shapes(trial.shapes, **params))]
    result = _asked("value", lambda: op.value(*trial.arrays, **params))
    values = [np.asarray(v) for v in _tuple(result)]
    if [v.shape for v in values] != shapes:
        got = [v.shape for v in values]
        raise _Broken(f"value has shape {_several(got)} where shapes says {_several(shapes)}, for operands of {_several(trial.shapes)}")
    if isinstance(result, tuple) != (op.kind == "several"):
        raise _Broken(f"value gives a tuple exactly if kind is 'several', and kind is '{op.kind}'")
    dtypes = _asked("dtypes", lambda: op.dtypes([("float64", shape) for shape in trial.shapes]))
    if {*_tuple(dtypes)} != {"float64"}:
        raise _Broken(f"dtypes says {dtypes} for operands of float64; a result must be as wide")
    _check_bounds(trial, values)
    return values


def _several(shapes: Sequence[Shape]) -> str:
    return " and ".join(map(str, shapes))


def _check_bounds(trial: _Trial, values: Sequence[Array]) -> None:
    terms = max([1, *(x.size for x in trial.arrays)])
    low, high = _asked("bounds", lambda: trial.op.bounds(trial.ranges, terms))
    for v in values:
        if not np.all(np.isfinite(v)):
            raise _Broken(f"value is not finite within {trial.ranges[0]}, which is in the domain")
        if np.any(v < low - 1e-6) or np.any(v > high + 1e-6):
            raise _Broken(
                f"value reaches {float(np.max(np.abs(v))):.4g}, outside of what bounds says: {low:.4g} to {high:.4g}"
            )


def _largest(trial: _Trial) -> float:
    """What bounds says of the size of the result."""
    low, high = trial.op.bounds(trial.ranges, max([1, *(x.size for x in trial.arrays)]))
    return float(max(abs(low), abs(high)))


def _check_vjp(trial: _Trial, values: Sequence[Array]) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    """Number, shapes, and numbers by central differences; returns the cotangents that went in and that came out."""
    from autograd_conformance.algebra import Plain

    op = trial.op
    rng = np.random.default_rng(11)
    gs = tuple(rng.uniform(0.5, 1.5, v.shape) for v in values)
    several = op.kind == "several"
    assert op.vjp is not None
    call = partial(
        op.vjp, Plain, gs if several else gs[0], tuple(values) if several else values[0], *trial.arrays, **trial.params
    )
    parts = _tuple(_asked("vjp", call))
    if len(parts) != len(trial.arrays):
        raise _Broken(f"vjp gives {len(parts)} cotangents for {len(trial.arrays)} operands")
    for i, (part, x) in enumerate(zip(parts, trial.arrays, strict=True)):
        if np.shape(part) != x.shape:
            raise _Broken(f"vjp gives a cotangent of shape {np.shape(part)} for an operand of shape {x.shape}")
        slope = _central(trial, gs, i)
        if not np.allclose(part, slope, rtol=1e-4, atol=1e-5):
            raise _Broken(
                f"vjp is not the derivative of value: {_first(part, slope)}, by central differences {_first(slope, part)}"
            )
    return gs, parts


def _first(one: Any, other: Any) -> str:
    far = ~np.isclose(one, other, rtol=1e-4, atol=1e-5)
    return f"{float(np.asarray(one)[far].ravel()[0]):.6g}"


def _central(trial: _Trial, gs: Sequence[Array], at: int) -> Array:
    slope = np.zeros(trial.arrays[at].shape)
    for where in np.ndindex(slope.shape):
        ends = []
        for step in (STEP, -STEP):
            moved = [x.copy() for x in trial.arrays]
            moved[at][where] += step
            result = _tuple(trial.op.value(*moved, **trial.params))
            ends.append(sum(float(np.sum(g * v)) for g, v in zip(gs, result, strict=True)))
        slope[where] = (ends[0] - ends[1]) / (2 * STEP)
    return slope


def _check_again(trial: _Trial, gs: Sequence[Array], parts: Sequence[Any]) -> None:
    """With the differentiable algebra the numbers are the same."""
    from autograd_conformance.algebra import Differentiable, Traced, gradient
    from autograd_conformance.reverse import outputs

    names = tuple(f"y{i}" for i in range(len(gs)))
    made = Apply(names, trial.op.name, tuple(f"x{i}" for i in range(len(trial.arrays))), tuple(trial.params.items()))
    operands = [Traced(x) for x in trial.arrays]

    def again() -> list[Any]:
        total = [gradient(out, Traced(g), operands, Differentiable) for out, g in zip(outputs(made, operands), gs, strict=True)]
        return [sum((row[i].value for row in total), start=np.zeros(x.shape)) for i, x in enumerate(operands)]

    found = _asked("vjp, written for numbers that can be differentiated again,", again)
    for part, other in zip(parts, found, strict=True):
        if not np.allclose(part, other, rtol=1e-9, atol=1e-9):
            raise _Broken("vjp gives other numbers with the algebra that can be differentiated again")
