"""Backward on paper, step by step: the gradient of every tensor of a graph, hooks included, and to any order. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autograd_conformance.algebra import Traced
from autograd_conformance.ops import OPS
from autograd_conformance.oracle import EQUALS, executed_nodes, pull
from autograd_conformance.paper import Array, Node, Noise, Paper
from autograd_conformance.program import Apply, Leaf, Program, Rewrap

Rewrite = Callable[[Array], Array]


def cotangents(
    roots: Sequence[tuple[Paper, Array]],
    *,
    rewrite: Mapping[str, Rewrite] | None = None,
    noise: Noise | None = None,
) -> dict[str, Array]:
    """The gradient of every tensor that backward from some roots reaches, by name.

    Args:
        roots: tensors that require grad, each with its ``gradient`` argument.
        rewrite: per name what a hook on that tensor makes of its gradient once it is complete.
        noise: random rounding, to see how far it moves the result.

    """
    hooks = rewrite or {}
    inbox: dict[tuple[int, int], Array] = {}
    final: dict[str, Array] = {}
    for root, seed in roots:
        _send(inbox, root.node or root, root.slot, seed)
    leaves = {id(root): root for root, _ in roots if root.node is None}
    for node in executed_nodes([root for root, _ in roots]):
        for out in node.outs:
            _complete(inbox, node, out, hooks, final)
        for edge, slot, part in zip(node.edges, node.slots, pull(node, inbox, noise), strict=True):
            if edge is not None:
                _send(inbox, edge, slot, part)
                if isinstance(edge, Paper):
                    leaves[id(edge)] = edge
    for leaf in leaves.values():
        _complete(inbox, leaf, leaf, hooks, final)
    return final


def _send(inbox: dict[tuple[int, int], Array], edge: Node | Paper, slot: int, part: Array) -> None:
    key = (id(edge), slot)
    known = inbox.get(key)
    inbox[key] = part if known is None else known + part


def _complete(
    inbox: dict[tuple[int, int], Array],
    owner: Node | Paper,
    tensor: Paper,
    hooks: Mapping[str, Rewrite],
    final: dict[str, Array],
) -> None:
    """All that reaches a tensor has arrived: its hooks see the sum."""
    key = (id(owner), tensor.slot)
    if key not in inbox:
        return
    hook = hooks.get(tensor.name)
    if hook is not None:
        inbox[key] = hook(inbox[key])
    final[tensor.name] = inbox[key]


def traced(program: Program, noise: Noise | None = None) -> dict[str, Traced]:
    """Every tensor of a graph as a value that can be differentiated, to any order; with random rounding if asked for."""
    live: dict[str, Traced] = {}
    rounded = _Rounded(noise, program) if noise is not None else None
    for s in program:
        match s:
            case Leaf():
                live[s.name] = Traced(np.array(s.data.values, dtype=np.float64).reshape(s.data.shape))
            case Apply():
                live.update(zip(s.outs, outputs(s, [live[name] for name in s.args], rounded), strict=True))
            case Rewrap():
                live[s.out] = live[s.arg] if s.how == "same" else Traced(live[s.arg].value)
    return live


class _Rounded:
    """Random rounding of what goes into ops, and of what comes back through them; as coarse as the coarsest dtype."""

    def __init__(self, noise: Noise, program: Program) -> None:
        narrow = any(isinstance(s, Leaf) and s.data.dtype == "float32" for s in program)
        narrow = narrow or any(isinstance(s, Apply) and s.op == "to_float32" for s in program)
        self.noise, self.dtype = noise, "float32" if narrow else "float64"

    def __call__(self, x: Traced) -> Traced:
        return x + (self.number(x.value) - x.value)

    def number(self, value: Array) -> Array:
        """A number, rounded."""
        return self.noise(np.asarray(value, dtype=np.float64), self.dtype)


def outputs(s: Apply, parents: Sequence[Traced], rounded: _Rounded | None = None) -> list[Traced]:
    """The outputs of an op; each pulls as if the cotangents of the others were zero, for a VJP is linear in them."""
    op, params = OPS[s.op], dict(s.params)
    if rounded is not None and op.vjp is not None:
        parents = [rounded(p) for p in parents]
    result = op.value(*(p.value for p in parents), **params)
    values = result if isinstance(result, tuple) else (result,)
    if rounded is not None and op.vjp is not None and not isinstance(result, tuple) and op.name not in EQUALS:
        values = (rounded.number(result),)  # 1 - y, say, where y is nearly 1
    vjp = op.vjp
    if vjp is None or s.no_grad:
        return [Traced(value) for value in values]
    outs: list[Traced] = []

    def puller(slot: int) -> Callable[[Any, Any], Sequence[Any]]:
        def pulled(A: Any, g: Any) -> Sequence[Any]:
            if rounded is not None and isinstance(g, Traced):
                g = rounded(g)
            gs = tuple(
                g if i == slot else A.broadcast_to(_zero(A), v.shape) for i, v in enumerate(map(np.asarray, values))
            )
            seen = tuple(A.seen(out) for out in outs)
            ins = [A.seen(p) for p in parents]
            several = isinstance(result, tuple)
            parts = vjp(A, gs if several else g, seen if several else seen[0], *ins, **params)
            return parts if isinstance(parts, tuple) else (parts,)

        return pulled

    outs.extend(Traced(value, parents, puller(slot)) for slot, value in enumerate(values))
    return outs


def _zero(algebra: Any) -> Any:
    return np.zeros(()) if algebra.__name__ == "Plain" else Traced(np.zeros(()))
