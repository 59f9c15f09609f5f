"""The console command: run, devices, list, replay, seeds."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from autograd_conformance import __version__, reporting
from autograd_conformance.errors import UsageError, unknown

if TYPE_CHECKING:
    from autograd_conformance.devices import Survey

IDLE = 5  # times that a run may be started again without having come any further
INI = Path(__file__).with_name("suite.ini")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 as expected, 1 not, 2 usage, 3 the run failed, 5 nothing ran."""
    options, rest = _parser().parse_known_args(arguments)
    try:
        _add_ops(getattr(options, "ops", ()))
        if rest and options.command != "run":
            raise unknown("argument", rest[0], ("--help",))
        code: int = options.call(options, rest)
    except UsageError as error:
        print(f"autograd-conformance: {error}", file=sys.stderr)
        return 2
    return code


def _add_ops(modules: Sequence[str]) -> None:
    if modules:
        from autograd_conformance.ops.added import load

        load(modules)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autograd-conformance", description="Does an implementation of PyTorch autograd keep its promises?"
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="judge all claims on all devices; further arguments go to pytest")
    run.add_argument(
        "--device", action="append", default=[], metavar="DEVICE", help="judge this device (repeatable; default: all)"
    )
    run.add_argument(
        "--setup", default="", metavar="PYTHON", help="a line of Python that makes a device known to torch"
    )
    reporting.takes_ops(run)
    run.add_argument("--profile", default="default", help="smoke, default or thorough")
    run.add_argument("--seed", default="0", metavar="N", help="seed of the programs")
    run.add_argument(
        "--claims", action="append", default=[], metavar="GLOB", help="judge only these claims (repeatable)"
    )
    run.add_argument("--report-dir", default="conformance-report", metavar="DIR", help="where the report goes")
    run.add_argument(
        "--expectations", action="append", default=[], metavar="FILE", help="known deviations (repeatable)"
    )
    run.add_argument(
        "-n", dest="workers", default="auto", metavar="N", help="worker processes (default: auto; 0 for none)"
    )
    run.set_defaults(call=_run)

    devices = commands.add_parser("devices", help="show the devices that are here, and what each can do")
    devices.add_argument("--device", action="append", default=[], metavar="DEVICE", help="only this one (repeatable)")
    devices.add_argument("--setup", default="", metavar="PYTHON", help="a line of Python that makes a device known")
    devices.add_argument(
        "--example", metavar="FILE", help="write a device in pure Python to start from, and do no more"
    )
    devices.set_defaults(call=_devices)

    listing = commands.add_parser("list", help="show the claims: sentence, sources, area, what they need")
    listing.add_argument("claims", nargs="*", metavar="GLOB", help="only these")
    listing.set_defaults(call=_list)

    replay = commands.add_parser("replay", help="run one stored program and say what is due and what was seen")
    replay.add_argument("file", metavar="FILE", help="a program as JSON, or '-' for standard input")
    replay.add_argument("--device", default="cpu")
    replay.add_argument("--setup", default="", metavar="PYTHON", help="a line of Python that makes the device known")
    reporting.takes_ops(replay)
    replay.set_defaults(call=_replay)

    seeds = commands.add_parser("seeds", help="show what two notes of 2017 taught, and the claims that check it")
    seeds.add_argument("--report", metavar="FILE", help="a report.json: show the verdict on each claim in it as well")
    seeds.set_defaults(call=_seeds)
    reporting.add(commands)
    return parser


# --- run --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    """Find the devices, then supervise one pytest run for all that can share a process and one for each other kind."""
    from autograd_conformance.claims import select
    from autograd_conformance.together import CODES, Whole, parts

    if options.claims:
        select(options.claims)  # a mistake is told at once
    report = _writable(Path(options.report_dir).absolute())
    work = report / ".work" / uuid.uuid4().hex[:12]
    found = _found(options, rest)
    if found is None:
        code = _supervised(_command(options, rest, report, work), work)
        return code if code in CODES or code == 2 else 3
    whole = Whole(found, report, options.claims, options.profile, options.seed)
    try:
        for folder, part in parts(found, work):
            target = report if whole.single else folder.with_name(f"{folder.name}-report")  # the folder itself goes
            code = _supervised(_command(options, rest, target, folder, part), folder)
            if code == 2:
                return code
            whole.add(target, part, code)
        return whole.finish()
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may still work beside us
            work.parent.rmdir()


