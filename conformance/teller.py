"""What a run says while it goes on, in the process that owns the terminal. Nothing heavy is imported up here."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from autograd_conformance.live import Live
    from autograd_conformance.progress import Progress

_SHORT = {"passed": "passed", "skipped": "skipped", "failed": "failed"}


class Teller:
    """Says which families are done; on a terminal also, in place of pytest's dots, what is being judged.

    Args:
        reporter: pytest's own.
        alive: may it write a line over again and again?

    """

    def __init__(self, reporter: pytest.TerminalReporter, *, alive: bool) -> None:
        self.reporter, self.alive = reporter, alive
        self.progress: Progress | None = None
        self.live: Live | None = None

    def start(self, work: Path) -> None:
        """The run has this working folder."""
        from autograd_conformance.progress import Progress

        self.progress = Progress(work)
        if self.alive:
            from autograd_conformance.live import Live

            with contextlib.suppress(OSError):  # no terminal to write to
                self.live = Live(self.progress.now)

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No dot for a claim while there is a line that tells more."""
        if self.live is None or not isinstance(report, pytest.TestReport) or not _of_ours(report):
            return None
        if report.when != "call" and report.passed:
            return "", "", ""
        return ("xfailed" if hasattr(report, "wasxfail") else _SHORT[report.outcome]), "", ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Whatever is printed has a line of its own, and a claim that is newly broken is told at once."""
        with self._aside():
            yield
            if self.live is not None and report.failed and _of_ours(report):
                found = dict(report.user_properties)
                self.reporter.write_line(f"{found['verdict']}: {found['claim']} on {found['device']}", red=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logfinish(self) -> Generator[None]:
        """A line for each family that is done since the test before."""
        with self._aside():
            yield
            for line in self.progress.lines() if self.progress else ():
                if self.reporter._tw.width_of_current_line:  # dots, of which the reporter keeps no account
                    self.reporter._tw.line()
                self.reporter.write_line(line)

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_testnodedown(self) -> Generator[None]:
        """What xdist says of a worker that died has a line of its own."""
        with self._aside():
            yield

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """The line goes before anything is summed up."""
        self._stop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        """The line goes before the traceback comes."""
        self._stop()

    def _aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.live is None else self.live.aside()

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def _of_ours(report: pytest.TestReport) -> bool:
    return any(name == "claim" for name, _ in report.user_properties)
