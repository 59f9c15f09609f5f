"""The zoo: every fault by name, and how to plant one. Each module of this folder that is not named below has faults."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from autograd_conformance.faults.base import ZOO, Fault, fault

_OTHERS = ("__main__", "base", "plant", "words")
MODULES = tuple(
    importlib.import_module(f"autograd_conformance.faults.{module.name}")
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if module.name not in _OTHERS
)
FAULTS: dict[str, Fault] = ZOO

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
