"""One stored program on one device: what is due, what was seen, and which claims it breaks."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from autograd_conformance.adapt import adapt
from autograd_conformance.claims import register
from autograd_conformance.compare import Case, PassCase
from autograd_conformance.devices import Device, discover
from autograd_conformance.engine import unsupported
from autograd_conformance.errors import UsageError, unknown
from autograd_conformance.families import AnyCheck, check_of
from autograd_conformance.judge import ClaimCheck, judge
from autograd_conformance.oracle import InvalidProgram
from autograd_conformance.program import Program, ProgramError
from autograd_conformance.reports.statements import line_source
from autograd_conformance.scene import Scene, parse
from autograd_conformance.scenes import SceneCheck, printed, stage
from autograd_conformance.verdicts import Violation


def all_checks() -> list[AnyCheck]:
    """The checks of all claims, from the test modules of this package."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"autograd_conformance.{name}") for name in names]
    found = [check_of(function) for module in modules for function in vars(module).values()]
    return [check for check in found if check is not None]


def replay(text: str, where: str, device_name: str, setup: str = "") -> int:
    """Run a stored program or scene and print what came of it; 1 if it breaks a claim, else 0.

    Raises:
        UsageError: the text is neither, or the device is not there.

    """
    import torch

    torch.set_num_threads(1)
    (device,) = discover([device_name], setup)
    claims = register()
    checks = [c for c in all_checks() if not unsupported(claims[c.claim], device, torch.__version__)]
    try:
        work = parse(text)
        with np.errstate(all="ignore"):
            broken = _scene(work, device, checks) if isinstance(work, Scene) else _program(work, device, checks)
    except (ProgramError, InvalidProgram) as error:
        raise UsageError(f"{where}: {error}") from None
    for claim, found in broken.items():
        print(f"\n{claim} is broken: {claims[claim].sentence}")
        for v in found:
            print(f"    after line {v.at}: {v.probe or 'the call'}")
            print(f"    due   {v.due}\n    seen  {v.seen}\n    because {v.because}")
    if not broken:
        print("\nas due")
    return 1 if broken else 0


Broken = dict[str, Sequence[Violation]]


def _program(program: Program, device: Device, checks: Sequence[AnyCheck]) -> Broken:
    adapted, changes = adapt(program, device)
    case = Case(adapted, device.name, values=device.has("values"))
    for line in _lines(case):
        print(line)
    for change in changes:
        print(f"# {change}")
    judged = judge(case, [c for c in checks if isinstance(c, ClaimCheck)])
    return {claim: found for claim, (_, found) in judged.items() if found}


def _scene(scene: Scene, device: Device, checks: Sequence[AnyCheck]) -> Broken:
    """By the claim that the scene names, or by all that are judged on scenes if it names none."""
    mine = [c for c in checks if isinstance(c, SceneCheck) and scene.claim in ("", c.claim)]
    if not mine:
        raise unknown("claim", scene.claim, [c.claim for c in checks if isinstance(c, SceneCheck)], "the scene")
    broken: Broken = {}
    for check in mine:
        staged = stage(check, replace(scene, graph=adapt(scene.graph, device)[0]), device)
        if staged.script is None:
            continue
        for at, line in enumerate(printed(check, scene, staged.script, device).lines):
            print(textwrap.indent(line, "     ").replace("     ", f"{at:3d}  ", 1))
        if staged.violations:
            broken[check.claim] = staged.violations
    return broken


def _lines(case: Case) -> Iterator[str]:
    passes = {p.at: p for p in case.passes}
    for at, statement in enumerate(case.program):
        yield f"{at:3d}  {line_source(at, statement, case.device)}"
        error = case.seen.errors.get(at)
        if at in passes:
            yield from (f"       # {line}" for line in _pass_lines(passes[at]))
        elif error is not None:
            yield f"       # raised {error.kind}: {error.message.splitlines()[0][:100]}"


def _pass_lines(p: PassCase) -> Iterator[str]:
    rule = {True: "must raise", False: "must succeed", None: "may raise or not: nobody promises"}[p.must_raise]
    yield f"{rule}; {'raised ' + p.error.kind if p.error else 'succeeded'}"
    for name, delta in p.due.deltas.items():
        after = p.after.get(name)
        seen = "" if after is None else f"; .grad is now {after.values}"
        yield f"due to {name}: {np.round(delta, 6).tolist()}{seen}"
