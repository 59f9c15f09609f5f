"""Each statement of a program as the one line of Python that it is."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

from autograd_conformance.ops import OPS
from autograd_conformance.program import (
    REWRAPS,
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Leaf,
    Pass,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
    layout_source,
)


def statement_source(statement: Statement, device: str = "cpu") -> str:
    """The line of Python that runs the statement where ``torch`` and the names it reads are bound.

    The gradients that a :class:`Grad` returns are not bound to a name; see :func:`line_source`.
    """
    match statement:
        case Leaf():
            line = f"{statement.name} = {_leaf(statement, device)}"
        case Apply():
            line = _apply(statement)
        case Rewrap(out=out, arg=arg, how=how):
            line = f"{out} = {REWRAPS[how][0].format(arg=arg)}"
        case DetachInPlace(arg=arg):
            line = f"{arg}.detach_()"
        case SetRequiresGrad(arg=arg, value=value, attribute=attribute):
            line = f"{arg}.requires_grad = {value}" if attribute else f"{arg}.requires_grad_({value})"
        case SetData(arg=arg, value=value):
            return f"{arg}.data = {constant_source(value, device)}"
        case SetGrad():
            line = _set_grad(statement, device)
        case Write(arg=arg):
            line = f"with torch.no_grad(): {arg}.mul_(2.0)"
        case Backward():
            line = _backward(statement, device)
        case Grad():
            line = _grad(statement, device)
    return line


def line_source(index: int, statement: Statement, device: str = "cpu") -> str:
    """The line of the statement at ``index``; what a :class:`Grad` there returns is named ``g<index>``."""
    line = statement_source(statement, device)
    return f"g{index} = {line}" if isinstance(statement, Grad) else line


def constant_source(constant: Constant, device: str = "cpu", *, requires_grad: bool = False) -> str:
    """The call that makes the tensor; ``device=`` and ``requires_grad=`` only where they are not the default."""
    options = [f"dtype=torch.{constant.dtype}"]
    options += [] if device == "cpu" else [f"device={device!r}"]
    options += ["requires_grad=True"] if requires_grad else []
    if not prod(constant.shape):
        return f"torch.zeros({', '.join([str(constant.shape), *options])})"
    return f"torch.tensor({', '.join([_numbers(constant.nested(), constant.dtype), *options])})"


def _numbers(nested: Any, dtype: str) -> str:
    if isinstance(nested, list):
        return f"[{', '.join(_numbers(item, dtype) for item in nested)}]"
    if dtype == "bool":
        return repr(bool(nested))
    if dtype.startswith(("int", "uint")):
        return repr(int(nested))
    return repr(float(nested)) if isfinite(nested) else f'float("{float(nested)!r}")'


def _leaf(leaf: Leaf, device: str) -> str:
    stored, view = layout_source(leaf)
    if not view:
        return constant_source(stored, device, requires_grad=leaf.requires_grad)
    flag = ".requires_grad_()" if leaf.requires_grad else ""
    return constant_source(stored, device) + view + flag


def _apply(statement: Apply) -> str:
    op = OPS[statement.op]
    outs = ", ".join(statement.outs)
    if len(statement.outs) == 1 and op.kind == "several":
        outs = f"({outs},)"
    line = f"{outs} = {op.source(statement.args, dict(statement.params))}"
    return f"with torch.no_grad(): {line}" if statement.no_grad else line


def _set_grad(statement: SetGrad, device: str) -> str:
    grad = f"{statement.arg}.grad"
    if statement.how == "zero":
        return f"if {grad} is not None: {grad}.zero_()"
    if statement.how == "none" or statement.value is None:
        return f"{grad} = None"
    return f"{grad} = {constant_source(statement.value, device)}"


def _backward(statement: Backward, device: str) -> str:
    inputs = None if statement.inputs is None else f"inputs={_list(statement.inputs)}"
    if len(statement.roots) > 1:
        return f"torch.autograd.backward({_arguments(_list(statement.roots), statement, device, inputs)})"
    return f"{statement.roots[0]}.backward({_arguments('', statement, device, inputs)})"


def _grad(statement: Grad, device: str) -> str:
    roots = _list(statement.roots) if len(statement.roots) > 1 else statement.roots[0]
    flags = [name for name in ("allow_unused", "materialize_grads") if getattr(statement, name)]
    more = ", ".join(f"{name}=True" for name in flags)
    return f"torch.autograd.grad({_arguments(f'{roots}, {_list(statement.inputs)}', statement, device, more)})"


def _arguments(first: str, statement: Pass, device: str, last: str | None) -> str:
    """The arguments that all passes share, between those that they do not; nothing that is the default."""
    retain = statement.retain_graph
    parts = [
        first,
        _seeds(statement, device),
        "" if retain is None else f"retain_graph={retain}",
        "create_graph=True" if statement.create_graph else "",
        last,
    ]
    return ", ".join(filter(None, parts))


def _seeds(statement: Pass, device: str) -> str:
    if all(seed is None for seed in statement.seeds):
        return ""
    seeds = ["None" if seed is None else constant_source(seed, device) for seed in statement.seeds]
    return seeds[0] if len(statement.roots) == 1 else f"[{', '.join(seeds)}]"


def _list(names: tuple[str, ...]) -> str:
    return f"[{', '.join(names)}]"
