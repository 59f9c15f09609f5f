"""What devices there are in this process, and what each can do: tried, not looked up.

Run as a module it is the child that :mod:`devices` starts, for whatever is tried here may kill the process: it reads a
request as JSON from its first argument and writes what it finds, a JSON object a line, to the file that the second names.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from autograd_conformance.claims import TRAITS

IN_TREE = ("cuda", "xpu", "mps", "mtia", "hpu")
RAISED = (RuntimeError, AssertionError, NotImplementedError, ImportError)


# --- which there are --------------------------------------------------------------------------------------------------


def candidates() -> Iterator[tuple[str, str, int]]:
    """Name, how it was found, and how many of its kind there are, of all that torch reports here."""
    yield "cpu", "always there", 1
    seen = {"cpu"}
    for kind in IN_TREE:
        module = getattr(torch, kind, None)
        if module is None or not _answers(getattr(module, "is_available", lambda: False)):
            continue
        seen.add(kind)
        yield from _indices(kind, _count(module), f"torch.{kind}")
    accelerator = _accelerator()
    if accelerator and accelerator not in seen:
        yield from _indices(accelerator, _count(torch.accelerator), "torch.accelerator")
        seen.add(accelerator)
    renamed = torch._C._get_privateuse1_backend_name()
    if renamed not in ("privateuseone", *seen):
        yield from _indices(renamed, _count(getattr(torch, renamed, None)), "the name of PrivateUse1")
    yield "meta", "always there", 1


def _indices(kind: str, count: int, where: str) -> Iterator[tuple[str, str, int]]:
    """Index 0, and 1 where there are several."""
    yield (f"{kind}:0" if count else kind), where, max(count, 1)
    if count > 1:
        yield f"{kind}:1", where, count


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


def unusable(name: str) -> str:
    """Why no tensor can be made on a device, or an empty text."""
    try:
        t = torch.zeros(2, device=name)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, it is no device
        return told(error)
    asked = torch.device(name)
    if asked.type != t.device.type or asked.index not in (None, t.device.index):
        return f"a tensor made on {name} is on {t.device}"
    return ""


def told(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


# --- traits: what may excuse a claim ----------------------------------------------------------------------------------


def _reads_values(name: str) -> None:
    if torch.tensor([1.5], device=name).tolist() != [1.5]:
        raise ValueError("a number came back changed")


def _has_addresses(name: str) -> None:
    t = torch.ones(2, device=name)
    if not t.data_ptr() or t.untyped_storage().data_ptr() != t.data_ptr():
        raise ValueError("data_ptr() tells nothing")


def _keeps_strides(name: str) -> None:
    t = torch.zeros(2, 4, device=name)
    seen = t.t().stride(), t[:, ::2].stride(), t.as_strided((2,), (3,)).stride(), t[0, :1].expand(3).stride()
    if seen != ((1, 4), (4, 2), (3,), (0,)):
        raise ValueError(f"a transpose, a slice, a view by as_strided and an expanded one have strides {seen}")


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


PROBES: dict[str, Callable[[str], None]] = {
    "values": _reads_values,
    "storage": _has_addresses,
    "strides": _keeps_strides,
    "float64": _has_float64,
    "complex": _has_complex,
    "threads": _has_threads,
    "streams": _has_streams,
    "reduced": _has_reduced,
    "forward_ad": _has_tangents,
}


# --- facts: shown, and excuse nothing ---------------------------------------------------------------------------------


def _gradient(name: str) -> str:
    t = torch.ones(2, device=name, requires_grad=True)
    (t * 3.0).sum().backward()
    return _yes(t.grad is not None and t.grad.tolist() == [3.0, 3.0])


def _slices_are_recorded(name: str) -> str:
    t = torch.ones(3, device=name, requires_grad=True)
    return _yes(t[0].requires_grad and t[1:].requires_grad and t[torch.tensor([0, 2], device=name)].requires_grad)


def _linear_is_recorded(name: str) -> str:
    return _yes(torch.nn.Linear(2, 1, device=name)(torch.ones(1, 2, device=name)).requires_grad)


def _views_alias(name: str) -> str:
    t = torch.zeros(4, device=name)
    t[1:3].fill_(1.0)
    return _yes(t.tolist() == [0.0, 1.0, 1.0, 0.0])


def _detach_aliases(name: str) -> str:
    t = torch.zeros(2, device=name)
    t.detach().fill_(1.0)
    return _yes(t.tolist() == [1.0, 1.0])


def _version_counts(name: str) -> str:
    t = torch.zeros(2, device=name)
    before = t._version
    t.add_(1.0)
    return _yes(t._version == before + 1)


def _second_derivative(name: str) -> str:
    t = torch.ones((), device=name, requires_grad=True)
    (first,) = torch.autograd.grad(t**3, t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    return _yes(second.item() == 6.0)


def _exp_error(name: str) -> str:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    due = torch.exp(x)
    return f"{((torch.exp(x.to(name)).cpu() - due) / due).abs().max().item():.0e}"


def _matmul_error(name: str) -> str:
    x = (torch.arange(64 * 64, dtype=torch.float64).reshape(64, 64) * 0.37).sin()
    seen = (x.float().to(name) @ x.float().to(name)).cpu().double()
    return f"{(seen - x @ x).abs().max().item():.0e}"


def _hook_thread(name: str) -> str:
    t, threads = torch.ones(2, device=name, requires_grad=True), []
    t.register_hook(lambda _: threads.append(threading.get_ident()))
    (t * 2).sum().backward()
    return "the caller's" if threads == [threading.get_ident()] else "another"


def _refuses_mixture(name: str) -> str:
    if torch.device(name).type == "cpu":
        return "it is the CPU itself"
    try:
        torch.ones(2, device=name) + torch.ones(2)
    except RAISED:
        return "yes"
    return "no"


def _copies_deeply(name: str) -> str:
    t = torch.ones(2, device=name)
    other = copy.deepcopy(t)
    other.fill_(2.0)
    return _yes(t.tolist() == [1.0, 1.0] and other.tolist() == [2.0, 2.0])


def _checkpoints(name: str) -> str:
    t = torch.ones(2, device=name, requires_grad=True)
    checkpoint(torch.sin, t, use_reentrant=False).sum().backward()
    return _yes(t.grad is not None)


def _repeats_random(name: str) -> str:
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(torch.rand(3, device=name).tolist())
    return _yes(drawn[0] == drawn[1])


def _yes(answer: object) -> str:
    return "yes" if answer else "no"


FACTS: dict[str, Callable[[str], str]] = {
    "backward": _gradient,
    "slices are recorded": _slices_are_recorded,
    "nn.Linear is recorded": _linear_is_recorded,
    "views alias": _views_alias,
    "detach aliases": _detach_aliases,
    "version counter": _version_counts,
    "double backward": _second_derivative,
    "relative error of float64 exp": _exp_error,
    "error of float32 matmul": _matmul_error,
    "hooks run on thread": _hook_thread,
    "mixed devices refused": _refuses_mixture,
    "deep copy": _copies_deeply,
    "checkpoint": _checkpoints,
    "seeded random": _repeats_random,
}


def measured(
    name: str, skip: dict[str, str], trying: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, str], dict[str, str]]:
    """Per trait an empty text, or why it is not there; and the facts. ``skip`` has what is known to kill the process."""
    traits, facts = {}, {}
    for trait in sorted(TRAITS, key=list(PROBES).index):
        traits[trait] = skip[trait] if trait in skip else _tried(trait, name, trying)
    for fact, look in FACTS.items():
        try:
            trying(fact)
            facts[fact] = skip[fact] if fact in skip else look(name)
        except Exception as error:  # noqa: BLE001 - that too is an answer
            facts[fact] = told(error)
    return traits, facts


def _tried(trait: str, name: str, trying: Callable[[str], None]) -> str:
    trying(trait)
    try:
        PROBES[trait](name)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, the trait is not there
        return told(error)
    return ""


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


def prepare(setup: str) -> None:
    """Run the line of Python that makes a device known."""
    exec(setup, {"torch": torch, "__name__": "setup"})  # noqa: S102 - the user's own line


# --- the child --------------------------------------------------------------------------------------------------------


def _serve(request: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    tell({"step": "setup"})
    try:
        prepare(request["setup"])
    except Exception as error:  # noqa: BLE001 - reported, not fatal
        tell({"failed": told(error)})
        return
    tell({"step": "look"})
    found = list(candidates())
    known = {name for name, *_ in found}
    for name in request["names"] or ():
        if name not in known:
            kind = name.partition(":")[0]
            count = next((count for other, _, count in found if other.partition(":")[0] == kind), 1)
            found.append((name, "named by the user", count))
    for name, how, count in found:
        if request["names"] and name not in request["names"]:
            tell({"seen": name})
            continue
        skip = request["skip"].get(name, {})
        tell({"device": name, "step": "make a tensor"})
        reason = skip.get("make a tensor") or unusable(name)
        if reason:
            tell({"left_out": name, "found": how, "count": count, "reason": reason})
            continue
        traits, facts = measured(name, skip, lambda what, name=name: tell({"device": name, "step": what}))  # type: ignore[misc]
        tell({"name": name, "found": how, "count": count, "traits": traits, "facts": facts})
    usable = [name for name in request["names"] or ["cpu"] if not unusable(name)]
    tell({"done": about(usable[0]) if usable else {}})


def main() -> None:
    """Entry point of the child."""
    torch.set_num_threads(1)
    with open(sys.argv[2], "a", encoding="utf-8") as file:  # noqa: PTH123 - a file that is written line by line

        def tell(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        _serve(json.loads(sys.argv[1]), tell)


if __name__ == "__main__":
    import os

    main()
    os._exit(0)  # threads of a device may not survive the interpreter's end
