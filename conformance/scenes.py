"""Claims that are judged on scenes: each is one function that writes a script, and one test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autograd_conformance.compare import FEW, SAMPLES, TIGHT, UNSTABLE, Case
from autograd_conformance.judge import Settle, reading
from autograd_conformance.oracle import InvalidProgram
from autograd_conformance.paper import Array, Due, Noise
from autograd_conformance.player import Played, play
from autograd_conformance.program import Backward, Constant, Grad, Leaf, Program, Statement, reads, writes
from autograd_conformance.reduce import Reducer
from autograd_conformance.reports.statements import line_source
from autograd_conformance.scene import Check, CheckKind, Line, Scene, Script
from autograd_conformance.stage import DeviceLike, Stage, Unfit, Write
from autograd_conformance.verdicts import Violation

Wanted = Callable[[Any, Violation], bool]
AGAIN = 2  # times that a smaller scene has to show a violation once more


@dataclass(frozen=True, slots=True)
class SceneCheck:
    """How a claim is judged on scenes: ``write(stage)`` makes the script and says what is due."""

    claim: str
    write: Write
    family: str


def scene(claim_id: str) -> Callable[[Write], Callable[[Settle], None]]:
    """Make a function that writes the scripts of a claim the test of that claim; its family is the claim's area."""

    def decorate(write: Write) -> Callable[[Settle], None]:
        return reading(SceneCheck(claim_id, write, claim_id.partition(".")[0]), write)

    return decorate


@dataclass(frozen=True, slots=True)
class Staged:
    """A scene, played and compared.

    Attributes:
        count: checks that could have shown something; 0 if the claim can do nothing with the scene.
        violations: those that came out wrong.
        excluded: checks that came out wrong while the graph alone is wrong too, so that nothing follows for the claim.
        scene: the scene, with the lines of its script if anything came out wrong.
        script: what ran; None if the claim can do nothing with the scene.
        leaks: modes that the script left changed.

    """

    count: int
    violations: tuple[Violation, ...]
    excluded: int
    scene: Scene
    script: Script | None = None
    leaks: tuple[str, ...] = ()


def written(
    check: SceneCheck, scene: Scene, device: DeviceLike, *, noise: Noise | None = None, due: Due | None = None
) -> Script | None:
    """The script that a claim makes of a scene; None if it can do nothing with it."""
    stage = Stage(scene, device, noise=noise, due=due)
    try:
        check.write(stage)
    except Unfit:
        return None
    return stage.script


def stage(check: SceneCheck, scene: Scene, device: DeviceLike, due: Due | None = None) -> Staged:
    """Write the script, run it, and compare; ``due`` is the graph on paper, for whoever has it already."""
    script = written(check, scene, device, due=due)
    if script is None:
        return Staged(0, (), 0, scene)
    played = play(script, device.name)
    found = [_violation(check, scene, device, script, played, number) for number in range(len(script.checks))]
    marked = [replace(v, mark=c.mark or v.mark) for v, c in zip(found, script.checks, strict=True) if v is not None]
    violations = marked + list(_stray(check, script, played))
    excluded = 0
    if violations and _graph_is_wrong(scene.graph, device):
        excluded, violations = len(violations), []
    count = sum(c.telling for number, c in enumerate(script.checks) if number in played.seen) - excluded
    if not violations:
        return Staged(max(0, count), (), excluded, scene, script, tuple(played.leaks))
    shown, violations = _without_dead_ops(printed(check, scene, script, device), script, violations)
    return Staged(max(1, count), tuple(violations), excluded, shown, script, tuple(played.leaks))


def printed(check: SceneCheck, scene: Scene, script: Script, device: DeviceLike) -> Scene:
    """The scene with the lines of its script."""
    lines = tuple(
        item.text if isinstance(item, Line) else line_source(at, item, device.name)
        for at, item in enumerate(script.items)
    )
    raising = tuple(i for i, item in enumerate(script.items) if isinstance(item, Line) and item.raises != "never")
    return replace(scene, claim=check.claim, lines=lines, raising=raising)


def _without_dead_ops(scene: Scene, script: Script, violations: list[Violation]) -> tuple[Scene, list[Violation]]:
    """Without what comes after the violations, and without statements of the graph whose results nothing names."""
    named = set(re.findall(r"\w+", " ".join(f"{v.probe} {v.before}" for v in violations)))
    at_most = max(v.at for v in violations)
    kept: list[int] = []
    for i in range(at_most, -1, -1):
        item = script.items[i]
        if isinstance(item, Line) or any(v.at == i for v in violations) or named & {*writes(item), *_changes(item)}:
            named.update(re.findall(r"\w+", scene.lines[i]))
            kept.append(i)
    kept.reverse()
    place = {old: new for new, old in enumerate(kept)}
    lines = tuple(scene.lines[i] for i in kept)
    raising = tuple(place[i] for i in scene.raising if i in place)
    return replace(scene, lines=lines, raising=raising), [replace(v, at=place[v.at]) for v in violations]


