"""Scenes: what is drawn, what a script sees, what counts as wrong, and how small a counterexample becomes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, find, settings

from autograd_conformance.census import SCENE_FLOORS, graph_words
from autograd_conformance.claims import register
from autograd_conformance.devices import discover
from autograd_conformance.families import SCENES
from autograd_conformance.oracle import predict
from autograd_conformance.player import play
from autograd_conformance.program import Apply, Constant, Leaf, Program, ProgramError
from autograd_conformance.replay import all_checks
from autograd_conformance.reports.script import repro
from autograd_conformance.scene import Check, Line, Scene, Script, parse
from autograd_conformance.scenes import SceneCheck, Staged, reduced, scene, stage
from autograd_conformance.stage import Stage, Unfit, Write
from autograd_conformance.strategies import scenes
from autograd_conformance.verdicts import Counterexample

torch.set_num_threads(1)
(CPU,) = discover(["cpu"])
A = Leaf("a", Constant((2,), "float64", (1.0, 3.0)), requires_grad=True)
SQUARE = Program((A, Apply(("b",), "mul", ("a", "a"))))


def checked(write: Write, claim: str = "hook.some") -> SceneCheck:
    """A function as the check of a claim."""
    return SceneCheck(claim, write, claim.partition(".")[0])


def staged(write: Write, graph: Program = SQUARE, *dials: int) -> Staged:
    """What comes of a claim on a scene."""
    with np.errstate(all="ignore"):
        return stage(checked(write), Scene(graph, dials), CPU)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_scenes_shrink_to_one_leaf() -> None:
    """One leaf that requires grad, all dials 0; and a condition keeps only what it needs."""
    setting = settings(database=None, derandomize=True, deadline=None, phases=(Phase.generate, Phase.shrink))
    one = find(scenes(), lambda _: True, settings=setting)
    assert len(one.graph) == 1
    assert set(one.dials) == {0}
    turned = find(scenes(), lambda s: s.dials[3] >= 128, settings=setting)
    assert turned.dials == (0, 0, 0, 128, *([0] * 28))
    two = find(scenes(), lambda s: any(isinstance(t, Apply) and t.op == "mul" for t in s.graph), settings=setting)
    assert [type(s).__name__ for s in two.graph] == ["Leaf", "Apply"]


def test_drawn_scenes_reach_everything() -> None:
    """The floors of what occurs in graphs of scenes; every scene has a leaf that requires grad."""
    counts: Counter[str] = Counter()
    with np.errstate(all="ignore"):
        drawn = SCENES.draw("hook", 400, 0)
        for work in drawn:
            assert isinstance(work, Scene)
            assert any(isinstance(s, Leaf) and s.requires_grad for s in work.graph)
            counts.update(graph_words(work.graph, predict(work.graph)))
    missed = {word: counts[word] / 400 for word, least in SCENE_FLOORS.items() if counts[word] < least * 400}
    assert not missed


def test_families_draw_scenes_of_their_own() -> None:
    """The seed is mixed with the name of the family, and the same name draws the same."""
    assert SCENES.draw("hook", 20, 0) == SCENES.draw("hook", 20, 0)
    assert not set(SCENES.draw("hook", 20, 0)[1:]) & set(SCENES.draw("saved", 20, 0)[1:])


def test_a_scene_survives_json() -> None:
    """JSON gives it back, lines included; its digest does not depend on lines."""
    work = Scene(SQUARE, (1, 2), "hook.some", ("a = 1", "b = 2"), (1,))
    back = parse(work.to_json())
    assert isinstance(back, Scene)
    assert back == work
    assert (back.lines, back.raising) == (work.lines, work.raising)
    assert back.digest() == Scene(SQUARE, (1, 2), "hook.some").digest() == "c81014e466f8"
    assert parse(SQUARE.to_json()) == SQUARE


@pytest.mark.parametrize("text", ["{", '{"scene":2}', '{"scene":1}', '{"scene":1,"dials":["x"],"graph":{},"claim":""}'])
def test_a_damaged_scene_is_one_clear_error(text: str) -> None:
    """As for programs."""
    with pytest.raises(ProgramError):
        parse(text)


# --- choices ----------------------------------------------------------------------------------------------------------


def test_dials_choose() -> None:
    """A dial spreads evenly over the options; when none is left the first option is taken; no options is unfit."""
    s = Stage(Scene(SQUARE, (0, 127, 128, 255)), CPU)
    assert [s.choose("xy") for _ in range(5)] == ["x", "x", "y", "y", "x"]
    with pytest.raises(Unfit):
        s.choose([])
    assert Stage(Scene(SQUARE, (255, 0, 255)), CPU).some("abc") == ["a", "c"]
    assert Stage(Scene(SQUARE), CPU).some("abc", least=2) == ["a", "b"]


def test_names_are_new() -> None:
    """A stem is given out once, then with a number."""
    s = Stage(Scene(SQUARE), CPU)
    assert [s.name("v"), s.name("v"), s.name("w")] == ["v", "v2", "w"]


# --- what a script sees -----------------------------------------------------------------------------------------------


def test_a_script_stops_at_an_error_that_was_not_due() -> None:
    """Lines that must or may raise go on; others end the script, and what was not reached was not seen."""
    items = [Line("x = 1"), Line("1 / 0", "must"), Line("y = 2", "may"), Line("nobody", "never"), Line("z = 3")]
    checks = [
        Check(0, "x", 1, "equal", ""),
        Check(1, "", "ArithmeticError", "raises", ""),
        Check(2, "y + nobody", 3, "equal", ""),
        Check(4, "z", 3, "equal", ""),
    ]
    seen = play(Script(list(items), checks), "cpu")
    assert seen.stopped == 3
    assert seen.seen[0] == 1
    assert isinstance(seen.seen[1], ZeroDivisionError)
    assert isinstance(seen.seen[2], NameError)
    assert 3 not in seen.seen


def test_a_mode_that_is_left_on_is_a_leak() -> None:
    """It is named, and put back."""
    seen = play(Script([Line("torch.set_grad_enabled(False)")]), "cpu")
    assert seen.leaks == ["grad mode"]
    assert torch.is_grad_enabled()


# --- what counts as wrong ---------------------------------------------------------------------------------------------


def _gradient(factor: float) -> Write:
    def write(s: Stage) -> None:
        """Claims that the gradient is ``factor`` times what it is."""
        root = s.root()
        s.play()
        grads = s.grads((root, s.backward(root)))
        s.close("a.grad", grads["a"] * factor, "by the chain rule")

    return write


def test_right_numbers_hold_and_wrong_ones_do_not() -> None:
    """A relative difference of a millionth is seen in float64."""
    assert staged(_gradient(1.0)).violations == ()
    assert staged(_gradient(1.0)).count == 1
    (wrong,) = staged(_gradient(1.0 + 1e-6)).violations
    assert (wrong.probe, wrong.check) == ("a.grad", "close")


def test_numbers_that_rounding_decides_are_not_compared() -> None:
    """At a kink nobody promises which side counts."""
    kink = Program((Leaf("a", Constant((), "float64", (0.0,)), True), Apply(("b",), "relu", ("a",))))
    assert staged(_gradient(5.0), kink).violations == ()


@pytest.mark.parametrize(
    ("probe", "due", "wrong"),
    [("1 == 1", True, False), ("1 == 1", 1, True), ("a.grad", None, False), ("nobody", None, True), ("[1]", [2], True)],
)
def test_plain_values_are_compared_with_their_type(probe: str, due: Any, wrong: bool) -> None:
    """True is not 1, and a probe that raises has seen something else."""

    def write(s: Stage) -> None:
        s.play()
        s.equal(probe, due, "because")

    assert bool(staged(write).violations) is wrong


@pytest.mark.parametrize(
    ("line", "error", "fragment", "wrong"),
    [
        ("a.add_(1)", "RuntimeError", "leaf", False),
        ("a.add_(1)", "RuntimeError", "nonsense", True),
        ("a.add_(1)", "TypeError", "", True),
        ("a.add(1)", "RuntimeError", "", True),
    ],
)
def test_errors_are_compared_by_class_and_fragment(line: str, error: str, fragment: str, wrong: bool) -> None:
    """A subclass counts."""

    def write(s: Stage) -> None:
        s.play()
        s.raises(line, error, "because", fragment=fragment)

    assert bool(staged(write).violations) is wrong


def test_success_that_is_promised_and_errors_that_are_not() -> None:
    """Either way the line must not raise; only one of the two is the claim's own sentence."""

    def write(s: Stage) -> None:
        s.play()
        (s.succeeds if s.flip() is False else lambda text, _: s.do(text))("a.add_(1)", "promised")

    (promised,), (stray,) = staged(write).violations, staged(write, SQUARE, 255).violations
    assert (promised.mark, stray.mark) == ("raised", "stray")


