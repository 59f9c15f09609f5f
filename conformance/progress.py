"""How far a run is, for whoever waits in front of it: a line for each family that is done, and one for those at work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autograd_conformance.journal import at_work, read_json, write_json

DONE = "done.json"


def note(folder: Path, family: str, device: str, programs: int) -> None:
    """Say in the folder of a family that it is done, and how long it took since the first of its programs was drawn."""
    if (folder / DONE).exists():
        return
    drawn = [path.stat().st_mtime for path in folder.glob("shard-*.programs")]
    seconds = time.time() - min(drawn, default=time.time())
    write_json(folder / DONE, {"family": family, "device": device, "programs": programs, "seconds": seconds})


class Progress:
    """What has come to an end in a working folder since somebody looked last."""

    def __init__(self, work: Path) -> None:
        self.work, self.started = work, time.time()
        self.told: set[Path] = set()

    def lines(self) -> Iterator[str]:
        """One for each family that has come to its end: programs, rate, claims judged so far, time left."""
        for path in sorted(self.work.glob(f"*/*/{DONE}")):
            if path not in self.told:
                self.told.add(path)
                yield self._line(read_json(path))

    def now(self) -> str:
        """What is being judged at this moment; empty if nothing is."""
        parts = []
        for folder in sorted(self.work.glob("*/*/")):
            drawn = [path.stat().st_mtime for path in folder.glob("shard-*.programs")]
            if drawn and not (folder / DONE).exists():
                programs, seconds = at_work(folder), max(time.time() - min(drawn), 0.1)
                parts.append(f"{folder.name} on {folder.parent.name}: {programs:,}, {programs / seconds:,.0f} a second")
        return "; ".join([self._rest(), *parts]) if parts else ""

    def _line(self, done: Any) -> str:
        programs, seconds = done["programs"], max(done["seconds"], 0.1)
        told = f"{done['family']} on {done['device']}: {programs:,} programs, {programs / seconds:,.0f} a second"
        return f"{told}; {self._rest()}"

    def _rest(self) -> str:
        judged = len(list(self.work.glob("results/*/*.json")))
        asked = len(read_json(self.work / "collected.json") or ())
        left = (time.time() - self.started) / judged * (asked - judged) if judged else 0.0
        rest = f"about {left:.0f} s left" if judged < asked else "done"
        return f"{judged} of {asked} claims judged, {rest}"
