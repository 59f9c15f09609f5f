"""Which gradients may arrive at several leaves in one buffer, because formulas hand it on without a copy.

torch takes such a gradient over as ``.grad`` as it is (pytorch #34082). A program on which two gradients share memory
for this reason is recognised here, so that sharing for any other reason is not mistaken for it.
"""

from __future__ import annotations

from typing import Any

from autograd_conformance.paper import Node, Paper, PassDue

Tag = tuple[Any, ...]


def origins(due: PassDue, roots: list[Paper]) -> dict[str, set[Tag]]:
    """Per leaf the buffers that its gradient may be (a view of): a seed, or what some formula made."""
    tags: dict[int, set[Tag]] = {}
    for i, root in enumerate(roots):  # a leaf that is itself a root gets a copy of its seed
        tags.setdefault(id(root.node or root), set()).add(("seed" if root.node else "copy", i))
    leaves: dict[str, Paper] = {root.name: root for root in roots if root.node is None}
    for node in due.executed:
        incoming = tags.get(id(node), set())
        for i, edge in enumerate(node.edges):
            if edge is None:
                continue
            handed = incoming if node.op.hands_on else {(node.at, i)}
            tags.setdefault(id(edge), set()).update(handed)
            if not isinstance(edge, Node):
                leaves[edge.name] = edge
    return {name: tags[id(leaf)] for name, leaf in leaves.items()}
