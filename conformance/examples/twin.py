"""A device with two indices in C++: torch's PrivateUse1 under the name ``twin``, built on the spot with g++.

``init()`` compiles ``twin.cpp`` once for each torch release (it takes half a minute) and loads it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import backend_registration

SOURCE = Path(__file__).with_name("twin.cpp")
FAULTS = ("strides-ignored", "offset-ignored", "empty-refused", "wrong-index", "count-lies")
"""What ``init(fault=...)`` can break."""


def init(fault: str = "") -> None:
    """Make the device known to torch, once a process; ``fault`` breaks it on purpose."""
    if fault and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; there are {', '.join(FAULTS)}")
    if not hasattr(torch, "twin"):
        torch.ops.load_library(str(built()))
        backend_registration.rename_privateuse1_backend("twin")
        torch._register_device_module("twin", _Module())
        backend_registration.generate_methods_for_privateuse1_backend()
    torch.ops.twin.set_fault(fault)


class _Module:
    """What ``torch.twin`` is."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(torch.ops.twin.device_count())

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the CPU's generator."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def built() -> Path:
    """The library; compiled if that has not been done yet for this source and this torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()
    folder = Path(cache) / f"autograd-conformance-twin-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    library = folder / f"twin-{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    part = library.with_suffix(".part")
    root = Path(torch.__file__).parent
    command = [
        *("g++", "-shared", "-fPIC", "-O0", "-w", "-std=c++20", str(SOURCE), "-o", str(part)),
        *(f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - our own command line
    if done.returncode:
        raise RuntimeError(f"g++ could not build the device: {done.stderr[-2000:]}")
    part.replace(library)
