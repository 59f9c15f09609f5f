"""What ends a shard early: a program that hangs, or a user who has had enough."""

from __future__ import annotations

import faulthandler
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

HANG = 60  # seconds without progress after which a process is ended
EVERY = 20  # programs between two renewals, for each takes a thread

Handler = signal.Handlers | int | None


class Patience:
    """Ends the process if nothing happens for too long; Ctrl-C is answered between two programs.

    A watchdog in Python cannot wake up while native code holds the interpreter lock; faulthandler's can. An interrupt
    in the middle of a program may land in a callback that swallows it (the garbage collector's, say), so the first one
    is kept until the program is over; the second acts at once.
    """

    def __init__(self, last_words: Path, seconds: float = 0.0) -> None:
        self.last_words, self.seconds = last_words, seconds or HANG
        self.count = 0
        self.interrupted = False
        self.file: IO[str] | None = None
        self.previous: object = None
        self.in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        self.file = self.last_words.open("w")
        self._arm()
        if self.in_main_thread:
            self.previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self.file is not None:
            self.file.close()
        self.last_words.unlink(missing_ok=True)
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self.previous)  # type: ignore[arg-type]
        if self.interrupted and kind is None:
            raise KeyboardInterrupt

    def renew(self) -> None:
        """A program is over."""
        self.count += 1
        if self.count % EVERY == 0:
            self._arm()
        if self.interrupted:
            raise KeyboardInterrupt

    def _arm(self) -> None:
        assert self.file is not None
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.file)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
