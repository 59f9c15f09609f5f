"""The register of claims: what autograd promises, each promise one sentence with its sources.

Knows no torch: the sentences lie in ``claims.toml`` beside this file, and :func:`load` checks them.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from autograd_conformance.errors import UsageError, unknown

AREAS = (
    *("requires-grad", "leaf", "grad", "retain-grad", "backward", "free", "agrad", "create-graph", "detach"),
    *("no-grad", "inference", "legacy", "inplace", "graph", "hook", "saved", "module", "optim", "gan", "function"),
    *("complex", "numeric", "nondiff", "checkpoint", "threads", "anomaly", "streams"),
)
"""The areas in the order of the register; the id of a claim starts with its area and a dot."""

# A claim only names traits; whether one is there is answered by each device.
TRAITS: dict[str, str] = {
    "values": "The numbers in a tensor can be read back; the meta device, which knows only shapes, has none.",
    "storage": "Tensors lie at addresses that can be compared, so shared memory can be told from a copy.",
    "strides": "A tensor keeps the strides that as_strided, a slice or a transpose gives it.",
    "float64": "Tensors of dtype float64 can be made and computed with.",
    "complex": "Tensors of dtype complex64 can be made and differentiated through.",
    "forward_ad": "Tensors can carry a tangent, and ops compute with it.",
    "threads": "Threads other than the main one can compute and differentiate.",
    "streams": "Work is queued on streams, of which there can be several; the CPU has none.",
    "reduced": "Tensors of dtype float16 and bfloat16 can be made and computed with.",
}
"""The closed list of what a claim may need of a device: each trait with one sentence on its meaning."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise of autograd.

    Attributes:
        id: the area, a dot and a name unique in the register.
        sentence: the promise, with its exceptions.
        sources: where it is promised; never empty.
        area: one of :data:`AREAS`.
        core: True for the promises that the rest of autograd stands on.
        needs: the traits without which a device cannot be judged on it.
        implies: ids of the claims that nobody can rely on where this one is broken.
        error: a fragment of the error or warning that stays the same between releases; empty if none is promised.
        since: the first torch release that promises it; empty if all do.
        until: the last torch release that promises it; empty if it still stands.
        old: the outdated or too strong sentence that this one replaces; empty if there is none.
        untestable: why no test of it is possible; empty if one is.

    """

    id: str
    sentence: str
    sources: tuple[str, ...]
    area: str
    core: bool
    needs: tuple[str, ...] = ()
    implies: tuple[str, ...] = ()
    error: str = ""
    since: str = ""
    until: str = ""
    old: str = ""
    untestable: str = ""


_FIELDS = tuple(f.name for f in fields(Claim))
_REQUIRED = ("id", "area", "core", "sentence", "sources")
_LISTS = ("sources", "needs", "implies")
_VERSION = re.compile(r"\d+(\.\d+)+")


def load(path: Path) -> dict[str, Claim]:
    """The claims of a TOML file by id, in the order of the file.

    Raises:
        UsageError: the file cannot be read, or breaks a rule of the register; the first problem is named.

    """
    where = str(path)
    claims: dict[str, Claim] = {}
    for entry in _entries(path):
        claim = _claim(entry, where)
        if claim.id in claims:
            msg = f"duplicate claim '{claim.id}' in {where}; an id may stand there once"
            raise UsageError(msg)
        claims[claim.id] = claim
    for claim in claims.values():
        for other in claim.implies:
            _known("claim", other, tuple(claims), f"implies of '{claim.id}' in {where}")
    return claims


@cache
def register() -> dict[str, Claim]:
    """The claims that this package judges, by id; read once, and not to be changed by callers."""
    return load(Path(__file__).with_name("claims.toml"))


def is_whole(chosen: Iterable[str]) -> bool:
    """Whether the ids name every claim of the register that a test is possible for."""
    return set(chosen) >= {claim.id for claim in register().values() if not claim.untestable}


def select(globs: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of the register whose id matches at least one glob, in its order; no globs match none.

    Raises:
        UsageError: a glob matches no claim.

    """
    claims = register()
    chosen: set[str] = set()
    for glob in globs:
        matched = [name for name in claims if fnmatch.fnmatchcase(name, glob)]
        if not matched:
            raise unknown("claim", glob, (*(f"{area}.*" for area in AREAS), *claims))
        chosen.update(matched)
    return tuple(claim for name, claim in claims.items() if name in chosen)


def _entries(path: Path) -> list[dict[str, Any]]:
    """The tables named ``claim``; nothing else may stand at the top of the file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        msg = f"cannot read the claims in {path}: {error}"
        raise UsageError(msg) from error
    for name in tables:
        _known("table", name, ("claim",), str(path))
    entries = tables.get("claim", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        msg = f"'claim' in {path} must be an array of tables, each under [[claim]]"
        raise UsageError(msg)
    return entries


def _claim(entry: dict[str, Any], where: str) -> Claim:
    """The entry as a claim, after every check that needs no other entry."""
    place = f"claim {entry.get('id', '(without id)')!r} in {where}"
    for name in entry:
        _known("field", name, _FIELDS, place)
    for name in _REQUIRED:
        if name not in entry:
            msg = f"missing field '{name}' in {place}"
            raise UsageError(msg)
    for name, value in entry.items():
        _check_type(name, value, place)
    values: dict[str, Any] = {name: tuple(value) if name in _LISTS else value for name, value in entry.items()}
    claim = Claim(**values)
    _check_rules(claim, place)
    return claim


def _check_type(name: str, value: object, place: str) -> None:
    if name == "core":
        due, fits = "true or false", isinstance(value, bool)
    elif name in _LISTS:
        due, fits = "an array of non-empty texts", isinstance(value, list) and all(map(_is_text, value))
    else:
        due, fits = "a non-empty text", _is_text(value)
    if not fits:
        msg = f"field '{name}' is {value!r} in {place}; it must be {due}"
        raise UsageError(msg)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _check_rules(claim: Claim, place: str) -> None:
    _known("area", claim.area, AREAS, place)
    if not claim.id.startswith(f"{claim.area}."):
        msg = f"id '{claim.id}' in {place} must start with its area: '{claim.area}.'"
        raise UsageError(msg)
    for trait in claim.needs:
        _known("trait", trait, tuple(TRAITS), place)
    if not claim.sources:
        msg = f"no source in {place}; 'sources' must name at least one, such as 'docstring torch.Tensor.backward'"
        raise UsageError(msg)
    for name, version in (("since", claim.since), ("until", claim.until)):
        if version and not _VERSION.fullmatch(version):
            msg = f"field '{name}' is '{version}' in {place}; it must be a torch release such as '2.4'"
            raise UsageError(msg)


def _known(kind: str, value: str, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise unknown(kind, value, choices, where)
