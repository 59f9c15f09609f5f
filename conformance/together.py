"""Several pytest runs, each of devices that can share a process, as one run with one report."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograd_conformance.claims import is_whole, register, select
from autograd_conformance.devices import Device, Survey
from autograd_conformance.errors import UsageError
from autograd_conformance.journal import slug, write_json
from autograd_conformance.reports.document import read
from autograd_conformance.reports.folder import put, write
from autograd_conformance.reports.terminal import summary
from autograd_conformance.verdicts import Result, Run, Verdict

CODES = (3, 1, 0, 5)  # of several exit codes the first of these counts
NO_TARGET = dict.fromkeys(("kind", "backend", "device_model", "runtime_version", "driver_version"))


def parts(found: Survey, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """Per setup a working folder that knows the devices, and their names."""
    groups: dict[str, list[Device]] = {}
    for device in found.usable:
        groups.setdefault(device.setup, []).append(device)
    for devices in groups.values():
        folder = work / slug(devices[0].name)
        plain = replace_devices(found, devices).to_plain()
        write_json(folder / "devices.json", plain)
        yield folder, [device.name for device in devices]


def replace_devices(found: Survey, devices: Sequence[Device]) -> Survey:
    """A survey of some of the devices."""
    return Survey(list(devices), {}, found.target)


def unjudged(claim: str, device: Device) -> Result:
    """The result of a claim on a device that no program can run on."""
    verdict = {"crashed": Verdict.CRASHED, "hung": Verdict.HUNG}.get(device.ended, Verdict.NOT_RUN)
    return Result(claim, device.name, verdict, expected=False, reason=device.left_out)


class Whole:
    """The report that grows from the reports of the parts."""

    def __init__(self, found: Survey, report: Path, globs: Sequence[str], profile: str, seed: str) -> None:
        self.found, self.report, self.profile, self.seed = found, report, profile, seed
        self.claims = [claim.id for claim in select(globs)] if globs else list(register())
        self.runs: list[Run] = []
        self.codes: list[int] = []
        self.lost: list[tuple[Device, str]] = []
        self.junit: list[Path] = []

    @property
    def single(self) -> bool:
        """Is there one part only, and nothing to add to what it says?"""
        one = len({device.setup for device in self.found.usable}) == 1
        return one and not (self._left_out() or self.lost or self.found.failures)

    def _left_out(self) -> list[Device]:
        return [device for device in self.found.devices if device.left_out]

    def add(self, folder: Path, names: Sequence[str], code: int) -> None:
        """A part is over."""
        self.codes.append(code)
        if self.single and code in CODES:
            return
        mine = [device for device in self.found.usable if device.name in names]
        if self.single:  # what may lie there is of an earlier run
            self.lost += [(device, f"its pytest run ended with exit code {code}") for device in mine]
            return
        try:
            self.runs.append(read(folder / "report.json"))
            self.junit.append(folder / "junit.xml")
        except UsageError as error:
            reason = f"its pytest run left no report (exit code {code}): {error}"
            self.lost += [(device, reason) for device in mine]

    def finish(self) -> int:
        """Write the report of the whole; returns the exit code."""
        if self.single:
            return self.codes[0]
        run = self._merged()
        write(run, register(), self.report)
        self._write_junit()
        print("\n".join(["", *summary(run, register(), str(self.report))]))  # noqa: T201
        codes = {*self.codes, *(3 if r.verdict is Verdict.NOT_RUN else 1 for r in run.results if not r.expected)}
        return next((code for code in CODES if code in codes), 3)

    def _merged(self) -> Run:
        results = [result for run in self.runs for result in run.results]
        lost = [*self.lost, *((device, device.left_out) for device in self._left_out())]
        for device, reason in lost:
            results += [unjudged(claim, replace(device, left_out=reason)) for claim in self.claims]
        devices: dict[str, dict[str, Any]] = {device.name: device.to_plain() for device in self.found.devices}
        failures = [run.failure for run in self.runs if run.failure]
        failures += [f"{device.name} was not judged: {reason}" for device, reason in lost if not device.ended]
        notes = [note for run in self.runs for note in run.notes]
        notes += [f"{name} was left out: {reason}" for name, reason in self.found.failures.items()]
        return Run(
            about=self._about(),
            devices=devices,
            families=[family for run in self.runs for family in run.families],
            results=tuple(results),
            complete=is_whole(result.claim for result in results),
            failure="; ".join(failures),
            notes=tuple(notes),
        )

    def _about(self) -> dict[str, Any]:
        sums = {name: sum(run.about[name] for run in self.runs) for name in ("wall_seconds", "cpu_seconds")}
        if not self.runs:
            from autograd_conformance.closing import about  # it imports torch, which no other run needs here

            seed = int(self.seed) if self.seed.isdecimal() else 0
            return about(self.profile, seed, self.found.target or NO_TARGET, wall=0.0, cpu=0.0)
        return self.runs[0].about | {name: round(seconds, 1) for name, seconds in sums.items()}

    def _write_junit(self) -> None:
        root = ET.Element("testsuites")
        for path in self.junit:
            if path.exists():
                root.extend(ET.parse(path).getroot())  # noqa: S314 - pytest has just written it
        put(self.report / "junit.xml", ET.tostring(root, encoding="unicode"))
