"""Programs made from programs: parts dropped, statements exchanged, uses rewired. Pure functions of plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from autograd_conformance.ops import FLOATS
from autograd_conformance.paper import Paper
from autograd_conformance.program import (
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Leaf,
    Program,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
    reads,
    renamed,
    writes,
)


def without(program: Program, dropped: Collection[int]) -> Program:
    """The program without some statements, and without what cannot run when they are gone."""
    known: set[str] = set()
    kept: list[Statement] = []
    for i, statement in enumerate(program):
        if i in dropped or not known.issuperset(reads(statement)):
            continue
        known.update(writes(statement))
        kept.append(statement)
    return Program(tuple(kept))


def needed(program: Program, at: int) -> Program:
    """The part of a program that statement ``at`` can depend on; that statement comes last."""
    wanted: set[str] = set()
    kept: list[Statement] = []
    for i in range(at, -1, -1):
        s = program.statements[i]
        if (
            isinstance(s, Backward | Grad)
            or i == at
            or (isinstance(s, Leaf | Apply | Rewrap) and wanted & set(writes(s)))
        ):
            wanted.update(reads(s))
            wanted.update(writes(s))
            kept.append(s)
        elif isinstance(s, SetGrad | SetData | SetRequiresGrad | DetachInPlace | Write):
            kept.append(s)
    kept.reverse()
    return without(Program(tuple(kept)), ())


def exchanged(program: Program, at: int, *statements: Statement) -> Program:
    """The program with other statements in the place of statement ``at``."""
    rows = program.statements
    return Program((*rows[:at], *statements, *rows[at + 1 :]))


def history(program: Program) -> list[int]:
    """Passes and resets before the last statement."""
    return [i for i, s in enumerate(program.statements[:-1]) if isinstance(s, Backward | Grad | SetGrad)]


def ones_like(constant: Constant) -> Constant:
    """The same shape and dtype, all 1."""
    return replace(constant, values=(1.0,) * len(constant.values))


def leaf_of(paper: Paper, *, requires_grad: bool | None = None, name: str = "") -> Leaf:
    """A leaf that holds what a tensor holds."""
    tracked = paper.requires_grad if requires_grad is None else requires_grad
    values = tuple(float(v) for v in paper.value.ravel())
    return Leaf(name or paper.name, Constant(paper.shape, paper.dtype, values), tracked)


def cut_off(program: Program, tensors: dict[str, Paper]) -> Program | None:
    """Each detached copy and each result under no_grad as a leaf of its own; None if there is neither."""
    found = False
    rows: list[Statement] = []
    for s in program:
        if isinstance(s, Rewrap):
            rows.append(leaf_of(tensors[s.out], name=s.out))
            found = True
        elif isinstance(s, Apply) and s.no_grad and all(tensors[out].dtype in FLOATS for out in s.outs):
            rows.extend(leaf_of(tensors[out], requires_grad=False) for out in s.outs)
            found = True
        else:
            rows.append(s)
    return without(Program(tuple(rows)), ()) if found else None


def unshared(program: Program, tensors: dict[str, Paper]) -> Program | None:
    """Every use of a tensor after the first by an op becomes a leaf of its own; None if nothing is used twice.

    A pass that names its inputs names the new leaves too.
    """
    used: set[str] = set()
    rows: list[Statement] = []
    copies: list[Leaf] = []
    for s in program:
        if isinstance(s, Backward | Grad) and s.inputs is not None:
            s = replace(s, inputs=(*s.inputs, *(leaf.name for leaf in copies if leaf.requires_grad)))
        if isinstance(s, Apply):
            args = []
            for name in s.args:
                again = name in used and tensors[name].dtype in FLOATS
                if again:
                    copies.append(leaf_of(tensors[name], name=f"u{len(copies)}"))
                    rows.append(copies[-1])
                args.append(copies[-1].name if again else name)
                used.add(name)
            s = replace(s, args=tuple(args))
        rows.append(s)
    return Program(tuple(rows)) if copies else None


def expanded(program: Program, tensors: dict[str, Paper]) -> Program | None:
    """Operands that an op would broadcast are expanded by a statement of their own; None if there are none."""
    rows: list[Statement] = []
    copies = 0
    for s in program:
        if isinstance(s, Apply) and len(s.args) > 1 and s.op not in ("mm", "mv", "dot", "outer", "bmm", "cat", "stack"):
            shape, args = tensors[s.out].shape, []
            for name in s.args:
                if tensors[name].shape == shape or len(shape) > 4:
                    args.append(name)
                    continue
                copies += 1
                rows.append(Apply((f"e{copies}",), "expand", (name,), (("shape", shape),)))
                args.append(f"e{copies}")
            s = replace(s, args=tuple(args))
        rows.append(s)
    return Program(tuple(rows)) if copies else None


def one_by_one(program: Program, tensors: dict[str, Paper]) -> Program | None:
    """Outputs of unbind, split and chunk that are used are taken one at a time; None if there are no such ops."""
    read = {name for s in program for name in reads(s)}
    rows: list[Statement] = []
    found = False
    for s in program:
        if not (isinstance(s, Apply) and s.op in ("unbind", "split", "chunk")):
            rows.append(s)
            continue
        found, dim, start = True, dict(s.params)["dim"], 0
        for i, out in enumerate(s.outs):
            if s.op == "unbind":
                params: tuple[tuple[str, object], ...] = (("dim", dim), ("index", i))
            else:
                length = tensors[out].shape[dim]  # type: ignore[index]
                params = (("dim", dim), ("start", start), ("length", length))
                start += length
            if out in read:
                rows.append(Apply((out,), "select" if s.op == "unbind" else "narrow", s.args, params))  # type: ignore[arg-type]
    return Program(tuple(rows)) if found else None


def bypassed(program: Program, ops: Collection[str]) -> Program | None:
    """Without ops that hand on their operand unchanged; None if there are none."""
    names: dict[str, str] = {}
    rows: list[Statement] = []
    for s in program:
        s = renamed(s, names)
        if isinstance(s, Apply) and s.op in ops:
            names[s.out] = s.args[0]
        else:
            rows.append(s)
    return Program(tuple(rows)) if names else None


def compact(program: Program) -> Program:
    """The program with its tensors named a, b, c ... in the order in which they appear."""
    made = [name for s in program for name in writes(s)]
    return Program(tuple(renamed(s, dict(zip(made, _names(len(made)), strict=True))) for s in program))


def _names(count: int) -> Sequence[str]:
    letters = "abcdefhijklmnopqrstuvwxyz"  # no g: results of autograd.grad are named g0, g1 ...
    return [letters[i] if i < len(letters) else f"{letters[i % len(letters)]}{i // len(letters)}" for i in range(count)]


def inserted(program: Program, at: int, statements: Iterable[Statement]) -> Program:
    """The program with statements put in before statement ``at``."""
    rows = program.statements
    return Program((*rows[:at], *statements, *rows[at:]))