def _changes(item: Statement) -> tuple[str, ...]:
    """Names of tensors that a statement of a graph changes; those that make tensors change none."""
    return () if writes(item) else reads(item)


def _stray(check: SceneCheck, script: Script, played: Played) -> Iterator[Violation]:
    """An error of an item that must not raise, unless a check is about that very error."""
    at = played.stopped
    if at is None or any(c.at == at and c.kind == "raises" for c in script.checks):
        return
    because = "nothing is wrong with this statement, so it must succeed"
    yield Violation(check.claim, at, "", "None", _text(played.errors[at]), "raises", because=because, mark="stray")


def _text(error: Any) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _violation(
    check: SceneCheck, scene: Scene, device: DeviceLike, script: Script, played: Played, number: int
) -> Violation | None:
    """What is wrong with what a check saw; None if nothing is, or if it was not reached."""
    due = script.checks[number]
    if number not in played.seen:
        return None
    seen = played.seen[number]
    if due.kind == "raises":
        return _raise_violation(check.claim, due, seen)
    if isinstance(seen, Exception):
        return Violation(check.claim, due.at, due.probe, _literal(due.due), _text(seen), because=due.because)
    if due.kind == "close" and due.due is not None and seen is not None:
        return _close_violation(check, scene, device, due, number, seen)
    if _equal(seen, due.due):
        return None
    kind: CheckKind = "close" if due.kind == "close" else "equal"
    # where None was seen, the script that is printed is to accept what is right up to rounding
    slack = 0.0 if kind == "equal" or due.due is None else _tight(scene, device, due)[1]
    literal = _literal(due.due)
    return Violation(check.claim, due.at, due.probe, literal, repr(seen)[:400], kind, slack, because=due.because)


def _equal(seen: Any, due: Any) -> bool:
    try:
        return type(seen) is type(due) and bool(seen == due)
    except Exception:  # noqa: BLE001 - what cannot be compared is not equal
        return False


def _literal(due: Any) -> str:
    return repr(due.tolist() if isinstance(due, np.ndarray) else due)


