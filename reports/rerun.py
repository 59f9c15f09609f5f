"""The script of a result: what to run to see its fault again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autograd_conformance.reports.script import repro
from autograd_conformance.reports.text import harmless
from autograd_conformance.verdicts import Result, Run

if TYPE_CHECKING:
    from autograd_conformance.claims import Claim


def script(run: Run, result: Result, claims: Mapping[str, Claim]) -> str:
    """The script of a result's counterexample, or an empty text if it has none."""
    if result.counterexample is None:
        return ""
    claim = claims.get(result.claim)
    sentence, source = (claim.sentence, "; ".join(claim.sources)) if claim else ("", "")
    setup = str(run.devices.get(result.device, {}).get("setup", ""))
    return harmless(repro(result.counterexample, sentence, source, torch_name(run, result.device), setup))


def torch_name(run: Run, device: str) -> str:
    """What torch calls a device; in a report of several runs it may have another name."""
    return str(run.devices.get(device, {}).get("torch_name", device))
