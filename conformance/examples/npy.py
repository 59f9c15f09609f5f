"""A device in pure Python: torch's PrivateUse1 under the name ``npy``, with its memory in numpy buffers.

Shows all that the suite needs of a new backend, in one file that imports torch and numpy alone::

    import autograd_conformance.examples.npy as npy
    npy.init()
    torch.ones(3, device="npy")

A tensor of this device has a storage that points into a numpy array; the array hangs on the storage, so it lives as long
as the storage does. Kernels see CPU tensors over the same memory. A few are written here with numpy, all others are
torch's own for the CPU. Needs torch 2.10 or later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "npy"
FAULTS = (
    *("strides-ignored", "offset-ignored", "empty-refused", "broadcast-once", "detach-leaks", "version-kept"),
    *("stale-second-pass", "late-crash", "late-hang", "vanishes"),
)
"""What ``init(fault=...)`` can break."""

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries: list[torch.library.Library] = []
_fault = ""


def init(name: str = NAME, fault: str = "") -> None:
    """Make the device known to torch, once a process; ``fault`` breaks it on purpose."""
    global NAME, _fault  # noqa: PLW0603 - a process has one device of this kind
    if fault and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; there are {', '.join(FAULTS)}")
    _fault = fault
    if _libraries:
        return
    NAME = name
    backend_registration._setup_privateuseone_for_python_backend(name, _Module(), device_guard=_Guard())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for op, kernel in _KERNELS.items():
        aten.impl(op, kernel, "PrivateUse1")
    for op in _LAYOUT:
        aten.impl(op, _redispatched(op), "PrivateUse1", with_keyset=True)
    for key in ("Conjugate", "Negative"):  # else a copy of a conjugated view asks for a copy of itself
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    if fault == "detach-leaks":
        aten.impl("detach", lambda t: torch.ops.aten.alias(t), "AutogradPrivateUse1")
    _libraries.extend((everything, aten))
    _let_storages_be_cloned()
    _let_errors_travel()


class _Module:
    """What ``torch.npy`` is."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the CPU's generator."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


# --- memory -----------------------------------------------------------------------------------------------------------


def _storage(nbytes: int) -> torch.UntypedStorage:
    """A storage of this device over a new numpy buffer."""
    buffer = np.zeros(max(nbytes, 1), dtype=np.uint8)
    device = torch.device(NAME, 0)
    storage: Any = torch._C._construct_storage_from_data_pointer(buffer.ctypes.data, device, nbytes)
    storage.buffer = buffer
    return storage  # type: ignore[no-any-return]


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, stride: Sequence[int] | None = None) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    stride = _dense(size) if stride is None else stride
    count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    t = torch._C._acc.create_empty_tensor((0,), dtype)
    _place(t, _storage(count * dtype.itemsize), 0, size, stride)
    return t


def _dense(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return strides[::-1]


def _place(
    t: torch.Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int]
) -> None:
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_CPU, t, storage, offset, list(size), list(stride))


def _ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _seen(t: torch.Tensor, op: str = "") -> torch.Tensor:
    """A CPU tensor over the memory of one of ours: what a kernel reads and writes."""
    storage = t.untyped_storage()
    size, stride, offset = _laid_out(t, op)
    if not storage.nbytes():
        return torch.empty_strided(size, stride, dtype=t.dtype)  # may be resized, as ``out=`` asks for
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    alias = torch.empty(0, dtype=t.dtype)
    alias.set_(memory, offset, size, stride)
    if t.is_conj():
        alias = torch._conj(alias)
    if t.is_neg():
        alias = torch._neg_view(alias)
    return alias


def _moved(t: torch.Tensor) -> torch.Tensor:
    """A tensor of ours with the numbers of a CPU tensor."""
    made = _empty(t.shape, t.dtype, t.stride())
    _seen(made).copy_(t)
    return made


# --- all other kernels: torch's own, on CPU tensors over the same memory ----------------------------------------------


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name.partition("::")[2]
    _check_devices(name, args, kwargs)
    _break_down(name, args)
    if _fault == "stale-second-pass":
        return _stale(op, lambda: _on_cpu(op, name, args, kwargs))
    return _on_cpu(op, name, args, kwargs)


