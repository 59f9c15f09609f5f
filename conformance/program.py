"""The words: a program is a tuple of statements, plain frozen data, complete before anything runs.

Knows neither torch nor hypothesis. Dtypes are strings in torch's spelling without the prefix (``"float64"``),
values are Python floats in row-major order, tensors are named by strings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

Shape = tuple[int, ...]
Param = int | float | bool | str | tuple[Any, ...] | None

Layout = Literal["contiguous", "permuted", "strided", "offset", "expanded"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
FORMAT = 1


class ProgramError(ValueError):
    """A stored program that cannot be read; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Numbers to make a tensor from: ``len(values) == prod(shape)``, row-major."""

    shape: Shape
    dtype: str
    values: tuple[float, ...]

    def nested(self) -> Any:
        """The values as nested lists, as ``torch.tensor`` reads them; a bare number for 0-dim."""
        return _nest(self.values, self.shape)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the user makes; ``layout`` says how its memory lies (see :func:`layout_source`)."""

    name: str
    data: Constant
    requires_grad: bool = False
    layout: Layout = "contiguous"


@dataclass(frozen=True, slots=True)
class Apply:
    """An op of the op table: ``outs = op(*args, **params)``, recorded unless ``no_grad``."""

    outs: tuple[str, ...]
    op: str
    args: tuple[str, ...]
    params: tuple[tuple[str, Param], ...] = ()
    no_grad: bool = False

    @property
    def out(self) -> str:
        """The only output, or the first of several."""
        return self.outs[0]


@dataclass(frozen=True, slots=True)
class Rewrap:
    """A tensor made from a tensor in a way that is no op: ``detach``, ``data``, ``Parameter`` ... (table REWRAPS)."""

    out: str
    arg: str
    how: str


@dataclass(frozen=True, slots=True)
class DetachInPlace:
    """``arg.detach_()``."""

    arg: str


@dataclass(frozen=True, slots=True)
class SetRequiresGrad:
    """``arg.requires_grad_(value)``, or the attribute assignment ``arg.requires_grad = value``."""

    arg: str
    value: bool
    attribute: bool = False


@dataclass(frozen=True, slots=True)
class SetGrad:
    """``arg.grad = None``, ``arg.grad.zero_()`` (nothing if it is None), or ``arg.grad = tensor``."""

    arg: str
    how: Literal["none", "zero", "assign"]
    value: Constant | None = None


@dataclass(frozen=True, slots=True)
class SetData:
    """``arg.data = tensor``: a leaf gets new memory, behind the back of autograd."""

    arg: str
    value: Constant


@dataclass(frozen=True, slots=True)
class Write:
    """A write that autograd does not record: ``with torch.no_grad(): arg.mul_(2.0)``."""

    arg: str


@dataclass(frozen=True, slots=True)
class Backward:
    """``torch.autograd.backward``, or the method when there is one root; seeds are the ``gradient=`` arguments."""

    roots: tuple[str, ...]
    seeds: tuple[Constant | None, ...] = (None,)
    retain_graph: bool | None = None
    create_graph: bool = False
    inputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Grad:
    """``torch.autograd.grad``: gradients are returned, nothing is accumulated."""

    roots: tuple[str, ...]
    inputs: tuple[str, ...]
    seeds: tuple[Constant | None, ...] = (None,)
    retain_graph: bool | None = None
    create_graph: bool = False
    allow_unused: bool = False
    materialize_grads: bool = False


Pass = Backward | Grad
Statement = Leaf | Apply | Rewrap | DetachInPlace | SetRequiresGrad | SetGrad | SetData | Write | Backward | Grad

# Ways to get a tensor from a tensor without an op: torch source, shares storage, requires_grad of the result.
REWRAPS: dict[str, tuple[str, bool, bool]] = {
    "detach": ("{arg}.detach()", True, False),
    "data": ("{arg}.data", True, False),
    "reattach": ("{arg}.detach().requires_grad_()", True, True),
    "copy": ("{arg}.detach().clone()", False, False),
    "tensor": ("torch.tensor({arg})", False, False),
    "tensor_tracked": ("torch.tensor({arg}, requires_grad=True)", False, True),
    "new_tensor": ("{arg}.new_tensor({arg})", False, False),
    "parameter": ("torch.nn.Parameter({arg})", True, True),
    "same": ("{arg}.to({arg}.dtype)", True, False),  # nothing to convert: the tensor itself
}

