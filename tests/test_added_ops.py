"""Ops that users bring along: mistakes in one line, their ops in every sort of program, a wrong backward found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import apart, exit_code

from autograd_conformance.devices import discover
from autograd_conformance.errors import UsageError
from autograd_conformance.families import GRAPHS, SCENES, WHOLES
from autograd_conformance.judge import ClaimCheck
from autograd_conformance.ops import ADDED, OPS
from autograd_conformance.ops.added import imports, load
from autograd_conformance.ops.trial import problem
from autograd_conformance.replay import all_checks
from autograd_conformance.reports.script import repro
from autograd_conformance.verdicts import Counterexample
from autograd_conformance.whole import family

(CPU,) = discover(["cpu"])
PAGE = Path(__file__).parents[1] / "docs" / "add-an-op.md"
SHOWN = next(text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "my_ops.py" in text)
RUN = ("run", "--device", "cpu", "--profile", "smoke", "--claims", "backward.chain-rule", "--claims", "create-graph.*")
FUNCTION = """import torch
from autograd_conformance.ops.entry import op, rising

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        {save}
        return x * x * x

    @staticmethod
    def backward(ctx, g):
        {read}
        return {result}

OPS = [op("my_cube", "{module}.Cube.apply({{a}})", lambda x: x**3, lambda A, g, y, x: g * 3.0 * x * x, "smooth",
          bounds=rising(lambda v: v**3))]
"""
SAVED = {"save": "ctx.save_for_backward(x)", "read": "(x,) = ctx.saved_tensors"}


def _console(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autograd_conformance.cli", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=300
    )


def _module(folder: Path, name: str, **parts: str) -> None:
    (folder / f"{name}.py").write_text(FUNCTION.format(module=name, **(SAVED | parts)))


# --- mistakes ---------------------------------------------------------------------------------------------------------

GOOD = 'op("my_sin", "torch.sin({a})", np.sin, lambda A, g, y, x: g * A.cos(x), "smooth", bounds=within(-1, 1))'
MISTAKES = {
    "raise ValueError('no library')": "cannot be imported: ValueError: no library (mine.py, line 3)",
    "OPS = []": "ops module 'mine' has no OPS: a list of entries made by autograd_conformance.ops.entry.op",
    "OPS = [3]": "OPS holds 3, which op(...) did not make",
    f"OPS = [{GOOD.replace('my_sin', 'sin')}]": "there is an op 'sin' already",
    f"OPS = [{GOOD}, {GOOD}]": "there is an op 'my_sin' already",
    f"OPS = [{GOOD.replace('my_sin', 'my sin')}]": "the name of an op is like that of a function, not 'my sin'",
    f"OPS = [{GOOD.replace('smooth', 'smoth')}]": "unknown kind 'smoth' in ops module 'mine', op 'my_sin'; nearest: smooth",
    f"OPS = [{GOOD.replace('lambda A, g, y, x: g * A.cos(x)', 'None')}]": "it has no vjp",
    f"OPS = [{GOOD.replace('{a}', 'x')}]": "call does not use all of its 1 operands: torch.sin(x)",
    f"OPS = [{GOOD.replace('{a}', '{b}')}]": "call raises KeyError: 'b'",
    f"OPS = [{GOOD.replace('{a})', '{a}')}]": "call is no Python expression: torch.sin(x0",
    f"OPS = [{GOOD.replace('torch.sin', 'other.sin')}]": "call names 'other', where programs know torch or mine",
    f"OPS = [{GOOD.replace('torch.sin', 'mine.sinn')}]": "call names 'mine.sinn', which is not there",
    f"OPS = [{GOOD.replace('within(-1, 1)', 'within(0, 1)')}]": "outside of what bounds says: 0 to 1",
    f"OPS = [{GOOD.replace('np.sin', 'lambda x: np.sin(x).sum()')}]": "value has shape () where shapes says (1,), for operands of (1,)",
    f"OPS = [{GOOD.replace('A.cos(x)', 'A.sin(x)')}]": "vjp is not the derivative of value:",
    f"OPS = [{GOOD.replace('A.cos(x)', 'np.cos(x)')}]": "vjp, written for numbers that can be differentiated again, raises",
    f"OPS = [{GOOD.replace('g * A.cos(x)', '(g, g)')}]": "vjp gives 2 cotangents for 1 operands",
    f"OPS = [{GOOD.replace('g * A.cos(x)', '(g * A.cos(x)).sum()')}]": "vjp gives a cotangent of shape () for an operand of shape (1,)",
    f"OPS = [{GOOD.replace('bounds', 'arity=2, shapes=lambda s: 1 / 0, bounds')}]": "call does not use all of its 2 operands",
    f"OPS = [{GOOD.replace('bounds', 'shapes=lambda s: 1 / 0, bounds')}]": "shapes raises ZeroDivisionError: division by zero",
    f"OPS = [{GOOD.replace('bounds', 'fits=lambda *_: False, bounds')}]": "allow no operands at all",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, where modules are looked for and forgotten again."""
    monkeypatch.chdir(tmp_path)
    known, path = set(sys.modules), list(sys.path)
    sys.path.append(str(tmp_path))
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(("text", "told"), list(MISTAKES.items()), ids=[told[:40] for told in MISTAKES.values()])
def test_a_mistake_is_one_line(text: str, told: str, folder: Path) -> None:
    """What is wrong, and where; nothing of the module is left in the table."""
    (folder / "mine.py").write_text(
        f"import numpy as np\nfrom autograd_conformance.ops.entry import op, within\n{text}\n"
    )
    before = dict(OPS)
    with pytest.raises(UsageError) as raised:
        load(["mine"])
    assert told in str(raised.value)
    assert "'mine'" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert before == OPS
    assert not ADDED


