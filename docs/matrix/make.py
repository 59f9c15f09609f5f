"""Put the matrix together, from the reports that are named.

    python docs/matrix/make.py REPORT.json [...]

Each report is one of ``autograd-conformance run --device ... --report-dir DIR``, with the torch and on the devices that
shall be columns. Writes ``verdicts.json``, what every column says of every claim and why, and ``matrix.svg``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from autograd_conformance.claims import register
from autograd_conformance.reports.document import read
from autograd_conformance.reports.merge import merged
from autograd_conformance.reports.overview import overview

HERE = Path(__file__).parent


def main(files: list[str]) -> None:
    """Read, merge and write."""
    run = merged([read(file) for file in files])
    run = replace(run, devices=dict(sorted(run.devices.items(), key=lambda item: not item[0].startswith("cpu"))))
    columns: dict[str, dict[str, str]] = {}
    for result in run.results:
        said = str(result.verdict) + ("" if result.expected else ", not expected")
        reason = f": {result.reason}" if result.reason else ""
        columns.setdefault(result.device, {})[result.claim] = said + reason
    text = json.dumps({"profile": run.about["profile"], "columns": columns}, indent=1, ensure_ascii=False)
    (HERE / "verdicts.json").write_text(text + "\n", encoding="utf-8")
    (HERE / "matrix.svg").write_text(overview(run, register()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
