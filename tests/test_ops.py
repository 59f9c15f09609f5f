"""The op table against torch, against central differences, and against HIPS autograd."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import autograd
import autograd.numpy as hips
import numpy as np
import pytest
import torch

from autograd_conformance.algebra import Differentiable, Plain, Traced, gradient, traced_op
from autograd_conformance.ops import FLOATS, MOST_DIMS, MOST_OUTPUTS, OPS, TABLE, Op
from autograd_conformance.program import Param, Shape
from autograd_conformance.runner import call_of

torch.set_num_threads(1)

Range = tuple[float, float]
NAMES = [op.name for op in TABLE]
DIFFERENTIABLE = [op.name for op in TABLE if op.differentiable]
ONE_OUTPUT = [op.name for op in TABLE if op.differentiable and op.kind != "several"]
SHAPES: tuple[Shape, ...] = (
    (), (3,), (2, 3), (1,), (2, 2), (3, 2), (4,), (2, 1), (1, 3), (2, 2, 3), (2, 3, 2), (1, 1), (2,), (0,), (2, 0),
    (1, 2, 1, 3), (2, 1, 2), (12,), (5,),
)  # fmt: skip
RANGES: tuple[Range, ...] = ((-2.0, 2.0), (0.3, 2.2), (-1.75, -0.25), (0.25, 1.5), (0.5, 4.0))
KINKS = (-1.0, 0.0, 1.0)
GAP = 1e-3  # between any two numbers of an instance, and to the next kink
STEP = 1e-5
NUMBERS = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}


@dataclasses.dataclass(frozen=True)
class Instance:
    """An op with operands that it takes: float64 arrays, the ranges that they were drawn from, and parameters."""

    op: Op
    args: tuple[np.ndarray, ...]
    ranges: tuple[Range, ...]
    params: dict[str, Param]

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of the operands."""
        return [x.shape for x in self.args]

    def value(self, *args: Any) -> tuple[Any, ...]:
        """The outputs on paper, always as a tuple."""
        result = self.op.value(*args, **self.params)
        return result if isinstance(result, tuple) else (result,)

    def dtypes(self, given: Sequence[str]) -> tuple[str, ...]:
        """Dtypes that the outputs are due to have."""
        due = self.op.dtypes(list(zip(given, self.shapes, strict=True)))
        count = len(self.op.shapes(self.shapes, **self.params))
        return (due,) * count if isinstance(due, str) else due

    def torch_value(self, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of torch, always as a tuple."""
        result = call_of(self.op.name, len(args), tuple(self.params))(*args, *self.params.values())
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    def vjp(self, cotangents: Sequence[np.ndarray], args: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Cotangents of the operands, with the plain algebra."""
        assert self.op.vjp is not None
        result = self.op.value(*args, **self.params)
        several = isinstance(result, tuple)
        parts = self.op.vjp(Plain, tuple(cotangents) if several else cotangents[0], result, *args, **self.params)
        return list(parts) if isinstance(parts, tuple) else [parts]


# --- drawing instances ------------------------------------------------------------------------------------------------


def _operand_shapes(op: Op, rng: np.random.Generator) -> list[Shape] | None:
    count = op.arity if op.arity > 0 else 2 + int(rng.integers(2))
    shapes: list[Shape] = []
    for _ in range(count):
        fitting = [s for s in SHAPES if op.fits(shapes, s)]
        if not fitting:
            return None
        shapes.append(fitting[rng.integers(len(fitting))])
    return shapes


def _numbers(rng: np.random.Generator, shapes: Sequence[Shape], ranges: Sequence[Range]) -> list[np.ndarray]:
    """Numbers that float32 can hold, all apart from each other and from kinks."""
    for _ in range(200):
        arrays = [
            rng.uniform(*r, size=s).astype(np.float32).astype(np.float64) for s, r in zip(shapes, ranges, strict=True)
        ]
        everything = np.sort(np.concatenate([*(x.ravel() for x in arrays), KINKS]))
        if np.all(np.diff(everything) > GAP):
            return arrays
    raise AssertionError("no numbers that lie apart")


def _instance(op: Op, rng: np.random.Generator) -> Instance | None:
    shapes = _operand_shapes(op, rng)
    if shapes is None:
        return None
    params = op.params(shapes, int(rng.integers(256)), int(rng.integers(256)))
    if params is None or any(len(s) > MOST_DIMS for s in op.shapes(shapes, **params)):
        return None
    ranges = [RANGES[rng.integers(len(RANGES))] for _ in shapes]
    if not op.domain(ranges):
        return None
    args = _numbers(rng, shapes, ranges)
    if op.takes == "bool":
        args[0], ranges[0] = (args[0] > 0).astype(np.float64), (0.0, 1.0)
    return Instance(op, tuple(args), tuple(ranges), params)


@cache
def instances(name: str, count: int = 12) -> tuple[Instance, ...]:
    """Instances of an op, the same in every run."""
    rng = np.random.default_rng([NAMES.index(name), 2024])
    found: list[Instance] = []
    for _ in range(600):
        made = _instance(OPS[name], rng)
        if made is not None:
            found.append(made)
        if len(found) == count:
            break
    return tuple(found)


@pytest.mark.parametrize("name", NAMES)
def test_there_are_instances(name: str) -> None:
    """Every op is tried on a dozen inputs, on three or more shapes where it takes them."""
    found = instances(name)
    assert len(found) == 12
    assert len({tuple(i.shapes) for i in found}) >= 3


# --- the table --------------------------------------------------------------------------------------------------------


def test_names_are_unique() -> None:
    """No two ops have one name, and the dictionary holds the whole table in its order."""
    assert len(set(NAMES)) == len(NAMES)
    assert list(OPS.values()) == list(TABLE)


def test_there_are_many_differentiable_ops() -> None:
    """At least forty ops have a derivative."""
    assert len(DIFFERENTIABLE) >= 40


def test_zero_bytes_give_the_simplest_parameters() -> None:
    """With zero bytes every dimension is the first, every index 0, and nothing is kept or descending."""
    shapes = {1: [(2, 2)], 2: [(2, 2), (2, 2)], 3: [(2, 2)] * 3, -1: [(2, 2), (2, 2)]}
    for op in TABLE:
        params = op.params(shapes[op.arity], 0, 0) or {}
        for key in ("dim", "index", "keepdim", "descending", "offset", "start"):
            value = params.get(key, 0)
            assert not np.any(value), (op.name, key, value)


# --- values, shapes and dtypes against torch --------------------------------------------------------------------------


def _dtype_choices(op: Op, count: int) -> Iterator[tuple[str, ...]]:
    """Dtypes of the operands: all float64, all float32, mixed where torch promotes, integers for a cast."""
    first = ("bool",) if op.takes == "bool" else ()
    rest = count - len(first)
    for dtype in FLOATS:
        yield (*first, *(dtype,) * rest)
    if op.takes == "any":
        yield ("int64",)
        yield ("bool",)
    if rest == 2 and not op.same_dtype:
        yield (*first, "float32", "float64")
        yield (*first, "float64", "float32")


def _tensors(args: Sequence[np.ndarray], dtypes: Sequence[str]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(x)).to(NUMBERS[dtype]) for x, dtype in zip(args, dtypes, strict=True)]


