"""Which devices there are, and what each can do. Asked by trait, never by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from autograd_conformance.claims import TRAITS
from autograd_conformance.errors import UsageError, unknown


@dataclass(frozen=True, slots=True)
class Device:
    """A device that programs can run on.

    Attributes:
        name: torch's device string.
        found: how it was found.
        traits: names of the traits that it has (see :data:`autograd_conformance.claims.TRAITS`).
        missing: per trait that it lacks, what happened when it was tried.

    """

    name: str
    found: str
    traits: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    def has(self, trait: str) -> bool:
        """Does the device have a trait?"""
        return trait in self.traits

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Device:
        """The device that :meth:`to_plain` wrote."""
        return cls(plain["name"], plain["found"], tuple(plain["traits"]), dict(plain["missing"]))


def discover(wanted: Iterable[str] = ()) -> list[Device]:
    """All devices of this process, or the wanted ones; cpu first.

    Raises:
        UsageError: a wanted device is not there.

    """
    there = dict(_candidates())
    names = list(wanted) or list(there)
    devices = []
    for name in names:
        if name not in there:
            there[name] = _tried(name, there)
        devices.append(_measured(name, there[name]))
    return devices


def _tried(name: str, there: dict[str, str]) -> str:
    """A device that was named but not discovered: it counts if a tensor can be made on it."""
    try:
        torch.zeros(2, device=name)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0][:160]
        raise UsageError(f"{unknown('device', name, there)} (torch says: {reason})") from None
    return "named by the user"


def _candidates() -> Iterable[tuple[str, str]]:
    yield "cpu", "always there"
    seen = {"cpu"}
    for kind in ("cuda", "xpu", "mps", "mtia", "hpu"):
        module = getattr(torch, kind, None)
        if module is None or not _answers(getattr(module, "is_available", lambda: False)):
            continue
        seen.add(kind)
        count = _count(module)
        yield (f"{kind}:0" if count else kind), f"torch.{kind}.is_available()"
        if count > 1:
            yield f"{kind}:1", f"torch.{kind}.device_count() is {count}"
    accelerator = _accelerator()
    if accelerator and accelerator not in seen:
        yield f"{accelerator}:0", "torch.accelerator.current_accelerator(check_available=True)"
    yield "meta", "always there"


def _answers(question: Callable[[], Any]) -> bool:
    try:
        return bool(question())
    except Exception:  # noqa: BLE001 - a backend that cannot answer is not available
        return False


def _count(module: Any) -> int:
    try:
        return int(module.device_count())
    except Exception:  # noqa: BLE001 - mps, say, has no count: it is one device without an index
        return 0


def _accelerator() -> str:
    """The accelerator that torch reports, be it one that has been renamed from PrivateUse1; empty if there is none."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return ""
    try:
        device = accelerator.current_accelerator(check_available=True)
    except (RuntimeError, TypeError):
        return ""
    return device.type if device is not None else ""


def _measured(name: str, found: str) -> Device:
    traits, missing = [], {}
    for trait in TRAITS:
        try:
            _PROBES[trait](name)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, the trait is not there
            missing[trait] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
        else:
            traits.append(trait)
    return Device(name, found, tuple(traits), missing)


def _reads_values(name: str) -> None:
    if torch.tensor([1.5], device=name).tolist() != [1.5]:
        raise ValueError("a number came back changed")


def _has_addresses(name: str) -> None:
    t = torch.ones(2, device=name)
    if not t.data_ptr() or t.untyped_storage().data_ptr() != t.data_ptr():
        raise ValueError("data_ptr() tells nothing")


def _has_float64(name: str) -> None:
    t = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64, device=name)
    (t * t).sum()


def _has_complex(name: str) -> None:
    z = torch.ones(2, dtype=torch.complex64, device=name, requires_grad=True)
    torch.view_as_real(z * z).sum().backward()


def _has_tangents(name: str) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, device=name), torch.ones(2, device=name))
        if forward_ad.unpack_dual(dual * dual).tangent is None:
            raise ValueError("the tangent got lost")


def _has_threads(name: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_differentiates, name).result()


def _differentiates(name: str) -> None:
    t = torch.ones(2, device=name, requires_grad=True)
    (t * t).sum().backward()


def _has_streams(name: str) -> None:
    streams = [torch.Stream(device=name) for _ in range(2)]
    if streams[0].stream_id == streams[1].stream_id:
        raise ValueError("a new stream is the one that there was")


def _has_reduced(name: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        t = torch.ones(2, dtype=dtype, device=name)
        (t * t).sum()


_PROBES: dict[str, Callable[[str], None]] = {
    "values": _reads_values,
    "storage": _has_addresses,
    "float64": _has_float64,
    "complex": _has_complex,
    "forward_ad": _has_tangents,
    "threads": _has_threads,
    "streams": _has_streams,
    "reduced": _has_reduced,
}


def about(device: str) -> dict[str, str | None]:
    """What a report says about the hardware behind a device."""
    kind = torch.device(device).type
    model = None
    if kind == "cuda":
        model = torch.cuda.get_device_name(device)
    return {
        "kind": kind,
        "backend": f"torch {torch.__version__}",
        "device_model": model,
        "runtime_version": torch.version.cuda if kind == "cuda" else None,
        "driver_version": None,
    }
