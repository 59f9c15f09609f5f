"""What a fault is, and how a module adds one to the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Install = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted breakage.

    Attributes:
        name: how it is asked for.
        sentence: what is wrong under it.
        areas: areas of the claims that it breaks.
        claims: ids that may rightly be named when it is noticed; one of them must be.
        rare: shows only in a situation that few programs meet.
        install: plants it for the rest of the process.
        witness: a script that passes on a healthy torch and fails under the fault.
        null: the same machinery without a fault; changes nothing, and its witness always passes.

    """

    name: str
    sentence: str
    areas: tuple[str, ...]
    claims: tuple[str, ...]
    rare: bool
    install: Install
    witness: str
    null: bool = False


ZOO: dict[str, Fault] = {}


def add(name: str, doc: str | None, claims: tuple[str, ...], install: Install, witness: str, rare: bool) -> None:
    """Enter a fault; one without claims is a null fault."""
    if name in ZOO:
        raise ValueError(f"two faults named {name!r}")
    areas = tuple(dict.fromkeys(claim.partition(".")[0] for claim in claims))
    script = "import torch\n" + witness.strip() + "\n"
    ZOO[name] = Fault(name, " ".join((doc or "").split()), areas, claims, rare, install, script, null=not claims)


def fault(name: str, *claims: str, witness: str, rare: bool = False) -> Callable[[Install], Install]:
    """Enter the decorated function, whose docstring is the sentence, as the installer of a fault."""

    def enter(install: Install) -> Install:
        add(name, install.__doc__, claims, install, witness, rare)
        return install

    return enter
