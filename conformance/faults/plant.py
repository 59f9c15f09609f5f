"""Pytest plug-in that plants a fault first: ``pytest -p autograd_conformance.faults.plant --conformance-fault NAME``.

Workers of pytest-xdist inherit the options, so every process plants the fault once for itself.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the fault."""
    group = parser.getgroup("autograd-conformance")
    group.addoption("--conformance-fault", metavar="NAME", default=None, help="plant this fault in torch first")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Plant it before anything of the suite runs."""
    name = config.getoption("--conformance-fault")
    if name is None:
        return
    from autograd_conformance.errors import UsageError
    from autograd_conformance.faults.words import plant

    try:
        plant(name)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say so: a run under a fault must not be taken for one of a healthy torch."""
    name = config.getoption("--conformance-fault")
    return f"planted fault: {name}" if name else None