def _raise_violation(claim: str, due: Check, error: Exception | None) -> Violation | None:
    if not due.due:
        if error is None:
            return None
        return Violation(claim, due.at, "", "None", _text(error), "raises", because=due.because, mark="raised")
    names = {cls.__name__ for cls in type(error).__mro__} if error is not None else set()
    if not names.isdisjoint(due.due.split(" | ")) and due.fragment in str(error):
        return None
    wanted = f"{due.due}: {due.fragment}" if due.fragment else due.due
    return Violation(
        claim, due.at, "", wanted, "None" if error is None else _text(error), "raises", because=due.because
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def _close_violation(
    check: SceneCheck, scene: Scene, device: DeviceLike, due: Check, number: int, seen: Any
) -> Violation | None:
    exact: Array = due.due
    try:
        fits = np.shape(seen) == exact.shape or np.size(seen) == exact.size == 0  # lists cannot say (0, 2)
        got = np.array(seen, dtype=np.float64).reshape(exact.shape) if fits else None
    except (TypeError, ValueError):
        got = None
    tolerance = 0.0
    if got is not None:
        size, tight = _tight(scene, device, due)
        if np.all(np.abs(got - exact) <= tight):
            return None
        moved = _moved(check, scene, device, number, exact)
        if moved is None or not np.all(moved <= UNSTABLE * size):
            return None
        far = ~(np.abs(got - exact) <= 8 * moved + tight) & np.isfinite(exact)
        if not far.any():
            return None
        tolerance = max(tight, float(np.min(np.abs(got - exact), where=far & np.isfinite(got), initial=np.inf)) / 4)
        tolerance = tolerance if np.isfinite(tolerance) else tight
    return Violation(
        check.claim, due.at, due.probe, _literal(exact), repr(seen), "close", tolerance, because=due.because
    )


def _tight(scene: Scene, device: DeviceLike, due: Check) -> tuple[float, float]:
    """How large the numbers are that are due, and how far from them is close."""
    least = 0.03 if due.narrow else 1e-3  # in networks of float32 sums of ones that cancel are a matter of course
    size = max(least, float(np.max(np.abs(due.due), initial=0.0, where=np.isfinite(due.due))))
    return size, TIGHT["float32" if due.narrow else _precision(scene, device)] * size


def _precision(scene: Scene, device: DeviceLike) -> str:
    narrow = not device.has("float64") or any(isinstance(s, Leaf) and s.data.dtype != "float64" for s in scene.graph)
    return "float32" if narrow or any(getattr(s, "op", "") == "to_float32" for s in scene.graph) else "float64"


def _moved(check: SceneCheck, scene: Scene, device: DeviceLike, number: int, exact: Array) -> Array | None:
    """How far random rounding moves the number that is due; None if that cannot be said."""
    moved = np.zeros(exact.shape)
    for sample in range(SAMPLES):
        script = written(check, scene, device, noise=Noise(sample))
        if script is None or number >= len(script.checks) or np.shape(script.checks[number].due) != exact.shape:
            return None
        moved = np.maximum(moved, np.abs(script.checks[number].due - exact))
    return np.where(np.isfinite(moved), moved, np.inf)


# --- controls ---------------------------------------------------------------------------------------------------------


def _graph_is_wrong(graph: Program, device: DeviceLike) -> bool:
    """Is the graph without the claim's lines wrong already: a flag, an error, or a gradient of plain passes?"""
    try:
        plain = Case(graph, device.name, values=device.has("values"), samples=FEW)
        roots = [t for t in plain.due.tensors.values() if t.requires_grad and t.node is not None]
        if plain.differences or _flags_differ(plain):
            return True
        if not roots:
            return False
        root = max(roots, key=lambda t: t.node.order if t.node else -1)
        names = tuple(s.name for s in graph if isinstance(s, Leaf) and s.requires_grad)
        seed = Constant(root.shape, root.dtype, (1.0,) * int(np.size(root.value)))
        again = Backward((root.name,), (seed,), retain_graph=True)
        asked = Grad((root.name,), names, (seed,), allow_unused=True)
        rows = (*graph.statements, again, again, *([asked] if names else []))
        return bool(Case(Program(rows), device.name, values=device.has("values"), samples=FEW).differences)
    except InvalidProgram:
        return False


def _flags_differ(case: Case) -> bool:
    return any(
        (m.seen.requires_grad, m.seen.is_leaf) != case.due.made[m.name] for m in case.made if m.name in case.due.made
    )


# --- making counterexamples small -------------------------------------------------------------------------------------


def reduced(
    check: SceneCheck, scene: Scene, device: DeviceLike, known: Violation, wanted: Wanted, budget: int
) -> tuple[Scene, Violation]:
    """The smallest scene found that shows the same kind of violation: a smaller graph, then simpler dials, then again."""

    def shows(graph: Program, dials: tuple[int, ...]) -> Violation | None:
        """A violation that is there every time, where the first one is: no remains of the scripts before."""
        found = once(graph, dials)
        return found if not steady or all(found and once(graph, dials) for _ in range(AGAIN)) else None

    def once(graph: Program, dials: tuple[int, ...]) -> Violation | None:
        try:
            staged = stage(check, Scene(graph, dials), device)
        except (
            InvalidProgram,
            ValueError,
            IndexError,
            ArithmeticError,
        ):  # a smaller graph need not be one, and backward may find out
            return None
        return next((v for v in staged.violations if alike(staged.scene, v)), None)

    def alike(played: Scene, violation: Violation) -> bool:
        return _sort(violation) == _sort(known) and wanted(played, violation)

    graph, dials = scene.graph, scene.dials
    steady = all(once(graph, dials) for _ in range(AGAIN + 1))
    for _ in range(2):
        dials = _simpler_dials(dials, partial(shows, graph), budget // 4)
        at_end = replace(known, at=max(0, len(graph) - 1))
        graph, _ = Reducer(partial(_at_end, shows, dials), budget // 4).reduce(graph, at_end)
    final = stage(check, Scene(graph, dials), device)
    found = next((v for v in final.violations if alike(final.scene, v)), None)
    return (final.scene, found) if found is not None else (stage(check, scene, device).scene, known)


def _sort(violation: Violation) -> tuple[str, str, bool]:
    """Lest the search slide into another fault."""
    return violation.check, violation.mark, violation.due == "None"


def _at_end(
    shows: Callable[[Program, tuple[int, ...]], Violation | None], dials: tuple[int, ...], graph: Program
) -> Violation | None:
    """The violation as the reducer wants it: after the last statement of the graph."""
    violation = shows(graph, dials)
    return None if violation is None else replace(violation, at=max(0, len(graph) - 1))


def _simpler_dials(
    dials: tuple[int, ...], shows: Callable[[tuple[int, ...]], Violation | None], budget: int
) -> tuple[int, ...]:
    """Dials turned to 0 from the last to the first, as long as the fault shows."""
    for candidate in (dials[:0], tuple(0 for _ in dials)):
        if candidate != dials and shows(candidate) is not None:
            return candidate
    for i in reversed(range(len(dials))):
        for value in (0, 128):
            if budget > 0 and value < dials[i]:
                budget -= 1
                candidate = (*dials[:i], value, *dials[i + 1 :])
                if shows(candidate) is not None:
                    dials = candidate
                    break
    while dials and dials[-1] == 0:
        dials = dials[:-1]
    return dials
