"""What a pytest process knows of a conformance run: what was asked for, the devices, the engine, the report."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from autograd_conformance import claims, expectations
from autograd_conformance.claims import Claim
from autograd_conformance.errors import DeviceGoneError, UsageError
from autograd_conformance.journal import locked, read_json, slug, write_json
from autograd_conformance.profiles import Profile, named
from autograd_conformance.reports.script import repro
from autograd_conformance.reports.terminal import argument, summary
from autograd_conformance.verdicts import Result, Verdict


@dataclass(frozen=True, slots=True)
class Shown:
    """What a test shows of a result: at most one of the three texts is set."""

    properties: list[tuple[str, str]]
    failure: str = ""
    skip: str = ""
    xfail: str = ""


class Session:
    """One process of a run; all share the working folder."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = time.time()
        self.lines: list[str] = []
        self._checks: dict[str, Any] = {}

    # --- what was asked for ---------------------------------------------------------------------------------------

    def _option(self, name: str) -> Any:
        return getattr(self.config.option, f"conformance_{name}")

    def check_request(self) -> None:
        """Find mistakes in the options before anything runs; a named device is tried."""
        try:
            self.report_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"cannot write to {self.report_dir}: {error.strerror}; name another --conformance-report-dir"
            pytest.exit(text, returncode=2)
        try:
            _ = self.profile, self.selected, self.expectations
            if self._option("device") or self._option("setup"):
                _ = self.devices
        except UsageError as error:
            pytest.exit(str(error), returncode=2)

    @cached_property
    def profile(self) -> Profile:
        """The profile that was asked for."""
        return named(self._option("profile"))

    @property
    def seed(self) -> int:
        """The seed of the run."""
        seed: int = self._option("seed")
        return seed

    @cached_property
    def register(self) -> dict[str, Claim]:
        """All claims."""
        return claims.register()

    @cached_property
    def selected(self) -> set[str]:
        """Ids of the claims that were asked for."""
        globs = self._option("claims")
        return {claim.id for claim in claims.select(globs)} if globs else set(self.register)

    @cached_property
    def expectations(self) -> tuple[expectations.Expectation, ...]:
        """Known deviations: the packaged ones, and those of the files that were named."""
        files = [expectations.PACKAGED, *map(Path, self._option("expectations"))]
        return expectations.load(files, self.register)

    @cached_property
    def report_dir(self) -> Path:
        """Where the report goes."""
        return Path(self._option("report_dir")).absolute()

    @cached_property
    def work(self) -> Path:
        """The working folder; made only when something is written to it."""
        given = getattr(self.config, "workerinput", {}).get("conformance_work") or self._option("work")
        return Path(given) if given else self.report_dir / ".work" / uuid.uuid4().hex[:12]

    @cached_property
    def devices(self) -> list[Any]:
        """The devices of the run: the first process that needs them decides for all."""
        import torch

        from autograd_conformance.devices import Survey, join, shared

        torch.set_num_threads(1)
        try:
            with locked(self.work / "devices.lock", wait=True):
                known = read_json(self.work / "devices.json")
                if known is None:
                    known = self._survey().to_plain()
                    write_json(self.work / "devices.json", known)
            devices = shared(Survey.from_plain(known).devices)
            join(device for device in devices if not device.left_out)
        except UsageError as error:
            pytest.exit(str(error), returncode=2)
        return devices

    def _survey(self) -> Any:
        from autograd_conformance.devices import ALWAYS, IN_TREE, KNOWN, Survey, here, survey
        from autograd_conformance.traits import about, unusable

        wanted, setup = self._option("device"), self._option("setup")
        kinds = {name.partition(":")[0] for name in wanted}
        plain = wanted and not setup and not kinds & ({*IN_TREE, *KNOWN} - {*ALWAYS})
        if plain and not any(unusable(name) for name in wanted):  # a plug-in may have made a device known
            return Survey([here(name) for name in wanted], target=about(wanted[0]))
        return survey(wanted, setup)

    # --- tests ----------------------------------------------------------------------------------------------------

    def collect(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Note the claims that were collected; returns the items that were not asked for."""
        dropped, pairs = [], []
        for item in items:
            check = item.function.claim_check  # type: ignore[attr-defined]
            if check.claim not in self.selected:
                dropped.append(item)
                continue
            self._checks[check.claim] = check
            pairs.append([check.claim, item.callspec.params["settle"]])  # type: ignore[attr-defined]
        if pairs:
            write_json(self.work / "collected.json", pairs)
        return dropped

    @cached_property
    def engine(self) -> Any:
        """Judges the families of the collected claims."""
        import torch

        from autograd_conformance.engine import Engine

        checks = sorted(self._checks.values(), key=lambda check: check.claim)
        return Engine(
            self.work, self.profile, self.seed, checks, self.expectations, torch.__version__, shares=self.shares
        )

    @property
    def shares(self) -> dict[str, int]:
        """Per device, of how many parts of the programs it runs the first."""
        known = read_json(self.work / "devices.json") or {"devices": []}
        return {plain["name"]: plain["share"] for plain in known["devices"]}

    def settle(self, claim_id: str, device_name: str) -> Shown:
        """Judge a claim on a device, store the result, and say what its test shows."""
        from autograd_conformance.settle import settle
        from autograd_conformance.together import unjudged

        claim = self.register[claim_id]
        device = next(d for d in self.devices if d.name == device_name)
        if device.left_out:
            result = unjudged(claim_id, device)
        else:
            try:
                result = settle(self.engine, claim, self._checks[claim_id], device)
            except DeviceGoneError as error:
                result = unjudged(claim_id, replace(device, left_out=str(error)))
        write_json(self._result_path(claim_id, device_name), result.to_plain())
        return self._shown(claim, result)

    def _result_path(self, claim_id: str, device_name: str) -> Path:
        return self.work / "results" / slug(device_name) / f"{claim_id}.json"

    def _shown(self, claim: Claim, result: Result) -> Shown:
        properties = [("claim", claim.id), ("device", result.device), ("verdict", str(result.verdict))]
        if result.verdict is Verdict.UNSUPPORTED:
            return Shown(properties, skip=result.reason)
        if not result.expected:
            return Shown(properties, failure=self._argument(claim, result))
        if result.verdict is Verdict.BROKEN:
            return Shown(properties, xfail=f"expected: {result.reason} {result.link}")
        return Shown(properties)

    def _argument(self, claim: Claim, result: Result) -> str:
        from autograd_conformance.reports.document import script_path

        example = result.counterexample
        if example is None:
            return argument(result, claim, "", "")
        setup = next(device.setup for device in self.devices if device.name == result.device)
        script = repro(example, claim.sentence, "; ".join(claim.sources), result.device, setup)
        return argument(result, claim, str(self.report_dir / script_path(result)), script)

    # --- the end --------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This process is done: note the CPU time it took."""
        if self.work.exists():
            times = os.times()
            write_json(self.work / f"cpu-{os.getpid()}.json", times.user + times.system)

    def report(self) -> str:
        """Write the report; returns why the run failed, or an empty text."""
        if read_json(self.work / "collected.json") is None:
            return ""
        from autograd_conformance.closing import close
        from autograd_conformance.reports.folder import write

        run = close(self)

        write(run, self.register, self.report_dir)
        self.lines = summary(run, self.register, str(self.report_dir))
        return run.failure

    def results(self) -> list[tuple[str, str, Result | None]]:
        """Claim, device and result, if there is one, of everything that was collected."""
        rows = []
        for claim_id, device in json.loads((self.work / "collected.json").read_text()):
            plain = read_json(self._result_path(claim_id, device))
            rows.append((claim_id, device, Result.from_plain(plain) if plain else None))
        return rows
