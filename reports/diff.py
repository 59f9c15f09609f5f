"""Two runs compared claim by claim: what is newly broken, what has healed, and what else has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autograd_conformance.errors import UsageError
from autograd_conformance.reports.merge import torch_version
from autograd_conformance.reports.text import counted, harmless_data, one_line
from autograd_conformance.verdicts import Result, Run, Verdict

SCHEMA = 1
SEVERITY = {Verdict.BROKEN: 1, Verdict.HUNG: 2, Verdict.CRASHED: 3}  # all else is no fault
KINDS = {
    "newly broken": "It was no fault, or a lesser or foreseen one, and is one now.",
    "healed": "It was a fault and holds now.",
    "changed": "Another verdict, none of the above.",
    "evidence": "The same verdict with more or less behind it.",
    "only in old": "The new run says nothing of it.",
    "only in new": "The old run said nothing of it.",
}
SHOWN = ("newly broken", "healed", "changed")  # one line each; of the others only the number
NAMED = 3


@dataclass(frozen=True, slots=True)
class Change:
    """A claim on a device that the two runs do not agree on; ``kind`` is one of :data:`KINDS`."""

    kind: str
    claim: str
    device: str
    old: Result | None
    new: Result | None


def changes(old: Run, new: Run, *, anyway: bool = False) -> tuple[Change, ...]:
    """What is not the same, in the order of the new run.

    Args:
        old: the run to compare with.
        new: the run in question.
        anyway: compare results of different programs too.

    Raises:
        UsageError: results are about different programs, so that a difference says nothing about torch.

    """
    before = {(result.claim, result.device): result for result in old.results}
    after = {(result.claim, result.device): result for result in new.results}
    if not anyway:
        _check_comparable(before, after)
    pairs = [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*after, *before])]
    return tuple(Change(kind, *key, one, other) for key, one, other in pairs if (kind := _kind(one, other)))


def newly_broken(found: Iterable[Change]) -> bool:
    """Is there anything that the old run was without?"""
    return any(change.kind == "newly broken" for change in found)


def told(old: Run, new: Run, found: Sequence[Change]) -> list[str]:
    """The comparison as lines of text."""
    lines = [f"old  {_run(old)}", f"new  {_run(new)}", ""]
    for kind in KINDS:
        mine = [change for change in found if change.kind == kind]
        if mine and kind in SHOWN:
            lines += [f"{kind}: {len(mine):,}", *(f"    {line}" for change in mine for line in _lines(change)), ""]
        elif mine:
            names = ", ".join(dict.fromkeys(one_line(change.claim, 100) for change in mine[:NAMED]))
            lines += [f"{kind}: {len(mine):,} ({names}{' ...' if len(mine) > NAMED else ''})", ""]
    return lines[:-1] if found else [*lines, "no verdict has changed"]


def plain(old: Run, new: Run, found: Sequence[Change]) -> dict[str, Any]:
    """The comparison as JSON-ready data."""
    body = {
        "schema": SCHEMA,
        "old": _about(old),
        "new": _about(new),
        "newly_broken": newly_broken(found),
        "changes": [
            {
                "kind": change.kind,
                "claim": change.claim,
                "device": change.device,
                "old": _result(change.old),
                "new": _result(change.new),
            }
            for change in found
        ],
    }
    safe: dict[str, Any] = harmless_data(body)
    return safe


def _check_comparable(before: dict[tuple[str, str], Result], after: dict[tuple[str, str], Result]) -> None:
    common = [(before[key], after[key]) for key in after if key in before]
    if not common:
        raise UsageError("the two reports have no claim on the same device in common")
    judged = [(one, other) for one, other in common if one.digest and other.digest]
    differ = [one for one, other in judged if one.digest != other.digest]
    if differ:
        name = one_line(differ[0].claim, 100)
        text = f"{len(differ)} of {counted(len(judged), 'claim')} were judged on other programs, such as {name}"
        raise UsageError(f"{text}; compare runs of one suite version, profile and seed, or say --anyway")


def _kind(old: Result | None, new: Result | None) -> str:
    if old is None or new is None:
        return "only in new" if old is None else "only in old"
    before, after = SEVERITY.get(old.verdict, 0), SEVERITY.get(new.verdict, 0)
    if after > before or (after and old.expected and not new.expected):
        return "newly broken"
    if before and new.verdict is Verdict.HOLDS:
        return "healed"
    if old.verdict is not new.verdict:
        return "changed"
    return "evidence" if (old.evidence, old.programs) != (new.evidence, new.programs) else ""


def _lines(change: Change) -> Iterator[str]:
    old, new = change.old, change.new
    assert old is not None  # noqa: S101 - both are there in the kinds that are shown
    assert new is not None  # noqa: S101
    yield f"{one_line(change.claim, 100)} on {one_line(change.device, 60)}: {_said(old)} -> {_said(new)}"
    example = new.counterexample
    if change.kind == "newly broken" and example is not None:
        yield f"    due {one_line(example.violation.due, 80)}, seen {one_line(example.violation.seen, 80)}"
    elif new.reason:
        yield f"    {one_line(new.reason, 160)}"


def _said(result: Result) -> str:
    return f"{result.verdict}{'' if result.expected else ', not as expected'}"


def _run(run: Run) -> str:
    about = run.about
    return one_line(
        f"torch {torch_version(run)}, profile {about['profile']}, seed {about['seed']}, {about['timestamp']}", 200
    )


def _about(run: Run) -> dict[str, Any]:
    return {"torch": torch_version(run), **{key: run.about[key] for key in ("profile", "seed", "timestamp")}}


def _result(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {"verdict": str(result.verdict), "expected": result.expected, "evidence": result.evidence}