_KINDS: dict[str, type] = {
    "leaf": Leaf,
    "apply": Apply,
    "rewrap": Rewrap,
    "detach_": DetachInPlace,
    "requires_grad": SetRequiresGrad,
    "set_grad": SetGrad,
    "set_data": SetData,
    "write": Write,
    "backward": Backward,
    "grad": Grad,
}
_KIND_OF = {cls: kind for kind, cls in _KINDS.items()}
_FIELDS = {cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in (*_KINDS.values(), Constant)}


@dataclass(frozen=True, slots=True)
class Program:
    """A whole program: statements in the order in which they run."""

    statements: tuple[Statement, ...]

    def __iter__(self) -> Iterator[Statement]:
        return iter(self.statements)

    def __len__(self) -> int:
        return len(self.statements)

    def size(self) -> int:
        """Statements that a reader has to think about: leaves and all passes but the first are not counted."""
        passes = sum(isinstance(s, Backward | Grad) for s in self)
        return sum(not isinstance(s, Leaf) for s in self) - max(0, passes - 1)

    def digest(self) -> str:
        """Twelve hex digits that name this program on every machine."""
        text = "\n".join(map(_text, self.statements))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Canonical JSON text: equal programs give equal text."""
        body = {"format": FORMAT, "statements": [_plain(s) for s in self]}
        return json.dumps(body, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program that :meth:`to_json` wrote.

        Raises:
            ProgramError: the text is not JSON, or not of this format.

        """
        try:
            body = json.loads(text)
        except ValueError as error:
            raise ProgramError(f"not JSON: {error}") from None
        if not isinstance(body, dict) or "statements" not in body:
            raise ProgramError("not a program: no 'statements'")
        if not isinstance(body["statements"], list):
            raise ProgramError(f"'statements' is no list but {body['statements']!r:.40}")
        if body.get("format") != FORMAT:
            raise ProgramError(f"program format {body.get('format')!r}, this version reads {FORMAT}")
        return cls(tuple(_statement(row) for row in body["statements"]))


def reads(statement: Statement) -> tuple[str, ...]:
    """Names of the tensors that a statement uses."""
    match statement:
        case Leaf():
            return ()
        case Apply(args=args):
            return args
        case Backward(roots=roots, inputs=inputs):
            return roots + (inputs or ())
        case Grad(roots=roots, inputs=inputs):
            return roots + inputs
        case _:
            return (statement.arg,)


def writes(statement: Statement) -> tuple[str, ...]:
    """Names of the tensors that a statement makes."""
    match statement:
        case Leaf(name=name):
            return (name,)
        case Apply(outs=outs):
            return outs
        case Rewrap(out=out):
            return (out,)
        case _:
            return ()


def renamed(statement: Statement, names: Mapping[str, str]) -> Statement:
    """The statement with every tensor name replaced that ``names`` knows."""

    def new(name: str) -> str:
        return names.get(name, name)

    def news(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(new, group))

    match statement:
        case Leaf():
            return dataclasses.replace(statement, name=new(statement.name))
        case Apply():
            return dataclasses.replace(statement, outs=news(statement.outs), args=news(statement.args))
        case Rewrap():
            return dataclasses.replace(statement, out=new(statement.out), arg=new(statement.arg))
        case Backward():
            inputs = None if statement.inputs is None else news(statement.inputs)
            return dataclasses.replace(statement, roots=news(statement.roots), inputs=inputs)
        case Grad():
            return dataclasses.replace(statement, roots=news(statement.roots), inputs=news(statement.inputs))
        case _:
            return dataclasses.replace(statement, arg=new(statement.arg))


