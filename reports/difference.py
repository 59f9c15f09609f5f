"""Due and seen side by side: which parts of the two texts differ."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from itertools import groupby
from math import isclose, isnan
from operator import itemgetter

from autograd_conformance.verdicts import Violation

_TOKEN = re.compile(r"-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\binf\b|\bnan\b)|\w+|\s+|.", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d|inf$|nan$)")
MOST = 600  # tokens that are aligned, which takes time; longer texts of different form differ as a whole


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a text, and whether the other text has something else there."""

    text: str
    differs: bool


Pieces = tuple[Piece, ...]


def compared(violation: Violation) -> tuple[Pieces, Pieces]:
    """Due and seen in pieces; numbers that are compared within a tolerance differ only beyond it."""
    due, seen = _TOKEN.findall(violation.due), _TOKEN.findall(violation.seen)
    if _skeleton(due) == _skeleton(seen):
        tolerance = violation.tolerance if violation.check == "close" else 0.0
        flags = [_far(one, other, tolerance) for one, other in zip(due, seen, strict=True)]
        return _joined(due, flags), _joined(seen, flags)
    if len(due) + len(seen) > MOST:
        return (Piece(violation.due, True),), (Piece(violation.seen, True),)
    return _aligned(due, seen)


def _skeleton(tokens: list[str]) -> list[str]:
    return ["#" if _NUMBER.match(token) else token for token in tokens]


def _far(one: str, other: str, tolerance: float) -> bool:
    if one == other or not _NUMBER.match(one):
        return False
    a, b = float(one), float(other)
    return not (isclose(a, b, rel_tol=0.0, abs_tol=tolerance) or (isnan(a) and isnan(b)))


def _aligned(due: list[str], seen: list[str]) -> tuple[Pieces, Pieces]:
    left, right = [True] * len(due), [True] * len(seen)
    for block in difflib.SequenceMatcher(a=due, b=seen, autojunk=False).get_matching_blocks():
        left[block.a : block.a + block.size] = [False] * block.size
        right[block.b : block.b + block.size] = [False] * block.size
    return _joined(due, left), _joined(seen, right)


def _joined(tokens: list[str], flags: list[bool]) -> Pieces:
    """Neighbours of one kind as one piece."""
    pairs = groupby(zip(tokens, flags, strict=True), key=itemgetter(1))
    return tuple(Piece("".join(token for token, _ in group), differs) for differs, group in pairs)
