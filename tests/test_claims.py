"""The register of claims, and the one-line errors for files and names that are wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from autograd_conformance.claims import AREAS, TRAITS, Claim, load, register, select
from autograd_conformance.errors import UsageError, unknown

GOOD = """
[[claim]]
id = "grad.leaf-only"
area = "grad"
core = true
sentence = "Only leaves get a grad."
sources = ["docstring torch.Tensor.grad"]
needs = ["values"]
"""
OTHER = GOOD.replace("grad.leaf-only", "grad.other")

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a text to a file named ``some.toml`` and returns its path."""

    def to_file(text: str) -> Path:
        path = tmp_path / "some.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def test_a_good_file_loads_in_order(write: Write) -> None:
    """Claims come back whole, keyed by id, in the order of the file."""
    claims = load(write(OTHER + GOOD))
    assert list(claims) == ["grad.other", "grad.leaf-only"]
    assert claims["grad.leaf-only"] == Claim(
        id="grad.leaf-only",
        sentence="Only leaves get a grad.",
        sources=("docstring torch.Tensor.grad",),
        area="grad",
        core=True,
        needs=("values",),
    )


def test_optional_fields_are_read(write: Write) -> None:
    """What may be left out is kept when it stands in the file."""
    extra = 'implies = ["grad.leaf-only"]\nerror = "no grad"\nsince = "2.4"\nuntil = "2.13.0"\n'
    extra += 'old = "All get one."\nuntestable = "Nobody can look."\n'
    claim = load(write(GOOD + OTHER + extra))["grad.other"]
    assert (claim.implies, claim.error, claim.since, claim.until) == (("grad.leaf-only",), "no grad", "2.4", "2.13.0")
    assert (claim.old, claim.untestable) == ("All get one.", "Nobody can look.")


def test_an_empty_file_has_no_claims(write: Write) -> None:
    """A file without tables is a register without claims."""
    assert load(write("")) == {}


DAMAGES = [
    pytest.param(
        GOOD + OTHER.replace("grad.other", "grad.leaf-only"), ("duplicate claim 'grad.leaf-only'",), id="twice"
    ),
    pytest.param(GOOD.replace('"values"', '"value"'), ("unknown trait 'value'", "nearest: values"), id="trait"),
    pytest.param(GOOD.replace('"grad"', '"gard"'), ("unknown area 'gard'", "nearest: grad"), id="area"),
    pytest.param(GOOD.replace("grad.leaf-only", "leaf.only"), ("id 'leaf.only'", "'grad.'"), id="prefix"),
    pytest.param(GOOD.replace("sentence", "sentense"), ("unknown field 'sentense'", "nearest: sentence"), id="field"),
    pytest.param(GOOD.replace("core = true\n", ""), ("missing field 'core'", "'grad.leaf-only'"), id="missing"),
    pytest.param(GOOD.replace("[[claim]]", "[[clam]]"), ("unknown table 'clam'", "nearest: claim"), id="table"),
    pytest.param(GOOD.replace("[[claim]]", "[claim]"), ("'claim'", "[[claim]]"), id="single-table"),
    pytest.param(
        GOOD.replace('"docstring torch.Tensor.grad"', ""),
        ("no source", "'grad.leaf-only'", "docstring torch.Tensor.backward"),
        id="source",
    ),
    pytest.param(
        GOOD + OTHER + 'implies = ["grad.leafonly"]\n',
        ("unknown claim 'grad.leafonly'", "implies of 'grad.other'", "nearest: grad.leaf-only"),
        id="implies",
    ),
    pytest.param(GOOD.replace("true", '"yes"'), ("'core' is 'yes'", "true or false"), id="core-type"),
    pytest.param(GOOD.replace('["values"]', '"values"'), ("'needs' is 'values'", "an array"), id="list-type"),
    pytest.param(GOOD.replace('"grad.leaf-only"', "7"), ("'id' is 7", "text"), id="id-type"),
    pytest.param(GOOD.replace("Only leaves get a grad.", " "), ("'sentence' is ' '", "non-empty"), id="blank"),
    pytest.param(GOOD + 'since = "new"\n', ("'since' is 'new'", "'2.4'"), id="version"),
]


@pytest.mark.parametrize(("text", "parts"), DAMAGES)
def test_a_damaged_file_is_named_in_one_line(write: Write, text: str, parts: tuple[str, ...]) -> None:
    """Each broken rule is one line with the value, the file and what would be right."""
    with pytest.raises(UsageError) as caught:
        load(write(text))
    message = str(caught.value)
    assert "\n" not in message
    for part in (*parts, "some.toml"):
        assert part in message


