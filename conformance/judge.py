"""From cases to findings: each claim is a function of a case, and one test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from autograd_conformance.blame import blame, stray_claim
from autograd_conformance.compare import HELD, Case, Findings
from autograd_conformance.program import Program
from autograd_conformance.verdicts import Violation

Check = Callable[[Case], Findings]


@dataclass(frozen=True, slots=True)
class ClaimCheck:
    """How a claim is judged: ``check(case)`` yields one finding per comparison, and none where nothing could show."""

    claim: str
    check: Check
    family: str


class Settle(Protocol):
    """Gives the verdict on a claim, or raises what pytest shows."""

    def __call__(self, claim: str) -> None:
        """Settle a claim on the device of the test."""


def reading(check: Any, function: Callable[..., Any]) -> Callable[[Settle], None]:
    """The test that reads the judgement of a check, under the name and with the words of a function."""

    def test(settle: Settle) -> None:
        settle(check.claim)

    test.__name__ = test.__qualname__ = getattr(function, "__name__", "test")
    test.__doc__ = function.__doc__
    test.__module__ = function.__module__
    test.claim_check = check  # type: ignore[attr-defined]
    return test


def claim(claim_id: str, *, family: str = "graphs") -> Callable[[Check], Callable[[Settle], None]]:
    """Make the check of a claim its test: the test reads the judgement that all claims of a family share."""

    def decorate(check: Check) -> Callable[[Settle], None]:
        return reading(ClaimCheck(claim_id, check, family), check)

    return decorate


def findings(case: Case, check: ClaimCheck, blamed: dict[str, list[Violation]]) -> tuple[int, list[Violation]]:
    """Comparisons made for a claim, and those that came out wrong."""
    count, broken = 0, list(blamed.get(check.claim, ()))
    for finding in check.check(case):
        count += 1
        if finding is not HELD:
            assert isinstance(finding, Violation)
            broken.append(replace(finding, claim=check.claim))
    return count + len(blamed.get(check.claim, ())), broken


def blamed_violations(case: Case) -> dict[str, list[Violation]]:
    """Differences in gradients, each under the claims that it breaks. The first of each kind and name speaks for all."""
    found: dict[str, list[Violation]] = {}
    known: set[tuple[str, str]] = set()
    for difference in case.differences:
        if difference.kind == "stray":
            claim_id = stray_claim(case.program.statements[difference.at])
            found.setdefault(claim_id, []).append(difference.violation(claim_id, _BECAUSE["stray"]))
            continue
        if (difference.kind, difference.name) in known:
            continue
        known.add((difference.kind, difference.name))
        for claim_id in blame(case, difference):
            found.setdefault(claim_id, []).append(difference.violation(claim_id, _BECAUSE[difference.kind]))
    return found


_BECAUSE = {
    "missing": "the root depends on this tensor, which requires grad, so it must get a gradient",
    "unexpected": "the root does not depend on this tensor in a way that carries a gradient, so nothing may change here",
    "wrong": "by the chain rule, computed on paper in float64, on top of what was there before",
    "accumulated": "autograd.grad returns gradients and must leave every .grad alone",
    "stray": "nothing is wrong with this statement, so it must succeed",
    "raised": "the arguments are right and no buffer that is needed was freed or written, so the call must succeed",
}


def judge(case: Case, checks: Iterable[ClaimCheck], *, examine: bool = True) -> dict[str, tuple[int, list[Violation]]]:
    """All claims of a family on one case: claim -> (comparisons, violations).

    Without ``examine`` differences in gradients are left alone, for finding their claims takes experiments.
    """
    with np.errstate(all="ignore"):
        blamed = blamed_violations(case) if examine and case.differences else {}
        return {check.claim: findings(case, check, blamed) for check in checks}


def violations_of(
    program: Program, device: str, check: ClaimCheck, *, values: bool = True
) -> tuple[Case, Sequence[Violation]]:
    """Run one program and judge it by one claim."""
    with np.errstate(all="ignore"):
        case = Case(program, device, values=values)
    return case, judge(case, [check])[check.claim][1]
