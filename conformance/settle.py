"""From a judgement to a result: verdict, reason, and the smallest counterexample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autograd_conformance.claims import Claim
from autograd_conformance.devices import Device
from autograd_conformance.engine import Engine, Example, Family, Judgement, unsupported
from autograd_conformance.expectations import Expectation
from autograd_conformance.families import AnyCheck, Kind, Work, families_of, kind_of
from autograd_conformance.program import Backward, Grad
from autograd_conformance.scene import Scene, parse
from autograd_conformance.verdicts import Counterexample, Result, Verdict, Violation
from autograd_conformance.whole import family as whole

REPEATS = 5
BUDGET = 250  # programs that may be run to make one counterexample small


def settle(engine: Engine, claim: Claim, check: AnyCheck, device: Device) -> Result:
    """The verdict on a claim; judges the programs of its family first if nobody has."""
    reason = unsupported(claim, device, engine.torch_version)
    if reason:
        return Result(claim.id, device.name, Verdict.UNSUPPORTED, reason=reason, family=check.family)
    families = [engine.family(name, device) for name in families_of(check)]
    family, *others = families
    found = family.claims.get(claim.id, Judgement())
    for other in others:
        found = found.joined(other.claims.get(claim.id, Judgement()))
    entries = [e for e in engine.expectations if e.concerns(claim.id, device.name, engine.torch_version)]
    base = Result(
        claim.id,
        device.name,
        Verdict.HOLDS,
        family=family.name,
        digest=family.digest,
        programs=sum(f.programs for f in families),
        evidence=found.evidence,
        checks=found.checks,
        violations=found.violations,
        expected_violations=found.expected,
        excluded=family.excluded if claim.id == "grad.accumulates-sum" else 0,
    )
    return _Settler(check, device, entries, engine.evidence(device.name)).result(base, found, family)


def ended(base: Result, deaths: Sequence[tuple[str, str]]) -> Result:
    """The result of a claim whose programs ended a process, each given with how it did."""
    text, how = deaths[0]
    verdict = Verdict.HUNG if how == "hung" else Verdict.CRASHED
    program = parse(text)
    last = max((i for i, s in enumerate(program) if isinstance(s, Backward | Grad)), default=len(program) - 1)
    because = f"the process {how} while it ran this program; it is not reduced"
    violation = Violation(base.claim, last, "", "None", f"the process {how}", "raises", because=because)
    example = Counterexample(program, violation, found=program.digest())
    reason = f"a process {how} in {len(deaths)} of the programs"
    return replace(base, verdict=verdict, expected=False, reason=reason, counterexample=example)


def smallest(
    check: AnyCheck, device: Device, entries: Sequence[Expectation], examples: Sequence[Example]
) -> Counterexample:
    """The smallest counterexample that some programs that break a claim lead to."""
    return _Settler(check, device, entries).smallest(examples)


class _Settler:
    """One claim on one device."""

    def __init__(self, check: AnyCheck, device: Device, entries: Sequence[Expectation], evidence: int = 0) -> None:
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

    def _kind(self, work: Work) -> Kind:
        return kind_of(whole.NAME if isinstance(work, Scene) and work.claim == whole.NAME else self.check.family)

    def _shows(self, witness: Work, entry: Expectation) -> bool:
        program, violations, _ = self._kind(witness).violations(self.check, witness, self.device)
        return any(entry.recognises(program, v) for v in violations)

    def smallest(self, examples: Sequence[Example]) -> Counterexample:
        """The smallest of the examples that show each time, reduced; one that does not show again is kept as it is."""
        ranked = sorted(examples, key=lambda example: len(example[0]))
        best: tuple[Work, list[Violation]] | None = None
        for text, _ in ranked:
            drawn = parse(text)
            again = [v for v in (self._first(drawn) for _ in range(REPEATS)) if v is not None]
            if again and (best is None or len(again) > len(best[1])):
                best = drawn, again
            if len(again) == REPEATS:
                break
        if best is None:
            drawn, violation = parse(ranked[0][0]), ranked[0][1]
            return Counterexample(drawn, violation, (), drawn.digest(), 0, REPEATS)
        drawn, again = best
        small, violation = self._reduced(drawn, again[0])
        shown, _, raised = self._kind(small).violations(self.check, small, self.device)
        return Counterexample(shown, violation, raised, drawn.digest(), len(again), REPEATS)

    def _first(self, program: Work) -> Violation | None:
        """The first violation that no expectation recognises; without such a one the first, if one is expected."""
        played, violations, _ = self._kind(program).violations(self.check, program, self.device)
        strange = [v for v in violations if self._strange(played, v)]
        if strange:
            return strange[0]
        return violations[0] if violations and self.entries else None

    def _strange(self, program: Work, violation: Violation) -> bool:
        return not any(e.recognises(program, violation) for e in self.entries)

    def _reduced(self, program: Work, violation: Violation) -> tuple[Work, Violation]:
        strange = self._strange(program, violation)
        return self._kind(program).reduce(
            self.check, program, self.device, violation, lambda p, v: self._strange(p, v) or not strange, BUDGET
        )
