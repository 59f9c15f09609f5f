"""One stored program on one device: what is due, what was seen, and which claims it breaks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autograd_conformance.adapt import adapt
from autograd_conformance.claims import register
from autograd_conformance.compare import Case, PassCase
from autograd_conformance.devices import discover
from autograd_conformance.engine import unsupported
from autograd_conformance.errors import UsageError
from autograd_conformance.judge import ClaimCheck, check_of, judge
from autograd_conformance.oracle import InvalidProgram
from autograd_conformance.program import Program, ProgramError
from autograd_conformance.reports.statements import line_source


def all_checks() -> list[ClaimCheck]:
    """The checks of all claims, from the test modules of this package."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"autograd_conformance.{name}") for name in names]
    found = [check_of(function) for module in modules for function in vars(module).values()]
    return [check for check in found if check is not None]


def replay(text: str, where: str, device_name: str) -> int:
    """Run a stored program and print what came of it; 1 if it breaks a claim, else 0.

    Raises:
        UsageError: the text is no program, or the device is not there.

    """
    import torch

    torch.set_num_threads(1)
    (device,) = discover([device_name])
    try:
        program, changes = adapt(Program.from_json(text), device)
        with np.errstate(all="ignore"):
            case = Case(program, device.name, values=device.has("values"))
    except (ProgramError, InvalidProgram) as error:
        raise UsageError(f"{where}: {error}") from None
    for line in _lines(case):
        print(line)
    for change in changes:
        print(f"# {change}")
    claims = register()
    checks = [c for c in all_checks() if not unsupported(claims[c.claim], device, torch.__version__)]
    broken = {claim: found for claim, (_, found) in judge(case, checks).items() if found}
    for claim, found in broken.items():
        print(f"\n{claim} is broken: {claims[claim].sentence}")
        for v in found:
            print(
                f"    after line {v.at}: {v.probe or 'the call'}\n    due   {v.due}\n    seen  {v.seen}\n    because {v.because}"
            )
    if not broken:
        print("\nas due")
    return 1 if broken else 0


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
