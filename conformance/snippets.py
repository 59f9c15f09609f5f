"""Pieces of scripts that the scenes of more than one area begin with. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from autograd_conformance.stage import Stage

KEEP = """
class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return sum(t.sum() for t in tensors)
    @staticmethod
    def backward(ctx, g):
        return tuple(g.expand(t.shape) for t in ctx.saved_tensors)
""".strip()
"""A custom Function that saves whatever it gets, and needs it in backward."""

UNTRACKED = ("{}.detach()", "{}.detach().clone()", "torch.zeros_like({})", "({}.detach() * 2.0)", "({} > 0)")
"""What does not require grad although it is made from what does."""


def untracked_names(s: Stage, made: Sequence[str] = UNTRACKED) -> list[str]:
    """Names of tensors that do not require grad: some of the graph's, copies made in these ways, a result under no_grad."""
    names = s.some([t.name for t in s.due.tensors.values() if not t.requires_grad], least=0)
    for _ in range(s.number(0 if names else 1, 2)):
        name = s.name("u")
        s.do(f"{name} = {s.choose(made).format(s.choose(s.tracked).name)}")
        names.append(name)
    if s.flip():
        name, t = s.name("u"), s.choose(s.tracked)
        s.block("with torch.no_grad():", f"{name} = {t.name} * 2.0")
        names.append(name)
    return names
