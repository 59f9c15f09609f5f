"""The folder that a run leaves behind: report.json, and all that is derived from it for people and machines."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autograd_conformance.reports.badge import badge, svg
from autograd_conformance.reports.document import document, encode, parsed, script_path
from autograd_conformance.reports.html import index
from autograd_conformance.reports.markdown import page
from autograd_conformance.reports.rerun import script
from autograd_conformance.verdicts import Run

if TYPE_CHECKING:
    from autograd_conformance.claims import Claim

__all__ = ["put", "script", "write"]

BADGES = ("badge.json", "badge.svg")


def write(run: Run, claims: Mapping[str, Claim], directory: Path | str) -> list[Path]:
    """Write report, page, badge and scripts, each file whole or not at all; the paths written, ``report.json`` first.

    All else is made from what ``report.json`` says, so that it can be made again from that file alone. A run of selected claims gets no badge, and takes away the one that an earlier run left in the folder.
    The report is written last, so that the scripts it names are there.

    Raises:
        OSError: the folder cannot be written.

    """
    folder = Path(directory)
    body = document(run, claims)
    run, claims = parsed(body)
    texts = {script_path(result): script(run, result, claims) for result in run.results if result.counterexample}
    if run.complete:
        shown = badge(run)
        texts |= dict(zip(BADGES, (json.dumps(shown, indent=1) + "\n", svg(shown)), strict=True))
    texts["index.html"] = index(run, claims)
    texts["summary.md"] = page(run, claims)
    texts["report.json"] = encode(body)
    paths = [put(folder / name, text) for name, text in texts.items()]
    for name in BADGES:
        if name not in texts:
            (folder / name).unlink(missing_ok=True)
    return [paths[-1], *paths[:-1]]


def put(path: Path, text: str) -> Path:
    """Put the text where ``path`` says through a temporary file beside it, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        part.chmod(0o644)  # mkstemp gives 0600: whoever collects the report may be another user
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return path
