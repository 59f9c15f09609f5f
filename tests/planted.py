"""Things that happen in a process of their own, because a fault that is planted stays."""

from __future__ import annotations

import contextlib
import io
import runpy
from functools import partial
from typing import Any

import torch

from autograd_conformance.faults.words import plant
from autograd_conformance.forks import forked

LIMIT = 300.0


def exit_code(path: str, name: str = "") -> int:
    """Run a script, under a fault or without."""
    torch.set_num_threads(1)
    if name:
        plant(name)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def apart(function: Any, *arguments: Any) -> Any:
    """Call a function in a process of its own."""
    ((_, (result, error)),) = forked([("", partial(_outcome, function, arguments))], 1, LIMIT)
    if error is not None:
        raise error
    return result


def _outcome(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except Exception as error:  # noqa: BLE001 - for the parent to raise
        return None, error
