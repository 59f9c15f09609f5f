"""A pass on paper: gradients walk back from the roots, hooks see them complete, leaves collect them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autograd_conformance.algebra import Plain, Traced
from autograd_conformance.whole.state import Array, Hook, Node, State, Tensor


@dataclass(slots=True)
class Swept:
    """What a pass does.

    Attributes:
        arrived: what reaches each leaf.
        kept: what each tensor that retains its gradient gets.
        captured: what reaches the values that were asked for.
        called: hooks that run, once for each time.
        given: what each hook gets, by its id.
        noted: what reaches the values that somebody looks at, after their hooks.
        reached: ids of all values that a gradient reaches.
        executed: statements whose nodes run.
        size: the largest number that turned up, the measure of rounding.

    """

    arrived: dict[str, tuple[Tensor, Array]] = field(default_factory=dict)
    kept: dict[str, tuple[Tensor, Array]] = field(default_factory=dict)
    captured: dict[int, Any] = field(default_factory=dict)
    called: list[Hook] = field(default_factory=list)
    given: dict[int, Any] = field(default_factory=dict)
    noted: dict[int, Any] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    executed: list[Node] = field(default_factory=list)
    size: float = 1e-3


def sweep(
    state: State,
    roots: Sequence[tuple[Traced, Any]],
    *,
    wanted: Sequence[Traced] | None = None,
    algebra: Any = Plain,
) -> Swept:
    """Run a pass from some values; with ``wanted`` only what leads to these runs."""
    swept = Swept()
    targets = None if wanted is None else {id(value) for value in wanted}
    path = _path(state, [value for value, _ in roots], wanted)
    inbox: dict[int, Any] = {}
    for value, seed in roots:
        inbox[id(value)] = inbox[id(value)] + seed if id(value) in inbox else seed
    nodes: dict[int, Node] = {}
    totals: dict[Tensor, tuple[Traced, Any]] = {}  # whatever values a leaf has had, its hooks see one sum
    for value in sorted(path, key=lambda v: -v.order):
        g = inbox.get(id(value))
        if g is None:
            continue
        owner = state.owners.get(id(value))
        if owner is not None:
            known = totals.get(owner)
            totals[owner] = (value, g if known is None else known[1] + g)
            continue
        g = swept.noted[id(value)] = _seen(state, swept, value, g)
        if targets is not None and id(value) in targets:
            swept.captured[id(value)] = g
        on_path = {id(parent) for parent in value.parents if parent in path}
        if value.pull is None or not on_path:
            continue
        node = state.node_of(value)
        if node is not None:
            nodes[id(node)] = node
        for hook in state.hooked.get(id(value), ()):
            _call(swept, hook, g)
        for parent, part in zip(value.parents, value.pull(algebra, g), strict=True):
            if id(parent) in on_path and part is not None:
                inbox[id(parent)] = inbox[id(parent)] + part if id(parent) in inbox else part
    swept.executed = list(nodes.values())
    swept.reached = set(inbox)
    for owner, (value, g) in totals.items():
        total = _hooked(swept, owner, g)
        swept.arrived[owner.name] = (owner, total)
        swept.captured[id(value)] = total
        swept.noted.update({id(source): total for source in owner.sources})
    return swept


def _seen(state: State, swept: Swept, value: Traced, g: Any) -> Any:
    """The gradient of a value that is no leaf is complete: hooks run, then it is kept if somebody asked for it."""
    t = state.watched.get(id(value))
    if t is None:
        _measure(swept, g)
        return g
    g = _hooked(swept, t, g)
    if t.retains:
        swept.kept[t.name] = (t, g)
    return g


def _hooked(swept: Swept, t: Tensor, g: Any) -> Any:
    _measure(swept, g)
    for hook in t.hooks:
        if not hook.after:
            _call(swept, hook, g)
            g = g if hook.factor is None else g * hook.factor
    return g


def _call(swept: Swept, hook: Hook, g: Any) -> None:
    swept.called.append(hook)
    swept.given[id(hook)] = g.value if isinstance(g, Traced) else g


def _measure(swept: Swept, g: Any) -> None:
    numbers = g.value if isinstance(g, Traced) else g
    swept.size = max(swept.size, float(np.max(np.abs(numbers), initial=0.0)))


def _path(state: State, roots: Sequence[Traced], wanted: Sequence[Traced] | None) -> dict[Traced, None]:
    """Values that lie between the roots and a leaf (or what is wanted)."""
    found: dict[int, Traced] = {}
    pending = list(roots)
    while pending:
        value = pending.pop()
        if id(value) not in found:
            found[id(value)] = value
            pending.extend(value.parents)
    targets = set(state.owners) if wanted is None else {id(value) for value in wanted}
    leading: dict[Traced, None] = {}
    reaches: set[int] = set()
    for value in sorted(found.values(), key=lambda v: v.order):
        if id(value) in targets or any(id(parent) in reaches for parent in value.parents):
            reaches.add(id(value))
            leading[value] = None
    return leading
