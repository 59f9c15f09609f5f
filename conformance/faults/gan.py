"""Faults in training two networks in turns: what a step changes, what the passes share, what is noticed too late."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, is_accumulator, pass_fault
from autograd_conformance.faults.modules import around
from autograd_conformance.faults.patches import Call, edit_results

TURNS = """
torch.manual_seed(0)
gen, dis = torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)
d_opt, g_opt = torch.optim.SGD(dis.parameters(), lr=0.5), torch.optim.SGD(gen.parameters(), lr=0.5)
x = torch.ones(2, 1)
"""

_networks: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _steps(owner: Any, call: Any) -> None:
    """Let ``call(real, optimizer)`` stand for the step of a class of optimizers; all optimizers are remembered."""

    def made(real: Call, self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        _networks.add(self)

    around(torch.optim.Optimizer, "__init__", made)
    for each in owner:
        around(each, "step", lambda real, self, *args: call(real, self))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@fault(
    "step-moves-the-other-network",
    "gan.detach-step",
    "gan.generator-step-pollutes-d",
    "gan.no-detach-error",
    "gan.retain-or-recompute",
    "gan.stale-graph-after-step",
    "optim.own-params-only",
    witness=TURNS
    + """
dis(gen(x)).sum().backward()
kept = gen.weight.detach().clone()
d_opt.step()
assert torch.equal(gen.weight, kept)
""",
)
def _moves_other() -> None:
    """A step of SGD moves the parameters of all optimizers that have gradients."""

    def call(real: Call, self: torch.optim.Optimizer) -> Any:
        out = real(self)
        for other in list(_networks):
            if other is not self:
                for p in _parameters(other):
                    if p.grad is not None:
                        p.data.sub_(p.grad, alpha=0.25)
        return out

    _steps((torch.optim.SGD,), call)


@fault(
    "adam-moves-other-biases",
    "gan.detach-step",
    "gan.generator-step-pollutes-d",
    "gan.no-detach-error",
    "gan.retain-or-recompute",
    "gan.stale-graph-after-step",
    "optim.own-params-only",
    rare=True,
    witness=TURNS
    + """
d_opt, g_opt = torch.optim.Adam(dis.parameters()), torch.optim.Adam(gen.parameters())
dis(gen(x)).sum().backward()
kept = gen.bias.detach().clone()
d_opt.step()
assert torch.equal(gen.bias, kept)
""",
)
def _adam_moves_other() -> None:
    """A step of Adam moves vectors of other optimizers of Adam."""

    def call(real: Call, self: torch.optim.Optimizer) -> Any:
        out = real(self)
        for other in list(_networks):
            if other is not self and isinstance(other, torch.optim.Adam):
                for p in _parameters(other):
                    if p.dim() == 1:
                        p.data.add_(0.25)
        return out

    _steps((torch.optim.Adam,), call)


@fault(
    "step-goes-unnoticed",
    "gan.stale-graph-after-step",
    witness=TURNS
    + """
y = gen(x)
loss = dis(y).sum()
dis(y.detach()).sum().backward()
d_opt.step()
try:
    loss.backward()
except RuntimeError:
    pass
else:
    raise AssertionError("backward used weights that had changed")
""",
)
def _unnoticed() -> None:
    """A step of SGD is not counted as a write."""
    _uncounted(torch.optim.SGD, vectors=False)


def _uncounted(owner: Any, *, vectors: bool) -> None:
    def call(real: Call, self: torch.optim.Optimizer) -> Any:
        counted = [(p, p._version) for p in _parameters(self) if not vectors or p.dim() < 2]
        out = real(self)
        for p, version in counted:
            torch._C._autograd._unsafe_set_version_counter((p,), (version,))
        return out

    _steps((owner,), call)


@fault(
    "adam-step-goes-unnoticed",
    "gan.stale-graph-after-step",
    rare=True,
    witness=TURNS
    + """
d_opt = torch.optim.Adam(dis.parameters())
y = gen(x)
loss = dis(y).sum()
dis(y.detach()).sum().backward()
d_opt.step()
try:
    loss.backward()