@pytest.mark.parametrize(("text", "place"), [("[[claim]\n", "line 1"), ('id = "open', "end of document")])
def test_bad_toml_is_named_in_one_line(write: Write, text: str, place: str) -> None:
    """A file that is no TOML is named together with the place at fault."""
    with pytest.raises(UsageError, match=rf"^cannot read the claims in .*some\.toml: .*{place}.*$"):
        load(write(text))


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    """A path that leads nowhere is named, without a traceback of its own kind."""
    with pytest.raises(UsageError, match=r"cannot read the claims in .*none\.toml"):
        load(tmp_path / "none.toml")


def test_the_register_is_read_once_and_covers_all_areas() -> None:
    """The packaged claims load, are cached, and stand area by area in the order of AREAS."""
    claims = register()
    assert claims is register()
    assert len(claims) == 250
    assert tuple(dict.fromkeys(claim.area for claim in claims.values())) == AREAS


@pytest.mark.parametrize("claim", register().values(), ids=list(register()))
def test_a_claim_is_one_sentence_and_implies_others(claim: Claim) -> None:
    """A registered claim is one finished sentence, and neither repeats a list entry nor implies itself."""
    assert claim.sentence.endswith(".")
    assert ". " not in claim.sentence
    for remark in filter(None, (claim.old, claim.untestable)):
        assert remark.endswith(".")
        assert ". " not in remark
        assert remark != claim.sentence
    for entries in (claim.sources, claim.needs, claim.implies):
        assert len(set(entries)) == len(entries)
    assert claim.id not in claim.implies


def test_sentences_are_unique() -> None:
    """No two claims say the same, and no claim repeats a sentence that another one replaces."""
    sentences = [text for claim in register().values() for text in (claim.sentence, claim.old) if text]
    assert len(set(sentences)) == len(sentences)


def test_what_no_test_can_show_is_rare() -> None:
    """A claim without a test is an exception, and it is on the list."""
    assert [claim.id for claim in register().values() if claim.untestable] == ["streams.backward-stream"]


def test_a_claim_is_frozen() -> None:
    """A claim cannot be changed once read."""
    claim = select(["grad.leaf-only"])[0]
    with pytest.raises(FrozenInstanceError):
        claim.core = False  # type: ignore[misc]


def test_every_trait_has_one_sentence() -> None:
    """Each trait is explained by a single finished sentence, and some claim needs it."""
    assert list(TRAITS)[:3] == ["values", "storage", "strides"]
    assert sorted(TRAITS) == sorted({trait for claim in register().values() for trait in claim.needs})
    assert all(text.endswith(".") and ". " not in text for text in TRAITS.values())


def test_select_keeps_the_order_of_the_register() -> None:
    """Overlapping globs give each claim once, in the register's order and not in theirs."""
    chosen = [claim.id for claim in select(["leaf.*", "requires-grad.propagates-*", "leaf.iff-no-grad-fn"])]
    assert chosen[:3] == ["requires-grad.propagates-any", "requires-grad.propagates-none", "leaf.iff-no-grad-fn"]
    assert len(chosen) == 12
    assert len(select(["*"])) == len(register())
    assert select([]) == ()


@pytest.mark.parametrize(
    ("glob", "nearest"), [("grad.leafonly", "grad.leaf-only"), ("gradd.*", "grad.*"), ("Grad.*", "grad.*")]
)
def test_select_names_the_nearest_choices(glob: str, nearest: str) -> None:
    """An id or a glob that matches nothing is an error with what was probably meant."""
    with pytest.raises(UsageError) as caught:
        select(["leaf.*", glob])
    assert str(caught.value).startswith(f"unknown claim '{glob}'; nearest: ")
    assert nearest in str(caught.value).split("nearest: ")[1].split(", ")


def test_unknown_shows_at_most_three_near_choices() -> None:
    """Close names come first and are three at the most."""
    error = unknown("claim", "grad.a", ["grad.b", "grad.c", "grad.d", "grad.e", "zzz"], "FILE")
    head, near = str(error).split("; nearest: ")
    assert head == "unknown claim 'grad.a' in FILE"
    assert len(near.split(", ")) == 3


def test_unknown_lists_the_choices_when_none_is_near() -> None:
    """Without a close name up to eight choices are listed, and the rest is counted."""
    assert str(unknown("area", "qqqq", iter(["leaf", "grad"]))) == "unknown area 'qqqq'; choices: leaf, grad"
    many = unknown("area", "qqqq", [f"x{number}" for number in range(10)])
    assert str(many) == "unknown area 'qqqq'; choices: x0, x1, x2, x3, x4, x5, x6, x7 and 2 more"
    assert str(unknown("area", "a", [])) == "unknown area 'a'; there is nothing to choose from"


def test_the_register_needs_no_torch() -> None:
    """Reading the claims imports neither torch nor numpy."""
    code = (
        "import sys; from autograd_conformance.claims import register; register();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
