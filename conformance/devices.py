"""Which devices there are, and what each can do. Asked by trait, never by name.

What a device can do is tried in a child process, for a backend may kill the process or never come back. Knows no torch:
what is tried stands in :mod:`traits`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autograd_conformance.errors import UsageError, unknown

SETUP = 300  # seconds that an import may take: a backend may have to be compiled
STEP = 60  # seconds that one trait may take
FOUND = "found"  # among the names of devices: all that are here
MAYBE = "?"  # behind the name of a device: if it can be used
ALWAYS = ("cpu", "meta")
IN_TREE = (*ALWAYS, "cuda", "xpu", "mps", "mtia", "hpu")


@dataclass(frozen=True, slots=True)
class Known:
    """A backend that needs an import before torch knows it.

    Attributes:
        setup: the line of Python.
        module: the package that must be there.
        asked: it is judged only if it is asked for.
        share: it is slow, and runs the first of so many parts of the programs.

    """

    setup: str
    module: str
    asked: bool = False
    share: int = 1


KNOWN = {
    "lazy": Known("import torch._lazy.ts_backend; torch._lazy.ts_backend.init()", "torch", asked=True, share=10),
    "npy": Known("import autograd_conformance.examples.npy as npy; npy.init()", "numpy", asked=True, share=10),
    "twin": Known("import autograd_conformance.examples.twin as twin; twin.init()", "torch", asked=True, share=10),
    "xla": Known("import os; os.environ.setdefault('PJRT_DEVICE', 'CPU'); import torch_xla", "torch_xla", share=20),
    "vulkan": Known("import torchvulkan", "torchvulkan"),
    "jax": Known("import torchax; torchax.enable_globally()", "torchax"),
}
ASKED = tuple(name for name, known in KNOWN.items() if known.asked)
SHARES = ("", KNOWN["lazy"].setup)  # every other setup may take the one name that PrivateUse1 has in a process


@dataclass(frozen=True, slots=True)
class Device:
    """A device that programs can run on.

    Attributes:
        name: torch's device string.
        found: how it was found.
        traits: names of the traits that it has (see :data:`autograd_conformance.claims.TRAITS`).
        missing: per trait that it lacks, what happened when it was tried.
        setup: the line of Python that makes it known to torch; empty if none is needed.
        count: devices of its kind that the backend says there are.
        facts: what else was seen; excuses nothing.
        left_out: why no program can run on it; empty if some can.
        ended: how the child died that tried it: ``crashed`` or ``hung``; else empty.
        share: it runs the first of so many parts of the programs; more than 1 for a slow one.

    """

    name: str
    found: str
    traits: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    count: int = 1
    facts: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    ended: str = ""
    share: int = 1

    def has(self, trait: str) -> bool:
        """Does the device have a trait?"""
        return trait in self.traits

    @property
    def kind(self) -> str:
        """The name without its index."""
        return self.name.partition(":")[0]

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Device:
        """The device that :meth:`to_plain` wrote."""
        return cls(**plain | {"traits": tuple(plain["traits"])})


@dataclass(slots=True)
class Survey:
    """What was found.

    Attributes:
        devices: usable or left out, in the order in which they were asked for; cpu first otherwise.
        failures: per backend that nobody asked for, why its import failed.
        target: what a report says about the hardware behind the first device.

    """

    devices: list[Device] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> list[Device]:
        """Those on which programs can run."""
        return [device for device in self.devices if not device.left_out]

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"devices": [d.to_plain() for d in self.devices], "target": self.target, "failures": self.failures}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Survey:
        """The survey that :meth:`to_plain` wrote."""
        return cls([Device.from_plain(d) for d in plain["devices"]], dict(plain["failures"]), dict(plain["target"]))


def survey(wanted: Sequence[str] = (), setup: str = "", limits: tuple[float, float] = (SETUP, STEP)) -> Survey:
    """All devices of this machine, or the wanted ones.

    Args:
        wanted: names of devices, among them perhaps "found"; none for all that are here. A name that ends in "?" is
            wanted if it can be used: if not, that is noted, and no mistake.
        setup: a line of Python that makes a device known to torch.
        limits: seconds for a setup, and for each step after it.

    Raises:
        UsageError: a wanted device is not there, or the setup raises.

    """
    if FOUND in wanted:
        return _with_all(wanted, setup, limits)
    optional = {name.removesuffix(MAYBE) for name in wanted if name.endswith(MAYBE)}
    wanted = [name.removesuffix(MAYBE) for name in wanted]
    result = Survey()
    for line, names in _groups(wanted, setup).items():
        child = _Child(line, names, limits)
        child.run()
        _take(result, child, wanted, setup, optional)
    result.failures |= {d.name: d.left_out for d in result.devices if d.left_out and d.name in optional}
    result.devices = [d for d in result.devices if not (d.left_out and d.name in optional)]
    order = {name: i for i, name in enumerate(wanted)}
    result.devices = list({device.name: device for device in reversed(result.devices)}.values())[::-1]
    result.devices.sort(key=lambda d: order.get(d.name, 0))
    for name in wanted:
        if name not in {device.name for device in result.devices} | optional:
            raise unknown("device", name, [device.name for device in result.devices])
    return result


def _with_all(wanted: Sequence[str], setup: str, limits: tuple[float, float]) -> Survey:
    """The named devices, and all others that are here."""
    named = [name for name in wanted if name != FOUND]
    result = survey(named, setup, limits) if named else Survey()
    everything = survey((), "" if named else setup, limits)
    known = {device.name for device in result.devices}
    result.devices += [device for device in everything.devices if device.name not in known]
    result.failures |= everything.failures
    result.target = result.target or everything.target
    return result


def _groups(wanted: Sequence[str], setup: str) -> dict[str, list[str]]:
    """Per line of setup the names that need it; no names for whatever it brings.

    The user's line is for names that nobody else knows; without such a name for those of our own, else for all.
    """
    if wanted:
        kinds = {name.partition(":")[0] for name in wanted}
        theirs = (kinds - {*IN_TREE, *KNOWN}) or (kinds - {*IN_TREE, "lazy"}) or kinds
        groups: dict[str, list[str]] = {}
        for name in wanted:
            kind = name.partition(":")[0]
            known = KNOWN.get(kind) or (None if kind in IN_TREE else _entry_point(kind))
            line = setup if setup and kind in theirs else known.setup if known else ""
            groups.setdefault(line, []).append(name)
        return groups
    brought: dict[str, list[str]] = {k.setup: [] for k in _brought().values()}
    return {"": [], **brought, **({setup: []} if setup else {})}


def _entry_point(kind: str) -> Known | None:
    """A backend that declares itself under a name like that of its device."""
    return next((known for name, known in _declared().items() if kind in name), None)


def _declared() -> dict[str, Known]:
    """What installed packages declare as ``torch.backends``; torch itself would import them, but not in a child."""
    line = "from importlib.metadata import entry_points; entry_points(group='torch.backends')[{!r}].load()()"
    return {
        e.name: Known(line.format(e.name), e.module.partition(".")[0]) for e in entry_points(group="torch.backends")
    }


def _brought() -> dict[str, Known]:
    """Backends that an import brings and that are installed."""
    known = {name: k for name, k in KNOWN.items() if not k.asked}
    return {name: k for name, k in {**_declared(), **known}.items() if find_spec(k.module)}


def _take(result: Survey, child: _Child, wanted: Sequence[str], setup: str, optional: Container[str] = ()) -> None:
    """Add what a child found; its failure is reported, and fatal only if the user's own line raised."""
    if child.failure:
        if child.setup == setup and setup and not child.ended:
            raise UsageError(f"the setup {setup!r} raised {child.failure}")
        for name in child.names:
            result.devices.append(_lost(name, child))
        if not child.names:
            label = next((n for n, k in _brought().items() if k.setup == child.setup), child.setup)
            result.failures[label] = child.failure
        if setup and child.setup == setup and not wanted:
            result.devices.append(_lost("(setup)", child))
        return
    there = [*child.seen, *(d.name for d in child.devices if not d.left_out)]
    known = {device.name for device in result.devices}
    for device in child.devices:
        if device.name in optional:
            pass
        elif device.left_out and not device.ended and device.found == "named by the user":
            raise UsageError(f"{unknown('device', device.name, [*there, *ASKED])} (torch says: {device.left_out})")
        if device.name not in known:
            result.devices.append(device)
    if setup and child.setup == setup and not wanted and not ({d.name for d in child.devices} - known):
        result.devices = [replace(d, setup=setup) if not d.setup else d for d in result.devices]
    result.target = result.target or child.target