def _assert_like_torch(case: Instance, dtypes: tuple[str, ...]) -> None:
    tensors = _tensors(case.args, dtypes)
    args = [t.to(torch.float64).numpy() for t in tensors]
    seen = case.torch_value(tensors)
    due = case.value(*args)
    tolerance = 1e-5 if "float32" in dtypes else 1e-12
    assert len(seen) == len(due) <= MOST_OUTPUTS
    assert [tuple(t.shape) for t in seen] == list(case.op.shapes(case.shapes, **case.params))
    assert [str(t.dtype) for t in seen] == [f"torch.{dtype}" for dtype in case.dtypes(dtypes)]
    for t, paper in zip(seen, due, strict=True):
        assert np.shape(paper) == tuple(t.shape)
        np.testing.assert_allclose(t.to(torch.float64).numpy(), paper, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("name", NAMES)
def test_like_torch(name: str) -> None:
    """Values, shapes and dtypes are those of torch, in float64, float32 and mixed."""
    for case in instances(name):
        for dtypes in _dtype_choices(case.op, len(case.args)):
            _assert_like_torch(case, dtypes)


def test_mixed_dtypes_are_tried_with_and_without_dimensions() -> None:
    """Promotion has two rules, for operands with and without dimensions; both are met above."""
    mixed = [i for name in NAMES for i in instances(name) if i.op.arity == 2 and not i.op.same_dtype]
    ranks = {tuple(bool(s) for s in i.shapes) for i in mixed}
    assert ranks == {(False, False), (False, True), (True, False), (True, True)}


# --- first order ------------------------------------------------------------------------------------------------------


def _cotangents(case: Instance, rng: np.random.Generator) -> list[np.ndarray]:
    dtypes = case.dtypes(("float64",) * len(case.args))
    values = case.value(*case.args)
    return [rng.uniform(-1, 1, np.shape(v)) * (d in FLOATS) for v, d in zip(values, dtypes, strict=True)]


def central(f: Callable[..., float], args: Sequence[np.ndarray], at: int) -> np.ndarray:
    """Central differences of a number with respect to one of several arrays."""
    slope = np.zeros(args[at].shape)
    for where in np.ndindex(args[at].shape):
        ends = []
        for step in (STEP, -STEP):
            moved = [np.array(x) for x in args]
            moved[at][where] += step
            ends.append(f(*moved))
        slope[where] = (ends[0] - ends[1]) / (2 * STEP)
    return slope


def _tracked(case: Instance) -> list[int]:
    """Operands that have a derivative."""
    return [i for i in range(len(case.args)) if not (i == 0 and case.op.takes == "bool")]


def assert_vjp_is_the_slope(case: Instance) -> None:
    """The VJP of an instance agrees with central differences of its value."""
    cotangents = _cotangents(case, np.random.default_rng(1))

    def product(*args: np.ndarray) -> float:
        return float(sum(np.sum(g * v) for g, v in zip(cotangents, case.value(*args), strict=True)))

    parts = case.vjp(cotangents, case.args)
    assert len(parts) == len(case.args)
    for i in _tracked(case):
        part = parts[i]
        assert part is not None
        assert np.shape(part) == case.args[i].shape
        np.testing.assert_allclose(part, central(product, case.args, i), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vjp_against_central_differences(name: str) -> None:
    """Every VJP is the slope of its value."""
    for case in instances(name, 8):
        assert_vjp_is_the_slope(case)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_checker_notices_one_part_in_a_thousand(name: str) -> None:
    """A VJP that is off by 0.1 % is noticed: the checker itself can fail."""
    true = OPS[name].vjp
    assert true is not None

    def off(A: Any, *rest: Any, **params: Any) -> Any:
        parts = true(A, *rest, **params)
        parts = parts if isinstance(parts, tuple) else (parts,)
        return tuple(None if part is None else part * 1.001 for part in parts)

    case = next(
        i for i in instances(name) if any(np.any(p) for p in i.vjp(_cotangents(i, np.random.default_rng(1)), i.args))
    )
    assert_vjp_is_the_slope(case)
    with pytest.raises(AssertionError):
        assert_vjp_is_the_slope(dataclasses.replace(case, op=dataclasses.replace(case.op, vjp=off)))


def test_the_checker_notices_a_missing_term() -> None:
    """A VJP that forgets one of its two operands is noticed."""
    half = dataclasses.replace(OPS["mul"], vjp=lambda A, g, _, x, y: (A.sum_to(g * y, x.shape), np.zeros(y.shape)))
    with pytest.raises(AssertionError):
        assert_vjp_is_the_slope(dataclasses.replace(instances("mul")[0], op=half))


# --- a second opinion: HIPS autograd ----------------------------------------------------------------------------------

# What its numpy wrapper cannot do: no gradient, no such function, or a method that its boxes lack.
BEYOND_HIPS = {
    "clone", "to_float32", "to_float64",  # np.copy
    "select", "index_select",  # np.take
    "max_dim", "min_dim", "sort", "gather",  # np.take_along_axis
    "diagonal", "unfold", "contiguous", "flip", "pad",
}  # fmt: skip


def rebuilt(f: Any) -> Any:
    """A value function with HIPS autograd's numpy in the place of numpy, all the way down."""
    if isinstance(f, np.ufunc) or getattr(f, "__module__", "").startswith("numpy"):
        return getattr(hips, f.__name__)
    if not isinstance(f, types.FunctionType):
        return f
    used = {name: f.__globals__[name] for name in f.__code__.co_names if name in f.__globals__}
    ours = {n: rebuilt(v) for n, v in used.items() if getattr(v, "__module__", "").startswith("autograd_conformance")}
    cells = tuple(types.CellType(rebuilt(c.cell_contents)) for c in f.__closure__ or ())
    made = types.FunctionType(f.__code__, f.__globals__ | ours | {"np": hips}, f.__name__, f.__defaults__, cells)
    made.__kwdefaults__ = f.__kwdefaults__
    return made


def _hips_gradients(case: Instance, cotangents: Sequence[np.ndarray]) -> list[np.ndarray]:
    value = rebuilt(case.op.value)
    dtypes = case.dtypes(("float64",) * len(case.args))

    def product(*args: Any) -> Any:
        result = value(*args, **case.params)
        outs = result if isinstance(result, tuple) else (result,)
        return sum(hips.sum(g * v) for g, v, d in zip(cotangents, outs, dtypes, strict=True) if d in FLOATS)

    return [autograd.grad(product, i)(*case.args) for i in _tracked(case)]


def hips_agrees(name: str) -> bool:
    """Compares every VJP of an op with HIPS autograd; False if that cannot do the op on any instance."""
    compared = 0
    for case in instances(name, 8):
        cotangents = _cotangents(case, np.random.default_rng(2))
        try:
            with np.errstate(all="ignore"):
                theirs = _hips_gradients(case, cotangents)
        except (AttributeError, NotImplementedError, TypeError, ValueError, AssertionError):
            continue
        if any(np.shape(their) != case.args[i].shape for i, their in zip(_tracked(case), theirs, strict=True)):
            continue  # its where forgets to sum over what it broadcast
        parts = case.vjp(cotangents, case.args)
        for i, their in zip(_tracked(case), theirs, strict=True):
            np.testing.assert_allclose(parts[i], their, rtol=1e-9, atol=1e-11)
        compared += 1
    return compared > 0


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vjp_against_hips_autograd(name: str) -> None:
    """Every VJP agrees with HIPS autograd wherever that knows the op, and it is known where it does not."""
    assert hips_agrees(name) is (name not in BEYOND_HIPS)


def test_hips_covers_most_ops() -> None:
    """A second opinion is there for at least 45 ops."""
    assert set(DIFFERENTIABLE) >= BEYOND_HIPS
    assert len(DIFFERENTIABLE) - len(BEYOND_HIPS) >= 45


# --- second order -----------------------------------------------------------------------------------------------------


def _traced_gradients(case: Instance, cotangent: np.ndarray) -> tuple[list[Any], list[Traced], Traced]:
    xs, seed = [Traced(x) for x in case.args], Traced(cotangent)
    out = traced_op(case.op.name, *xs, **case.params)
    return gradient(out, seed, xs, Differentiable), xs, seed


@pytest.mark.parametrize("name", ONE_OUTPUT)
def test_traced_first_order_is_the_plain_one(name: str) -> None:
    """Both algebras give the same numbers, in the same shapes."""
    for case in instances(name, 8):
        cotangents = _cotangents(case, np.random.default_rng(3))
        twice, _, _ = _traced_gradients(case, cotangents[0])
        parts = case.vjp(cotangents, case.args)
        for i in _tracked(case):
            assert isinstance(twice[i], Traced)
            assert twice[i].shape == case.args[i].shape
            np.testing.assert_allclose(twice[i].value, parts[i], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ONE_OUTPUT)
def test_second_order_against_central_differences(name: str) -> None:
    """The derivative of the VJP, by operands and by the cotangent, is the slope of the VJP."""
    for case in instances(name, 6):
        _assert_second_order(case)


def _assert_second_order(case: Instance) -> None:
    rng = np.random.default_rng(4)
    cotangent = _cotangents(case, rng)[0]
    weights = [rng.uniform(-1, 1, x.shape) for x in case.args]
    tracked = _tracked(case)

    def product(*args: np.ndarray) -> float:
        *operands, g = args
        parts = case.vjp([g], operands)
        return float(sum(np.sum(weights[i] * parts[i]) for i in tracked))

    grads, xs, seed = _traced_gradients(case, cotangent)
    wanted = [*(xs[i] for i in tracked), seed]
    totals = [np.zeros(x.shape) for x in wanted]
    for i in tracked:
        totals = [t + part for t, part in zip(totals, gradient(grads[i], weights[i], wanted), strict=True)]
    points = [*case.args, cotangent]
    for total, at in zip(totals, [*tracked, len(case.args)], strict=True):
        np.testing.assert_allclose(total, central(product, points, at), rtol=1e-5, atol=1e-7, err_msg=str(case))


# --- ranges -----------------------------------------------------------------------------------------------------------


def _corner_arrays(case: Instance, rng: np.random.Generator) -> Iterator[list[np.ndarray]]:
    """Operands at random, and with every element at an end of its range."""
    for _ in range(6):
        yield [rng.uniform(*r, size=s) for r, s in zip(case.ranges, case.shapes, strict=True)]
    for _ in range(6):
        yield [np.where(rng.random(s) < 0.5, *r) for r, s in zip(case.ranges, case.shapes, strict=True)]
    for ends in ((0, 0), (1, 1), (0, 1), (1, 0)):
        yield [np.full(s, r[ends[min(i, 1)]]) for i, (r, s) in enumerate(zip(case.ranges, case.shapes, strict=True))]


@pytest.mark.parametrize("name", NAMES)
def test_bounds_contain_the_values(name: str) -> None:
    """Whatever lies in the operands' ranges, every output lies in the range that the rule gives; integers too."""
    rng = np.random.default_rng(5)
    for case in instances(name, 24):
        low, high = case.op.bounds(list(case.ranges), prod(case.shapes[0]))
        slack = 1e-12 * max(1.0, abs(low), abs(high))
        for args in _corner_arrays(case, rng):
            if case.op.takes == "bool":
                args[0] = np.round(args[0])
            for out in case.value(*args):
                assert np.all(np.asarray(out) >= low - slack), (case.shapes, case.ranges, case.params, low, out)
                assert np.all(np.asarray(out) <= high + slack), (case.shapes, case.ranges, case.params, high, out)


# --- gradients that are handed on -------------------------------------------------------------------------------------


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _leaf_dtypes(op: Op, count: int) -> tuple[str, ...]:
    if op.takes == "bool":
        return ("bool", *("float64",) * (count - 1))
    return ("float32",) if op.name == "to_float64" else ("float64",) * count


def _hands_on(case: Instance) -> bool:
    """Does torch return a gradient that lies in the memory of the incoming one?"""
    dtypes = _leaf_dtypes(case.op, len(case.args))
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in _tensors(case.args, dtypes)]
    outs = [out for out in case.torch_value(leaves) if out.requires_grad and out.numel()]
    wanted = [t for t in leaves if t.requires_grad]
    for roots in (outs, *([out] for out in outs if len(outs) > 1)):
        if not roots:
            continue
        seeds = [torch.rand_like(out, memory_format=torch.contiguous_format) for out in roots]
        found = torch.autograd.grad(roots, wanted, seeds, retain_graph=True, allow_unused=True)
        memory = {_storage(seed) for seed in seeds}
        if any(g is not None and g.numel() and _storage(g) in memory for g in found):
            return True
    return False


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_hands_on_is_declared(name: str) -> None:
    """An op whose backward returns a gradient in the memory of the incoming one says so."""
    seen = [case.shapes for case in instances(name, 24) if _hands_on(case)]
    assert OPS[name].hands_on or not seen, f"shapes on which torch hands on: {seen}"


def test_hands_on_is_seen() -> None:
    """The check above can see it: for these ops torch hands the gradient on."""
    seen = {name for name in DIFFERENTIABLE if any(map(_hands_on, instances(name, 24)))}
    assert seen >= {
        "add",
        "sub",
        "shift",
        "clone",
        "reshape",
        "transpose",
        "unsqueeze",
        "cat",
        "stack",
        "sum",
        "sum_dim",
    }
