"""report.json and its folder, and what people read in the terminal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autograd_conformance.claims import Claim
from autograd_conformance.errors import UsageError
from autograd_conformance.program import Apply, Backward, Constant, Leaf, Program
from autograd_conformance.reports.document import ABOUT, SCHEMA_FILE, document, encode, read
from autograd_conformance.reports.folder import script, write
from autograd_conformance.reports.terminal import argument, summary
from autograd_conformance.reports.text import harmless, labelled, shortened
from autograd_conformance.verdicts import Counterexample, Result, Run, Verdict, Violation

HOSTILE = "\x1b[2J red \u202eevil\u2066 \ud800 \x00 \x7f </script> \u2028 \N{SNOWMAN}"
ABOUT_RUN: dict[str, Any] = {
    "name": "torch",
    "version": "2.13.0",
    "timestamp": "2026-01-02T03:04:05+00:00",
    "platform": "Linux-x86_64",
    "python": "3.11.7",
    "test_suite": {"name": "autograd-conformance", "version": "0.1.0"},
    "execution_target": dict.fromkeys(("kind", "backend", "device_model", "runtime_version", "driver_version"), "cpu"),
    "torch": {"version": "2.13.0+cpu", "git": "abc"},
    "packages": {"numpy": "2.0", "hypothesis": "6.100"},
    "profile": "default",
    "seed": 0,
    "threads": {"torch": 1},
    "wall_seconds": 1.5,
    "cpu_seconds": 2.5,
}
PROGRAM = Program(
    (
        Leaf("a", Constant((2,), "float64", (0.5, -1.25)), True),
        Apply(("b",), "square", ("a",)),
        Apply(("c",), "sum", ("b",)),
        Backward(("c",), retain_graph=True),
        Backward(("c",)),
    )
)
VIOLATION = Violation(
    "grad.adds", 4, "a.grad", "[2.0, -5.0]", "[1.0, -2.5]", "close", 1e-9, because="a had a gradient before the pass."
)
CLAIMS = {
    name: Claim(name, sentence, ("docs notes/autograd.md", "docstring torch.Tensor.backward"), name.split(".")[0], True)
    for name, sentence in [
        ("grad.adds", "Gradients that reach a leaf are added to what its .grad holds."),
        ("leaf.flag", "A tensor that no op made is a leaf."),
        ("free.raises", "A second pass through a freed graph raises."),
    ]
}


def _broken(device: str = "cpu", **changes: Any) -> Result:
    example = Counterexample(PROGRAM, dataclasses.replace(VIOLATION, **changes), found="0123456789ab")
    counts = {"programs": 200, "evidence": 150, "checks": 4000, "violations": 3}
    return Result(
        "grad.adds", device, Verdict.BROKEN, False, "seen 3 times", family="dag", counterexample=example, **counts
    )


def _run(*results: Result, **changes: Any) -> Run:
    results = results or (_broken(), Result("leaf.flag", "cpu", Verdict.HOLDS, programs=200, checks=800))
    names = dict.fromkeys(result.device for result in results)
    families = [{"family": "dag", "device": name, "programs": 200, "digest": "d1"} for name in names]
    devices: dict[str, dict[str, Any]] = {name: {"found": "built in", "traits": ["float64"]} for name in names}
    return Run(ABOUT_RUN, devices, families, tuple(results), **changes)


def _valid(body: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)


# --- report.json --------------------------------------------------------------------------------------------------


def test_report_follows_its_schema() -> None:
    """A report with every kind of verdict is valid."""
    others = [Result("leaf.flag", "cpu", verdict) for verdict in Verdict]
    _valid(document(_run(_broken(), *others, notes=("a note",), failure="worker lost"), CLAIMS))


@pytest.mark.parametrize("damage", [{"schema": 2}, {"extra": 1}, {"results": [{}]}, {"seed": None}])
def test_schema_refuses_what_is_no_report(damage: dict[str, Any]) -> None:
    """The schema is strict enough to notice a wrong version, an unknown name, an empty result, a missing value."""
    with pytest.raises(jsonschema.ValidationError):
        _valid(document(_run(), CLAIMS) | damage)


def test_script_is_named_exactly_where_there_is_a_counterexample() -> None:
    """Broken results name their script, the others have no such field, and the schema insists on both."""
    broken, holds = document(_run(), CLAIMS)["results"]
    assert broken["script"].startswith("repro/cpu/repro_grad_adds_")
    assert "script" not in holds
    for wrong in ({**holds, "script": "x"}, {k: v for k, v in broken.items() if k != "script"}):
        with pytest.raises(jsonschema.ValidationError):
            _valid(document(_run(), CLAIMS) | {"results": [wrong]})


def test_report_tells_the_claims_that_were_judged() -> None:
    """Sentence, area and sources of the judged claims travel with the report."""
    claims = document(_run(), CLAIMS)["claims"]
    assert list(claims) == ["grad.adds", "leaf.flag"]
    assert claims["leaf.flag"]["area"] == "leaf"


@pytest.mark.parametrize("name", ABOUT)
def test_nothing_about_the_run_may_be_missing(name: str) -> None:
    """A run that does not say all about itself is refused by name."""
    about = {key: value for key, value in ABOUT_RUN.items() if key != name}
    with pytest.raises(ValueError, match=f"lacks {name}"):
        document(dataclasses.replace(_run(), about=about), CLAIMS)


def test_nothing_unknown_is_said_about_the_run() -> None:
    """A name that the schema does not have is refused before it is written."""
    with pytest.raises(ValueError, match="mood"):
        document(dataclasses.replace(_run(), about=ABOUT_RUN | {"mood": "good"}), CLAIMS)


def test_written_report_reads_back(tmp_path: Path) -> None:
    """What is written is what is read, every field of it."""
    run = _run(notes=("one", "two"), complete=False, failure="lost")
    write(run, CLAIMS, tmp_path)
    assert read(tmp_path / "report.json") == run


def test_hostile_texts_are_harmless_in_every_file(tmp_path: Path) -> None:
    """Controls, bidi marks and surrogates reach no file raw, and the report still follows its schema."""
    hostile = _broken(seen=HOSTILE, because=HOSTILE)
    run = _run(dataclasses.replace(hostile, reason=HOSTILE), notes=(HOSTILE,), failure=HOSTILE)
    run.devices["cpu"][HOSTILE] = HOSTILE
    for path in write(run, CLAIMS, tmp_path):
        text = path.read_text(encoding="utf-8")
        assert not set("\x1b\x00\x7f\u202e\u2066\u2028\ud800") & set(text), path
    body = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    _valid(body)
    assert "\\u202eevil\\u2066 \\ud800 \\x00 \\x7f </script> \\u2028 \N{SNOWMAN}" in body["failure"]


def test_very_long_values_are_cut_with_a_count() -> None:
    """A huge seen value does not swell the report; how much was left out is said."""
    body = document(_run(_broken(seen="9" * 100_000)), CLAIMS)
    assert body["results"][0]["counterexample"]["violation"]["seen"].endswith("9 ... (98,000 more characters)")


# --- the folder ---------------------------------------------------------------------------------------------------


def test_folder_holds_report_badges_and_scripts(tmp_path: Path) -> None:
    """The paths returned are all that there is: no temporary file is left."""
    run = _run(_broken(), _broken("lazy"))
    paths = write(run, CLAIMS, tmp_path / "new" / "folder")
    assert sorted(paths) == sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert paths[0].name == "report.json"
    named = [row["script"] for row in document(run, CLAIMS)["results"]]
    assert {f"repro/{device}" for device in ("cpu", "lazy")} == {name.rpartition("/")[0] for name in named}
    assert all((paths[0].parent / name).read_text(encoding="utf-8").startswith("# Broken:") for name in named)
    assert json.loads((paths[0].parent / "badge.json").read_text(encoding="utf-8"))["message"] == "0/1 claims"


def test_selected_claims_get_no_badge(tmp_path: Path) -> None:
    """A run of selected claims writes no badge and takes an older one away."""
    write(_run(), CLAIMS, tmp_path)
    assert (tmp_path / "badge.svg").exists()
    write(_run(complete=False), CLAIMS, tmp_path)
    assert not list(tmp_path.glob("badge.*"))


def test_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new report cannot be put in place the old one stays whole, and no part of the new one is left."""
    write(_run(), CLAIMS, tmp_path)
    before = (tmp_path / "report.json").read_text(encoding="utf-8")

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write(_run(notes=("new",)), CLAIMS, tmp_path)
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == before
    assert not list(tmp_path.rglob(".*"))


