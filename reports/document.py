"""The canonical report: a run as one JSON document, and back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autograd_conformance.claims import Claim
from autograd_conformance.errors import UsageError
from autograd_conformance.reports.script import repro_name
from autograd_conformance.reports.text import harmless_data, one_line, shortened
from autograd_conformance.verdicts import Result, Run

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("schema.json")
ABOUT = (
    "name",
    "version",
    "timestamp",
    "platform",
    "python",
    "test_suite",
    "execution_target",
    "torch",
    "packages",
    "profile",
    "seed",
    "threads",
    "wall_seconds",
    "cpu_seconds",
)
_DERIVED = ("schema", "claims")


def document(run: Run, claims: Mapping[str, Claim]) -> dict[str, Any]:
    """The report as JSON-ready data that ``schema.json`` describes; every text in it is harmless to print.

    Raises:
        ValueError: ``run.about`` lacks a name of ABOUT, or has one that is not there.

    """
    _check_about(run.about)
    judged = dict.fromkeys(result.claim for result in run.results)
    body = {
        "schema": SCHEMA,
        **{name: run.about[name] for name in ABOUT},
        "complete": run.complete,
        "failure": run.failure,
        "notes": run.notes,
        "devices": run.devices,
        "families": run.families,
        "claims": {name: _claim(claims[name]) for name in judged if name in claims},
        "results": [_result(result) for result in run.results],
    }
    plain: dict[str, Any] = harmless_data(body)
    return plain


def encode(body: dict[str, Any]) -> str:
    """The document as ASCII JSON text, one field a line."""
    return json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def read(path: Path | str) -> Run:
    """The run that a ``report.json`` tells of; see :func:`load`."""
    return load(path)[0]


def load(path: Path | str) -> tuple[Run, dict[str, Claim]]:
    """The run that a ``report.json`` tells of, and the claims as they stood when it was written.

    Raises:
        UsageError: there is no such file, or it is no whole report of this version; one line that names the file.

    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a report, or cut short: {one_line(str(error), 200)}") from None
    if not isinstance(body, dict) or "schema" not in body or "results" not in body:
        raise UsageError(f"{path}: not a report of this suite")
    if body["schema"] != SCHEMA:
        raise UsageError(f"{path}: report schema {one_line(repr(body['schema']), 40)}, this version reads {SCHEMA}")
    try:
        return parsed(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: damaged report: {one_line(repr(error), 200)}") from None


def parsed(body: Mapping[str, Any]) -> tuple[Run, dict[str, Claim]]:
    """The run and the claims of a document; whatever it raises for a damaged one, :func:`load` puts in one line."""
    claims = {name: _claim_of(name, row) for name, row in body["claims"].items()}
    return _run(body), claims


def script_path(result: Result) -> str:
    """Where the script of a result's counterexample lies, relative to the report; empty without a counterexample."""
    if result.counterexample is None:
        return ""
    folder = re.sub(r"[^0-9A-Za-z]", "_", result.device)
    return f"repro/{folder}/{repro_name(result.counterexample)}"


def _check_about(about: Mapping[str, Any]) -> None:
    missing = [name for name in ABOUT if name not in about]
    if missing:
        raise ValueError(f"run.about lacks {', '.join(missing)}")
    unknown = [name for name in about if name not in ABOUT]
    if unknown:
        raise ValueError(f"run.about has names that the report does not know: {', '.join(unknown)}")


def _claim(claim: Claim) -> dict[str, Any]:
    plain = {"sentence": claim.sentence, "area": claim.area, "sources": list(claim.sources)}
    return plain | {"core": claim.core, "needs": list(claim.needs)}


def _claim_of(name: str, row: Mapping[str, Any]) -> Claim:
    core, needs = bool(row.get("core", False)), tuple(row.get("needs", ()))
    return Claim(name, row["sentence"], tuple(row["sources"]), row["area"], core, needs)


def _result(result: Result) -> dict[str, Any]:
    plain = result.to_plain() | {"reason": shortened(result.reason)}
    example = plain["counterexample"]
    if example is None:
        return plain
    violation = example["violation"] | {"seen": shortened(example["violation"]["seen"])}
    return plain | {"counterexample": example | {"violation": violation}, "script": script_path(result)}


def _run(body: Mapping[str, Any]) -> Run:
    rows = [{name: value for name, value in row.items() if name != "script"} for row in body["results"]]
    own = {field.name for field in dataclasses.fields(Run)}
    unknown = [name for name in body if name not in {*ABOUT, *own, *_DERIVED}]
    if unknown:
        raise ValueError(f"unknown names: {', '.join(unknown)}")
    return Run(
        about={name: body[name] for name in ABOUT},
        devices=dict(body["devices"]),
        families=list(body["families"]),
        results=tuple(map(Result.from_plain, rows)),
        complete=body["complete"],
        failure=body["failure"],
        notes=tuple(body["notes"]),
    )
