"""Things that happen in a process of their own, because a fault that is planted stays."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import runpy
from typing import Any

import torch

from autograd_conformance.faults.words import plant


def exit_code(path: str, name: str = "") -> int:
    """Run a script, under a fault or without."""
    torch.set_num_threads(1)
    if name:
        plant(name)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(path)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def apart(function: Any, *arguments: Any) -> Any:
    """Call a function in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)
