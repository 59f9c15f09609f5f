"""Work in forked processes, a few at a time: what one of them does to torch, or to itself, the others do not see."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

Key = TypeVar("Key")
Result = TypeVar("Result")
Death = Literal["crashed", "hung"]


def forked(
    jobs: Iterable[tuple[Key, Callable[[], Result]]], workers: int, limit: float
) -> Iterator[tuple[Key, Result | Death]]:
    """What each job returns, or how its process ended, in the order in which they are done.

    Args:
        jobs: key and function of each; the next is asked for when a worker is free.
        workers: processes at a time.
        limit: seconds after which a process counts as ``hung`` and is killed.

    """
    waiting, running, more = iter(jobs), dict[Connection, _Fork[Key, Result]](), True
    while more or running:
        while more and len(running) < workers:
            job = next(waiting, None)
            more = job is not None
            if job is not None:
                one = _Fork(*job, limit)
                running[one.pipe] = one
        ready = wait(list(running), timeout=1.0) if running else []
        for pipe in [p for p, one in running.items() if p in ready or one.late]:
            one = running.pop(pipe)
            yield one.key, one.result()


class _Fork(Generic[Key, Result]):
    """A job at work in a child process."""

    def __init__(self, key: Key, function: Callable[[], Result], limit: float) -> None:
        context = multiprocessing.get_context("fork")
        self.key, self.end = key, time.monotonic() + limit
        self.pipe, theirs = context.Pipe(duplex=False)
        self.child: ForkProcess = context.Process(target=_send, args=(function, theirs))
        self.child.start()
        theirs.close()

    @property
    def late(self) -> bool:
        """Has it had its time?"""
        return time.monotonic() > self.end

    def result(self) -> Result | Death:
        """What it sent, or how it ended."""
        try:
            found: Result | Death = self.pipe.recv() if self.pipe.poll() else "hung"
        except EOFError:
            found = "crashed"
        self.child.kill()
        self.child.join()
        self.pipe.close()
        return found


def _send(function: Callable[[], object], pipe: Connection) -> None:
    pipe.send(function())