def test_setup_line_of_the_device_is_in_its_script() -> None:
    """The line that makes a device known comes from what the run says about the device."""
    run = _run(_broken("npy"))
    run.devices["npy"]["setup"] = "import npy_device"
    assert "import torch\nimport npy_device\n" in script(run, run.results[0], CLAIMS)


WHOLE = encode(document(_run(), CLAIMS))
DAMAGED = {
    "empty": b"",
    "truncated": WHOLE[: len(WHOLE) // 2].encode(),
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "foreign list": b"[1, 2]",
    "foreign object": b'{"tests": 3}',
    "future": WHOLE.replace('"schema": 1', '"schema": 2').encode(),
    "unknown verdict": WHOLE.replace('"broken"', '"fine"').encode(),
    "unknown field": WHOLE.replace('"evidence"', '"evidenze"').encode(),
    "no families": WHOLE.replace('"families"', '"famillies"').encode(),
    "damaged program": WHOLE.replace("statements", "sttements").encode(),
    "results no list": json.dumps({"schema": 1, "results": 7}).encode(),
    "hostile version": json.dumps({"schema": HOSTILE, "results": []}).encode(),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_report_is_a_usage_error_of_one_line(kind: str, tmp_path: Path) -> None:
    """Whatever is wrong with a file, the error is one printable line that names it."""
    path = tmp_path / "report.json"
    path.write_bytes(DAMAGED[kind])
    with pytest.raises(UsageError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


def test_missing_report_is_a_usage_error(tmp_path: Path) -> None:
    """A path without a file, or that is a folder, is named in the error."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read(path)


# --- the terminal -------------------------------------------------------------------------------------------------


def test_summary_has_five_lines() -> None:
    """Devices, verdicts, what is unexpected, how much was checked, where the report lies."""
    lines = summary(_run(), CLAIMS, "out/report.json")
    assert lines[:3] == [
        "devices     cpu with torch 2.13.0+cpu",
        "verdicts    1 holds, 1 broken",
        "unexpected  1: grad.adds broken",
    ]
    assert lines[3].startswith("checked     2 of 3 claims, 200 programs, 4,800 checks, digest ")
    assert lines[4:] == ["report      out/report.json"]


def test_summary_of_several_devices_counts_each() -> None:
    """With several devices every count and every unexpected claim says where; what was foretold is not unexpected."""
    known = dataclasses.replace(_broken("lazy"), expected=True)
    lines = summary(_run(Result("leaf.flag", "cpu", Verdict.HOLDS), known, _broken("npy")), CLAIMS, "x")
    assert lines[1] == "verdicts    cpu: 1 holds; lazy: 1 broken (1 expected); npy: 1 broken"
    assert lines[2] == "unexpected  1: grad.adds broken on npy"


def test_summary_cuts_long_lists_with_a_count() -> None:
    """Five unexpected claims are named, the rest are counted."""
    many = [Result(f"leaf.n{i}", "cpu", Verdict.UNPROVEN, False) for i in range(12)]
    assert summary(_run(*many), CLAIMS, "x")[2].endswith("leaf.n4 unproven, and 7 more")


def test_summary_of_a_failed_run_says_so() -> None:
    """Failure and notes follow the five lines, each on one harmless line."""
    lines = summary(Run({}, {}, [], (), failure=f"lost\n{HOSTILE}", notes=("look here",)), CLAIMS, "x")
    assert lines[:3] == ["devices     none", "verdicts    none: nothing ran", "unexpected  nothing"]
    assert lines[5].startswith("RUN FAILED  lost \\x1b[2J red")
    assert lines[6] == "note        look here"
    assert all(line.isprintable() for line in lines)


def test_argument_reads_like_a_proof() -> None:
    """A failing test prints what was promised, due and seen, why, the script and how to run it again, in this order."""
    run = _run()
    text = argument(run.results[0], CLAIMS["grad.adds"], "out/repro_x.py", script(run, run.results[0], CLAIMS))
    assert text.splitlines()[0] == "grad.adds is broken on cpu"
    parts = [
        "promised    Gradients that reach a leaf are added to what its .grad holds.",
        "source      docs notes/autograd.md",
        "looked at   a.grad",
        "due         [2.0, -5.0]   (within 1e-09)",
        "seen        [1.0, -2.5]",
        "because     a had a gradient before the pass.",
        "broken by   3 of 200 programs; the smallest found has 5 statements",
        "# --- script",
        "import torch",
        "c.backward()",
        "run again   python out/repro_x.py",
    ]
    places = [text.index(f"\n{part}\n" if part != parts[-1] else part) for part in parts]
    assert places == sorted(places)


def test_argument_without_a_counterexample_gives_the_reason() -> None:
    """A claim that is unproven has no program to show, only a reason."""
    result = Result("leaf.flag", "cpu", Verdict.UNPROVEN, False, "3 programs had something to say, 20 are needed")
    text = argument(result, CLAIMS["leaf.flag"], "", "")
    assert text.splitlines()[0] == "leaf.flag is unproven on cpu"
    assert "because     3 programs had something to say, 20 are needed" in text


def test_argument_is_harmless() -> None:
    """No error text of a device can move the cursor or turn the line around."""
    text = argument(_broken(seen=HOSTILE), CLAIMS["grad.adds"], "x.py", "import torch\n")
    assert all(line.isprintable() for line in text.splitlines())


# --- text ---------------------------------------------------------------------------------------------------------


def test_harmless_leaves_ordinary_text_alone() -> None:
    """Letters of any script, newlines and tabs pass; only what is invisible is spelled out."""
    assert harmless("Grüße, 你好\n\t«ok»") == "Grüße, 你好\n\t«ok»"
    assert harmless("\U000e0001") == "\\U000e0001"


def test_shortened_keeps_what_fits() -> None:
    """A text of just the limit is not touched."""
    assert shortened("abc", 3) == "abc"
    assert shortened("abcd", 3) == "abc ... (1 more characters)"


def test_labelled_aligns_wrapped_lines() -> None:
    """Lines after the first start where the text of the first does."""
    assert labelled("due", "one two three", column=5, width=12) == ["due  one two", "     three"]
    assert labelled("due", "") == ["due"]
