"""Reports of several devices, machines or torch versions as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autograd_conformance.errors import UsageError
from autograd_conformance.verdicts import Run


def merged(runs: Sequence[Run]) -> Run:
    """One run with the results of all; devices of one name are told apart by torch version, or by a number.

    Raises:
        UsageError: there is nothing to merge.

    """
    if not runs:
        raise UsageError("no report to merge")
    parts = _told_apart(runs)
    return Run(
        about=_about([run.about for run in runs]),
        devices={name: device for run in parts for name, device in run.devices.items()},
        families=[family for run in parts for family in run.families],
        results=tuple(result for run in parts for result in run.results),
        complete=all(run.complete for run in runs),
        failure="; ".join(run.failure for run in runs if run.failure),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
    )


def torch_version(run: Run) -> str:
    """The version of torch that a run was about."""
    torch = run.about.get("torch", {})
    return str(torch.get("version", "") if isinstance(torch, dict) else torch)


def _told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs with devices renamed whose names occur in several of them."""
    often = Counter(name for run in runs for name in _names(run))
    versions = {torch_version(run) for run in runs}
    taken: set[str] = set()
    parts = []
    for run in runs:
        label = f"torch {torch_version(run)}" if len(versions) > 1 else ""
        names = {name: _free(name, label if often[name] > 1 else "", taken) for name in _names(run)}
        taken.update(names.values())
        parts.append(_renamed(run, names))
    return parts


def _names(run: Run) -> list[str]:
    return list(dict.fromkeys([*run.devices, *(result.device for result in run.results)]))


def _free(name: str, label: str, taken: set[str]) -> str:
    wanted = f"{name} ({label})" if label else name
    numbers = (f"{wanted} ({number})" for number in range(2, len(taken) + 3))
    return next(candidate for candidate in (wanted, *numbers) if candidate not in taken)


def _renamed(run: Run, names: dict[str, str]) -> Run:
    """With new names; each device remembers what torch calls it, for its scripts."""
    devices = {
        new: {
            **run.devices.get(old, {}),
            **({} if new == old else {"torch_name": run.devices.get(old, {}).get("torch_name", old)}),
        }
        for old, new in names.items()
    }
    families = [{**family, "device": names.get(str(family["device"]), family["device"])} for family in run.families]
    return replace(
        run,
        devices=devices,
        families=families,
        results=tuple(replace(result, device=names[result.device]) for result in run.results),
    )


def _about(abouts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all agree on; what differs is listed, seconds are added, and the first run gives the time."""
    first = dict(abouts[0])
    for key in ("name", "version", "platform", "python", "profile"):
        first[key] = _listed(about[key] for about in abouts)
    seeds = list(dict.fromkeys(about["seed"] for about in abouts))
    first["seed"] = seeds[0] if len(seeds) == 1 else _listed(seeds)
    for key in ("torch", "packages", "execution_target"):
        names = dict.fromkeys(name for about in abouts for name in about[key])
        first[key] = {name: _listed(about[key].get(name) for about in abouts) or None for name in names}
    first["torch"]["version"] = first["torch"].get("version") or ""
    first["timestamp"] = min(str(about["timestamp"]) for about in abouts)
    for key in ("wall_seconds", "cpu_seconds"):
        first[key] = round(sum(about[key] for about in abouts), 1)
    return first


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))
