"""Runs whole programs on torch, looks at everything after each line, and says where it differs from paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autograd_conformance.ops.added import bound
from autograd_conformance.player import code, probe
from autograd_conformance.runner import modes, quiet, readable, restore, storage_of
from autograd_conformance.verdicts import Violation
from autograd_conformance.whole.state import Tensor
from autograd_conformance.whole.words import Flags, Numbers, Plainly, Told, Whole

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Packing:
    """Asks torch what an op saves: runs it once on ones, with hooks that see what is packed."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, source: str, tensors: Sequence[Tensor]) -> Sequence[str]:
        """See :data:`autograd_conformance.whole.state.Packs`."""
        return _packed(source, tuple((t.shape, t.dtype, t.requires_grad) for t in tensors), self.device)


@lru_cache(maxsize=4096)
def _packed(source: str, operands: tuple[tuple[tuple[int, ...], str, bool], ...], device: str) -> tuple[str, ...]:
    seen: set[int] = set()

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.add(storage_of(t))
        return t

    names: dict[str, Any] = {"torch": torch, **bound()}
    for i, (shape, dtype, tracked) in enumerate(operands):
        leaf = torch.ones(shape, dtype=_DTYPES[dtype], device=device, requires_grad=tracked)
        names[f"x{i}"] = leaf + 0.0  # no leaf, for it may be written
    with quiet(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        exec(code(source), names)  # noqa: S102
    slots = {f"in{i}": names[f"x{i}"] for i in range(len(operands))}
    out = names.get("out")
    outs = (out,) if isinstance(out, torch.Tensor) else tuple(out or ())
    slots |= {f"out{i}": t for i, t in enumerate(outs)}
    return tuple(name for name, t in slots.items() if storage_of(t) in seen)


def play(whole: Whole, device: str, *, values: bool) -> list[Violation]:
    """Run a program and compare after each line; the first line where anything differs ends it."""
    before = modes()
    with quiet():
        player = _Player(device, whole.narrow, values=values)
        found: list[Violation] = []
        try:
            for at, told in enumerate(whole.lines):
                found = list(player.line(at, told))
                if found or player.lost:
                    break
        finally:
            player.leave()
    restore(before)
    return found


class _Player:
    def __init__(self, device: str, narrow: bool, *, values: bool) -> None:
        self.names: dict[str, Any] = {"torch": torch, "__name__": "script", **bound()}
        self.device, self.values = device, values
        self.tolerance = 1e-3 if narrow else 1e-7
        self.versions: dict[str, int] = {}
        self.shared: set[str] = set()
        self.lost = False

    def line(self, at: int, told: Told) -> Iterator[Violation]:
        """Run one line and look."""
        error: Exception | None = None
        if told.what == "step" and self.shared:
            self.lost = True  # what is in gradients that share memory, nobody knows
            return
        try:
            exec(code(told.text), self.names)  # noqa: S102 - the text is our own
        except Exception as raised:  # noqa: BLE001 - whatever torch raises is an observation
            error = raised.with_traceback(None)
        yield from _raised(at, told, error)
        for plain in told.plain[:1]:  # the mode, whatever has happened
            yield from self._plain(at, plain)
        yield from self._flags(at, told)
        yield from self._versions(at, told)
        if self.values:
            self._look_for_shared(told)
        for number in told.numbers:
            if error is None and number.grad_of not in self.shared:
                yield from self._number(at, number)
        for plain in told.plain[1:] if error is None else ():
            yield from self._plain(at, plain)

    def _plain(self, at: int, due: Plainly) -> Iterator[Violation]:
        seen = self._see(due.probe)
        if seen != due.due:
            yield _differs(at, due.claim, due.probe, due.due, seen, due.because)

    def _flags(self, at: int, told: Told) -> Iterator[Violation]:
        for name, due in told.flags.items():
            t = self.names.get(name)
            if not isinstance(t, torch.Tensor):
                continue
            seen: Flags = (t.requires_grad, t.is_leaf, t.grad_fn is not None, t.retains_grad, tuple(t.shape))
            if seen != due:
                for (word, claim), one, other in zip(_WORDS, due, seen, strict=True):
                    if one != other:
                        because = f"so it must be after this statement ({told.what})"
                        told_by = told.claim or ("create-graph.result-tracks" if told.what == "second" else claim)
                        yield _differs(at, told_by, f"{name}.{word}", one, other, because)
                        break
        if told.shares and self.values:
            one, other = (self.names[name] for name in told.shares)
            if one.numel() and storage_of(one) != storage_of(other):
                text = f"{told.shares[0]}.untyped_storage().data_ptr() == {told.shares[1]}.untyped_storage().data_ptr()"
                yield _differs(at, "detach.storage-shared", text, True, False, "detach shares memory")

    def _versions(self, at: int, told: Told) -> Iterator[Violation]:
        for name in told.flags:
            t = self.names.get(name)
            if not isinstance(t, torch.Tensor) or t.is_inference():  # which has no version
                continue
            now, before = t._version, self.versions.get(name)
            self.versions[name] = now
            if before is None:
                continue
            if name in told.wrote and told.raises == "never" and now <= before:
                yield _differs(
                    at, "inplace.version-counter", f"{name}._version > {before}", True, False, "a write raises it"
                )
            if now < before:
                yield _differs(
                    at, "inplace.version-counter", f"{name}._version >= {before}", True, False, "it never falls"
                )

    def _look_for_shared(self, told: Told) -> None:
        """Gradients that share memory with others: pytorch issue 34082; what they hold later is not judged."""
        self.shared -= set(told.cleared)
        if not any(number.grad_of for number in told.numbers):
            return
        groups: dict[int, list[str]] = {}
        for name, t in self.names.items():
            if isinstance(t, torch.Tensor):
                groups.setdefault(storage_of(t), []).append("")
                g = t.grad if t.is_leaf or t.retains_grad else None
                if g is not None:
                    groups.setdefault(storage_of(g), []).append(name)
            elif isinstance(t, tuple):
                for part in t:
                    if isinstance(part, torch.Tensor):
                        groups.setdefault(storage_of(part), []).append("")
        for group in groups.values():
            if len(group) > 1:
                self.shared.update(name for name in group if name)

    def _see(self, text: str) -> Any:
        try:
            return eval(probe(text), self.names)  # noqa: S307 - as above
        except Exception as error:  # noqa: BLE001 - a probe that raises has seen something
            return error.with_traceback(None)

    def _number(self, at: int, due: Numbers) -> Iterator[Violation]:
        seen = self._see(due.probe)
        if due.due is None or not isinstance(seen, torch.Tensor):
            if due.due is not None or seen is not None:
                yield Violation(
                    due.claim, at, due.probe, _literal(due.due), _literal(seen), "close", 1e-6, because=due.because
                )
            return
        if not self.values:
            return
        got = np.array(readable(seen), dtype=np.float64).reshape(tuple(seen.shape))
        tolerance = self.tolerance * max(due.size, float(np.max(np.abs(due.due), initial=0.0)))
        if got.shape != due.due.shape or not np.all(np.abs(got - due.due) <= tolerance):
            yield Violation(
                due.claim, at, due.probe, _literal(due.due), _literal(got), "close", tolerance, because=due.because
            )

    def leave(self) -> None:
        """Leave the block around the program, and break cycles."""
        if "around" in self.names:
            self.names["around"].__exit__(None, None, None)
        for value in self.names.values():
            if isinstance(value, torch.Tensor) and value.is_leaf:
                value.grad = None


_WORDS = (
    ("requires_grad", "requires-grad.propagates-any"),
    ("is_leaf", "leaf.iff-no-grad-fn"),
    ("grad_fn is not None", "leaf.iff-no-grad-fn"),
    ("retains_grad", "retain-grad.flag"),
    ("shape", "requires-grad.value-independent"),
)


def _literal(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value)


def _differs(at: int, claim: str, probed: str, due: Any, seen: Any, because: str) -> Violation:
    return Violation(claim, at, probed, repr(due), repr(seen), because=because)


def _raised(at: int, told: Told, error: Exception | None) -> Iterator[Violation]:
    if told.raises == "must" and not isinstance(error, RuntimeError):
        seen = "None" if error is None else f"{type(error).__name__}: {error}"[:200]
        yield Violation(told.claim, at, "", "RuntimeError", seen, "raises", because=told.because)
    if told.raises == "never" and error is not None:
        because = "nothing is wrong with this statement, so it must succeed"
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        yield Violation(told.claim, at, "", "None", text, "raises", because=because, mark="stray")