def _lost(name: str, child: _Child) -> Device:
    return Device(name, "its setup", (), {}, child.setup, left_out=child.failure, ended=child.ended)


class _Child:
    """A process that tries the devices of one setup; started again behind what kills it."""

    def __init__(self, setup: str, names: Sequence[str], limits: tuple[float, float]) -> None:
        self.setup, self.names, self.limits = setup, list(names), limits
        self.skip: dict[str, dict[str, str]] = {}
        self.devices: list[Device] = []
        self.seen: list[str] = []
        self.target: dict[str, Any] = {}
        self.failure = self.ended = ""
        self.done = False

    def run(self) -> None:
        """Until a child reaches its end, or dies before it has looked."""
        while not self.failure and not self.done:
            with tempfile.TemporaryDirectory() as folder:
                told = Path(folder) / "told"
                told.touch()
                how = self._watched(told)
                self._heed([json.loads(line) for line in told.read_text().splitlines()], how)

    def _watched(self, told: Path) -> str:
        """Start a child and wait; how it ended, empty if well."""
        request = json.dumps({"setup": self.setup, "names": self.names, "skip": self.skip})
        command = [sys.executable, "-m", "autograd_conformance.traits", request, str(told)]
        with subprocess.Popen(  # noqa: S603 - our own command line
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment()
        ) as child:
            size, since = 0, time.monotonic()
            while True:
                try:
                    _, errors = child.communicate(timeout=0.2)
                except subprocess.TimeoutExpired:
                    now = told.stat().st_size
                    if now != size:
                        size, since = now, time.monotonic()
                    limit = (SETUP, *self.limits)[min(2, told.read_text().count("\n"))]  # torch itself comes first
                    if time.monotonic() - since > limit:
                        child.kill()
                        child.communicate()
                        return f"it did not come to an end within {limit:g} s"
                else:
                    return _how(child.returncode, errors.decode(errors="replace"))

    def _heed(self, rows: list[dict[str, Any]], how: str) -> None:
        self.devices, self.seen, step = [], [], {}
        for row in rows:
            if "failed" in row:
                self.failure = row["failed"]
            elif "traits" in row or "left_out" in row:
                self.devices.append(self._device(row))
            elif "seen" in row:
                self.seen.append(row["seen"])
            elif "done" in row:
                self.target, self.done = row["done"], True
            else:
                step = row
        if self.failure or self.done:
            return
        if "device" not in step:
            self.failure = f"in its setup, {how}" if step.get("step") == "setup" else how
            self.ended = "hung" if "come to an end" in how else "crashed"
        elif step["step"] in self.skip.get(step["device"], {}):
            self.failure, self.ended = how, "crashed"  # no progress
        else:
            self.skip.setdefault(step["device"], {})[step["step"]] = how

    def _device(self, row: dict[str, Any]) -> Device:
        if "left_out" in row:
            reason, count = row["reason"], row["count"]
            if count > 1 and ":" in row["left_out"]:
                reason = f"{row['found']} says there are {count}, but: {reason}"
            ended = ("hung" if "come to an end" in reason else "crashed") if self._died(row["left_out"]) else ""
            return Device(row["left_out"], row["found"], (), {}, self.setup, count, left_out=reason, ended=ended)
        missing = {trait: reason for trait, reason in row["traits"].items() if reason}
        traits = tuple(trait for trait in row["traits"] if trait not in missing)
        known = KNOWN.get(row["name"].partition(":")[0])
        share = known.share if known else 1
        return Device(row["name"], row["found"], traits, missing, self.setup, row["count"], row["facts"], share=share)

    def _died(self, name: str) -> bool:
        return "make a tensor" in self.skip.get(name, {})