def _on_cpu(op: Any, name: str, args: Any, kwargs: Any) -> Any:
    ours: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def inward(value: Any) -> Any:
        if _ours(value):
            alias = _seen(value, name)
            ours[id(alias)] = (value, alias)
            return alias
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def outward(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in ours:
            return ours[id(value)][0]
        return _moved(value.resolve_conj().resolve_neg())

    changed = args, kwargs
    changed = pytree.tree_map(inward, changed)
    result = op(*changed[0], **changed[1])
    for t, alias in ours.values():
        if _written(op, t, alias):
            _fit(t, alias)
            if _fault == "version-kept" and not t.is_inference() and name.endswith("_") and t._version:
                torch._C._autograd._unsafe_set_version_counter((t,), (t._version - 1,))
    return pytree.tree_map(outward, result)


def _written(op: Any, t: torch.Tensor, alias: torch.Tensor) -> bool:
    return bool(op._schema.is_mutable) and (t.shape != alias.shape or not t.untyped_storage().nbytes() or _fault != "")


def _fit(t: torch.Tensor, alias: torch.Tensor) -> None:
    """An ``out=`` tensor that the kernel has resized."""
    if t.shape != alias.shape or (alias.numel() and not t.untyped_storage().nbytes()):
        fresh = _empty(alias.shape, t.dtype)
        _seen(fresh).copy_(alias)
        _place(t, fresh.untyped_storage(), 0, fresh.shape, fresh.stride())


_MAY_BE_MIXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_copy_from", "_copy_from_and_resize")


def _check_devices(name: str, args: Any, kwargs: Any) -> None:
    if name in _MAY_BE_MIXED:
        return
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and value.dim() and not _ours(value):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {value.device} and {NAME}:0")


# --- kernels of its own -----------------------------------------------------------------------------------------------


def _empty_kernel(size: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _empty(size, dtype)


def _empty_strided_kernel(size: Any, stride: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _empty(size, dtype, stride)


def _resize(t: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
    stride = _dense(size)
    offset = int(t.storage_offset())
    count = offset + int(np.prod(size, dtype=np.int64))
    if count * t.dtype.itemsize > t.untyped_storage().nbytes():
        fresh = _storage(count * t.dtype.itemsize)
        old = t.untyped_storage()
        if old.nbytes():
            fresh.buffer[: old.nbytes()] = old.buffer[: old.nbytes()]  # type: ignore[attr-defined]
        _place(t, fresh, offset, size, stride)
    elif list(t.shape) != list(size):
        _place(t, t.untyped_storage(), offset, size, stride)
    return t


def _copy_from(source: torch.Tensor, target: torch.Tensor, *_: Any) -> torch.Tensor:
    _break_down("_copy_from", (source, target))
    into = _seen(target) if _ours(target) else target
    into.copy_(_seen(source) if _ours(source) else source)
    return target


def _item(t: torch.Tensor) -> Any:
    return _seen(t).item()


def _zeros_without_memory(size: Any, **options: Any) -> torch.Tensor:
    return _empty(size, options.get("dtype"))


def _convolution(*args: Any) -> Any:
    return _on_cpu(torch.ops.aten.convolution.default, "convolution", args, {})


def _convolution_backward(grad: torch.Tensor, inputs: Any, weight: Any, *how: Any) -> Any:
    args = (grad, inputs, weight, [grad.shape[1]], *how)
    return _on_cpu(torch.ops.aten.convolution_backward.default, "convolution_backward", args, {})


def _binary(op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel in numpy where both operands are tensors of one dtype; anything else falls back."""

    def kernel(one: torch.Tensor, other: Any, **options: Any) -> Any:
        plain = _ours(one) and _ours(other) and one.dtype == other.dtype and one.dtype.is_floating_point
        if _fault or options.get("alpha", 1) != 1 or not plain or one.dtype == torch.bfloat16:
            return _fallback(op, one, other, **options)
        made = _empty(np.broadcast_shapes(one.shape, other.shape), one.dtype)
        with np.errstate(all="ignore"):
            compute(_seen(one).numpy(), _seen(other).numpy(), out=_seen(made).numpy())
        return made

    return kernel


def _redispatched(name: str) -> Callable[..., Any]:
    """Kernels that only look at sizes and strides are torch's own for the CPU."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda keys, *args, **kwargs: op.redispatch(_CPU, *args, **kwargs)


_LAYOUT = (
    *("as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"),
    *("set_.source_Storage_storage_offset", "set_.source_Tensor"),
)
_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty_kernel,
    "empty_strided": _empty_strided_kernel,
    "resize_": _resize,
    "_copy_from": _copy_from,
    "_local_scalar_dense": _item,
    "_efficientzerotensor": _zeros_without_memory,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "add.Tensor": _binary(torch.ops.aten.add.Tensor, np.add),
    "sub.Tensor": _binary(torch.ops.aten.sub.Tensor, np.subtract),
    "mul.Tensor": _binary(torch.ops.aten.mul.Tensor, np.multiply),
}


def _let_storages_be_cloned() -> None:
    """``copy.deepcopy`` of a tensor asks its storage for a clone, and torch finds no allocator for this device."""
    original: Any = torch.UntypedStorage.clone

    def clone(self: Any) -> Any:
        if self.device.type != NAME:
            return original(self)
        made: Any = _storage(self.nbytes())
        made.buffer[:] = self.buffer
        return made

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]


class _Pending:
    """The error of a Python hook while torch unwinds the stack of the device's thread.

    On its way torch asks the guard for its type, and calling Python while an error is set ends the process. So the
    guard takes the error, and whoever has called backward gets it back.
    """

    def __init__(self) -> None:
        self.parts = [ctypes.c_void_p() for _ in range(3)]
        self.places = [ctypes.byref(part) for part in self.parts]
        self.error: BaseException | None = None

    def keep(self) -> None:
        kind, value, _ = self.parts
        if kind.value:
            ctypes.pythonapi.PyErr_NormalizeException(*self.places)
            self.error = ctypes.cast(value, ctypes.py_object).value
            for part in self.parts:
                part.value = None


_pending = _Pending()
_KIND, _VALUE, _TRACE = _pending.places
_FETCH = ctypes.pythonapi.PyErr_Fetch
_FETCH.restype = None


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        _FETCH(_KIND, _VALUE, _TRACE)  # first of all: nothing else can be called while an error is set
        _pending.keep()
        return torch._C._autograd.DeviceType.PrivateUse1


def _let_errors_travel() -> None:
    original = torch.autograd.graph._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except SystemError:
            error, _pending.error = _pending.error, None
            if error is None:
                raise
            raise error from None

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run  # type: ignore[attr-defined]


# --- faults -----------------------------------------------------------------------------------------------------------

_MULTIPLIES = ("mul", "mul_")
_passes: dict[Any, Any] = {}  # what a kernel gave when a node ran first
_runs: dict[Any, int] = {}  # calls of a kernel in one run of a node
_calls = 0


def _laid_out(t: torch.Tensor, op: str) -> tuple[Sequence[int], Sequence[int], int]:
    """Size, stride and offset of a tensor as a kernel takes them; the kernel of ``mul`` may be a faulty one."""
    size, stride, offset = t.shape, t.stride(), int(t.storage_offset())
    if not _fault or op not in _MULTIPLIES:
        return size, stride, offset
    room = t.untyped_storage().nbytes() // t.dtype.itemsize
    if _fault == "strides-ignored" and t.numel() <= room - offset:
        return size, _dense(size), offset
    if _fault == "offset-ignored":
        return size, stride, 0
    if _fault == "broadcast-once" and 0 in stride and t.numel() > 1 and room - offset > 1:
        return size, [step or 1 for step in stride] if _reach(size, stride) <= room - offset else stride, offset
    return size, stride, offset


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((n - 1) * (step or 1) for n, step in zip(size, stride, strict=True))


def _break_down(name: str, args: Any) -> None:
    """Faults that are no wrong number."""
    global _calls  # noqa: PLW0603
    if not _fault:
        return
    _calls += 1
    if _fault == "empty-refused" and name == "mul" and any(_ours(a) and not a.numel() for a in args):
        raise RuntimeError("cannot launch a kernel with 0 threads")
    if _fault == "vanishes" and _calls > 2000:
        raise RuntimeError("the device does not answer any more")
    if _fault == "late-crash" and name == "sin":
        import ctypes

        ctypes.string_at(0)
    if _fault == "late-hang" and name == "sin":
        import ctypes

        ctypes.PyDLL(None).pause()  # holds the interpreter lock, as native code does


def _stale(op: Any, compute: Callable[[], Any]) -> Any:
    """In a later backward over the same graph a kernel gives what it gave in the first."""
    node = torch._C._current_autograd_node()
    if node is None or op._schema.is_mutable or node.name().endswith("AccumulateGrad"):  # these share one number
        return compute()
    run = (torch._C._current_graph_task_id(), node._sequence_nr(), op)
    _runs[run] = _runs.get(run, 0) + 1
    key = (node._sequence_nr(), op, _runs[run])
    if key not in _passes:
        _passes[key] = compute()
    return _passes[key]