def test_a_module_that_is_not_there_has_a_near_one(folder: Path) -> None:
    """The modules of the folder are the choices."""
    (folder / "my_ops.py").write_text("")
    with pytest.raises(UsageError, match="unknown ops module 'my_op'; nearest: my_ops"):
        load(["my_op"])


@pytest.mark.parametrize("name", ["torch", "a", "t1", "b.c"])
def test_a_module_has_a_name_that_programs_do_not_use(name: str) -> None:
    """Else a tensor of that name would hide it."""
    with pytest.raises(UsageError, match=f"'{name}' cannot be used: programs use"):
        load([name])


@pytest.mark.parametrize("words", [("run", "--ops", "nowhere"), ("replay", "x.json", "--ops", "nowhere")])
def test_the_console_says_so_too(words: tuple[str, ...], tmp_path: Path) -> None:
    """One line, exit code 2."""
    done = _console(tmp_path, *words)
    assert (done.returncode, done.stderr) == (
        2,
        "autograd-conformance: unknown ops module 'nowhere'; there is nothing to choose from\n",
    )


def test_pytest_says_so_too(tmp_path: Path) -> None:
    """Exit code 2, before anything is collected."""
    words = ["-m", "pytest", "-q", "--pyargs", "autograd_conformance", "--conformance-ops=nowhere"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "unknown ops module 'nowhere'" in done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name, entry in OPS.items() if entry.vjp and entry.takes == "float"])
def test_the_tables_own_entries_pass_the_trial(name: str) -> None:
    """Whoever copies an entry of the table and its call is not told that it is broken."""
    entry = OPS[name]
    if entry.kind in ("view", "cast", "constant") or name in ("amax", "amin", "max_dim", "min_dim", "sort"):
        pytest.skip("not a kind that can be added, or with ties among equal numbers")
    with np.errstate(all="ignore"):
        assert not problem(entry, {})


# --- in programs ------------------------------------------------------------------------------------------------------


