"""How much a run does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """A size of run.

    Attributes:
        name: what ``--conformance-profile`` takes.
        shards: parts that workers share out among them; each has a seed of its own.
        size: programs in a shard.
        evidence: in how many programs a wrong result must have been able to show, or a claim is ``unproven``.

    """

    name: str
    shards: int
    size: int
    evidence: int

    @property
    def programs(self) -> int:
        """Programs a family."""
        return self.shards * self.size


PROFILES = {
    p.name: p for p in (Profile("smoke", 4, 60, 1), Profile("default", 20, 100, 10), Profile("thorough", 100, 200, 100))
}
