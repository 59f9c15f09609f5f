"""Programs as plain data: JSON and back, digests, names, sizes, memory layouts; damage is told in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from autograd_conformance.program import (
    LAYOUTS,
    REWRAPS,
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Leaf,
    Program,
    ProgramError,
    Rewrap,
    SetData,
    SetGrad,
    SetRequiresGrad,
    Statement,
    Write,
    layout_source,
    reads,
    renamed,
    writes,
)
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.programs import decode

PAIR = Constant((2,), "float64", (1.0, 2.0))
ONE = Constant((), "float32", (0.5,))
EMPTY = Constant((2, 0), "float64", ())
KINDS: dict[str, Statement] = {
    "leaf": Leaf("a", PAIR, True, "strided"),
    "leaf, empty": Leaf("a", EMPTY),
    "apply": Apply(("c",), "add", ("a", "b")),
    "apply, several": Apply(("v", "i"), "sort", ("a",), (("dim", 0), ("descending", True)), True),
    "apply, nested": Apply(("c",), "gather", ("a",), (("dim", 1), ("index", ((0, 1), (1, 0))))),
    "apply, bools": Apply(("c",), "masked_fill", ("a",), (("mask", (True, False)),)),
    "rewrap": Rewrap("b", "a", "detach"),
    "detach_": DetachInPlace("a"),
    "requires_grad": SetRequiresGrad("a", True, True),
    "set_grad": SetGrad("a", "none"),
    "set_data": SetData("a", PAIR),
    "set_grad, assigned": SetGrad("a", "assign", PAIR),
    "write": Write("a"),
    "backward": Backward(("a",)),
    "backward, all": Backward(("a", "b"), (None, PAIR), False, True, ("a",)),
    "backward, no inputs": Backward(("a", "b"), (PAIR, ONE), True, False, ()),
    "grad": Grad(("a",), ("b",)),
    "grad, all": Grad(("a", "b"), ("b", "a"), (ONE, None), True, True, True, True),
}
# One changed field each; no two of all these may have one digest.
VARIANTS: tuple[Statement, ...] = (
    KINDS["leaf"],
    Leaf("b", PAIR, True, "strided"),
    Leaf("a", replace(PAIR, values=(1.0, 2.5)), True, "strided"),
    Leaf("a", replace(PAIR, dtype="float32"), True, "strided"),
    Leaf("a", replace(PAIR, shape=(2, 1)), True, "strided"),
    Leaf("a", PAIR, False, "strided"),
    Leaf("a", PAIR, True, "offset"),
    Apply(("c",), "add", ("a", "b")),
    Apply(("d",), "add", ("a", "b")),
    Apply(("c",), "sub", ("a", "b")),
    Apply(("c",), "add", ("b", "a")),
    Apply(("c",), "add", ("a", "b"), (("dim", 0),)),
    Apply(("c",), "add", ("a", "b"), (("dim", 1),)),
    Apply(("c",), "add", ("a", "b"), (("dims", 1),)),
    Apply(("c",), "add", ("a", "b"), (), True),
    Rewrap("b", "a", "detach"),
    Rewrap("c", "a", "detach"),
    Rewrap("b", "c", "detach"),
    Rewrap("b", "a", "data"),
    DetachInPlace("a"),
    DetachInPlace("b"),
    SetRequiresGrad("a", True),
    SetRequiresGrad("b", True),
    SetRequiresGrad("a", False),
    SetRequiresGrad("a", True, True),
    SetGrad("a", "none"),
    SetGrad("b", "none"),
    SetGrad("a", "zero"),
    SetGrad("a", "assign", PAIR),
    SetGrad("a", "assign", ONE),
    Write("a"),
    Write("b"),
    Backward(("a",)),
    Backward(("b",)),
    Backward(("a",), (PAIR,)),
    Backward(("a",), retain_graph=False),
    Backward(("a",), retain_graph=True),
    Backward(("a",), create_graph=True),
    Backward(("a",), inputs=()),
    Backward(("a",), inputs=("a",)),
    Grad(("a",), ("b",)),
    Grad(("b",), ("b",)),
    Grad(("a",), ("a",)),
    Grad(("a",), ("b",), (PAIR,)),
    Grad(("a",), ("b",), retain_graph=True),
    Grad(("a",), ("b",), create_graph=True),
    Grad(("a",), ("b",), allow_unused=True),
    Grad(("a",), ("b",), materialize_grads=True),
)


@cache
def drawn() -> tuple[Program, ...]:
    """Two hundred drawn programs."""
    return tuple(decode(payload) for payload in draw(200, 3))


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_json_round_trip_of_a_statement(kind: str) -> None:
    """Every statement kind comes back equal, with every field of the same type all the way down."""
    program = Program((KINDS[kind],))
    back = Program.from_json(program.to_json())
    assert back == program
    assert repr(back) == repr(program)
    assert hash(back) == hash(program)


def test_json_round_trip_of_drawn_programs() -> None:
    """Two hundred drawn programs come back equal, and give the same text and digest again."""
    assert len(drawn()) == 200
    for program in drawn():
        back = Program.from_json(program.to_json())
        assert repr(back) == repr(program)
        assert back.to_json() == program.to_json()
        assert back.digest() == program.digest()


def test_drawn_programs_have_every_kind() -> None:
    """The round trip above is tried on every kind of statement that is drawn."""
    seen = {type(s) for program in drawn() for s in program}
    assert seen == {type(s) for s in KINDS.values()}


def test_json_is_canonical() -> None:
    """The text is pinned: stored counterexamples of today are read tomorrow."""
    program = Program((Leaf("a", ONE, True), Backward(("a",), (None,), True)))
    assert program.to_json() == (
        '{"format":1,"statements":[["leaf","a",[[],"float32",[0.5]],true,"contiguous"],'
        '["backward",["a"],[null],true,false,null]]}'
    )


def test_json_survives_numbers_at_the_edge() -> None:
    """Values that are not finite, or as small as they get, come back as they were."""
    values = (float("inf"), float("-inf"), 5e-324, -0.0, 0.1)
    program = Program((Leaf("a", Constant((5,), "float64", values)),))
    assert repr(Program.from_json(program.to_json())) == repr(program)


# --- damage -----------------------------------------------------------------------------------------------------------

LEAF_ROW = ["leaf", "a", [[], "float32", [0.5]], True, "contiguous"]
DAMAGED: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "not JSON"),
    "empty text": ("", "not JSON"),
    "cut off": (Program((KINDS["leaf"],)).to_json()[:-9], "not JSON"),
    "a list": ("[]", "no 'statements'"),
    "a number": ("3", "no 'statements'"),
    "null": ("null", "no 'statements'"),
    "no statements": ('{"format":1}', "no 'statements'"),
    "no format": ('{"statements":[]}', "format None"),
    "format of tomorrow": ('{"format":2,"statements":[]}', "format 2, this version reads 1"),
    "unknown kind": ('{"format":1,"statements":[["laef"]]}', "laef.*known kinds: leaf, apply"),
    "statement is a word": ('{"format":1,"statements":["leaf"]}', "unknown statement 'leaf'"),
    "statement is empty": ('{"format":1,"statements":[[]]}', "unknown statement"),
    "statement is null": ('{"format":1,"statements":[null]}', "unknown statement None"),
    "field missing": ('{"format":1,"statements":[["detach_"]]}', "'detach_' has 0 fields, want 1 .arg."),
    "field too many": ('{"format":1,"statements":[["write","a","b"]]}', "'write' has 2 fields, want 1 .arg."),
    "constant without values": (
        json.dumps({"format": 1, "statements": [["leaf", "a", [[], "float32"], True, "contiguous"]]}),
        "statement 'leaf'",
    ),
    "constant is a number": ('{"format":1,"statements":[["leaf","a",7,true,"contiguous"]]}', "statement 'leaf'"),
    "seed is a number": ('{"format":1,"statements":[["backward",["a"],[7],null,false,null]]}', "statement 'backward'"),
    "seeds are a number": ('{"format":1,"statements":[["backward",["a"],7,null,false,null]]}', "statement 'backward'"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_json_is_named(damage: str) -> None:
    """Damaged text raises ProgramError, and the message names what is wrong in one line."""
    text, message = DAMAGED[damage]
    with pytest.raises(ProgramError, match=message) as caught:
        Program.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("statements", ["null", "5", "true", '"leaf"'])
def test_statements_must_be_a_list(statements: str) -> None:
    """Anything but a list of statements raises ProgramError that says so."""
    with pytest.raises(ProgramError, match="statement"):
        Program.from_json(f'{{"format":1,"statements":{statements}}}')


@pytest.mark.parametrize("kind", ["[1]", "{}", "null", "1"])
def test_a_kind_must_be_a_word(kind: str) -> None:
    """A statement whose kind is no word is an unknown statement."""
    with pytest.raises(ProgramError, match="unknown statement"):
        Program.from_json(f'{{"format":1,"statements":[[{kind},"a"]]}}')


def _damaged_anywhere(node: Any, junk: Any) -> Iterator[Any]:
    """Copies of a JSON tree with one node replaced."""
    yield junk
    if isinstance(node, list):
        for i, child in enumerate(node):
            for damaged in _damaged_anywhere(child, junk):
                yield [*node[:i], damaged, *node[i + 1 :]]
        if node:
            yield node[:-1]


@pytest.mark.parametrize("junk", [None, 7, "word", [], [7], {}], ids=repr)
def test_damage_anywhere_gives_a_program_or_a_program_error(junk: Any) -> None:
    """One node of the text replaced: what comes out is a program, or a ProgramError, and no other exception."""
    rows = json.loads(Program(tuple(KINDS.values())).to_json())["statements"]
    refused = 0
    for row in rows:
        for damaged in _damaged_anywhere(row, junk):
            try:
                Program.from_json(json.dumps({"format": 1, "statements": [damaged]}))
            except ProgramError:
                refused += 1
    assert refused > len(rows)


# --- digests ----------------------------------------------------------------------------------------------------------


def test_digests_are_pinned() -> None:
    """The names of programs are the same on every machine, run and Python."""
    small = Program((Leaf("a", Constant((), "float64", (1.0,)), True), Backward(("a",))))
    large = Program(tuple(KINDS.values()))
    assert Program(()).digest() == "e3b0c44298fc"
    assert small.digest() == "3917cc06f4dd"
    assert large.digest() == "46f1395fd534"


def test_digests_of_neighbours_differ() -> None:
    """Programs that differ in one field of one statement have different digests."""
    assert len(set(VARIANTS)) == len(VARIANTS)
    assert len({Program((s,)).digest() for s in VARIANTS}) == len(VARIANTS)


def test_digest_depends_on_the_order() -> None:
    """The same statements in another order are another program."""
    one, other = KINDS["leaf"], KINDS["write"]
    assert Program((one, other)).digest() != Program((other, one)).digest()


def test_digests_of_drawn_programs_tell_them_apart() -> None:
    """As many digests as there are different programs, each of twelve hex digits."""
    digests = {program.digest() for program in drawn()}
    assert len(digests) == len(set(drawn())) > 150
    assert all(len(d) == 12 and int(d, 16) >= 0 for d in digests)


# --- names ------------------------------------------------------------------------------------------------------------

NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "leaf": ((), ("a",)),
    "apply": (("a", "b"), ("c",)),
    "apply, several": (("a",), ("v", "i")),
    "rewrap": (("a",), ("b",)),
    "detach_": (("a",), ()),
    "requires_grad": (("a",), ()),
    "set_grad": (("a",), ()),
    "write": (("a",), ()),
    "backward": (("a",), ()),
    "backward, all": (("a", "b", "a"), ()),
    "grad": (("a", "b"), ()),
}


@pytest.mark.parametrize("kind", NAMES)
def test_reads_and_writes(kind: str) -> None:
    """Each statement names the tensors that it uses and makes."""
    assert (reads(KINDS[kind]), writes(KINDS[kind])) == NAMES[kind]


@pytest.mark.parametrize("kind", NAMES)
def test_renamed_replaces_every_name(kind: str) -> None:
    """Renaming reaches every name of a statement and nothing else, and back again it is the same."""
    there = {name: name.upper() for name in "abcvi"}
    new = renamed(KINDS[kind], there)
    assert reads(new) == tuple(map(str.upper, NAMES[kind][0]))
    assert writes(new) == tuple(map(str.upper, NAMES[kind][1]))
    assert renamed(new, {v: k for k, v in there.items()}) == KINDS[kind]
    assert renamed(KINDS[kind], {}) == KINDS[kind]


def test_every_rewrap_has_a_source() -> None:
    """Each way to get a tensor from a tensor is torch source over ``{arg}``."""
    for how, (source, shares, tracked) in REWRAPS.items():
        assert "{arg}" in source, how
        assert {shares, tracked} <= {True, False}


# --- size -------------------------------------------------------------------------------------------------------------

SIZES: tuple[tuple[int, tuple[Statement, ...]], ...] = (
    (0, ()),
    (0, (KINDS["leaf"], KINDS["leaf"])),
    (1, (KINDS["leaf"], KINDS["backward"])),
    (1, (KINDS["leaf"], KINDS["backward"], KINDS["grad"], KINDS["backward"])),
    (2, (KINDS["leaf"], KINDS["apply"], KINDS["backward"], KINDS["backward"])),
    (3, (KINDS["leaf"], KINDS["rewrap"], KINDS["write"], KINDS["set_grad"])),
)


@pytest.mark.parametrize(("size", "statements"), SIZES)
def test_size_counts_what_a_reader_has_to_think_about(size: int, statements: tuple[Statement, ...]) -> None:
    """Leaves, and all passes but the first, are not counted."""
    assert Program(statements).size() == size


# --- memory -----------------------------------------------------------------------------------------------------------

SHAPES = ((), (1,), (3,), (0,), (1, 1), (2, 3), (3, 1), (0, 2), (2, 0), (2, 3, 4), (1, 2, 1, 3), (3, 2, 2, 2))


def _leaf(shape: tuple[int, ...], layout: str) -> Leaf:
    size = int(np.prod(shape))
    values = tuple(float(i + 1) for i in range(size))
    if layout == "expanded" and shape and shape[0]:
        values = values[: size // shape[0]] * shape[0]
    return Leaf("a", Constant(shape, "float64", values), True, layout)  # type: ignore[arg-type]


def _viewed(stored: np.ndarray, view: str) -> np.ndarray:
    """What numpy makes of the source of a view."""
    if not view:
        return stored
    if view.startswith(".permute("):
        return stored.transpose(json.loads(view[9:-1].replace("(", "[").replace(")", "]")))
    if view.startswith(".expand("):
        return np.broadcast_to(stored, json.loads(view[8:-1].replace("(", "[").replace(",)", "]").replace(")", "]")))
    return {"[..., ::2]": stored[..., ::2], "[1:]": stored[1:]}[view]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_source_gives_the_right_numbers(shape: tuple[int, ...], layout: str) -> None:
    """The view of what is stored has the leaf's shape and numbers."""
    leaf = _leaf(shape, layout)
    data, view = layout_source(leaf)
    stored = np.array(data.values, dtype=np.float64).reshape(data.shape)
    seen = _viewed(stored, view)
    assert seen.shape == shape
    assert seen.ravel().tolist() == list(leaf.data.values)
    assert data.dtype == leaf.data.dtype


def _layouts() -> Iterator[tuple[str, str]]:
    for layout in LAYOUTS:
        yield layout, layout_source(_leaf((2, 3), layout))[1]


def test_layouts_differ_in_memory() -> None:
    """Each layout is another view, and only contiguous memory needs none."""
    views = dict(_layouts())
    assert len(set(views.values())) == len(LAYOUTS)
    assert [layout for layout, view in views.items() if not view] == ["contiguous"]


@pytest.mark.parametrize(("shape", "nested"), [((), 1.0), ((2,), [1.0, 2.0]), ((2, 1), [[1.0], [2.0]])])
def test_nested_values(shape: tuple[int, ...], nested: Any) -> None:
    """A constant nests its values as torch.tensor reads them."""
    assert _leaf(shape, "contiguous").data.nested() == nested
