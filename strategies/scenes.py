"""Scenes: a small graph and the dials that a claim turns to write its script. One payload, one scene."""

from __future__ import annotations

from autograd_conformance.program import DetachInPlace, Leaf, Program, SetRequiresGrad
from autograd_conformance.scene import Scene
from autograd_conformance.strategies.payload import FIELD
from autograd_conformance.strategies.programs import decode

LEAVES, NODES, DIALS = 3, 7, 32
GRAPH = (1 + LEAVES + NODES) * FIELD
PAYLOAD = GRAPH + DIALS


def decode_scene(payload: bytes) -> Scene:
    """The scene that a payload describes; at least one leaf of its graph requires grad."""
    graph = decode(payload[:GRAPH], leaves=LEAVES, nodes=NODES, closings=0)
    if not any(isinstance(s, Leaf) and s.requires_grad for s in graph):
        graph = decode(_tracked(payload[:GRAPH]), leaves=LEAVES, nodes=NODES, closings=0)
    if any(isinstance(s, DetachInPlace) for s in graph):  # what it does to what others saved is a claim of its own,
        graph = Program(
            tuple(s for s in graph if not isinstance(s, DetachInPlace | SetRequiresGrad))
        )  # and so are flags
    return Scene(graph, tuple(payload[GRAPH:]))


def _tracked(payload: bytes) -> bytes:
    """The payload with its last leaf there, and requiring grad (kind above 1, the low bits of the flags clear)."""
    start = (LEAVES - 1) * FIELD
    field = bytearray(payload[start : start + FIELD])
    field[0], field[-1] = max(field[0], 2), field[-1] - field[-1] % 4
    return payload[:start] + bytes(field) + payload[start + FIELD :]
