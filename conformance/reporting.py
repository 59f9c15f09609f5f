"""The commands that work on reports: report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autograd_conformance.errors import UsageError

if TYPE_CHECKING:
    from autograd_conformance.claims import Claim
    from autograd_conformance.verdicts import Run


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    report = commands.add_parser("report", help="make page, badge and scripts again from a report.json")
    report.add_argument("file", metavar="FILE", help="the report.json")
    report.add_argument("--out", default="conformance-report", metavar="DIR", help="where they go")
    report.set_defaults(call=_report)


def _report(options: argparse.Namespace, _: list[str]) -> int:
    from autograd_conformance.reports.document import load

    run, claims = load(options.file)
    return _write(run, claims, options.out)


def _write(run: Run, claims: Mapping[str, Claim], directory: str) -> int:
    from autograd_conformance.reports.folder import write

    try:
        paths = write(run, claims, directory)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror or error}") from None
    print(f"{len(paths)} files in {directory}")
    return 0
