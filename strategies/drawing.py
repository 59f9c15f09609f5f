"""Drawing with Hypothesis: first all payloads, by a body that cannot fail, and only then anything else.

The same seed gives the same payloads on every run and every device, because nothing that happens later can influence
the draws. No decision is taken by the clock, and no other setting of Hypothesis, such as its ``ci`` profile, matters.
"""

from __future__ import annotations

from functools import partial

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from autograd_conformance.program import Program, Shape
from autograd_conformance.scene import Scene
from autograd_conformance.strategies.leaves import base_shape, varied
from autograd_conformance.strategies.payload import FIELD, slot
from autograd_conformance.strategies.programs import CLOSINGS, LEAVES, NODES, PAYLOAD, decode
from autograd_conformance.strategies.scenes import PAYLOAD as SCENE
from autograd_conformance.strategies.scenes import decode_scene

BATCH = 4  # payloads in one example: most of what an example costs is Hypothesis' own bookkeeping


def draw(count: int, run_seed: int, size: int = PAYLOAD) -> list[bytes]:
    """``count`` payloads of ``size`` bytes, all different; the first is all zero."""
    drawn: list[bytes] = []

    @seed(run_seed)
    @settings(
        max_examples=count // BATCH + 2,
        phases=[Phase.generate],
        database=None,
        deadline=None,  # the first case of a process takes up to a second
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),  # they decide by the clock, and nothing here is filtered
    )
    @given(st.binary(min_size=BATCH * size, max_size=BATCH * size))
    def record(payload: bytes) -> None:
        drawn.extend(payload[i : i + size] for i in range(0, BATCH * size, size))

    record()
    return list(dict.fromkeys(drawn))[:count]


def _payloads(fields: int) -> SearchStrategy[bytes]:
    return st.binary(min_size=fields * FIELD, max_size=fields * FIELD)


def programs(*, leaves: int = LEAVES, nodes: int = NODES, closings: int = CLOSINGS) -> SearchStrategy[Program]:
    """Whole programs: up to so many leaves, ops, and passes or resets after them.

    Shrinks to ``a = torch.tensor(1.0)`` that requires grad and nothing else.
    """
    sized = partial(decode, leaves=leaves, nodes=nodes, closings=closings)
    return _payloads(1 + leaves + nodes + closings).map(sized)


def scenes() -> SearchStrategy[Scene]:
    """Scenes: a small graph, and dials for the lines that a claim adds. Shrinks to one leaf and dials of 0."""
    return st.binary(min_size=SCENE, max_size=SCENE).map(decode_scene)


def graphs(*, leaves: int = LEAVES, nodes: int = NODES) -> SearchStrategy[Program]:
    """Graphs without passes: leaves and ops, with reuse, dead branches, detach and no_grad inside."""
    return programs(leaves=leaves, nodes=nodes, closings=0)


def leaves() -> SearchStrategy[Program]:
    """Programs of one leaf, with every shape, dtype, flag and memory layout."""
    return programs(leaves=1, nodes=0, closings=0)


def shapes() -> SearchStrategy[Shape]:
    """Shapes of 0 to 4 dimensions with sizes from 0 to 5. Shrinks to ``()``."""
    return _payloads(1).map(lambda payload: base_shape(slot(payload, 0)))


def shape_pairs() -> SearchStrategy[tuple[Shape, Shape]]:
    """Two shapes, the second a variation of the first: a broadcast or contraction partner, or the same."""

    def decoded(payload: bytes) -> tuple[Shape, Shape]:
        base, how = base_shape(slot(payload, 0)), slot(payload, 1)
        return base, varied(base, how.first, how.second)

    return _payloads(2).map(decoded)
