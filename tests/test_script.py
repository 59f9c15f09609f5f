"""The printer: a statement is one line that Python compiles, a counterexample a script that tells fault from health."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from autograd_conformance.ops import TABLE
from autograd_conformance.program import (
    LAYOUTS,
    REWRAPS,
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
)
from autograd_conformance.reports.script import program_source, repro, repro_name, statement_source
from autograd_conformance.verdicts import Counterexample, Violation

RUNNER = """
import contextlib, io, json, sys
import torch

for name, source in json.load(sys.stdin).items():
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
        except SystemExit as stop:
            code = int(stop.code)
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    print(json.dumps([name, code, out.getvalue()]))
"""

PAIR = Constant((2,), "float64", (0.5, -1.25))
SQUARE = Constant((2, 2), "float32", (1.0, 2.0, 3.0, 4.0))
ONE = Constant((), "float64", (1.0,))

LINES: list[tuple[Statement, str]] = [
    (Leaf("a", PAIR, True), "a = torch.tensor([0.5, -1.25], dtype=torch.float64, requires_grad=True)"),
    (Leaf("a", ONE), "a = torch.tensor(1.0, dtype=torch.float64)"),
    (Leaf("a", Constant((0, 3), "float64", ())), "a = torch.zeros((0, 3), dtype=torch.float64)"),
    (Leaf("a", Constant((2,), "int64", (1.0, -2.0))), "a = torch.tensor([1, -2], dtype=torch.int64)"),
    (Leaf("a", Constant((2,), "bool", (1.0, 0.0))), "a = torch.tensor([True, False], dtype=torch.bool)"),
    (
        Leaf("a", Constant((2,), "float32", (nan, -inf))),
        'a = torch.tensor([float("nan"), float("-inf")], dtype=torch.float32)',
    ),
    (
        Leaf("a", PAIR, True, "strided"),
        "a = torch.tensor([0.5, 0.0, -1.25, 0.0], dtype=torch.float64)[..., ::2].requires_grad_()",
    ),
    (Apply(("c",), "add", ("a", "b")), "c = a + b"),
    (Apply(("c", "d"), "unbind", ("a",), (("dim", 0),)), "c, d = a.unbind(0)"),
    (Apply(("c",), "unbind", ("a",), (("dim", 0),)), "(c,) = a.unbind(0)"),
    (Apply(("c",), "cat", ("a", "b"), (("dim", 0),)), "c = torch.cat((a, b), dim=0)"),
    (Apply(("c",), "add", ("a", "b"), no_grad=True), "with torch.no_grad(): c = a + b"),
    (Rewrap("b", "a", "parameter"), "b = torch.nn.Parameter(a)"),
    (DetachInPlace("a"), "a.detach_()"),
    (SetRequiresGrad("a", False), "a.requires_grad_(False)"),
    (SetRequiresGrad("a", True, attribute=True), "a.requires_grad = True"),
    (SetGrad("a", "none"), "a.grad = None"),
    (SetData("a", PAIR), "a.data = torch.tensor([0.5, -1.25], dtype=torch.float64)"),
    (SetGrad("a", "zero"), "if a.grad is not None: a.grad.zero_()"),
    (SetGrad("a", "assign", PAIR), "a.grad = torch.tensor([0.5, -1.25], dtype=torch.float64)"),
    (Write("a"), "with torch.no_grad(): a.mul_(2.0)"),
    (Backward(("c",)), "c.backward()"),
    (
        Backward(("c",), (ONE,), True, True, ("a",)),
        "c.backward(torch.tensor(1.0, dtype=torch.float64), retain_graph=True, create_graph=True, inputs=[a])",
    ),
    (Backward(("c",), retain_graph=False), "c.backward(retain_graph=False)"),
    (Backward(("c", "d"), (None, None)), "torch.autograd.backward([c, d])"),
    (
        Backward(("c", "d"), (ONE, None), inputs=("a", "b")),
        "torch.autograd.backward([c, d], [torch.tensor(1.0, dtype=torch.float64), None], inputs=[a, b])",
    ),
    (Grad(("c",), ("a", "b")), "torch.autograd.grad(c, [a, b])"),
    (
        Grad(("c", "d"), ("a",), (None, None), True, True, True, True),
        "torch.autograd.grad([c, d], [a], retain_graph=True, create_graph=True, "
        "allow_unused=True, materialize_grads=True)",
    ),
]

# a = [0.5, -1.25]; b = a * 2; c = b.sum(); c.backward(): a.grad is [2, 2], and nothing was saved.
SUM = (
    Leaf("a", PAIR, True),
    Apply(("b",), "double", ("a",)),
    Apply(("c",), "sum", ("b",)),
    Backward(("c",)),
)


def _example(at: int, raised: tuple[int, ...] = (), tail: tuple[Statement, ...] = (), **fields: Any) -> Counterexample:
    violation = Violation("area.some-claim", at, seen="whatever", because="nothing else is possible", **fields)
    return Counterexample(Program(SUM + tail), violation, raised)


AGAIN = (Apply(("d",), "square", ("a",)), Apply(("e",), "sum", ("d",)), Backward(("e",)), Backward(("e",)))
NOTHING = (Leaf("z", Constant((0, 3), "float64", ()), True), Apply(("s",), "sum", ("z",)), Backward(("s",)))
SECOND = {"at": 7, "tail": AGAIN, "check": "raises", "probe": ""}
FILLED = {"at": 3, "check": "close", "probe": "a.grad", "tolerance": 1e-9}

# name: (exit code on a healthy torch, what is printed as due and seen, the counterexample)
CASES: dict[str, tuple[int, str, Counterexample]] = {
    "equal, healthy": (0, "True True", _example(3, probe="a.is_leaf", due="True")),
    "equal, faulty": (1, "False True", _example(3, probe="a.is_leaf", due="False")),
    "equal, none due": (1, "None tensor([2., 2.], dtype=torch.float64)", _example(3, probe="a.grad", due="None")),
    "before": (0, "None None", _example(3, probe="held", due="None", before="held = a.grad")),
    "close, healthy": (0, "[2.0, 2.0000000001] [2.0, 2.0]", _example(**FILLED, due="[2.0, 2.0000000001]")),
    "close, faulty": (1, "[2.0, 3.0] [2.0, 2.0]", _example(**FILLED, due="[2.0, 3.0]")),
    "close, other shape": (1, "[[2.0, 2.0]] [2.0, 2.0]", _example(**FILLED, due="[[2.0, 2.0]]")),
    "close, missing": (1, "[2.0] None", _example(**FILLED | {"at": 2}, due="[2.0]")),
    "close, none due": (0, "None None", _example(**FILLED | {"at": 2}, due="None")),
    "close, none but some": (
        1, "None tensor([2., 2.], dtype=torch.float64)", _example(**FILLED, due="None")
    ),
    "close, scalar": (0, "-1.5 -1.5", _example(**FILLED | {"at": 2, "probe": "c"}, due="-1.5")),
    "close, no elements": (0, "[] []", _example(**FILLED | {"at": 6, "probe": "z.grad"}, tail=NOTHING, due="[]")),
    "close, nan due": (1, "[nan, 2.0] [2.0, 2.0]", _example(**FILLED, due="[nan, 2.0]")),
    "close, nan seen": (
        0, "[nan, -inf] [nan, -inf]",
        _example(**FILLED | {"probe": "a.new_tensor([float('nan'), -float('inf')])"}, due='[float("nan"), -inf]'),
    ),
    "raises, healthy": (0, "RuntimeError RuntimeError(", _example(**SECOND, due="RuntimeError")),
    "raises, subclass": (0, "Exception RuntimeError(", _example(**SECOND, due="Exception")),
    "raises, other class": (1, "ValueError RuntimeError(", _example(**SECOND, due="ValueError")),
    "raises, message": (0, "RuntimeError: second time RuntimeError(", _example(**SECOND, due="RuntimeError: second time")),
    "raises, other message": (1, "RuntimeError: sad RuntimeError(", _example(**SECOND, due="RuntimeError: sad")),
    "raises, class without name": (1, "CheckpointError RuntimeError(", _example(**SECOND, due="CheckpointError")),
    "raises, one of two": (0, "Own | RuntimeError RuntimeError(", _example(**SECOND, due="Own | RuntimeError")),
    "raises, none due": (1, "None RuntimeError(", _example(**SECOND, due="None")),
    "raises not": (1, "RuntimeError None", _example(**SECOND | {"at": 6}, due="RuntimeError")),
    "raised on the way": (
        0, "[3.0, -0.5] [3.0, -0.5]",
        _example(**FILLED | {"at": 8}, raised=(7,), tail=(*AGAIN, Write("b")), due="[3.0, -0.5]"),
    ),
    "raised by the judged": (
        0, "[3.0, -0.5] [3.0, -0.5]", _example(**FILLED | {"at": 7}, raised=(7,), tail=AGAIN, due="[3.0, -0.5]")
    ),
    "gradient returned": (
        0, "[1.0, -2.5] [1.0, -2.5]",
        _example(**FILLED | {"at": 6, "probe": "g6[0]"}, tail=(*AGAIN[:2], Grad(("e",), ("a",))), due="[1.0, -2.5]"),
    ),
}  # fmt: skip


def _ran(sources: dict[str, str]) -> dict[str, tuple[int | str, str]]:
    """Exit code and output of every script, all in one child process."""
    child = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(sources), capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    return {name: (code, out) for name, code, out in rows}


@pytest.fixture(scope="module")
def ran() -> dict[str, tuple[int | str, str]]:
    """All that this file runs under torch, at the price of one import."""
    sources = {name: repro(case[2], "A sentence.", "a source") for name, case in CASES.items()}
    for layout in LAYOUTS:
        leaf = Leaf("a", _layout_data(layout), True, layout)
        sources[layout] = program_source(Program((leaf,))) + "print(a.tolist(), a.stride(), a.is_leaf, a.requires_grad)"
    return _ran(sources)


def _layout_data(layout: str) -> Constant:
    return Constant((2, 2), "float32", (1.0, 2.0, 1.0, 2.0)) if layout == "expanded" else SQUARE


@pytest.mark.parametrize(("statement", "line"), LINES, ids=[line for _, line in LINES])
def test_statement_is_one_line_that_compiles(statement: Statement, line: str) -> None:
    """A statement prints as exactly this line, and Python compiles it."""
    assert statement_source(statement) == line
    compile(line, "statement", "exec")


@pytest.mark.parametrize("how", REWRAPS)
def test_every_rewrap_compiles(how: str) -> None:
    """Each way to wrap a tensor anew prints a line that binds the new name."""
    line = statement_source(Rewrap("b", "a", how))
    assert line.startswith("b = ")
    compile(line, "rewrap", "exec")


@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_every_op_compiles(op: Any) -> None:
    """Each op of the table prints one line that binds its output."""
    shapes = [(2, 2)] * max(op.arity, 2 if op.arity < 0 else 1)
    params = op.params(shapes, 1, 1) or op.params([(2,)] * len(shapes), 1, 1) or op.params([(1, 2)], 0, 0)
    if params is None:
        params = op.params([(1, 2, 2)] * len(shapes), 0, 0)
    assert params is not None
    line = statement_source(Apply(("y",), op.name, tuple("abc"[: len(shapes)]), tuple(params.items())))
    assert line.startswith(("y = ", "(y,) = "))
    compile(line, "op", "exec")


def test_device_is_named_only_where_it_is_not_the_default() -> None:
    """A tensor made elsewhere than on the CPU says where; so does a seed."""
    assert statement_source(Leaf("a", ONE, True), "cuda:0") == (
        "a = torch.tensor(1.0, dtype=torch.float64, device='cuda:0', requires_grad=True)"
    )
    assert "device='lazy'" in statement_source(Backward(("c",), (ONE,)), "lazy")
    assert "device" not in statement_source(Leaf("a", ONE))


def test_returned_gradients_have_a_name() -> None:
    """What the statement at index 1 returns is bound to g1."""
    text = program_source(Program((Leaf("a", ONE, True), Grad(("a",), ("a",)))))
    assert text.splitlines()[-1] == "g1 = torch.autograd.grad(a, [a])"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_values_and_strides(layout: str, ran: dict[str, tuple[int | str, str]]) -> None:
    """A leaf has its own values whatever its memory looks like, and the strides that the layout stands for."""
    strides = {"permuted": (1, 2), "strided": (4, 2), "expanded": (0, 1)}.get(layout, (2, 1))
    assert ran[layout] == (0, f"{_layout_data(layout).nested()} {strides} True True\n")


@pytest.mark.parametrize("name", CASES)
def test_script_tells_fault_from_health(name: str, ran: dict[str, tuple[int | str, str]]) -> None:
    """On a healthy torch a script exits 0 if what it says was due is right and 1 if it is wrong, and prints both."""
    code, shown, _ = CASES[name]
    got, out = ran[name]
    assert got == code, out
    due, seen = out.splitlines()
    assert f"{due.removeprefix('due:').strip()} {seen.removeprefix('seen:').strip()}".startswith(shown)


def test_script_is_a_file_to_run(tmp_path: Path) -> None:
    """Run as people run it, a script exits 1 while the fault is there."""
    path = tmp_path / "repro.py"
    path.write_text(repro(CASES["close, faulty"][2], "A sentence.", "a source"), encoding="utf-8")
    child = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (1, "due:  [2.0, 3.0]\nseen: [2.0, 2.0]\n"), child.stderr


@pytest.mark.parametrize("name", CASES)
def test_script_imports_torch_alone(name: str) -> None:
    """The only import of a script is torch."""
    tree = ast.parse(repro(CASES[name][2], "A sentence.", "a source"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["import torch"]


def test_script_stops_at_the_judged_statement() -> None:
    """Statements after the one that is judged are left out."""
    text = repro(CASES["close, missing"][2], "A sentence.", "a source")
    assert "c = b.sum()" in text
    assert "backward" not in text


def test_header_argues_and_cannot_be_broken_out_of() -> None:
    """The head of the script says what is promised, where and why; a hostile sentence stays a comment."""
    text = repro(CASES["equal, faulty"][2], 'First.\nimport os\u2028os.abort() """ \\', "docs\nnotes", "lazy", "init()")
    head = text.split("\n\nimport torch\ninit()\n")[0]
    assert all(line.startswith("# ") for line in head.split("\n"))
    for part in ("area.some-claim, on lazy", "First. import os", "docs notes", "nothing else is possible"):
        assert part in head


def test_script_on_a_device_runs_its_setup_line_after_the_import() -> None:
    """The line that makes a device known follows the import at once."""
    text = repro(CASES["equal, faulty"][2], "", "", "npy", "import npy_device")
    assert "import torch\nimport npy_device\n" in text
    assert "device='npy'" in text


def test_name_is_made_of_claim_and_digest() -> None:
    """The file name holds nothing that a shell or a file system could trip over."""
    example = CASES["equal, faulty"][2]
    assert repro_name(example) == f"repro_area_some_claim_{example.program.digest()}.py"
