"""The end of a run: everything that its processes left in the working folder becomes one :class:`Run`."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from autograd_conformance import __version__
from autograd_conformance.claims import is_whole
from autograd_conformance.devices import Device
from autograd_conformance.engine import Engine
from autograd_conformance.families import AnyCheck, families_of
from autograd_conformance.journal import read_json
from autograd_conformance.ops.added import loaded
from autograd_conformance.settle import ended
from autograd_conformance.verdicts import Result, Run, Verdict

if TYPE_CHECKING:
    from autograd_conformance.session import Session

PACKAGES = ("numpy", "hypothesis", "pytest", "pytest-xdist")


def close(session: Session) -> Run:
    """Put the run together and remove the working folder."""
    found = read_json(session.work / "devices.json") or {"devices": [], "target": {}}
    engine = Engine(session.work, session.profile, session.seed, (), (), "", shares=session.shares)
    devices = {plain["name"]: Device.from_plain(plain) for plain in found["devices"]}
    found_rows = session.results()
    checks = _checks() if any(result is None for *_, result in found_rows) else {}
    rows = [
        (claim, name, result or _lost(engine, claim, checks.get(claim), devices.get(name) or Device(name, "")))
        for claim, name, result in found_rows
    ]
    results = tuple(result for *_, result in rows)
    pairs = dict.fromkeys((r.family, r.device) for r in results if r.family and r.verdict is not Verdict.UNSUPPORTED)
    families = [engine.collected(*pair) for pair in pairs]
    complete = is_whole(claim for claim, *_ in rows)
    run = Run(
        about=about(
            session.profile.name,
            session.seed,
            found["target"],
            wall=time.time() - session.started,
            cpu=sum(read_json(path) or 0.0 for path in session.work.glob("cpu-*.json")),
        ),
        devices={plain["name"]: plain for plain in found["devices"]},
        families=[family.to_plain() for family in families],
        results=results,
        complete=complete,
        failure=_failure(results),
        notes=tuple(_notes(families)),
    )
    shutil.rmtree(session.work, ignore_errors=True)
    with suppress(OSError):  # another run may still work beside us
        session.work.parent.rmdir()
    return run


def _checks() -> dict[str, AnyCheck]:
    from autograd_conformance.replay import all_checks  # only here: it imports the tests of all claims

    return {check.claim: check for check in all_checks()}


def _lost(engine: Engine, claim: str, check: AnyCheck | None, device: Device) -> Result:
    """A claim whose test gave no result: its process died, or the run was stopped before."""
    for name in families_of(check) if check else ():
        family = engine.collected(name, device.name)
        family.deaths += engine.lost(name, device.name)
        if check and family.killed(claim):
            base = Result(claim, device.name, Verdict.CRASHED, family=name)
            return ended(base, family.killed(claim), check, device)
    return Result(claim, device.name, Verdict.NOT_RUN, expected=False, reason="the run ended before")


def _failure(results: Iterable[Result]) -> str:
    lost = [r for r in results if r.verdict is Verdict.NOT_RUN]
    names = ", ".join(r.claim for r in lost[:5])
    return f"{len(lost)} claims were collected and not judged: {names} ({lost[0].reason})" if lost else ""


def _notes(families: Iterable[Any]) -> Iterable[str]:
    for family in families:
        where = f"{family.name} on {family.device}"
        if family.unexamined:
            yield f"{where}: so many gradients differ that those of {family.unexamined} programs were not compared"
        for leak in sorted(set(family.leaks)):
            yield f"{where}: a program left {leak} changed"
        for change, count in family.changed.items():
            yield f"{where}: in {count} programs {change}"


def about(profile: str, seed: int, target: dict[str, Any], *, wall: float, cpu: float) -> dict[str, Any]:
    """What a report says of the run as a whole."""
    return {
        "name": "torch",
        "version": _version("torch"),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "test_suite": {"name": "autograd-conformance", "version": __version__}
        | ({"ops": loaded()} if loaded() else {}),
        "execution_target": target,
        "torch": {"version": _version("torch")},
        "packages": {name: _version(name) for name in PACKAGES},
        "profile": profile,
        "seed": seed,
        "threads": 1,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
