"""The same program on torch: runs it statement by statement and writes down what it sees.

With devices.py and faults/ the only place that touches torch. Judges nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from autograd_conformance.ops import OPS
from autograd_conformance.ops.added import bound
from autograd_conformance.program import (
    REWRAPS,
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Leaf,
    Program,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
    layout_source,
)
from autograd_conformance.seen import Error, GradSeen, Seen, TensorSeen

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "bool")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_GRADIENTS = (Backward, Grad, SetGrad)  # statements after which a .grad may be another


def run(program: Program, device: str, *, values: bool = True) -> Seen:
    """Run a program on a device and return what was seen; ``values=False`` where numbers cannot be read back."""
    with quiet():
        runner = Runner(device, values=values)
        runner.play(program)
    return runner.seen


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings about ``.grad`` of non-leaves and create_graph cycles are due; nobody needs to read them here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def call_of(op_name: str, count: int, params: tuple[str, ...]) -> Callable[..., Any]:
    """The torch call of an op, compiled from the source that the printer prints."""
    op = OPS[op_name]
    names = [f"x{i}" for i in range(count)] if op.arity < 0 else list("abc"[:count])
    body = op.source(names, {name: name for name in params})
    # the source is the op table's own text
    call: Callable[..., Any] = eval(f"lambda {', '.join((*names, *params))}: {body}", {"torch": torch, **bound()})  # noqa: S307
    return call


@cache
def _rewrap_call(how: str) -> Callable[[Any], Any]:
    call: Callable[[Any], Any] = eval(f"lambda arg: {REWRAPS[how][0].format(arg='arg')}", {"torch": torch})  # noqa: S307
    return call


@cache
def _view_call(source: str) -> Callable[[Any], Any]:
    call: Callable[[Any], Any] = eval(f"lambda x: x{source}")  # noqa: S307
    return call


class Runner:
    """Plays statements; ``live`` holds the tensors by name."""

    def __init__(self, device: str, *, values: bool = True) -> None:
        self.device, self.values = device, values
        self.on_cpu = device == "cpu"
        self.live: dict[str, torch.Tensor] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor | None] = {}
        self.seeds: list[tuple[str, torch.Tensor]] = []
        self.watched = self.leaves
        self.seen = Seen()

    def play(self, program: Program) -> None:
        """Run all statements, and leave no trace."""
        last = max((i for i, s in enumerate(program) if isinstance(s, Backward)), default=-1)
        before = modes()
        for at, statement in enumerate(program):
            self.watched = self.live if at == last else self.leaves
            self.step(at, statement)
            if at == last:
                self._look_for_kept_grads()
        for t in self.leaves.values():
            t.grad = None
        self.seen.leaks = restore(before)

    def step(self, at: int, statement: Statement) -> None:
        """Run one statement and note what came of it."""
        try:
            self.perform(at, statement)
        except KeyError as error:
            if error.args and isinstance(error.args[0], str) and error.args[0] not in self.live:
                self.seen.skipped.append(at)
                return
            self._failed(at, error)
        except Exception as error:  # noqa: BLE001 - whatever torch raises is an observation
            self._failed(at, error)
        if isinstance(statement, _GRADIENTS):
            self._look_at_grads(at, statement)

    def _failed(self, at: int, error: Exception) -> None:
        self.seen.errors[at] = Error(type(error).__name__, str(error)[:400])

    def perform(self, at: int, s: Statement) -> None:
        """Run one statement; whatever torch raises comes out."""
        match s:
            case Apply():
                self._apply(at, s)
            case Leaf():
                self._leaf(s)
            case Backward():
                self._backward(at, s)
            case Grad():
                self._grad(at, s)
            case Rewrap():
                self._rewrap(at, s)
            case SetGrad():
                self._set_grad(s)
            case SetRequiresGrad():
                self._set_requires_grad(at, s)
            case DetachInPlace():
                self._detach_in_place(at, s)
            case Write():
                self._write(at, s)
            case SetData():
                self._set_data(at, s)

    # --- tensors --------------------------------------------------------------------------------------------------

    def _tensor(self, data: Constant, *, requires_grad: bool = False) -> torch.Tensor:
        dtype = _DTYPES[data.dtype]
        if not data.values:
            return torch.zeros(data.shape, dtype=dtype, device=self.device, requires_grad=requires_grad)
        return torch.tensor(data.nested(), dtype=dtype, device=self.device, requires_grad=requires_grad)

    def _leaf(self, s: Leaf) -> None:
        data, view = layout_source(s)
        if view:
            t = _view_call(view)(self._tensor(data))
            if s.requires_grad:
                t.requires_grad_()
        else:
            t = self._tensor(data, requires_grad=s.requires_grad)
        self._keep(s.name, t)

    def _keep(self, name: str, t: torch.Tensor) -> None:
        self.live[name] = t
        grad = None
        if t.is_leaf:
            self.leaves[name] = t
            self.before[name] = grad = t.grad
        self.seen.made[name] = _look(t, grad)

    def _follow(self, name: str, t: torch.Tensor) -> None:
        """A tensor that became a leaf is watched from now on."""
        if t.is_leaf and name not in self.leaves:
            self.leaves[name] = t
            self.before[name] = t.grad

    def _apply(self, at: int, s: Apply) -> None:
        args = [self.live[name] for name in s.args]
        call = call_of(s.op, len(args), tuple(name for name, _ in s.params))
        values = [value for _, value in s.params]
        if s.no_grad:
            with torch.no_grad():
                result = call(*args, *values)
        else:
            result = call(*args, *values)
        if isinstance(result, torch.Tensor):
            self._keep(s.outs[0], result)
            if s.op == "clone" and result.numel():
                self.seen.facts[at, "same memory"] = storage_of(result) == storage_of(args[0])
            return
        for name, t in zip(s.outs, result, strict=True):
            self._keep(name, t)
        nodes = [t.grad_fn for t in result if t.grad_fn is not None]
        self.seen.facts[at, "one node"] = all(node is nodes[0] for node in nodes)

    def _rewrap(self, at: int, s: Rewrap) -> None:
        t = self.live[s.arg]
        flags = _look(t)
        new = _rewrap_call(s.how)(t)
        facts = self.seen.facts
        facts[at, "new object"] = new is not t
        if s.how == "same":
            self.live[s.out] = t
            return
        self._keep(s.out, new)
        facts[at, "source unchanged"] = _look(t) == flags
        if new.numel():
            facts[at, "same memory"] = storage_of(new) == storage_of(t) and new.storage_offset() == t.storage_offset()
        if self.values:
            self.seen.values[at, s.arg], self.seen.values[at, s.out] = readable(t), readable(new)

    def _detach_in_place(self, at: int, s: DetachInPlace) -> None:
        t = self.live[s.arg]
        flags = _look(t)
        try:
            self.seen.facts[at, "returns self"] = t.detach_() is t
        finally:
            self.seen.changed[at] = _look(t)
            self.seen.facts[at, "flags kept"] = self.seen.changed[at] == flags
            self._follow(s.arg, t)

    def _set_requires_grad(self, at: int, s: SetRequiresGrad) -> None:
        t = self.live[s.arg]
        try:
            if s.attribute:
                t.requires_grad = s.value
            else:
                self.seen.facts[at, "returns self"] = t.requires_grad_(s.value) is t
        finally:
            self.seen.changed[at] = _look(t)
            self._follow(s.arg, t)

    def _write(self, at: int, s: Write) -> None:
        t = self.live[s.arg]
        with torch.no_grad():
            t.mul_(2.0)
        if self.values:
            for name, other in self.live.items():
                self.seen.values[at, name] = readable(other)

    def _set_data(self, at: int, s: SetData) -> None:
        t, value = self.live[s.arg], self._tensor(s.value)
        flags, grad = _look(t), t.grad if t.is_leaf else None
        try:
            t.data = value
        finally:
            self.seen.facts[at, "flags kept"] = _look(t)._replace(dtype=flags.dtype, stride=flags.stride) == flags
            self.seen.facts[at, "grad kept"] = t.grad is grad
        if value.numel():
            self.seen.facts[at, "same memory"] = storage_of(t) == storage_of(value)

    # --- gradients ------------------------------------------------------------------------------------------------

    def _set_grad(self, s: SetGrad) -> None:
        t = self.live[s.arg]
        if s.how == "assign" and s.value is not None:
            t.grad = self._tensor(s.value)
        elif s.how == "none":
            t.grad = None
        elif t.grad is not None:
            t.grad.zero_()

    def _gradients(self, at: int, s: Backward | Grad) -> list[torch.Tensor | None]:
        seeds = [None if seed is None else self._tensor(seed) for seed in s.seeds]
        self.seeds.extend((f"gradient={i}@{at}", seed) for i, seed in enumerate(seeds) if seed is not None)
        return seeds

    def _backward(self, at: int, s: Backward) -> None:
        roots, seeds = [self.live[name] for name in s.roots], self._gradients(at, s)
        keywords: dict[str, Any] = {}
        if s.retain_graph is not None:
            keywords["retain_graph"] = s.retain_graph
        if s.create_graph:
            keywords["create_graph"] = True
        if s.inputs is not None:
            keywords["inputs"] = [self.live[name] for name in s.inputs]
            self._watch(s.inputs)
        held, versions = self._numbers_of(roots), {name: t._version for name, t in self.live.items()}
        if len(roots) > 1:
            result = torch.autograd.backward(roots, seeds, **keywords)  # type: ignore[func-returns-value]
        elif seeds[0] is None:
            result = roots[0].backward(**keywords)
        else:
            result = roots[0].backward(seeds[0], **keywords)
        self.seen.facts[at, "returns None"] = result is None
        self.seen.facts[at, "roots unchanged"] = _equal(held, self._numbers_of(roots))
        self.seen.written[at] = [name for name, t in self.live.items() if t._version != versions[name]]

    def _numbers_of(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [readable(t) for t in tensors] if self.values else []

    def _watch(self, inputs: Iterable[str]) -> None:
        """Tensors that backward was asked for get a ``.grad``, be they leaves or not."""
        for name in inputs:
            if name not in self.leaves:
                self.leaves[name], self.before[name] = self.live[name], None

    def _grad(self, at: int, s: Grad) -> None:
        roots, inputs = [self.live[name] for name in s.roots], [self.live[name] for name in s.inputs]
        seeds = self._gradients(at, s)
        keywords: dict[str, Any] = {}
        if s.retain_graph is not None:
            keywords["retain_graph"] = s.retain_graph
        for word in ("create_graph", "allow_unused", "materialize_grads"):
            if getattr(s, word):
                keywords[word] = True
        if seeds != [None] * len(seeds):
            keywords["grad_outputs"] = seeds if len(seeds) > 1 else seeds[0]
        result = torch.autograd.grad(roots if len(roots) > 1 else roots[0], inputs, **keywords)
        self.seen.returned[at] = [None if g is None else self._look_at_grad(g, None) for g in result]

    def _look_at_grads(self, at: int, statement: Statement) -> None:
        now: dict[str, GradSeen | None] = {}
        before = self.before
        for name, t in self.leaves.items():
            g, old = t.grad, before[name]
            if old is not None and g is not old and self.values:
                self.seen.replaced.setdefault(at, {})[name] = readable(old)
            before[name] = g
            now[name] = None if g is None else self._look_at_grad(g, old)
        self.seen.grads[at] = now
        if not isinstance(statement, Grad):  # which leaves every .grad where it was
            self._look_for_overlaps(at)

    def _look_at_grad(self, g: torch.Tensor, old: torch.Tensor | None) -> GradSeen:
        return GradSeen(
            readable(g) if self.values else None,
            tuple(g.shape),
            _NAMES.get(g.dtype) or str(g.dtype),
            g.stride(),
            g.requires_grad,
            g.grad_fn is not None,
            g.data_ptr() if self.values else 0,
            g is old,
        )

    def _look_for_overlaps(self, at: int) -> None:
        if not self.values:
            return
        grads = [(f"{name}.grad", g) for name, g in self.before.items() if g is not None]
        if not grads:
            return
        spans = []
        for name, t in (*grads, *self.seeds, *self.watched.items()):
            size = t.nbytes
            start = t.data_ptr() if size else 0
            if start:  # a device without addresses gives 0 for all
                spans.append((start, start + (size if t.is_contiguous() else _reach(t)), name))
        spans.sort()
        earlier: list[tuple[int, str]] = []
        earlier_grads: list[tuple[int, str]] = []
        for start, end, name in spans:
            is_grad = name.endswith(".grad")
            for stop, other in earlier if is_grad else earlier_grads:
                if start < stop:
                    self.seen.overlaps.setdefault(at, []).append((other, name))
            earlier.append((end, name))
            if is_grad:
                earlier_grads.append((end, name))

    def _look_for_kept_grads(self) -> None:
        for name, t in self.live.items():
            if name not in self.leaves and _grad_of(t) is not None:
                self.seen.kept.append(name)


def _grad_of(t: torch.Tensor) -> torch.Tensor | None:
    try:
        return t.grad
    except RuntimeError:  # one of several views of a base that was written since: torch refuses to look at its history
        return None


def _look(t: torch.Tensor, grad: torch.Tensor | None = None) -> TensorSeen:
    dtype = _NAMES.get(t.dtype) or str(t.dtype)
    has_grad_fn = t.grad_fn is not None
    return TensorSeen(t.requires_grad, t.is_leaf, has_grad_fn, tuple(t.shape), dtype, t.stride(), grad is None)


def numbers(t: torch.Tensor) -> Any:
    """The values as nested lists of floats.

    Zeros that have no memory, as second derivatives may be, have to be cloned first.
    """
    if t._is_zerotensor():
        t = t.clone()
    if t.is_cpu:
        return t.tolist()
    with torch.no_grad():  # the copy to the CPU is no op of the program: torch may refuse to record one for a view
        return t.tolist()


def readable(t: torch.Tensor) -> Any:
    """The values, or nan for each where the device refuses to tell them: then whatever was due is not there."""
    try:
        return numbers(t)
    except RuntimeError:
        return torch.full(tuple(t.shape), float("nan")).tolist()


def _equal(one: Any, other: Any) -> bool:
    """Equal, where nan equals nan."""
    return bool(one == other) or repr(one) == repr(other)


def storage_of(t: torch.Tensor) -> int:
    """What tells the memory of a tensor from that of others, also on devices without addresses."""
    return int(t.untyped_storage()._cdata)


def _reach(t: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last, gaps included."""
    steps = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (steps + 1) * t.element_size()


# --- modes ------------------------------------------------------------------------------------------------------------


Modes = tuple[bool, bool, bool, torch.dtype]


def modes() -> Modes:
    """What a program may switch and must leave as it was."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
    )


def restore(before: Modes) -> list[str]:
    """Put the modes back and name those that the program left changed."""
    now = modes()
    if now == before:
        return []
    torch.set_grad_enabled(before[0])
    torch.autograd.set_detect_anomaly(before[2])
    torch.set_default_dtype(before[3])
    words = ("grad mode", "inference mode", "anomaly mode", "default dtype")
    return [word for word, was, is_now in zip(words, before, now, strict=True) if was != is_now]
