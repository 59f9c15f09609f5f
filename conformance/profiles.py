"""How much a run does."""

from __future__ import annotations

from dataclasses import dataclass

from autograd_conformance.errors import unknown


@dataclass(frozen=True, slots=True)
class Profile:
    """A size of run.

    Attributes:
        name: what ``--conformance-profile`` takes.
        shards: parts that workers share out among them; each has a seed of its own.
        size: programs in a shard.
        scene_shards, scene_size: the same for families that are judged on scenes, where each claim runs a script.
        whole_shards, whole_size: the same for programs with statements of every kind.
        evidence: in how many programs a wrong result must have been able to show, or a claim is ``unproven``.

    """

    name: str
    shards: int
    size: int
    scene_shards: int
    scene_size: int
    whole_shards: int
    whole_size: int
    evidence: int

    @property
    def programs(self) -> int:
        """Whole programs a family."""
        return self.shards * self.size


PROFILES = {
    p.name: p
    for p in (
        Profile("smoke", 4, 60, 2, 10, 1, 20, 1),
        Profile("default", 20, 100, 4, 20, 4, 75, 5),
        Profile("thorough", 100, 200, 20, 50, 40, 100, 50),
        Profile("fuzz", 1, 200, 1, 20, 1, 20, 1),  # a round of autograd-conformance fuzz
    )
}


def named(name: str) -> Profile:
    """The profile of a name.

    Raises:
        UsageError: there is none.

    """
    if name not in PROFILES:
        raise unknown("profile", name, PROFILES)
    return PROFILES[name]
