"""From a judgement to a result: verdict, reason, and the smallest counterexample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autograd_conformance.claims import Claim
from autograd_conformance.devices import Device
from autograd_conformance.engine import Engine, Example, Judgement, unsupported
from autograd_conformance.expectations import Expectation
from autograd_conformance.families import AnyCheck, Kind, Work, families_of, kind_of
from autograd_conformance.patience import Patience
from autograd_conformance.program import Backward, Grad
from autograd_conformance.scene import Scene, parse
from autograd_conformance.verdicts import Counterexample, Result, Verdict, Violation
from autograd_conformance.whole import family as whole

REPEATS = 5
REDUCING = 300  # seconds that the result of a claim may take, once its programs are judged
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
    deaths = [death for f in families for death in f.killed(claim.id)]
    settler = _Settler(check, device, entries, engine.evidence(device.name))
    last_words = engine.last_words(claim.id, device.name)
    if not engine.first_time(claim.id, device.name):
        how = "hung" if last_words.exists() and last_words.stat().st_size else "crashed"
        return settler.untried(base, found, deaths, how)
    with Patience(last_words, REDUCING):
        return settler.result(base, found, deaths)


def ended(base: Result, deaths: Sequence[tuple[str, str]], check: AnyCheck, device: Device) -> Result:
    """The result of a claim whose programs ended a process, each given with how it did."""
    text, how = deaths[0]
    verdict = Verdict.HUNG if how == "hung" else Verdict.CRASHED
    drawn = parse(text)
    program = kind_of_work(drawn, check).fatal(check, drawn, device)
    last = max((i for i, s in enumerate(program) if isinstance(s, Backward | Grad)), default=len(program) - 1)
    because = f"the process {how} while it ran this program; it is not reduced"
    violation = Violation(base.claim, last, "", "None", f"the process {how}", "raises", because=because)
    raised = program.raising if isinstance(program, Scene) else ()
    example = Counterexample(program, violation, raised, found=program.digest())
    reason = f"a process {how} in {len(deaths)} of the programs"
    return replace(base, verdict=verdict, expected=False, reason=reason, counterexample=example)


def smallest(
    check: AnyCheck, device: Device, entries: Sequence[Expectation], examples: Sequence[Example]
) -> Counterexample:
    """The smallest counterexample that some programs that break a claim lead to."""
    return _Settler(check, device, entries).smallest(examples)


def kind_of_work(work: Work, check: AnyCheck) -> Kind:
    """What a program of a claim is run by: its family, or that of programs of every kind."""
    return kind_of(whole.NAME if isinstance(work, Scene) and work.claim == whole.NAME else check.family)


def _as_found(examples: Sequence[Example]) -> Counterexample:
    """The shortest example, as it was when it was seen first."""
    text, violation = min(examples, key=lambda example: len(example[0]))
    work = parse(text)
    raised = work.raising if isinstance(work, Scene) else ()
    return Counterexample(work, violation, raised, work.digest(), 0, REPEATS)


class _Settler:
    """One claim on one device."""

    def __init__(self, check: AnyCheck, device: Device, entries: Sequence[Expectation], evidence: int = 0) -> None:
        self.check, self.device, self.entries, self.evidence = check, device, entries, evidence

    def untried(self, base: Result, found: Judgement, deaths: Sequence[tuple[str, str]], how: str) -> Result:
        """The verdict from what is known, for a process died when it ran the programs of this result again."""
        if found.examples:
            return replace(base, verdict=Verdict.BROKEN, expected=False, counterexample=_as_found(found.examples))
        if found.foretold:
            return self._foretold(base, found.foretold, _as_found(found.foretold))
        again = [(entry.witness.to_json(), how) for entry in self._own]
        return ended(base, [*deaths, *again], self.check, self.device)

    def result(self, base: Result, found: Judgement, deaths: Sequence[tuple[str, str]]) -> Result:
        """The verdict, by the first of these rules that applies."""
        if found.examples:
            return replace(base, verdict=Verdict.BROKEN, expected=False, counterexample=self.smallest(found.examples))
        healed = [e for e in self._own if self._tells(e.witness) and not self._shows(e)]
        if healed:
            reason = f"the known deviation is gone, remove its expectation: {healed[0].reason}"
            return replace(base, verdict=Verdict.HOLDS, expected=False, reason=reason, link=healed[0].link)
        if deaths:
            return ended(base, deaths, self.check, self.device)
        shown = [example for e in self._own for example in self._shows(e)] or found.foretold
        if shown:
            return self._foretold(base, shown, self.smallest(shown[:1]))
        if found.evidence < self.evidence:
            reason = f"a fault could have shown in {found.evidence} programs, want {self.evidence}"
            return replace(base, verdict=Verdict.UNPROVEN, expected=False, reason=reason)
        return base

    def _kind(self, work: Work) -> Kind:
        return kind_of_work(work, self.check)

    @property
    def _own(self) -> list[Expectation]:
        """Those whose witnesses show this very claim."""
        return [entry for entry in self.entries if entry.claim == self.check.claim]

    def _foretold(self, base: Result, shown: Sequence[Example], example: Counterexample) -> Result:
        """Broken, as an entry says that recognises what was shown."""
        work, violation = parse(shown[0][0]), shown[0][1]
        entry = next(e for e in self.entries if e.recognises(work, violation))
        return replace(base, verdict=Verdict.BROKEN, reason=entry.reason, link=entry.link, counterexample=example)

    def _shows(self, entry: Expectation) -> list[Example]:
        """The violations of its witness that an entry recognises."""
        shown, violations, _ = self._kind(entry.witness).violations(self.check, entry.witness, self.device)
        return [(shown.to_json(), v) for v in violations if entry.recognises(shown, v)]

    def _tells(self, witness: Work) -> bool:
        """Can a witness be judged on this device? Where something else spoils it nothing follows."""
        judged = self._kind(witness).judge(witness, self.device, [self.check], examine=False)
        return judged.found.get(self.check.claim, (0, []))[0] > 0 and not judged.excluded

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
            return _as_found(ranked)
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
