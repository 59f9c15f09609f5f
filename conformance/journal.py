"""Written down first: what is about to run, so that a crash or a hang has its program; and results, so that none is lost.

A run has a working folder that all its processes share. In it every device and family has shards. Whoever holds the
lock of a shard works on it; the kernel frees the lock when the holder dies, and the next one finds in the journal which
program was running.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autograd_conformance.program import Program
from autograd_conformance.reports.folder import put
from autograd_conformance.scene import Scene, parse

try:
    import fcntl
except ImportError:  # not on Windows: there one process works alone
    fcntl = None  # type: ignore[assignment]


Work = Program | Scene
NUMBER, NAME = 8, 120  # bytes of a page: the running program, and the claim it is run for


class Death(NamedTuple):
    """A program during which a process died, how (``crashed`` or ``hung``), and for which claim if for one alone."""

    number: int
    how: str
    claim: str


def write_json(path: Path, body: Any) -> None:
    """Write atomically: a reader sees the old file, or the whole new one."""
    put(path, json.dumps(body))


def read_json(path: Path) -> Any | None:
    """What :func:`write_json` wrote, or None."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock file; gives False at once if another process holds it and ``wait`` is off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if fcntl is None:
            yield True
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def slug(name: str) -> str:
    """A device's name as a folder's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "device"


class Shard:
    """One shard of a family on a device: its lock, its journal, its result."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.stem = folder / f"shard-{number:03d}"

    def lock(self, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """The right to work on this shard."""
        return locked(self.stem.with_suffix(".lock"), wait=wait)

    @property
    def result(self) -> Any | None:
        """What the shard found, once it is done."""
        return read_json(self.stem.with_suffix(".json"))

    def finish(self, body: Any) -> None:
        """Store the result."""
        write_json(self.stem.with_suffix(".json"), body)

    def programs(self, drawn: Callable[[], list[Work]]) -> list[Work]:
        """The programs of the shard. Whoever needs them first draws them, and they are on disk before any is run."""
        path = self.stem.with_suffix(".programs")
        if path.exists():
            return [parse(text) for text in path.read_text().splitlines()]
        programs = drawn()
        put(path, "".join(f"{program.to_json()}\n" for program in programs))
        return programs

    @property
    def deaths(self) -> list[Death]:
        """Programs during which a process died. Notes one that nobody noted yet.

        Only for whoever holds the lock, or when all processes are gone.
        """
        path, running = self.stem.with_suffix(".deaths"), self.stem.with_suffix(".running")
        known = [Death(*row) for row in read_json(path) or ()]
        page = running.read_bytes() if running.exists() else b""
        fallen = int.from_bytes(page[:NUMBER], "little") - 1
        claim = page[NUMBER:].rstrip(b"\0").decode(errors="replace")
        if fallen >= 0 and not any((death.number, death.claim) == (fallen, claim) for death in known):
            hung = self.last_words.exists() and self.last_words.stat().st_size > 0
            known.append(Death(fallen, "hung" if hung else "crashed", claim))
            self.last_words.unlink(missing_ok=True)
            write_json(path, known)
        return known

    @property
    def last_words(self) -> Path:
        """Where the traceback of a process goes that is ended because it hangs."""
        return self.stem.with_suffix(".hang")

    @contextlib.contextmanager
    def journal(self) -> Iterator[Pen]:
        """Say which program is running. A pen that was not laid down tells where its process died."""
        path = self.stem.with_suffix(".running")
        if not path.exists():
            path.write_bytes(bytes(NUMBER + NAME))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), NUMBER + NAME) as page:
            yield Pen(page)


def at_work(folder: Path) -> int:
    """Programs of a family that have been judged so far, or are being judged; safe at any time."""
    judged = 0
    for path in folder.glob("shard-*.programs"):
        page = path.with_suffix(".running")
        done = path.with_suffix(".json").exists()
        number = page.read_bytes()[:NUMBER] if page.exists() and not done else b""
        judged += path.read_bytes().count(b"\n") if done else int.from_bytes(number, "little")
    return judged


def known_deaths(folder: Path) -> list[Death]:
    """What is known of the shards of a folder, and of the folders in it; safe at any time."""
    return [Death(*row) for path in sorted(folder.rglob("*.deaths")) for row in read_json(path) or ()]


class Pen:
    """A piece of shared memory: 0 while nothing runs, else the number of the running program plus one; and a claim."""

    def __init__(self, page: mmap.mmap) -> None:
        self.page = page

    def put(self, number: int | None) -> None:
        """Program ``number`` starts, or nothing runs any more."""
        self.page[:] = (0 if number is None else number + 1).to_bytes(NUMBER, "little") + bytes(NAME)

    def name(self, claim: str) -> None:
        """The program is run for one claim alone."""
        self.page[NUMBER:] = claim.encode()[:NAME].ljust(NAME, b"\0")
