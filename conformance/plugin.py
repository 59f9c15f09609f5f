"""The pytest plug-in: options, one test for each claim and device, and the report at the end.

It is loaded in every pytest run of whoever installs the package, so nothing heavy is imported up here, and nothing
happens unless a claim is collected or one of the options is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from autograd_conformance.session import Session
    from autograd_conformance.teller import Teller

_KEY: pytest.StashKey[Session] = pytest.StashKey()
_TELLER: pytest.StashKey[Teller] = pytest.StashKey()
DEFAULT_REPORT = "conformance-report"


def pytest_addoption(parser: pytest.Parser) -> None:
    """All options begin with ``--conformance-``."""
    group = parser.getgroup("autograd conformance")
    add = group.addoption
    add(
        "--conformance-device",
        action="append",
        default=[],
        metavar="DEVICE",
        help="judge this device (repeatable; default: all)",
    )
    add(
        "--conformance-ops",
        action="append",
        default=[],
        metavar="MODULE",
        help="add the ops of this module to the programs (repeatable)",
    )
    add("--conformance-setup", default="", metavar="PYTHON", help="a line of Python that makes a device known to torch")
    add("--conformance-profile", default="default", metavar="NAME", help="smoke, default or thorough")
    add("--conformance-seed", type=int, default=0, metavar="N", help="seed of the programs (default: 0)")
    add(
        "--conformance-claims", action="append", default=[], metavar="GLOB", help="judge only these claims (repeatable)"
    )
    add(
        "--conformance-report-dir",
        default=DEFAULT_REPORT,
        metavar="DIR",
        help=f"where the report goes (default: {DEFAULT_REPORT})",
    )
    add("--conformance-expectations", action="append", default=[], metavar="FILE", help="known deviations (repeatable)")
    add(
        "--conformance-baseline",
        default=None,
        metavar="FILE",
        help="report.json of an earlier run: say what has changed, and fail if something is newly broken",
    )
    add(
        "--conformance-progress",
        action="store_true",
        help="a line for each family of programs that is done, although pytest is told to be quiet",
    )
    add("--conformance-work", default=None, metavar="DIR", help="working folder of a run that is resumed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check what was asked for; a mistake is one line and exit code 2."""
    options = config.option
    if options.conformance_ops:
        _add_ops(options.conformance_ops)
    if options.conformance_baseline and not hasattr(config, "workerinput"):
        _check_baseline(config)
    asked = options.conformance_device or options.conformance_claims or options.conformance_expectations
    asked = asked or options.conformance_setup or options.conformance_report_dir != DEFAULT_REPORT
    if hasattr(config, "workerinput") or not (asked or options.conformance_profile != "default"):
        return
    _session(config).check_request()


def _add_ops(modules: list[str]) -> None:
    """The op table has to be whole before any claim is collected, in every process."""
    from autograd_conformance.errors import UsageError
    from autograd_conformance.ops.added import load

    try:
        load(modules)
    except UsageError as error:
        pytest.exit(str(error), returncode=2)


def _check_baseline(config: pytest.Config) -> None:
    """A baseline that is no report is found before anything runs."""
    from autograd_conformance.errors import UsageError
    from autograd_conformance.reports.document import read

    try:
        read(config.option.conformance_baseline)
    except UsageError as error:
        pytest.exit(str(error), returncode=2)


def _session(config: pytest.Config) -> Session:
    """The session of this process, made when it is first needed."""
    if _KEY not in config.stash:
        from autograd_conformance.session import Session

        config.stash[_KEY] = Session(config)
    return config.stash[_KEY]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell an xdist worker which working folder the run has."""
    node.workerinput["conformance_work"] = str(_session(node.config).work)
    _tell(node.config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """A worker that a program kills is replaced, however often; xdist alone would give up and lose tests."""
    if config.option.maxworkerrestart is None:
        config.option.maxworkerrestart = "1000"


def _is_claim(function: Any) -> bool:
    return hasattr(function, "claim_check")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each device."""
    if _is_claim(metafunc.function):
        names = [device.name for device in _session(metafunc.config).devices]
        metafunc.parametrize("settle", names, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the claims that were not asked for."""
    ours = [item for item in items if _is_claim(getattr(item, "function", None))]
    if ours:
        dropped = _session(config).collect(ours)
        _tell(config)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item not in dropped]


def _tell(config: pytest.Config) -> None:
    """From now on say how far the run is, unless it is to be quiet or another process owns the terminal."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    verbosity, asked = config.option.verbose, config.option.conformance_progress
    if reporter is None or hasattr(config, "workerinput") or (verbosity < 0 and not asked) or _TELLER in config.stash:
        return
    from autograd_conformance.teller import Teller

    config.stash[_TELLER] = teller = Teller(reporter, alive=reporter.isatty and verbosity <= 0)
    config.pluginmanager.register(teller)
    teller.start(_session(config).work)


@pytest.fixture
def settle(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Gives the verdict on a claim on the device of this test, or raises what pytest shows."""
    session, node, device = _session(request.config), request.node, request.param

    def verdict(claim: str) -> None:
        shown = session.settle(claim, device)
        node.user_properties.extend(shown.properties)
        if shown.failure:
            pytest.fail(shown.failure, pytrace=False)
        if shown.skip:
            pytest.skip(shown.skip)
        if shown.xfail:
            pytest.xfail(shown.xfail)

    return verdict


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, whatever has happened."""
    if _KEY not in session.config.stash:
        return
    ours = _session(session.config)
    ours.leave()
    if hasattr(session.config, "workerinput"):
        return
    if ours.report():
        session.exitstatus = 3
    elif ours.lines and session.config.option.conformance_baseline:
        from autograd_conformance.baseline import held

        lines, code = held(session.config.option.conformance_baseline, ours.report_dir / "report.json")
        ours.lines += lines
        session.exitstatus = max(code, session.exitstatus)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Five lines: devices, verdicts, what is unexpected, what it rests on, where the report lies."""
    if _KEY in config.stash:
        lines = _session(config).lines
        if lines:
            terminalreporter.section("autograd conformance")
            for line in lines:
                terminalreporter.write_line(line)