def _words(folder: str, name: str) -> tuple[list[int], list[str]]:
    """In how many programs of each family the added ops are, and the claims that anything breaks."""
    sys.path.append(folder)
    load([name])
    checks = all_checks()
    counts, broken = [], []
    with np.errstate(all="ignore"):
        for kind, of in ((GRAPHS, "graphs"), (SCENES, "retain-grad"), (WHOLES, "programs")):
            mine = [
                c
                for c in checks
                if of == "programs" or (c.family == of and isinstance(c, ClaimCheck) == (of == "graphs"))
            ]
            judged = [kind.judge(work, CPU, mine, examine=True) for work in kind.draw(of, 60, 1)]
            counts.append(sum("op my_cube" in [*j.words] or "op my_blend" in [*j.words] for j in judged))
            broken += [claim for j in judged for claim, (_, found) in j.found.items() if found]
    return counts, broken


def test_ops_of_the_page_are_everywhere_and_hold(tmp_path: Path) -> None:
    """In graphs, scenes and whole programs alike; known deviations aside nothing is broken."""
    (tmp_path / "my_ops.py").write_text(SHOWN)
    counts, broken = apart(_words, str(tmp_path), "my_ops")
    assert min(counts) >= 25
    assert set(broken) <= {"grad.own-memory"}


def test_without_the_option_nothing_is_added() -> None:
    """No op of the table is chosen by what users add."""
    assert not ADDED
    assert not imports(["t1 = my_ops.Cube.apply(a)"])


def _found(folder: str, name: str) -> list[tuple[str, str]]:
    """Claim and script of what whole programs find."""
    sys.path.append(folder)
    load([name])
    found = []
    with np.errstate(all="ignore"):
        for scene in family.drawn(150, 3):
            _, differ = family.examined(scene, CPU)
            if differ and len(found) < 3:
                small, violation = family.small(scene, CPU, differ[0])
                found.append((violation.claim, repro(Counterexample(small, violation, small.raising), "", "")))
    return found


WRONG = {
    "not contiguous": {"result": "g * 3.0 * x * x * (1.0 if x.is_contiguous() else 2.0)"},
    "second order": {"result": "g * (3.0 * x * x).detach()"},
    "no version check": {"save": "ctx.x = x", "read": "x = ctx.x", "result": "g * 3.0 * x * x"},
    "expanded gradient": {"result": "g * 3.0 * x * x * (1.0 if 0 not in g.stride() else 0.5)"},
}
RIGHTLY = {
    "not contiguous": {"backward.chain-rule", "create-graph.same-values"},
    "second order": {"create-graph.second-order", "create-graph.result-tracks"},
    "no version check": {"inplace.out-of-place-equivalence", "inplace.view-rebase", "optim.separate-from-backward"},
    "expanded gradient": {"backward.chain-rule", "agrad.equals-backward", "create-graph.same-values"},
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_backward_is_found(wrong: str, tmp_path: Path) -> None:
    """A small script that names the op fails, and the claim is one that fits."""
    _module(tmp_path, "wrong_ops", **WRONG[wrong])
    found = apart(_found, str(tmp_path), "wrong_ops")
    assert found
    assert {claim for claim, _ in found} <= RIGHTLY[wrong]
    script = min((text for _, text in found), key=len)
    assert "wrong_ops.Cube.apply" in script
    assert script.count("\n") < 40
    path = tmp_path / "repro.py"
    path.write_text(script)
    assert apart(exit_code, str(path)) == 1


def test_a_run_with_ops_is_whole(tmp_path: Path) -> None:
    """Workers have them, the script imports them, report.json names them, and the page is made again with them alone."""
    _module(tmp_path, "wrong_ops", **WRONG["second order"])
    done = _console(tmp_path, *RUN, "--ops", "wrong_ops", "-n2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong_ops.Cube.apply" in done.stdout
    report = tmp_path / "conformance-report"
    body: dict[str, Any] = json.loads((report / "report.json").read_text())
    assert body["test_suite"]["ops"] == ["wrong_ops"]
    (path, *_) = sorted((report / "repro" / "cpu").glob("*second_order*.py"))
    again = subprocess.run([sys.executable, str(path)], check=False, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1, again.stderr
    words = ("report", str(report / "report.json"), "--out", "again")
    refused = _console(tmp_path, *words)
    assert (refused.returncode, "add --ops wrong_ops" in refused.stderr) == (2, True)
    assert _console(tmp_path, *words, "--ops", "wrong_ops").returncode == 0
