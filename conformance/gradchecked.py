"""torch's own gradcheck on the graph of a program: what it costs, and what it notices, to compare with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from autograd_conformance.ops import FLOATS, OPS
from autograd_conformance.oracle import predict
from autograd_conformance.program import (
    Apply,
    Backward,
    Constant,
    Grad,
    Leaf,
    Pass,
    Program,
    Rewrap,
    SetGrad,
    Statement,
)
from autograd_conformance.runner import Runner


def followed(program: Program) -> Program:
    """The same graph with nothing in it that gradcheck cannot follow: float64 throughout, and nothing cut or written."""
    floats = {name for name, t in predict(program).tensors.items() if t.dtype in FLOATS}
    leaves = {s.name for s in program if isinstance(s, Leaf)}
    return Program(tuple(kept for s in program if (kept := _followed(s, floats, leaves)) is not None))


def _followed(s: Statement, floats: Collection[str], leaves: Collection[str]) -> Statement | None:
    match s:
        case Leaf():
            return replace(s, data=_wide(s.data))
        case Apply() if OPS[s.op].kind == "cast":
            return replace(s, op="clone" if s.args[0] in floats else "to_float64", no_grad=False)
        case Apply():
            return replace(s, no_grad=False)
        case Rewrap():
            return Apply((s.out,), "clone", (s.arg,))
        case Backward():
            inputs = s.inputs and tuple(name for name in s.inputs if name in leaves)
            return replace(s, seeds=_seeds(s), inputs=inputs) if s.inputs is None or inputs else None
        case Grad():
            return replace(s, seeds=_seeds(s))
        case SetGrad():
            return replace(s, value=s.value and _wide(s.value))
    return None


def _seeds(s: Pass) -> tuple[Constant | None, ...]:
    return tuple(seed and _wide(seed) for seed in s.seeds)


def _wide(data: Constant) -> Constant:
    return replace(data, dtype="float64") if data.dtype in FLOATS else data


def passes(program: Program) -> bool | None:
    """Whether gradcheck, in its fast mode, is content with a followed graph, from its leaves to the roots of its passes.

    None if there is nothing to differentiate.
    """
    player = Runner("cpu")
    for at, s in enumerate(program):
        if isinstance(s, Leaf):
            player.perform(at, s)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in player.live.items() if t.requires_grad}
    roots = dict.fromkeys(root for s in program if isinstance(s, Backward | Grad) for root in s.roots)

    def graph(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        player.live.update(zip(leaves, tensors, strict=True))
        for at, s in enumerate(program):
            if isinstance(s, Apply):
                player.perform(at, s)
        return tuple(player.live[root] for root in roots if player.live[root].requires_grad)

    if not leaves or not graph(*leaves.values()):
        return None
    return bool(torch.autograd.gradcheck(graph, tuple(leaves.values()), fast_mode=True, raise_exception=False))