def test_a_graph_that_is_wrong_by_itself_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a difference is no evidence against the claim; it is counted as excluded."""
    right = torch.Tensor.__mul__
    scene_of_product = Program((A, Apply(("b",), "mul", ("a", "a"))))
    assert staged(_gradient(2.0), scene_of_product).violations
    monkeypatch.setattr("autograd_conformance.scenes._graph_is_wrong", lambda *_: True)
    excluded = staged(_gradient(2.0), scene_of_product)
    assert (excluded.violations, excluded.excluded, excluded.count) == ((), 1, 0)
    assert torch.Tensor.__mul__ is right


def test_zero_gradients_are_no_evidence() -> None:
    """A wrong result would hardly show where zeros are due."""
    zero = Program((A, Apply(("b",), "mul", ("a", "z"))))
    zero = Program((A, Leaf("z", Constant((2,), "float64", (0.0, 0.0))), *zero.statements[1:]))
    assert staged(_gradient(1.0), zero).count == 0


# --- small counterexamples --------------------------------------------------------------------------------------------


def test_counterexamples_are_small_and_run_with_torch_alone(tmp_path: Path) -> None:
    """A false claim about any scene shrinks to one op, dials of 0, and a script that exits 1."""

    def write(s: Stage) -> None:
        root, t = s.root(), s.choose(s.tracked)
        s.play()
        if s.flip():
            s.do("extra = 1")
        s.backward(root)
        s.true(f"{t.name}.requires_grad is False", "so says nobody")

    for work in SCENES.draw("hook", 12, 3):
        assert isinstance(work, Scene)
        with np.errstate(all="ignore"):
            found = stage(checked(write), work, CPU)
            if not found.violations:
                continue
            small, violation = reduced(checked(write), work, CPU, found.violations[0], lambda *_: True, 250)
        assert small.size() <= 2
        assert not any(small.dials)
        script = tmp_path / "repro.py"
        script.write_text(repro(Counterexample(small, violation, small.raising), "", "", "cpu"))
        assert subprocess.run([sys.executable, script], check=False, capture_output=True).returncode == 1


# --- claims -----------------------------------------------------------------------------------------------------------


def test_the_decorator_names_claim_and_family() -> None:
    """The test that pytest collects has the name and the words of the function."""

    @scene("hook.order")
    def test_order(s: Stage) -> None:
        """In order."""
        s.play()

    check = test_order.claim_check  # type: ignore[attr-defined]
    assert (check.claim, check.family, test_order.__doc__) == ("hook.order", "hook", "In order.")


def test_every_claim_has_one_test_or_a_reason() -> None:
    """No claim of the register is silently without a test, and no test is about something else."""
    counts = Counter(check.claim for check in all_checks())
    twice = [claim for claim, count in counts.items() if count > 1]
    untested = [claim.id for claim in register().values() if not counts[claim.id] and not claim.untestable]
    excused = [claim.id for claim in register().values() if counts[claim.id] and claim.untestable]
    assert (twice, untested, excused, set(counts) - set(register())) == ([], [], [], set())