def _how(code: int, errors: str) -> str:
    if code == 0:
        return "it ended early"
    try:
        return f"the process died of {signal.Signals(-code).name}"
    except ValueError:
        last = errors.strip().splitlines()[-1][:160] if errors.strip() else ""
        return f"the process ended with exit code {code}" + (f": {last}" if last else "")


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}


def discover(wanted: Iterable[str] = (), setup: str = "") -> list[Device]:
    """The devices of a survey that can be used, made known to this process.

    Raises:
        UsageError: a wanted device is not there, or cannot be used.

    """
    names = list(wanted)
    if names and not setup and all(name in ALWAYS for name in names):  # nothing of torch itself needs a child
        return [here(name) for name in names]
    found = survey(names, setup)
    for device in found.devices:
        if device.left_out and device.name in names:
            raise UsageError(f"device {device.name!r} cannot be used: {device.left_out}")
    join(found.usable)
    return found.usable


def here(name: str) -> Device:
    """A device that this process knows already, measured in it."""
    from autograd_conformance.traits import measured

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself: it scripts what forward mode needs
        traits, facts = measured(name, {})
    missing = {trait: reason for trait, reason in traits.items() if reason}
    return Device(name, "known to this process", tuple(t for t in traits if t not in missing), missing, facts=facts)


def join(devices: Iterable[Device]) -> None:
    """Make devices known to this process, and warm them: the first backward finds a device that is awake.

    Raises:
        UsageError: a setup raises, or no tensor can be made.

    """
    import torch

    from autograd_conformance.traits import prepare, told

    done: set[str] = set()
    for device in devices:
        try:
            if device.setup and device.setup not in done:
                prepare(device.setup)
                done.add(device.setup)
            torch.ones(2, device=device.name)
        except Exception as error:  # noqa: BLE001 - one line says what went wrong
            raise UsageError(f"device {device.name!r} cannot be used: {told(error)}") from None


def shared(devices: Iterable[Device]) -> list[Device]:
    """The devices as one process can have them: PrivateUse1 has one name, and the first setup that may take it has it."""
    first, found = "", []
    for device in devices:
        if not device.left_out and device.setup not in SHARES:
            first = first or device.setup
            if device.setup != first:
                reason = "it needs a process of its own, which autograd-conformance run gives it"
                device = replace(device, left_out=reason)
        found.append(device)
    return found
