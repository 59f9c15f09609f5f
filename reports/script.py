"""Programs and counterexamples as straight-line scripts that import torch alone."""

from __future__ import annotations

import ast
import builtins
import re

from autograd_conformance.ops.added import imports
from autograd_conformance.program import Program
from autograd_conformance.reports.statements import line_source, statement_source
from autograd_conformance.reports.text import labelled
from autograd_conformance.scene import Scene
from autograd_conformance.verdicts import Counterexample, Violation

__all__ = ["program_source", "repro", "repro_name", "statement_source"]

_TENSOR = "seen = None if seen is None else seen.detach().cpu().double()"
# What ast.parse raises: also lone surrogates, null bytes, and brackets nested too deep.
_NO_LITERAL = (SyntaxError, ValueError, RecursionError, MemoryError)
_FAR = "seen is None or seen.shape != due.shape or not torch.allclose(seen, due, rtol=0.0, atol={}, equal_nan=True)"


def program_source(program: Program, device: str = "cpu") -> str:
    """The whole program: ``import torch``, then one statement a line."""
    lines = [line_source(index, statement, device) for index, statement in enumerate(program)]
    return "\n".join(["import torch", *imports(lines), "", *lines, ""])


def repro(example: Counterexample, sentence: str, source: str, device: str = "cpu", setup: str = "") -> str:
    """A script that shows the fault: prints due and seen, exits 1 while it is there and 0 once it is gone.

    Args:
        example: the program and what it breaks.
        sentence: what the claim promises.
        source: where that is promised.
        device: where the tensors are made.
        setup: the line of Python that makes the device known to torch, if it needs one.

    """
    violation = example.violation
    statements = _lines(example.program, device)
    brought = [*imports(statements), *([setup] if setup else [])]
    lines = [*_header(example, sentence, source, device), "", "import torch", *brought, ""]
    for index, statement in enumerate(statements[: violation.at]):
        lines += _guarded(statement, index in example.raised)
    lines += [violation.before] if violation.before else []
    judged = _bound(statements[violation.at], violation)
    if violation.check == "raises" and not violation.probe:
        lines += _attempt(judged)
    else:
        lines += [*_guarded(judged, violation.at in example.raised), "", *_look(violation)]
    return "\n".join([*lines, *_verdict(violation), ""])


def _lines(program: Program | Scene, device: str) -> list[str]:
    if isinstance(program, Scene):
        return list(program.lines)
    return [line_source(index, statement, device) for index, statement in enumerate(program)]


def _bound(line: str, violation: Violation) -> str:
    """The judged line with what the probe asks for by name: a value that ``before`` binds, or what the call returns."""
    name, _, value = violation.before.partition(" = ")
    if value and value in line:
        line = line.replace(value, name)
    return f"returned = {line}" if re.search(r"\breturned\b", violation.probe) else line


def repro_name(example: Counterexample) -> str:
    """File name of the script: ``repro_<claim>_<digest of the program>.py``, letters, digits and ``_`` only."""
    claim = re.sub(r"[^0-9A-Za-z]", "_", example.violation.claim)
    return f"repro_{claim}_{example.program.digest()}.py"


def _header(example: Counterexample, sentence: str, source: str, device: str) -> list[str]:
    rows = [
        ("Broken:", f"{example.violation.claim}, on {device}"),
        ("Promise:", sentence),
        ("Source:", source),
        ("Here:", example.violation.because),
        ("Changed:", "; ".join(example.changes)),
        ("Unsteady:", f"seen {example.seen} times out of {example.tried}" if example.seen < example.tried else ""),
        ("Exit:", "1 while the fault is there, 0 once it is gone."),
    ]
    return [line for label, text in rows if text for line in labelled(label, text, prefix="# ", width=100)]


def _guarded(line: str, raises: bool) -> list[str]:
    if not raises:
        return [line]
    return ["try:", *_indented(line), "except Exception:", "    pass  # not the fault in question"]


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _attempt(line: str) -> list[str]:
    return ["", "seen = None", "try:", *_indented(line), "except Exception as error:", "    seen = error", ""]


def _look(violation: Violation) -> list[str]:
    """Bind what was seen, and what was due unless the check is for an exception."""
    if violation.check == "raises":
        return _attempt(violation.probe)[1:]
    lines = [f"seen = {violation.probe}"]
    if violation.check == "close" and violation.due != "None":
        lines += [_TENSOR] if _has_numbers(violation.due) else ["seen = None if seen is None else seen.tolist()"]
    due = f"torch.tensor({violation.due}, dtype=torch.float64)" if _by_tensor(violation) else violation.due
    names = ['inf, nan = float("inf"), float("nan")'] if _names_non_finite(violation.due) else []
    return [*lines, *names, f"due = {due}", ""]


def _verdict(violation: Violation) -> list[str]:
    """Print both, then exit by what the comparison says."""
    if violation.check == "raises":
        text = f'"due:  {violation.due}"' if '"' not in violation.due else repr(f"due:  {violation.due}")
        return [f"print({text})", 'print("seen:", repr(seen))', f"raise SystemExit({_raised_other(violation.due)})"]
    if _by_tensor(violation):
        shown = ['print("due: ", due.tolist())', 'print("seen:", None if seen is None else seen.tolist())']
        return [*shown, f"far = {_FAR.format(violation.tolerance)}", "raise SystemExit(far)"]
    fault = "seen is not None" if violation.due == "None" else "seen != due"
    return ['print("due: ", due)', 'print("seen:", seen)', f"raise SystemExit({fault})"]


def _raised_other(due: str) -> str:
    """The source of: ``seen`` is not the exception that was due."""
    if due == "None":
        return "seen is not None"
    classes, _, fragment = due.partition(": ")
    names = classes.split(" | ")
    if all(hasattr(builtins, name) for name in names):
        other = f"not isinstance(seen, {classes})"
    else:  # the script has no name for the class
        other = f"not {{{', '.join(map(repr, names))}}} & {{c.__name__ for c in type(seen).__mro__}}"
    return f"{other} or {fragment!r} not in str(seen)" if fragment else other


def _by_tensor(violation: Violation) -> bool:
    """Numbers are compared as tensors, what has none (``None``, an empty tensor) as it is."""
    return violation.check == "close" and violation.due != "None" and _has_numbers(violation.due)


def _has_numbers(literal: str) -> bool:
    """Is there any element in the nested lists? Anything that is no literal counts as one."""
    try:
        nodes = list(ast.walk(ast.parse(literal, mode="eval")))
    except _NO_LITERAL:
        return True
    return any(not isinstance(node, ast.Expression | ast.List | ast.Load) for node in nodes)


def _names_non_finite(literal: str) -> bool:
    """Does the literal use the bare names that ``repr`` gives to floats that are not finite?"""
    try:
        nodes = ast.walk(ast.parse(literal, mode="eval"))
    except _NO_LITERAL:
        return False
    return any(isinstance(node, ast.Name) and node.id in ("inf", "nan") for node in nodes)
