"""A failing program made small: parts are dropped and simplified as long as the same fault shows.

Works on the decoded program, so it starts from any failing one, and is bounded in calls, never by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from autograd_conformance.oracle import InvalidProgram, predict
from autograd_conformance.paper import Paper
from autograd_conformance.program import (
    Apply,
    Backward,
    Constant,
    Grad,
    Leaf,
    Program,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Shape,
    Statement,
    renamed,
)
from autograd_conformance.transform import compact, exchanged, leaf_of, needed, ones_like, without
from autograd_conformance.verdicts import Violation

Shows = Callable[[Program], Violation | None]
Small = tuple[Program, Violation]


class Reducer:
    """Tries smaller programs; ``shows`` gives the violation of a program, or None if the fault is gone."""

    def __init__(self, shows: Shows, budget: int) -> None:
        self.shows, self.budget = shows, budget

    def reduce(self, program: Program, violation: Violation) -> Small:
        """The smallest program found within the budget."""
        best = (program, violation)
        while self.budget > 0:
            before = best[0]
            for step in (_parts, _cuts, _bypasses, _simpler_statements, _smaller_shapes, _simpler_numbers):
                best = self._all_of(step, best)
            if best[0] == before:
                break
        return self._renamed(best)

    def _all_of(self, step: Callable[[Program, Violation], Iterator[Program]], best: Small) -> Small:
        """Apply a step until none of its candidates shows the fault."""
        progress = True
        while progress and self.budget > 0:
            progress = False
            for candidate in step(*best):
                found = self._try(candidate, best[0])
                if found is not None:
                    best, progress = (candidate, found), True
                    break
        return best

    def _try(self, candidate: Program, current: Program) -> Violation | None:
        if candidate == current or self.budget <= 0:
            return None
        self.budget -= 1
        try:
            return self.shows(candidate)
        except InvalidProgram:
            return None

    def _renamed(self, best: Small) -> Small:
        program = compact(best[0])
        violation = self.shows(program)
        return best if violation is None else (program, violation)


def _parts(program: Program, violation: Violation) -> Iterator[Program]:
    """Without what comes after the fault or cannot matter; then without halves, quarters ... single statements."""
    if violation.at < len(program) - 1:
        yield Program(program.statements[: violation.at + 1])
    yield needed(program, min(violation.at, len(program) - 1))
    size = len(program)
    while size > 1:
        size = (size + 1) // 2
        for start in range(len(program) - size, -1, -size):
            yield without(program, range(start, start + size))
        if size == 1:
            break
    for i in range(len(program) - 1, -1, -1):
        yield without(program, (i,))


def _tensors(program: Program) -> dict[str, Paper]:
    """The tensors of a program as they are before any pass; empty if it makes no sense."""
    try:
        with np.errstate(all="ignore"):
            return predict(Program(tuple(s for s in program if isinstance(s, Leaf | Apply | Rewrap)))).tensors
    except InvalidProgram:
        return {}


def _cuts(program: Program, violation: Violation) -> Iterator[Program]:
    """With the result of an op or a detach as a leaf of its own, so that what led to it can go."""
    tensors = _tensors(program)
    for i in range(len(program) - 1, -1, -1):
        s = program.statements[i]
        outs = s.outs if isinstance(s, Apply) else (s.out,) if isinstance(s, Rewrap) else ()
        if outs and all(out in tensors and tensors[out].dtype.startswith("float") for out in outs):
            cut = exchanged(program, i, *(leaf_of(tensors[out], name=out) for out in outs))
            at = violation.at + len(outs) - 1
            yield needed(cut, min(at, len(cut) - 1))


def _bypasses(program: Program, _: Violation) -> Iterator[Program]:
    """With an op left out and its operand in the place of its result."""
    for i, s in enumerate(program):
        if isinstance(s, Apply):
            for arg in dict.fromkeys(s.args):
                rest = tuple(renamed(t, dict.fromkeys(s.outs, arg)) for t in program.statements[i + 1 :])
                yield refitted(Program((*program.statements[:i], *rest)))


def _simpler_statements(program: Program, _: Violation) -> Iterator[Program]:
    for i, s in enumerate(program):
        for simpler in _simpler(s):
            yield exchanged(program, i, simpler)


def _simpler(s: Statement) -> Iterator[Statement]:
    match s:
        case Leaf():
            if s.layout != "contiguous":
                yield replace(s, layout="contiguous")
            if s.requires_grad:
                yield replace(s, requires_grad=False)
            if s.data.dtype != "float64":
                yield replace(s, data=replace(s.data, dtype="float64"))
        case Apply(no_grad=True):
            yield replace(s, no_grad=False)
        case Backward() | Grad():
            yield from _simpler_pass(s)
        case SetRequiresGrad(attribute=True):
            yield replace(s, attribute=False)


def _simpler_pass(s: Backward | Grad) -> Iterator[Statement]:
    if len(s.roots) > 1:
        for i in range(len(s.roots)):
            yield replace(s, roots=(s.roots[i],), seeds=(s.seeds[i],))
    if isinstance(s, Backward) and s.inputs is not None:
        yield replace(s, inputs=None)
    if s.inputs is not None and len(s.inputs) > 1:
        for name in s.inputs:
            yield replace(s, inputs=(name,))
    if s.create_graph:
        yield replace(s, create_graph=False)
    if s.retain_graph is not None:
        yield replace(s, retain_graph=None)
    if any(seed is not None and prod(seed.shape) == 1 for seed in s.seeds):
        yield replace(s, seeds=tuple(None if seed is None or prod(seed.shape) == 1 else seed for seed in s.seeds))
    ones = tuple(None if seed is None else ones_like(seed) for seed in s.seeds)
    if ones != s.seeds:
        yield replace(s, seeds=ones)


def refitted(program: Program) -> Program:
    """The program with seeds and assigned gradients in the shapes and dtypes that its tensors now have."""
    tensors = _tensors(program)

    def fit(name: str, c: Constant | None) -> Constant | None:
        t = tensors.get(name)
        if c is None or t is None or (c.shape == t.shape and c.dtype == t.dtype):
            return c
        return Constant(t.shape, t.dtype, _counted(prod(t.shape)))

    rows: list[Statement] = []
    for s in program:
        if isinstance(s, Backward | Grad):
            s = replace(s, seeds=tuple(fit(root, seed) for root, seed in zip(s.roots, s.seeds, strict=True)))
        elif isinstance(s, SetGrad):
            s = replace(s, value=fit(s.arg, s.value))
        elif isinstance(s, SetData):
            s = replace(s, value=fit(s.arg, s.value) or s.value)
        rows.append(s)
    return Program(tuple(rows))


def _counted(size: int) -> tuple[float, ...]:
    return tuple(float(i + 1) for i in range(size))


def _reshaped(leaf: Leaf, shape: Shape) -> Leaf:
    values = leaf.data.values[: prod(shape)]
    values += _counted(prod(shape) - len(values))
    return replace(leaf, data=replace(leaf.data, shape=shape, values=values))


def _smaller_shapes(program: Program, _: Violation) -> Iterator[Program]:
    """All leaves 0-dim, or with a dimension less, or with every size n replaced by a smaller one."""
    leaves = [s for s in program if isinstance(s, Leaf)]
    sizes = sorted({size for s in leaves for size in s.data.shape}, reverse=True)
    maps: list[Callable[[Shape], Shape]] = [_scalar, _without_first, _without_last]
    maps += [partial(_with_size, a, b) for a in sizes for b in (1, 2) if b < a]
    for shrink in maps:
        yield _with_shapes(program, {i: shrink for i, s in enumerate(program) if isinstance(s, Leaf)})
    for i, s in enumerate(program):
        if isinstance(s, Leaf) and s.data.shape:
            for shrink in maps[:3]:
                yield _with_shapes(program, {i: shrink})


def _scalar(_: Shape) -> Shape:
    return ()


def _without_first(shape: Shape) -> Shape:
    return shape[1:]


def _without_last(shape: Shape) -> Shape:
    return shape[:-1]


def _with_size(size: int, smaller: int, shape: Shape) -> Shape:
    return tuple(smaller if n == size else n for n in shape)


def _with_shapes(program: Program, shrink: dict[int, Callable[[Shape], Shape]]) -> Program:
    rows: list[Statement] = []
    for i, s in enumerate(program):
        rows.append(_reshaped(s, shrink[i](s.data.shape)) if i in shrink and isinstance(s, Leaf) else s)
    return refitted(Program(tuple(rows)))


def _simpler_numbers(program: Program, _: Violation) -> Iterator[Program]:
    for i, s in enumerate(program):
        if isinstance(s, Leaf):
            for values in ((1.0,) * len(s.data.values), _counted(len(s.data.values))):
                if s.data.values not in (values, (1.0,) * len(values)):
                    yield exchanged(program, i, replace(s, data=replace(s.data, values=values)))
