"""The zoo: every fault by name, and how to plant one."""

from __future__ import annotations

from autograd_conformance.faults import accumulate, formulas, leaves, passes, recording, seeds, severed
from autograd_conformance.faults.base import ZOO, Fault, fault

FAULTS: dict[str, Fault] = ZOO
MODULES = (accumulate, formulas, leaves, passes, recording, seeds, severed)

__all__ = ["FAULTS", "MODULES", "Fault", "fault", "plant"]


def plant(name: str) -> Fault:
    """Plant a fault for the rest of this process.

    Raises:
        UsageError: there is no fault of that name.

    """
    if name not in FAULTS:
        from autograd_conformance.errors import unknown

        raise unknown("fault", name, FAULTS)
    FAULTS[name].install()
    return FAULTS[name]