def _writable(report: Path) -> Path:
    try:
        report.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=report):
            return report
    except OSError as error:
        raise UsageError(f"cannot write to {report}: {error.strerror}; name another --report-dir") from None


def _found(options: argparse.Namespace, rest: list[str]) -> Survey | None:
    """The devices; None if only the pytest run can tell, because its plug-ins make them."""
    from autograd_conformance.devices import ALWAYS, survey

    if options.device and not options.setup and set(options.device) <= set(ALWAYS):
        return None
    try:
        return survey(options.device, options.setup)
    except UsageError:
        if "-p" in rest and not options.setup:
            return None
        raise


def _command(
    options: argparse.Namespace, rest: list[str], report: Path, work: Path, part: Sequence[str] | None = None
) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-c", str(INI), "--pyargs", "autograd_conformance", "-q"]
    command += [
        f"--conformance-report-dir={report}",
        f"--conformance-work={work}",
        f"--junitxml={report / 'junit.xml'}",
    ]
    command += [f"--conformance-profile={options.profile}", f"--conformance-seed={options.seed}"]
    command += [f"--conformance-device={name}" for name in (options.device if part is None else part)]
    command += [f"--conformance-setup={options.setup}"] if options.setup else []
    for name in ("claims", "expectations", "ops"):
        command += [f"--conformance-{name}={value}" for value in getattr(options, name)]
    command += [] if {"-q", "--quiet"} & set(rest) else ["--conformance-progress"]
    return [*command, "-n", options.workers, *rest]


def _supervised(command: list[str], work: Path) -> int:
    """A pytest run; one that a program kills is started again where it stopped, as long as that leads on.

    Returns the exit code, which is none of pytest's if it was killed again and again.
    """
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    done, idle = -1, 0
    while True:
        code = _child(command, environment)
        hung = code == 1 and any(path.stat().st_size for path in work.rglob("*.hang"))  # faulthandler exits with 1
        if code in (0, 1, 2, 3, 4, 5) and not hung:
            return 2 if code == 4 else code
        now = sum(path.suffix in (".json", ".deaths", ".settling") for path in work.rglob("*"))
        done, idle = now, 0 if now > done else idle + 1
        if idle == IDLE:
            return code
        print(
            f"autograd-conformance: pytest ended with {_named(code)}; starting again where it stopped", file=sys.stderr
        )


def _child(command: list[str], environment: dict[str, str]) -> int:
    child = subprocess.Popen(command, env=environment)  # noqa: S603 - our own command line
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the child has got it too, and writes its report
            continue


def _named(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


# --- devices ----------------------------------------------------------------------------------------------------------


def _devices(options: argparse.Namespace, _: list[str]) -> int:
    if options.example:
        return _example(Path(options.example))
    from autograd_conformance.devices import survey
    from autograd_conformance.reports.devices import table

    found = survey(options.device, options.setup)
    print("\n".join(table([device.to_plain() for device in found.devices], found.failures)))
    return 0


def _example(path: Path) -> int:
    source = Path(__file__).parent / "examples" / "npy.py"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}; its device is made known by: import {path.stem}; {path.stem}.init('mine')")
    return 0


# --- list -------------------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace, _: list[str]) -> int:
    from autograd_conformance.claims import register, select

    chosen = select(options.claims) if options.claims else tuple(register().values())
    for claim in chosen:
        print(f"{claim.id}{'  (core)' if claim.core else ''}")
        print(f"    {claim.sentence}")
        for source in claim.sources:
            print(f"    from  {source}")
        if claim.needs:
            print(f"    needs {', '.join(claim.needs)}")
    print(f"{len(chosen)} of {len(register())} claims")
    return 0


# --- replay -----------------------------------------------------------------------------------------------------------


def _replay(options: argparse.Namespace, _: list[str]) -> int:
    from autograd_conformance.replay import replay

    return replay(_text(options.file), options.file, options.device, options.setup)


def _text(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {error}") from None


# --- seeds ------------------------------------------------------------------------------------------------------------


def _seeds(options: argparse.Namespace, _: list[str]) -> int:
    from autograd_conformance.reports.document import read
    from autograd_conformance.reports.seeds import page
    from autograd_conformance.seeds import seeds

    run = None if options.report is None else read(options.report)
    document = seeds()
    notes = {name: asdict(note) for name, note in document.notes.items()}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows no Chinese still gets the English
    print("\n".join(page(notes, [asdict(statement) for statement in document.statements], run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
