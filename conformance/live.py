"""On a terminal: one line that is written over while the run goes on, and gives way to whatever else is printed.

It goes to the terminal itself, since pytest keeps what a test prints, and comes from a thread of its own, since neither
a test that judges a family nor xdist, which waits for one, returns for seconds.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PERIOD = 0.5  # seconds between two looks
_ERASE = "\r\x1b[2K"


class Live:
    """A line at the bottom of the terminal.

    Args:
        text: what it says; asked again each time.
        terminal: file that is the terminal.

    Raises:
        OSError: the process has no terminal.

    """

    def __init__(self, text: Callable[[], str], terminal: str = "/dev/tty") -> None:
        self.text = text
        self.file = os.open(terminal, os.O_WRONLY | getattr(os, "O_NOCTTY", 0))
        self.lock, self.stopped, self.shown = threading.Lock(), threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="conformance-live", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stopped.wait(PERIOD):
            text = self.text()
            with self.lock:
                if text and not self.stopped.is_set():
                    self._write(_ERASE + text[: shutil.get_terminal_size().columns - 1])
                    self.shown = True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The line is away, and stays away, while something else is printed."""
        with self.lock:
            if self.shown:
                self._write(_ERASE)
                self.shown = False
            yield

    def stop(self) -> None:
        """The line is away for good."""
        with self.aside():
            self.stopped.set()
        self.thread.join()
        os.close(self.file)

    def _write(self, text: str) -> None:
        os.write(self.file, text.encode(errors="replace"))
