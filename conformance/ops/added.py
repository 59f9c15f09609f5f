"""Ops that users bring along: ``--ops MODULE`` adds the entries of a module to the table. No torch but that of the module.

A module of ops has a sequence ``OPS`` of entries, and their calls name it: ``"my_ops.Cube.apply({a})"`` in ``my_ops.py``.
"""

from __future__ import annotations

import importlib
import re
import site
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from autograd_conformance.errors import UsageError, unknown
from autograd_conformance.ops.entry import Op

ADDED: list[Op] = []
"""What was added, in the order in which it came."""
KINDS = ("smooth", "kinked", "binary", "contraction", "reduction", "index", "join", "several")
"""What an added op may be: one that returns new memory. Views and casts are torch's own."""

_modules: dict[str, ModuleType] = {}
# Names that the lines of programs make, or take for granted.
_TAKEN = re.compile(r"torch|seen|due|inf|nan|far|returned|checkpoint|[a-z]+_?\d+(_\d+)?|[a-zA-Z]{1,2}|_.*")


def load(names: Sequence[str]) -> None:
    """Import modules of ops and add their entries to the table; one that was added before is passed over.

    Raises:
        UsageError: a module cannot be imported or has no entries, or one of these is broken.

    """
    for name in dict.fromkeys(names):
        if name not in _modules:
            module = _imported(name)
            _modules[name] = module
            try:
                _add(module, f"ops module '{name}'")
            except UsageError:
                del _modules[name]
                raise


def bound() -> dict[str, Any]:
    """What the calls of added ops name: their modules, by the first part of their names."""
    return {name.partition(".")[0]: sys.modules[name.partition(".")[0]] for name in _modules}


def loaded() -> list[str]:
    """The modules that were added."""
    return list(_modules)


def imports(lines: Iterable[str]) -> list[str]:
    """The lines of Python that a script of these lines has to begin with, after ``import torch``."""
    text = "\n".join(lines)
    found = [name for name in _modules if re.search(rf"\b{re.escape(name)}\.", text)]
    folders = dict.fromkeys(folder for name in found if (folder := _folder(_modules[name])))
    paths = ["import sys", *(f"sys.path.insert(0, {folder!r})" for folder in folders)] if folders else []
    return [*paths, *(f"import {name}" for name in found)]


def _folder(module: ModuleType) -> str:
    """What ``sys.path`` must hold for the module to be found; empty where it is installed."""
    file = Path(module.__file__ or "").resolve()
    installed = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    if not module.__file__ or any(file.is_relative_to(Path(place).resolve()) for place in installed):
        return ""
    up = module.__name__.count(".") + (file.name == "__init__.py")
    return str(file.parents[up])


# --- importing --------------------------------------------------------------------------------------------------------


def _imported(name: str) -> ModuleType:
    if _TAKEN.fullmatch(name.partition(".")[0]):
        raise UsageError(f"ops module '{name}' cannot be used: programs use '{name.partition('.')[0]}' as a name of their own")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        missing = find_spec(name) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        raise unknown("ops module", name, [path.stem for path in Path(here).glob("*.py")])
    try:
        with warnings.catch_warnings():  # of torch, for most modules import it
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever the user's module raises is told to the user
        raise UsageError(f"ops module '{name}' cannot be imported: {_told(error)}") from None


def _told(error: Exception) -> str:
    """One line: what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "importlib" not in frame.filename), None)
    place = f" ({Path(last.filename).name}, line {last.lineno})" if last else ""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{place}"


# --- adding -----------------------------------------------------------------------------------------------------------


def _add(module: ModuleType, where: str) -> None:
    from autograd_conformance.ops import OPS

    entries = getattr(module, "OPS", None)
    if not isinstance(entries, list | tuple) or not entries:
        raise UsageError(f"{where} has no OPS: a list of entries made by autograd_conformance.ops.entry.op")
    before = len(ADDED)
    try:
        for entry in entries:
            _check_words(entry, where, OPS)
            OPS[entry.name] = entry
            ADDED.append(entry)
            _check_numbers(entry, where)
    except UsageError:
        for entry in ADDED[before:]:
            del OPS[entry.name]
        del ADDED[before:]
        raise


def _check_words(entry: Any, where: str, known: dict[str, Op]) -> None:
    """Name and kind."""
    if not isinstance(entry, Op):
        raise UsageError(f"{where}: OPS holds {entry!r:.80}, which op(...) did not make")
    if not entry.name.isidentifier():
        raise UsageError(f"{where}: the name of an op is like that of a function, not {entry.name!r}")
    if entry.name in known:
        raise UsageError(f"{where}: there is an op '{entry.name}' already")
    if entry.kind not in KINDS:
        raise unknown("kind", entry.kind, KINDS, f"{where}, op '{entry.name}'")


def _check_numbers(entry: Op, where: str) -> None:
    from autograd_conformance.ops.trial import problem

    found = problem(entry, bound())
    if found:
        raise UsageError(f"{where}, op '{entry.name}': {found}")
