"""Whole programs: leaves, a graph, and what is done with it. One payload, one program."""

from __future__ import annotations

from autograd_conformance.program import Program
from autograd_conformance.strategies.graphs import add_op
from autograd_conformance.strategies.leaves import add_leaf, base_shape
from autograd_conformance.strategies.passes import Draft, add_closing
from autograd_conformance.strategies.payload import FIELD, Pool, slot

LEAVES, NODES, CLOSINGS = 4, 20, 7
PAYLOAD = (1 + LEAVES + NODES + CLOSINGS) * FIELD


def decode(payload: bytes, *, leaves: int = LEAVES, nodes: int = NODES, closings: int = CLOSINGS) -> Program:
    """The program that a payload of ``(1 + leaves + nodes + closings) * 8`` bytes describes."""
    end = leaves + nodes + closings
    header = slot(payload, end)  # last, for Hypothesis makes the first bytes small first
    base, group = base_shape(header), header.kind % 8
    draft = Draft(Pool())
    for i in range(leaves):
        field = slot(payload, i)
        if field.kind or (i == leaves - 1 and not draft.statements):
            draft.statements.append(add_leaf(draft.pool, field, base, chr(ord("a") + i)))
    for i in range(leaves, leaves + nodes):
        field = slot(payload, i)
        if field.kind:
            draft.statements.extend(add_op(draft.pool, field, group, f"t{i - leaves + 1}"))
    for i in range(leaves + nodes, end):
        field = slot(payload, i)
        if field.kind:
            add_closing(draft, field, last=i == end - 1)
    return Program(tuple(draft.statements))
