"""``python -m autograd_conformance.faults`` lists the faults; with ``NAME script.py`` it runs a script under one."""

from __future__ import annotations

import runpy
import sys

from autograd_conformance.faults.words import FAULTS, plant


def main(argv: list[str]) -> int:
    """List the faults, or run a script under one of them."""
    from autograd_conformance.errors import UsageError

    if not argv:
        print("\n".join(_line(name) for name in FAULTS))
        return 0
    if len(argv) < 2:
        print("usage: python -m autograd_conformance.faults [NAME script.py [argument ...]]", file=sys.stderr)
        return 2
    try:
        plant(argv[0])
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    sys.argv = argv[1:]
    runpy.run_path(argv[1], run_name="__main__")
    return 0


def _line(name: str) -> str:
    fault = FAULTS[name]
    kind = "null" if fault.null else "rare" if fault.rare else "plain"
    return f"{name:36} {kind:6} {', '.join(fault.claims) or '-':60} {fault.sentence}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