def layout_source(leaf: Leaf) -> tuple[Constant, str]:
    """The numbers to store and the source of the view that gives the leaf its value in that memory.

    The view source is empty for contiguous memory. A layout that a shape cannot have (0-dim, say) is contiguous.
    """
    view, data, shape = layout_view(leaf), leaf.data, leaf.data.shape
    if not view:
        return data, ""
    if leaf.layout == "permuted":
        moved = tuple(_permuted(data.values, shape))
        return Constant(tuple(reversed(shape)), data.dtype, moved), view
    if leaf.layout == "strided":
        spread = tuple(v for value in data.values for v in (value, 0.0))
        return Constant((*shape[:-1], shape[-1] * 2), data.dtype, spread), view
    if leaf.layout == "offset":
        row = (0.0,) * prod(shape[1:])
        return Constant((shape[0] + 1, *shape[1:]), data.dtype, row + data.values), view
    row = data.values[: prod(shape[1:])]
    return Constant((1, *shape[1:]), data.dtype, row), view


def layout_view(leaf: Leaf) -> str:
    """The source of the view alone."""
    shape = leaf.data.shape
    if not shape or leaf.layout == "contiguous":
        return ""
    if leaf.layout == "permuted":
        return f".permute({tuple(reversed(range(len(shape))))})" if len(shape) > 1 else ""
    if leaf.layout == "expanded":
        return f".expand({shape})" if shape[0] > 1 else ""
    return "[..., ::2]" if leaf.layout == "strided" else "[1:]"


def _permuted(values: tuple[float, ...], shape: Shape) -> Iterator[float]:
    """Row-major values of the tensor with its dimensions reversed."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    offsets = [0]
    for size, stride in zip(shape, strides, strict=True):
        offsets = [o + i * stride for i in range(size) for o in offsets]
    return (values[o] for o in offsets)


def _nest(values: tuple[float, ...], shape: Shape) -> Any:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return list(values)
    step = prod(shape[1:])
    return [_nest(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _text(statement: Statement) -> str:
    """One line that tells statements apart; a good deal faster than JSON."""
    if type(statement) is Apply:
        return f"{statement.outs}{statement.op}{statement.args}{statement.params}{statement.no_grad}"
    if type(statement) is Leaf:
        data = statement.data
        return f"{statement.name}{data.shape}{data.dtype}{data.values}{statement.requires_grad}{statement.layout}"
    return repr(statement)


def _plain(statement: Statement) -> list[Any]:
    return [_KIND_OF[type(statement)], *_values(statement)]


def _values(record: Any) -> list[Any]:
    fields = (getattr(record, name) for name in _FIELDS[type(record)])
    return [_value(field) for field in fields]


def _value(field: Any) -> Any:
    if type(field) is Constant:
        return _values(field)
    if type(field) is tuple and field and type(field[0]) is Constant:
        return [_value(item) for item in field]
    if type(field) is tuple and any(type(item) is Constant for item in field):
        return [_value(item) for item in field]
    return field


def _statement(row: Any) -> Statement:
    if not isinstance(row, list) or not row or not isinstance(row[0], str) or row[0] not in _KINDS:
        known = ", ".join(_KINDS)
        raise ProgramError(f"unknown statement {row!r:.80}; known kinds: {known}")
    cls = _KINDS[row[0]]
    names = _FIELDS[cls]
    if len(row) != len(names) + 1:
        raise ProgramError(f"statement {row[0]!r} has {len(row) - 1} fields, want {len(names)} ({', '.join(names)})")
    try:
        fields = {name: _parsed(name, value) for name, value in zip(names, row[1:], strict=True)}
    except (TypeError, ValueError) as error:
        raise ProgramError(f"statement {row[0]!r}: {error}") from None
    statement: Statement = cls(**fields)
    return statement


def _parsed(name: str, value: Any) -> Any:
    if name == "data" or (name == "value" and isinstance(value, list)):
        shape, dtype, values = value
        return Constant(tuple(shape), dtype, tuple(values))
    if name == "seeds":
        return tuple(None if seed is None else _parsed("data", seed) for seed in value)
    return _tupled(value)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
