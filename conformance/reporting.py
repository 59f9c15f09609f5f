"""The commands that work on reports and on the register: report, merge, diff, explain, zoo, fuzz."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograd_conformance.errors import UsageError

if TYPE_CHECKING:
    from autograd_conformance.claims import Claim
    from autograd_conformance.verdicts import Run


def takes_ops(command: argparse.ArgumentParser) -> None:
    """Give a command the option that adds the ops of a module to the table."""
    command.add_argument(
        "--ops", action="append", default=[], metavar="MODULE", help="add the ops of this module (repeatable)"
    )


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    report = commands.add_parser("report", help="make page, summary, badge and scripts again from a report.json")
    report.add_argument("file", metavar="FILE", help="the report.json")
    report.add_argument("--out", default="conformance-report", metavar="DIR", help="where they go")
    takes_ops(report)
    report.set_defaults(call=_report)

    merge = commands.add_parser("merge", help="put reports of several devices, machines or versions together")
    merge.add_argument("files", nargs="+", metavar="FILE", help="a report.json")
    merge.add_argument("--out", default="conformance-report", metavar="DIR", help="where the report goes")
    takes_ops(merge)
    merge.set_defaults(call=_merge)

    diff = commands.add_parser("diff", help="compare two reports; exit code 1 if something is newly broken")
    diff.add_argument("old", metavar="OLD", help="a report.json")
    diff.add_argument("new", metavar="NEW", help="another one")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.add_argument("--anyway", action="store_true", help="compare although the programs are not the same")
    diff.set_defaults(call=_diff)

    explain = commands.add_parser("explain", help="explain a claim: sentence, sources, and a small example as a script")
    explain.add_argument("claim", metavar="CLAIM", help="its id")
    explain.add_argument("--device", default="cpu", help="the device of the example (default: cpu)")
    explain.set_defaults(call=_explain)

    zoo = commands.add_parser("zoo", help="plant faults in torch, one after the other, and see which are noticed")
    zoo.add_argument("faults", nargs="*", metavar="GLOB", help="only these")
    zoo.add_argument("--profile", default="default", help="smoke, default or thorough")
    zoo.add_argument("-n", dest="workers", type=int, default=2, metavar="N", help="faults at a time (default: 2)")
    zoo.add_argument("--out", metavar="DIR", help="write zoo.json and strength.md there")
    zoo.set_defaults(call=_zoo)

    fuzz = commands.add_parser("fuzz", help="judge fresh programs for as long as you like")
    fuzz.add_argument("--device", default="cpu", help="on this device (default: cpu)")
    fuzz.add_argument("--setup", default="", metavar="PYTHON", help="a line of Python that makes the device known")
    fuzz.add_argument("--minutes", type=float, default=10.0, metavar="N", help="how long (default: 10)")
    fuzz.add_argument("--seed", type=int, metavar="N", help="the first seed (default: from the clock)")
    fuzz.add_argument("--corpus", default="conformance-corpus", metavar="DIR", help="what is found is kept here")
    fuzz.add_argument("-n", dest="workers", type=int, default=2, metavar="N", help="processes at a time (default: 2)")
    fuzz.set_defaults(call=_fuzz)


def _report(options: argparse.Namespace, _: list[str]) -> int:
    from autograd_conformance.reports.document import load

    run, claims = load(options.file)
    return _write(run, claims, options.out)


def _merge(options: argparse.Namespace, _: list[str]) -> int:
    from autograd_conformance.reports.document import load
    from autograd_conformance.reports.merge import merged

    loaded = [load(file) for file in options.files]
    claims = {name: claim for _, known in loaded for name, claim in known.items()}
    return _write(merged([run for run, _ in loaded]), claims, options.out)


def _write(run: Run, claims: Mapping[str, Claim], directory: str) -> int:
    from autograd_conformance.ops.added import loaded
    from autograd_conformance.reports.folder import write

    missing = [name for name in run.about["test_suite"].get("ops", ()) if name not in loaded()]
    if missing:
        raise UsageError(f"the programs of the report use ops of {missing[0]}: add --ops {missing[0]}")
    try:
        paths = write(run, claims, directory)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror or error}") from None
    print(f"{len(paths)} files in {directory}")
    return 0


def _diff(options: argparse.Namespace, _: list[str]) -> int:
    from autograd_conformance.reports.diff import changes, newly_broken, plain, told
    from autograd_conformance.reports.document import read

    old, new = read(options.old), read(options.new)
    found = changes(old, new, anyway=options.anyway)
    print(json.dumps(plain(old, new, found), indent=1) if options.json else "\n".join(told(old, new, found)))
    return 1 if newly_broken(found) else 0


def _explain(options: argparse.Namespace, _: list[str]) -> int:
    import torch

    from autograd_conformance.devices import discover
    from autograd_conformance.explain import explained

    (device,) = discover([options.device])
    print("\n".join(explained(options.claim, device, torch.__version__)))
    return 0


def _zoo(options: argparse.Namespace, _: list[str]) -> int:
    """Exit code 1 if a fault survives, or a null fault does not."""
    from autograd_conformance.claims import register
    from autograd_conformance.faults.words import FAULTS
    from autograd_conformance.profiles import named
    from autograd_conformance.reports.folder import put
    from autograd_conformance.strength import encoded, page, told
    from autograd_conformance.zoo import about, chosen, kills

    found, profile = [], named(options.profile)
    testable = [claim.id for claim in register().values() if not claim.untestable]
    for kill in kills(chosen(options.faults), profile, max(1, options.workers)):
        print(told(kill, FAULTS[kill.fault]), flush=True)
        found.append(kill)
        if options.out:  # after each, for it takes long
            folder = Path(options.out)
            ordered = sorted(found, key=lambda kill: list(FAULTS).index(kill.fault))
            put(folder / "zoo.json", encoded(ordered, about(profile)))
            put(folder / "strength.md", page(ordered, FAULTS, testable, about(profile)))
    survivors = [k for k in found if bool(k.broken if FAULTS[k.fault].null else not k.claim)]
    print(f"{len(found) - len(survivors)} of {len(found)} as they should be")
    return 1 if survivors else 0


def _fuzz(options: argparse.Namespace, _: list[str]) -> int:
    """Exit code 1 if a claim was broken or a process died."""
    from autograd_conformance.devices import discover
    from autograd_conformance.fuzz import Soak, seeds_for

    (device,) = discover([options.device], options.setup)
    seed = int(time.time()) if options.seed is None else options.seed
    soak = Soak(device, Path(options.corpus), options.setup)
    print(f"from seed {seed} on", flush=True)
    try:
        soak.run(seeds_for(options.minutes, seed), max(1, options.workers), lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("interrupted")
    found = soak.summary()
    print(f"{found['programs']:,} programs, {found['checks']:,} checks in {found['rounds']} rounds on {device.name}")
    print(f"{found['meetings']:,} pairs of ops met; broken: {', '.join(found['broken']) or 'nothing'}")
    return 1 if found["broken"] or found["deaths"] else 0
