"""The matrix of a run: areas, in them claims, and for each claim what every device says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autograd_conformance.claims import AREAS, Claim
from autograd_conformance.verdicts import Result, Run, Verdict


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: its results in the order of the devices, None where it was not asked."""

    claim: Claim
    results: tuple[Result | None, ...]

    @property
    def known(self) -> tuple[Result, ...]:
        """The results that there are."""
        return tuple(result for result in self.results if result is not None)


@dataclass(frozen=True, slots=True)
class Area:
    """Claims that belong together."""

    name: str
    rows: tuple[Row, ...]

    @property
    def counts(self) -> list[tuple[Verdict, int]]:
        """How often each verdict occurs."""
        return counted_verdicts(result for row in self.rows for result in row.known)

    @property
    def unexpected(self) -> int:
        """How many results were not foreseen."""
        return sum(not result.expected for row in self.rows for result in row.known)


def device_names(run: Run) -> list[str]:
    """All devices that the run speaks of."""
    return list(dict.fromkeys([*run.devices, *(result.device for result in run.results)]))


def matrix(run: Run, claims: Mapping[str, Claim]) -> tuple[Area, ...]:
    """The areas in the order of the register, others behind them; a claim that nobody knows is its own sentence."""
    names = device_names(run)
    found: dict[str, dict[str, Result]] = {}
    for result in run.results:
        found.setdefault(result.claim, {})[result.device] = result
    areas: dict[str, list[Row]] = {}
    for name, seen in found.items():
        claim = claims.get(name) or Claim(name, "", (), name.partition(".")[0], False)
        areas.setdefault(claim.area, []).append(Row(claim, tuple(map(seen.get, names))))
    order = [*(area for area in AREAS if area in areas), *(area for area in areas if area not in AREAS)]
    return tuple(Area(name, tuple(areas[name])) for name in order)


def counted_verdicts(results: Iterable[Result]) -> list[tuple[Verdict, int]]:
    """How often each verdict occurs, in the order of the verdicts."""
    counts = Counter(result.verdict for result in results)
    return [(verdict, counts[verdict]) for verdict in Verdict if counts[verdict]]