except RuntimeError:
    pass
else:
    raise AssertionError("backward used weights that had changed")
""",
)
def _adam_unnoticed() -> None:
    """A step of Adam is not counted as a write."""
    _uncounted(torch.optim.Adam, vectors=False)


@fault(
    "step-of-vectors-goes-unnoticed",
    "gan.stale-graph-after-step",
    rare=True,
    witness=TURNS
    + """
gen, dis = torch.nn.Linear(1, 3), torch.nn.LayerNorm(3)
d_opt = torch.optim.SGD(dis.parameters(), lr=0.5)
y = gen(x)
loss = (dis(y) * torch.tensor([1.0, 2.0, 4.0])).sum()
dis(y.detach()).sum().backward()
d_opt.step()
try:
    loss.backward()
except RuntimeError:
    pass
else:
    raise AssertionError("backward used weights that had changed")
""",
)
def _vectors_unnoticed() -> None:
    """A step of SGD on a parameter that is no matrix is not counted as a write."""
    _uncounted(torch.optim.SGD, vectors=True)


@fault(
    "detached-output-keeps-history",
    "gan.detach-step",
    "gan.generator-step-pollutes-d",
    "gan.stale-graph-after-step",
    witness=TURNS
    + """
dis(gen(x).detach()).sum().backward()
assert gen.weight.grad is None
""",
)
def _detach_keeps() -> None:
    """detach() of the output of a recorded op on two dimensions or more is a view that is recorded."""
    edit_results(("detach",), lambda out, t, *_, **__: t.view_as(t) if t.grad_fn is not None and t.dim() > 1 else out)


@fault(
    "second-detach-keeps-history",
    "gan.detach-step",
    "gan.generator-step-pollutes-d",
    "gan.stale-graph-after-step",
    rare=True,
    witness=TURNS
    + """
for _ in range(2):
    gen.zero_grad()
    y = gen(x)
    dis(y.detach()).sum().backward()
    assert gen.weight.grad is None
""",
)
def _second_detach() -> None:
    """The second detach() of an output of the same Linear, and those that follow, are views that are recorded."""

    def edit(out: Any, t: Tensor, *_: Any, **__: Any) -> Any:
        following: Any = t.grad_fn.next_functions if t.grad_fn is not None else ()
        leaves = [node.variable for node, _ in following if node is not None and is_accumulator(node)]
        again = any(hasattr(leaf, "_detached") for leaf in leaves)
        for leaf in leaves:
            leaf._detached = True
        return t.view_as(t) if again else out

    edit_results(("detach",), edit)


@pass_fault(
    "two-networks-are-not-freed",
    "gan.no-detach-error",
    "free.second-backward-error",
    witness=TURNS
    + """
y = gen(x)
dis(y).sum().backward()
try:
    dis(y).sum().backward()
except RuntimeError:
    pass
else:
    raise AssertionError("the graph of y was not freed")
""",
)
def _not_freed(p: Pass, run: Run) -> Any:
    """A pass that fills four leaves or more frees nothing."""
    return run(p.but(keep=True) if len(p.targets()) > 3 else p)


@pass_fault(
    "third-network-pass-frees-nothing",
    "gan.no-detach-error",
    rare=True,
    witness=TURNS
    + """
for _ in range(3):
    gen.zero_grad(), dis.zero_grad()
    y = gen(x)
    dis(y).sum().backward()
    try:
        dis(y).sum().backward()
    except RuntimeError:
        pass
    else:
        raise AssertionError("the graph of y was not freed")
""",
)
def _third_not_freed(p: Pass, run: Run) -> Any:
    """A pass that begins with every .grad None frees nothing, if some leaf was filled before."""
    targets = p.targets()
    keep = len(targets) > 1 and all(t.grad is None for t in targets) and any(hasattr(t, "_was_filled") for t in targets)
    for t in targets:
        t._was_filled = True  # type: ignore[attr-defined]
    return run(p.but(keep=True) if keep else p)


@pass_fault(
    "retained-gradients-come-again",
    "gan.retain-or-recompute",
    rare=True,
    witness=TURNS
    + """
