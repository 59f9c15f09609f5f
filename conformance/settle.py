"""From a judgement to a result: verdict, reason, and the smallest counterexample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autograd_conformance.blame import GENERAL
from autograd_conformance.claims import Claim
from autograd_conformance.compare import Case
from autograd_conformance.devices import Device
from autograd_conformance.engine import Engine, Example, Family, Judgement, unsupported
from autograd_conformance.expectations import Expectation
from autograd_conformance.judge import ClaimCheck, violations_of
from autograd_conformance.oracle import InvalidProgram
from autograd_conformance.program import Backward, Grad, Program
from autograd_conformance.reduce import Reducer
from autograd_conformance.verdicts import Counterexample, Result, Verdict, Violation

REPEATS = 5
BUDGET = 250  # programs that may be run to make one counterexample small


def settle(engine: Engine, claim: Claim, check: ClaimCheck, device: Device) -> Result:
    """The verdict on a claim; judges the programs of its family first if nobody has."""
    reason = unsupported(claim, device, engine.torch_version)
    if reason:
        return Result(claim.id, device.name, Verdict.UNSUPPORTED, reason=reason, family=check.family)
    family = engine.family(check.family, device)
    found = family.claims.get(claim.id, Judgement())
    entries = [e for e in engine.expectations if e.concerns(claim.id, device.name, engine.torch_version)]
    base = Result(
        claim.id,
        device.name,
        Verdict.HOLDS,
        family=family.name,
        digest=family.digest,
        programs=family.programs,
        evidence=found.evidence,
        checks=found.checks,
        violations=found.violations,
        expected_violations=found.expected,
        excluded=family.excluded if claim.id == "grad.accumulates-sum" else 0,
    )
    return _Settler(check, device, entries, engine.profile.evidence).result(base, found, family)


def ended(base: Result, deaths: Sequence[tuple[str, str]]) -> Result:
    """The result of a claim whose programs ended a process, each given with how it did."""
    text, how = deaths[0]
    verdict = Verdict.HUNG if how == "hung" else Verdict.CRASHED
    program = Program.from_json(text)
    last = max((i for i, s in enumerate(program) if isinstance(s, Backward | Grad)), default=len(program) - 1)
    because = f"the process {how} while it ran this program; it is not reduced"
    violation = Violation(base.claim, last, "", "None", f"the process {how}", "raises", because=because)
    example = Counterexample(program, violation, found=program.digest())
    reason = f"a process {how} in {len(deaths)} of the programs"
    return replace(base, verdict=verdict, expected=False, reason=reason, counterexample=example)


def smallest(
    check: ClaimCheck, device: Device, entries: Sequence[Expectation], examples: Sequence[Example]
) -> Counterexample:
    """The smallest counterexample that some programs that break a claim lead to."""
    return _Settler(check, device, entries).smallest(examples)


class _Settler:
    """One claim on one device."""

    def __init__(self, check: ClaimCheck, device: Device, entries: Sequence[Expectation], evidence: int = 0) -> None:
        self.check, self.device, self.entries, self.evidence = check, device, entries, evidence

    def result(self, base: Result, found: Judgement, family: Family) -> Result:
        """The verdict, by the first of these rules that applies."""
        if found.examples:
            return replace(base, verdict=Verdict.BROKEN, expected=False, counterexample=self.smallest(found.examples))
        healed = [e for e in self.entries if not self._shows(e.witness, e)]
        if healed:
            reason = f"the known deviation is gone, remove its expectation: {healed[0].reason}"
            return replace(base, verdict=Verdict.HOLDS, expected=False, reason=reason, link=healed[0].link)
        if family.deaths:
            return ended(base, family.deaths)
        if self.entries:
            entry = self.entries[0]
            examples = found.foretold or [(entry.witness.to_json(), Violation(self.check.claim, 0, "", "", ""))]
            example = self.smallest([(entry.witness.to_json(), examples[0][1])])
            return replace(base, verdict=Verdict.BROKEN, reason=entry.reason, link=entry.link, counterexample=example)
        if found.evidence < self.evidence:
            reason = f"a fault could have shown in {found.evidence} programs, want {self.evidence}"
            return replace(base, verdict=Verdict.UNPROVEN, expected=False, reason=reason)
        return base

    def _run(self, program: Program) -> tuple[Case, Sequence[Violation]]:
        return violations_of(program, self.device.name, self.check, values=self.device.has("values"))

    def _shows(self, witness: Program, entry: Expectation) -> bool:
        _, violations = self._run(witness)
        return any(entry.recognises(witness, v) for v in violations)

    def _strange(self, program: Program) -> Violation | None:
        """The first violation of a program that no expectation recognises."""
        _, violations = self._run(program)
        return next((v for v in violations if not any(e.recognises(program, v) for e in self.entries)), None)

    def smallest(self, examples: Sequence[Example]) -> Counterexample:
        """The smallest of the examples, reduced; one that does not show again is kept as it is."""
        ranked = sorted(examples, key=lambda example: len(example[0]))
        for text, _ in ranked:
            program = Program.from_json(text)
            again = [v for v in (self._first(program) for _ in range(REPEATS)) if v is not None]
            if again:
                small, violation = self._reduced(program, again[0])
                raised = tuple(sorted(self._run(small)[0].seen.errors))
                return Counterexample(small, violation, raised, program.digest(), len(again), REPEATS)
        program, violation = Program.from_json(ranked[0][0]), ranked[0][1]
        return Counterexample(program, violation, (), program.digest(), 0, REPEATS)

    def _first(self, program: Program) -> Violation | None:
        strange = self._strange(program)
        if strange is not None:
            return strange
        _, violations = self._run(program)
        return violations[0] if violations and self.entries else None

    def _reduced(self, program: Program, violation: Violation) -> tuple[Program, Violation]:
        """First by the bare difference, which is cheap; if that led to another claim, by the claim itself."""
        if violation.mark in GENERAL:
            small, _ = Reducer(self._same_difference(violation), BUDGET).reduce(program, violation)
            found = self._like(violation, small)
            if found is not None:
                return small, found
        return Reducer(partial(self._like, violation), BUDGET).reduce(program, violation)

    def _like(self, known: Violation, program: Program) -> Violation | None:
        """A violation of the same kind, lest the search slide into another fault."""
        found = self._first(program)
        return found if found is not None and (found.mark, found.check) == (known.mark, known.check) else None

    def _same_difference(self, violation: Violation) -> Callable[[Program], Violation | None]:
        def shows(program: Program) -> Violation | None:
            try:
                case = Case(program, self.device.name, values=self.device.has("values"))
            except InvalidProgram:
                return None
            same = [d for d in case.differences if d.kind == violation.mark]
            return same[0].violation(self.check.claim, violation.because) if same else None

        return shows