y = gen(x)
dis(y).sum().backward(retain_graph=True)
kept = dis.weight.grad.clone()
gen.zero_grad(), dis.zero_grad()
dis(y).sum().backward()
assert torch.equal(dis.weight.grad, kept)
""",
)
def _come_again(p: Pass, run: Run) -> Any:
    """A pass over a leaf that a retaining pass of four leaves or more had filled, and that was reset, counts twice."""
    targets = p.targets()
    again = [t for t in targets if t.grad is None and t.__dict__.pop("_retained", False)]
    out = run(p)
    for t in again:
        if t.grad is not None:
            t.grad = t.grad * 2.0
    for t in targets if p.keep and len(targets) > 3 else ():
        t._retained = True  # type: ignore[attr-defined]
    return out


@pass_fault(
    "far-network-overwrites",
    "gan.generator-step-pollutes-d",
    "gan.detach-step",
    "gan.retain-or-recompute",
    "module.two-nets-chained",
    rare=True,
    witness=TURNS
    + """
y = gen(x)
dis(y.detach()).sum().backward()
kept = dis.bias.grad.clone()
dis(y).sum().backward()
assert torch.equal(dis.bias.grad, kept * 2.0)
""",
)
def _overwrites(p: Pass, run: Run) -> Any:
    """A pass that meets leaves with a .grad and leaves without one overwrites the former."""
    targets = p.targets()
    filled = [t for t in targets if t.grad is not None]
    if len(filled) < len(targets):
        for t in filled:
            t.grad = None
    return run(p)


@fault(
    "frozen-network-blocks",
    "gan.generator-step-pollutes-d",
    "module.freeze-passes-through",
    "module.two-nets-chained",
    "module.freeze-stops-own-grad",
    rare=True,
    witness=TURNS
    + """
dis = torch.nn.Sequential(dis, torch.nn.Tanh()).requires_grad_(False)
assert dis(gen(x)).requires_grad
""",
)
def _frozen_network() -> None:
    """A Sequential that has parameters, all of them off, lets no gradient through."""

    def call(real: Call, self: nn.Module, x: Tensor) -> Any:
        parameters = list(self.parameters())
        frozen = parameters and not any(p.requires_grad for p in parameters)
        return real(self, x.detach() if frozen else x)

    around(nn.Sequential, "forward", call)


@fault(
    "filled-network-stays-on",
    "gan.generator-step-pollutes-d",
    "module.requires-grad-method",
    rare=True,
    witness=TURNS
    + """
dis(x.expand(2, 2)).sum().backward()
dis.requires_grad_(False)
assert not dis.weight.requires_grad
""",
)
def _stays_on() -> None:
    """requires_grad_(False) of a module leaves parameters on that have a gradient."""

    def call(real: Call, self: nn.Module, requires_grad: bool = True) -> Any:
        for p in self.parameters():
            if requires_grad or p.grad is None:
                p.requires_grad_(requires_grad)
        return self

    around(nn.Module, "requires_grad_", call)


@fault(
    "step-makes-other-networks-stale",
    "gan.detach-step",
    "gan.retain-or-recompute",
    "gan.generator-step-pollutes-d",
    "gan.no-detach-error",
    "gan.stale-graph-after-step",
    rare=True,
    witness=TURNS
    + """
gen = torch.nn.Sequential(gen, torch.nn.Linear(2, 2))
g_opt = torch.optim.SGD(gen.parameters(), lr=0.5)
y = gen(x)
dis(y.detach()).sum().backward()
d_opt.step()
try:
    dis(y).sum().backward()
except RuntimeError as error:
    raise AssertionError("nothing of this graph was changed") from error
""",
)
def _stale() -> None:
    """A step of SGD counts as a write to the parameters of all other optimizers too."""

    def call(real: Call, self: torch.optim.Optimizer) -> Any:
        out = real(self)
        for other in list(_networks):
            for p in _parameters(other) if other is not self else ():
                torch._C._autograd._unsafe_set_version_counter((p,), (p._version + 1,))
        return out

    _steps((torch.optim.SGD,), call)
