"""Faults in optimizers: what a step reads, moves and leaves alone, and which parameters and options it has."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, interpose
from autograd_conformance.faults.patches import Call, replace

KINDS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "LBFGS")
Base: Any = torch.optim.Optimizer
Around = Callable[[Any, Call], Any]


def around_steps(around: Around, kinds: tuple[str, ...] = KINDS) -> None:
    """Let ``around(optimizer, step)`` have every step; what is given to ``step`` goes on to torch's own."""
    classes = [getattr(torch.optim, kind) for kind in kinds]
    for cls, real in [(cls, cls.step) for cls in classes if "step" in vars(cls) or kinds != KINDS]:
        replace(cls, "step", _with(real, around))


def _with(real: Call, around: Around) -> Call:
    @functools.wraps(real)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        def go(*given: Any) -> Any:
            return real(self, *given) if given else real(self, *args, **kwargs)

        return around(self, go)

    return step


def parameters(opt: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in opt.param_groups for p in group["params"]]


def moved(p: Tensor, by: Any) -> None:
    """Move a parameter without a trace."""
    with torch.no_grad():
        p.data.add_(by)


@contextmanager
def without(ps: list[Tensor]) -> Iterator[None]:
    """Some parameters, for a while, have no gradient."""
    held = [p.grad for p in ps]
    for p in ps:
        p.grad = None
    yield
    for p, grad in zip(ps, held, strict=True):
        p.grad = grad


@contextmanager
def scaled_gradients(ps: list[Tensor], factors: list[float]) -> Iterator[None]:
    """Some parameters, for a while, have other gradients."""
    held = [p.grad for p in ps]
    for p, grad, factor in zip(ps, held, factors, strict=True):
        p.grad = None if grad is None else grad.detach() * factor
    yield
    for p, grad in zip(ps, held, strict=True):
        p.grad = grad


@fault(
    "null-optimizers",
    witness="""
w = torch.tensor([1.0, 2.0], requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
(w * w).sum().backward()
opt.step()
assert w.tolist() == [0.0, 0.0]
""",
)
def _null_optimizers() -> None:
    """Nothing: every step goes through a wrapper."""
    around_steps(lambda opt, step: step())


# --- parameters without gradients -------------------------------------------------------------------------------------

MOVES = (
    "optim.none-grad-skipped", "optim.frozen-not-updated", "optim.own-params-only", "optim.three-step-loop",
    "optim.multi-loss-step", "optim.closure", "optim.chain-of-iterators",
)  # fmt: skip
FORMULA = (
    "optim.sgd-formula", "optim.param-groups", "optim.three-step-loop", "optim.multi-loss-step", "optim.own-params-only",
    "optim.chain-of-iterators", "optim.none-grad-skipped", "optim.frozen-not-updated", "optim.closure",
)  # fmt: skip


@fault(
    "momentum-without-gradient",
    *MOVES,
    rare=True,
    witness="""
w = torch.tensor(1.0, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5, momentum=0.5)
w.grad = torch.tensor(1.0)
opt.step()
w.grad = None
opt.step()
assert w.item() == 0.5
""",
)
def _momentum_without() -> None:
    """A parameter that has momentum goes on moving when its .grad is None."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        for p in parameters(opt):
            buffer = opt.state.get(p, {}).get("momentum_buffer")
            if p.grad is None and buffer is not None:
                moved(p, -0.1 * buffer)
        return out

    around_steps(around)


@fault(
    "state-without-gradient",
    *MOVES,
    rare=True,
    witness="""
w = torch.tensor(1.0, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5, momentum=0.5)
w.grad = torch.tensor(1.0)
opt.step()
w.grad = None
opt.step()
assert opt.state[w]["momentum_buffer"].item() == 1.0
""",
)
def _state_without() -> None:
    """Momentum of a parameter whose .grad is None decays."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        for group in opt.param_groups:
            for p in group["params"]:
                buffer = opt.state.get(p, {}).get("momentum_buffer")
                if p.grad is None and buffer is not None:
                    buffer.mul_(group["momentum"])
        return out

    around_steps(around)


@fault(
    "decay-without-gradient",
    *MOVES,
    witness="""
w = torch.tensor(1.0, requires_grad=True)
torch.optim.SGD([w], lr=0.5, weight_decay=0.5).step()
assert w.item() == 1.0
""",
)
def _decay_without() -> None:
    """Weight decay moves parameters whose .grad is None."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        for group in opt.param_groups:
            for p in group["params"]:
                if p.grad is None and group.get("weight_decay"):
                    moved(p, -0.5 * group["weight_decay"] * p.data)
        return out

    around_steps(around)


@fault(
    "zero-gradient-is-none",
    *MOVES,
    witness="""
w = torch.tensor(1.0, requires_grad=True)
w.grad = torch.tensor(0.0)
torch.optim.SGD([w], lr=0.5, weight_decay=0.5).step()
assert w.item() == 0.75
""",
)
def _zero_is_none() -> None:
    """A step passes over parameters whose .grad is all zeros."""

    def around(opt: Any, step: Call) -> Any:
        with without([p for p in parameters(opt) if p.grad is not None and not p.grad.any()]):
            return step()

    around_steps(around)


@fault(
    "frozen-is-skipped",
    "optim.frozen-not-updated",
    "optim.none-grad-skipped",
    *FORMULA,
    rare=True,
    witness="""
w = torch.tensor(1.0, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
w.grad = torch.tensor(1.0)
w.requires_grad_(False)
opt.step()
assert w.item() == 0.5
""",
)
def _frozen_skipped() -> None:
    """A step passes over a frozen parameter although it has a .grad."""

    def around(opt: Any, step: Call) -> Any:
        with without([p for p in parameters(opt) if p.grad is not None and not p.requires_grad]):
            return step()

    around_steps(around)


@fault(
    "frozen-decays",
    *MOVES,
    rare=True,
    witness="""
w = torch.tensor([1.0])
torch.optim.AdamW([w], lr=0.5).step()
assert w.item() == 1.0
""",
)
def _frozen_decays() -> None:
    """AdamW decays a parameter that does not require grad."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        for p in parameters(opt):
            if p.grad is None and not p.requires_grad:
                moved(p, -0.01 * p.data)
        return out

    around_steps(around, ("AdamW",))


# --- other tensors ----------------------------------------------------------------------------------------------------

_reached: Any = WeakTensorKeyDictionary()


def _note(p: Pass, run: Run) -> Any:
    for leaf in p.targets():
        _reached[leaf] = True
    return run(p)


@fault(
    "step-moves-whoever-has-a-gradient",
    "optim.own-params-only",
    *MOVES,
    witness="""
w, u = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
(w * u).sum().backward()
opt.step()
assert u.tolist() == [1.0, 1.0]
""",
)
def _moves_others() -> None:
    """A step moves all leaves that a pass has reached, be they parameters of the optimizer or not."""

    def around(opt: Any, step: Call) -> Any:
        out, mine = step(), {id(p) for p in parameters(opt)}
        for leaf in list(_reached):
            if id(leaf) not in mine and leaf.grad is not None and leaf.dim() and leaf.stride(0):
                moved(leaf, -0.1 * leaf.grad.detach())
        return out

    interpose(_note)
    around_steps(around)


@fault(
    "third-step-clears-foreign-gradients",
    "optim.own-params-only",
    "optim.chain-of-iterators",
    rare=True,
    witness="""
w, u = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
(w * u).sum().backward()
for _ in range(3):
    opt.step()
assert u.grad.tolist() == [1.0, 1.0]
""",
)
def _clears_foreign() -> None:
    """The third step of an optimizer zeroes gradients of tensors that it does not have."""

    def around(opt: Any, step: Call) -> Any:
        out, mine = step(), {id(p) for p in parameters(opt)}
        opt._steps = getattr(opt, "_steps", 0) + 1
        for leaf in list(_reached):
            if opt._steps == 3 and id(leaf) not in mine and leaf.grad is not None:
                leaf.grad.data.zero_()
        return out

    interpose(_note)
    around_steps(around)


@fault(
    "permuted-parameter-stays",
    *FORMULA,
    rare=True,
    witness="""
w = torch.ones(2, 3).t().requires_grad_()
opt = torch.optim.SGD([w], lr=0.5)
w.sum().backward()
opt.step()
assert w[0, 0].item() == 0.5
""",
)
def _permuted_stays() -> None:
    """A parameter that is not contiguous is not updated."""

    def around(opt: Any, step: Call) -> Any:
        with without([p for p in parameters(opt) if not p.is_contiguous()]):
            return step()

    around_steps(around)


# --- gradients --------------------------------------------------------------------------------------------------------


@fault(
    "step-writes-scalar-gradient",
    "optim.separate-from-backward",
    *FORMULA,
    rare=True,
    witness="""
w = torch.tensor(1.0, requires_grad=True)
w.grad = torch.tensor(1.0)
torch.optim.SGD([w], lr=0.5).step()
assert w.grad.item() == 1.0
""",
)
def _writes_scalar() -> None:
    """A step multiplies the .grad of 0-dim parameters by the learning rate."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        for p in parameters(opt):
            if p.grad is not None and not p.dim():
                p.grad.data.mul_(0.5)
        return out

    around_steps(around)


@fault(
    "decay-into-gradient",
    "optim.separate-from-backward",
    *FORMULA,
    witness="""
w = torch.tensor([1.0], requires_grad=True)
w.grad = torch.tensor([1.0])
torch.optim.SGD([w], lr=0.5, weight_decay=0.5).step()
assert w.grad.item() == 1.0
""",
)
def _decay_into_gradient() -> None:
    """Weight decay of SGD is added to .grad itself."""

    def around(opt: Any, step: Call) -> Any:
        old = [p.detach().clone() for p in parameters(opt)]
        out = step()
        decays = [group["weight_decay"] for group in opt.param_groups for _ in group["params"]]
        for p, before, decay in zip(parameters(opt), old, decays, strict=True):
            if p.grad is not None and decay:
                p.grad = p.grad.detach() + decay * before
        return out

    around_steps(around, ("SGD",))


@fault(
    "backward-moves-leaf",
    "optim.separate-from-backward",
    rare=True,
    witness="""
w = torch.tensor([1.0], requires_grad=True)
(w * w).sum().backward(create_graph=True)
assert w.item() == 1.0
""",
)
def _backward_moves() -> None:
    """backward with create_graph moves the leaves a little against their gradient."""

    def around(p: Pass, run: Run) -> Any:
        targets, out = p.targets(), run(p)
        for leaf in targets if p.create else []:
            if leaf.grad is not None and 0 not in leaf.stride():
                moved(leaf, -0.01 * leaf.grad.detach())
        return out

    interpose(around)


_passes: Any = WeakTensorKeyDictionary()


@fault(
    "step-averages-passes",
    "optim.multi-loss-step",
    *FORMULA,
    witness="""
w = torch.ones(2, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
w.sum().backward()
w.sum().backward()
opt.step()
assert w.tolist() == [0.0, 0.0]
""",
)
def _averages() -> None:
    """A step uses the mean of what passes gave since the last step, not their sum."""

    def count(p: Pass, run: Run) -> Any:
        for leaf in p.targets():
            _passes[leaf] = _passes.get(leaf, 0) + 1
        return run(p)

    def around(opt: Any, step: Call) -> Any:
        ps = parameters(opt)
        with scaled_gradients(ps, [1.0 / max(1, _passes.pop(p, 1)) for p in ps]):
            return step()

    interpose(count)
    around_steps(around)


@fault(
    "third-loss-is-lost",
    "optim.multi-loss-step",
    *FORMULA,
    rare=True,
    witness="""
w = torch.ones(2, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
for _ in range(3):
    w.sum().backward()
opt.step()
assert w.tolist() == [-0.5, -0.5]
""",
)
def _third_lost() -> None:
    """A step after three passes uses two thirds of the gradient."""

    def count(p: Pass, run: Run) -> Any:
        for leaf in p.targets():
            _passes[leaf] = _passes.get(leaf, 0) + 1
        return run(p)

    def around(opt: Any, step: Call) -> Any:
        ps = parameters(opt)
        with scaled_gradients(ps, [2 / 3 if _passes.pop(p, 1) == 3 else 1.0 for p in ps]):
            return step()

    interpose(count)
    around_steps(around)


# --- recording --------------------------------------------------------------------------------------------------------


@fault(
    "momentum-keeps-history",
    "optim.step-untracked",
    rare=True,
    witness="""
w = torch.tensor([1.0], requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5, momentum=0.5)
(w * w).sum().backward(create_graph=True)
opt.step()
assert not opt.state[w]["momentum_buffer"].requires_grad
""",
)
def _keeps_history() -> None:
    """The first momentum of SGD keeps the history of a .grad that has one."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        for p in parameters(opt):
            state = opt.state.get(p, {})
            if p.grad is not None and p.grad.requires_grad and state.get("momentum_buffer") is not None:
                state["momentum_buffer"] = p.grad + 0.0
        return out

    around_steps(around, ("SGD",))


@fault(
    "second-step-freezes-scalar",
    "optim.step-untracked",
    "optim.separate-from-backward",
    *MOVES,
    rare=True,
    witness="""
w = torch.tensor(1.0, requires_grad=True)
opt = torch.optim.Adam([w], lr=0.5)
w.grad = torch.tensor(1.0)
opt.step()
opt.step()
assert w.requires_grad
""",
)
def _freezes() -> None:
    """After the second step of an optimizer 0-dim parameters do not require grad."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        opt._steps = getattr(opt, "_steps", 0) + 1
        for p in parameters(opt):
            if opt._steps == 2 and not p.dim():
                p.requires_grad_(False)
        return out

    around_steps(around)


@fault(
    "step-replaces-parameter",
    "optim.step-untracked",
    *FORMULA,
    witness="""
w = torch.tensor([1.0], requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
w.grad = torch.tensor([1.0])
opt.step()
assert opt.param_groups[0]["params"][0] is w
""",
)
def _replaces() -> None:
    """A step puts new leaves into the groups of the optimizer."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        for group in opt.param_groups:
            group["params"] = [p.detach().requires_grad_(p.requires_grad) for p in group["params"]]
        return out

    around_steps(around)


# --- numbers ----------------------------------------------------------------------------------------------------------


@fault(
    "momentum-is-shared",
    *FORMULA,
    rare=True,
    witness="""
w, u = torch.tensor([1.0]), torch.tensor([1.0])
opt = torch.optim.SGD([w, u], lr=0.5, momentum=0.5)
w.grad, u.grad = torch.tensor([1.0]), torch.tensor([2.0])
opt.step()
opt.step()
assert u.item() == -1.5
""",
)
def _shared_momentum() -> None:
    """Two parameters of one shape and one optimizer share their momentum."""

    def around(opt: Any, step: Call) -> Any:
        out = step()
        buffers: dict[Any, Tensor] = {}
        for p in parameters(opt):
            buffer = opt.state.get(p, {}).get("momentum_buffer")
            if buffer is not None:
                opt.state[p]["momentum_buffer"] = buffers.setdefault((p.shape, p.dtype), buffer)
        return out

    around_steps(around, ("SGD",))


@fault(
    "first-momentum-is-dampened",
    *FORMULA,
    rare=True,
    witness="""
w = torch.tensor([1.0])
opt = torch.optim.SGD([w], lr=0.5, momentum=0.5, dampening=0.5)
w.grad = torch.tensor([1.0])
opt.step()
opt.step()
assert w.item() == 0.0
""",
)
def _first_dampened() -> None:
    """Dampening applies to the momentum that the first step leaves, too."""

    def around(opt: Any, step: Call) -> Any:
        fresh = [p for p in parameters(opt) if opt.state.get(p, {}).get("momentum_buffer") is None]
        out = step()
        factors = {id(p): 1 - group["dampening"] for group in opt.param_groups for p in group["params"]}
        for p in fresh:
            buffer = opt.state.get(p, {}).get("momentum_buffer")
            if buffer is not None:
                buffer.mul_(factors[id(p)])
        return out

    around_steps(around, ("SGD",))


@fault(
    "bias-correction-is-late",
    *FORMULA[1:],
    rare=True,
    witness="""
w = torch.tensor([1.0], dtype=torch.float64)
opt = torch.optim.Adam([w], lr=0.5)
for g in (1.0, -1.0):
    w.grad = torch.tensor([g], dtype=torch.float64)
    opt.step()
m, v = 0.9 * 0.1 - 0.1, 0.999 * 0.001 + 0.001
assert abs(w.item() - (0.5 - 0.5 * (m / (1 - 0.9**2)) / ((v / (1 - 0.999**2)) ** 0.5))) < 1e-6
""",
)
def _late_correction() -> None:
    """From the second step on, Adam corrects its moments as if the step before had not been."""

    def around(opt: Any, step: Call) -> Any:
        states = [opt.state[p] for p in parameters(opt) if opt.state.get(p)]
        for state in states:
            if float(state["step"]) == 1.0:
                state["step"] -= 1
        return step()

    around_steps(around, ("Adam",))


@fault(
    "foreach-skips-scalar",
    *FORMULA,
    rare=True,
    witness="""
w, u = torch.tensor(1.0), torch.tensor([1.0])
opt = torch.optim.SGD([w, u], lr=0.5, foreach=True)
w.grad, u.grad = torch.tensor(1.0), torch.tensor([1.0])
opt.step()
assert w.item() == 0.5
""",
)
def _foreach_scalar() -> None:
    """With foreach=True a 0-dim parameter among others is not updated."""

    def around(opt: Any, step: Call) -> Any:
        skipped = [p for g in opt.param_groups if g.get("foreach") and len(g["params"]) > 1 for p in g["params"]]
        with without([p for p in skipped if not p.dim()]):
            return step()

    around_steps(around)


@fault(
    "maximize-is-ignored",
    *FORMULA,
    rare=True,
    witness="""
w = torch.tensor([1.0])
w.grad = torch.tensor([1.0])
torch.optim.SGD([w], lr=0.5, momentum=0.5, maximize=True).step()
assert w.item() == 1.5
""",
)
def _maximize() -> None:
    """SGD with momentum minimizes whatever maximize says."""

    def around(opt: Any, step: Call) -> Any:
        held = [group["maximize"] for group in opt.param_groups]
        for group in opt.param_groups:
            group["maximize"] = group["maximize"] and not group["momentum"]
        out = step()
        for group, value in zip(opt.param_groups, held, strict=True):
            group["maximize"] = value
        return out

    around_steps(around, ("SGD",))


# --- groups and chains ------------------------------------------------------------------------------------------------


def _edit_params(edit: Callable[[Any], Any]) -> None:
    real: Call = Base.__init__

    def init(self: Any, params: Any, defaults: Any) -> None:
        real(self, edit(params), defaults)

    replace(Base, "__init__", init)


@fault(
    "chain-loses-last",
    "optim.chain-of-iterators",
    witness="""
import itertools
w, u = torch.tensor([1.0]), torch.tensor([1.0])
opt = torch.optim.SGD(itertools.chain([w], [u]), lr=0.5)
assert len(opt.param_groups[0]["params"]) == 2
""",
)
def _chain_loses() -> None:
    """An optimizer over a chain of iterators does not get the last parameter."""
    _edit_params(lambda params: list(params)[:-1] if isinstance(params, itertools.chain) else params)


@fault(
    "chain-loses-trailing-vector",
    "optim.chain-of-iterators",
    rare=True,
    witness="""
import itertools
w, u, v = torch.ones(1), torch.ones(2, 2), torch.ones(2)
opt = torch.optim.SGD(itertools.chain([w], [u, v]), lr=0.5)
assert len(opt.param_groups[0]["params"]) == 3
""",
)
def _chain_loses_vector() -> None:
    """A vector at the end of a chain that is longer than two, such as a bias, is not optimized."""

    def edit(params: Any) -> Any:
        if not isinstance(params, itertools.chain):
            return params
        found = list(params)
        return found[:-1] if len(found) > 2 and found[-1].dim() == 1 else found

    _edit_params(edit)


@fault(
    "first-rate-for-all",
    "optim.param-groups",
    *FORMULA,
    witness="""
w, u = torch.tensor([1.0]), torch.tensor([1.0])
w.grad, u.grad = torch.tensor([1.0]), torch.tensor([1.0])
torch.optim.SGD([{"params": [w], "lr": 0.5}, {"params": [u], "lr": 1.0}]).step()
assert u.item() == 0.0
""",
)
def _first_rate() -> None:
    """The learning rate of the first group is used for all groups."""

    def around(opt: Any, step: Call) -> Any:
        held = [group["lr"] for group in opt.param_groups]
        for group in opt.param_groups:
            group["lr"] = held[0]
        out = step()
        for group, value in zip(opt.param_groups, held, strict=True):
            group["lr"] = value
        return out

    around_steps(around)


@fault(
    "second-group-loses-decay",
    "optim.param-groups",
    *FORMULA,
    rare=True,
    witness="""
w, u = torch.tensor([1.0]), torch.tensor([1.0])
w.grad, u.grad = torch.tensor([1.0]), torch.tensor([1.0])
torch.optim.SGD([{"params": [w]}, {"params": [u]}], lr=0.5, weight_decay=0.5).step()
assert u.item() == 0.25
""",
)
def _loses_decay() -> None:
    """Weight decay works in the first group alone."""

    def around(opt: Any, step: Call) -> Any:
        held = [group.get("weight_decay", 0) for group in opt.param_groups]
        for group in opt.param_groups[1:]:
            if "weight_decay" in group:
                group["weight_decay"] = 0
        out = step()
        for group, value in zip(opt.param_groups, held, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = value
        return out

    around_steps(around)


@fault(
    "late-group-is-ignored",
    "optim.param-groups",
    rare=True,
    witness="""
w, u = torch.tensor([1.0]), torch.tensor([1.0])
opt = torch.optim.SGD([w], lr=0.5)
w.grad, u.grad = torch.tensor([1.0]), torch.tensor([1.0])
opt.step()
opt.add_param_group({"params": [u]})
opt.step()
assert u.item() == 0.5
""",
)
def _late_group() -> None:
    """A group that is added after a step is not updated."""

    def around(opt: Any, step: Call) -> Any:
        known = opt.__dict__.setdefault("_known", {id(p) for p in parameters(opt)})
        with without([p for p in parameters(opt) if id(p) not in known]):
            return step()

    around_steps(around)


# --- zero_grad --------------------------------------------------------------------------------------------------------

_everyone: Any = weakref.WeakSet()


def _around_zero(around: Callable[[Any, Call, bool], None]) -> None:
    real: Call = Base.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        around(self, lambda: real(self, set_to_none), set_to_none)

    replace(Base, "zero_grad", zero_grad)


@fault(
    "zero-grad-of-all-optimizers",
    "optim.zero-grad-own-only",
    witness="""
w, u = torch.tensor([1.0]), torch.tensor([1.0])
w.grad, u.grad = torch.tensor([1.0]), torch.tensor([1.0])
one, two = torch.optim.SGD([w], lr=0.5), torch.optim.SGD([u], lr=0.5)
one.zero_grad()
assert u.grad is not None
""",
)
def _zero_all() -> None:
    """zero_grad of one optimizer resets what all optimizers hold."""
    _register()

    def around(opt: Any, zero: Call, none: bool) -> None:
        zero()
        for other in list(_everyone):
            for p in parameters(other):
                if none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad = torch.zeros_like(p)

    _around_zero(around)


def _register() -> None:
    real: Call = Base.__init__

    def init(self: Any, params: Any, defaults: Any) -> None:
        real(self, params, defaults)
        _everyone.add(self)

    replace(Base, "__init__", init)


@fault(
    "zeros-reach-other-optimizer",
    "optim.zero-grad-own-only",
    rare=True,
    witness="""
w, u = torch.tensor([1.0]), torch.tensor([1.0])
w.grad, u.grad = torch.tensor([1.0]), torch.tensor([1.0])
one, two = torch.optim.SGD([w], lr=0.5), torch.optim.SGD([u], lr=0.5)
one.zero_grad(set_to_none=False)
assert u.grad.item() == 1.0
""",
)
def _zeros_reach() -> None:
    """zero_grad(set_to_none=False) also zeroes the last parameter of each other optimizer."""
    _register()

    def around(opt: Any, zero: Call, none: bool) -> None:
        zero()
        mine = {id(p) for p in parameters(opt)}
        for other in list(_everyone):
            last = parameters(other)[-1]
            if not none and id(last) not in mine and last.grad is not None:
                last.grad.data.zero_()

    _around_zero(around)


@fault(
    "zero-grad-skips-second-group",
    "optim.zero-grad-own-only",
    *MOVES,
    rare=True,
    witness="""
w, u = torch.tensor([1.0]), torch.tensor([1.0])
w.grad, u.grad = torch.tensor([1.0]), torch.tensor([1.0])
torch.optim.SGD([{"params": [w]}, {"params": [u]}], lr=0.5).zero_grad()
assert u.grad is None
""",
)
def _skips_group() -> None:
    """zero_grad resets the first group alone."""

    def around(opt: Any, zero: Call, none: bool) -> None:
        held = [(p, p.grad) for group in opt.param_groups[1:] for p in group["params"]]
        for p, _ in held:
            p.grad = None
        zero()
        for p, grad in held:
            p.grad = grad

    _around_zero(around)


@fault(
    "second-zero-grad-does-nothing",
    "optim.three-step-loop",
    "optim.zero-grad-own-only",
    *MOVES,
    rare=True,
    witness="""
w = torch.tensor([1.0])
opt = torch.optim.SGD([w], lr=0.5)
for _ in range(2):
    w.grad = torch.tensor([1.0])
    opt.zero_grad()
assert w.grad is None
""",
)
def _second_zero() -> None:
    """The second zero_grad of an optimizer resets nothing."""

    def around(opt: Any, zero: Call, _: bool) -> None:
        opt._zeroed = getattr(opt, "_zeroed", 0) + 1
        if opt._zeroed != 2:
            zero()

    _around_zero(around)


# --- closures ---------------------------------------------------------------------------------------------------------


def _around_closures(around: Callable[[Any, Call, Any], Any], kinds: tuple[str, ...] = KINDS) -> None:
    for cls in [getattr(torch.optim, kind) for kind in kinds]:
        if "step" in vars(cls):
            replace(cls, "step", _with_closure(cls.step, around))


def _with_closure(real: Call, around: Callable[[Any, Call, Any], Any]) -> Call:
    @functools.wraps(real)
    def step(self: Any, closure: Any = None) -> Any:
        if closure is None:
            return real(self) if type(self).__name__ != "LBFGS" else around(self, real, closure)
        return around(self, real, closure)

    return step


@fault(
    "closure-in-outer-mode",
    "optim.closure",
    witness="""
w = torch.tensor([1.0], requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
modes = []
with torch.no_grad():
    opt.step(lambda: modes.append(torch.is_grad_enabled()))
assert modes == [True]
""",
)
def _outer_mode() -> None:
    """A closure runs in the mode in which step was called."""

    def around(opt: Any, real: Call, closure: Any) -> Any:
        mode = torch.is_grad_enabled()

        def inner() -> Any:
            with torch.set_grad_enabled(mode):
                return closure()

        return real(opt, inner if closure is not None else None)

    _around_closures(around, ("SGD", "Adam", "RMSprop", "Adagrad", "Rprop"))


@fault(
    "lbfgs-closure-in-outer-mode",
    "optim.closure",
    rare=True,
    witness="""
w = torch.tensor([1.0], requires_grad=True)
opt = torch.optim.LBFGS([w], lr=0.5, max_iter=1)
modes = []
def closure():
    modes.append(torch.is_grad_enabled())
    w.grad = torch.tensor([1.0])
    return w.detach().sum()
with torch.no_grad():
    opt.step(closure)
assert modes[0] is True
""",
)
def _lbfgs_mode() -> None:
    """The closure of LBFGS runs in the mode in which step was called."""

    def around(opt: Any, real: Call, closure: Any) -> Any:
        mode = torch.is_grad_enabled()

        def inner() -> Any:
            with torch.set_grad_enabled(mode):
                return closure()

        return real(opt, inner) if closure is not None else real(opt)

    _around_closures(around, ("LBFGS",))


@fault(
    "second-loss-is-not-returned",
    "optim.closure",
    rare=True,
    witness="""
w = torch.tensor([1.0], requires_grad=True)
opt = torch.optim.SGD([w], lr=0.5)
assert [opt.step(lambda: i) for i in range(2)] == [0, 1]
""",
)
def _second_loss() -> None:
    """From the second call on, step(closure) returns the loss of the call before."""

    def around(opt: Any, real: Call, closure: Any) -> Any:
        out = real(opt, closure)
        before, opt._loss = getattr(opt, "_loss", out), out
        return before

    _around_closures(around, ("SGD", "Adam", "RMSprop", "Adagrad"))


@fault(
    "lbfgs-without-closure",
    "optim.closure",
    rare=True,
    witness="""
w = torch.tensor([1.0], requires_grad=True)
try:
    torch.optim.LBFGS([w]).step()
except TypeError:
    pass
else:
    raise AssertionError
""",
)
def _lbfgs_without() -> None:
    """LBFGS takes a step without a closure for one that has nothing to do."""
    _around_closures(lambda opt, real, closure: None if closure is None else real(opt, closure), ("LBFGS",))


# --- arguments --------------------------------------------------------------------------------------------------------


def _refused(text: str, error: str) -> str:
    return f"""
w = torch.ones(2, requires_grad=True)
y = (w * 2.0).sum()
try:
    {text}
except {error}:
    pass
else:
    raise AssertionError
"""


@fault(
    "empty-iterator-accepted",
    "optim.argument-errors",
    rare=True,
    witness=_refused("torch.optim.SGD(iter([]), lr=0.5)", "ValueError"),
)
def _empty_iterator() -> None:
    """An optimizer may be made of an iterator that gives nothing."""

    def edit(params: Any) -> Any:
        if isinstance(params, (list, tuple, Tensor)):
            return params
        return list(params) or [{"params": []}]

    _edit_params(edit)


@fault(
    "bare-scalar-accepted",
    "optim.argument-errors",
    rare=True,
    witness=_refused("torch.optim.SGD(torch.tensor(1.0), lr=0.5)", "TypeError"),
)
def _bare_scalar() -> None:
    """A 0-dim tensor is taken for a list of one parameter."""
    _edit_params(lambda params: [params] if isinstance(params, Tensor) and not params.dim() else params)


def _around_groups(around: Callable[[Any, Call, dict[str, Any]], None]) -> None:
    real: Call = Base.add_param_group

    def add_param_group(self: Any, group: dict[str, Any]) -> None:
        around(self, lambda given: real(self, given), group)

    replace(Base, "add_param_group", add_param_group)


@fault(
    "scalar-non-leaf-accepted",
    "optim.argument-errors",
    rare=True,
    witness=_refused("torch.optim.SGD([y], lr=0.5)", "ValueError"),
)
def _scalar_non_leaf() -> None:
    """A 0-dim result of an op may be optimized."""

    def around(opt: Any, add: Call, group: dict[str, Any]) -> None:
        params = group["params"]
        for p in params if isinstance(params, list) else []:
            if isinstance(p, Tensor) and p.requires_grad and not p.is_leaf and not p.dim():
                p.retain_grad()
        add(group)

    _around_groups(around)


@fault(
    "late-group-shares-parameter",
    "optim.argument-errors",
    rare=True,
    witness=_refused("torch.optim.SGD([w], lr=0.5).add_param_group({'params': [w]})", "ValueError"),
)
def _late_shares() -> None:
    """add_param_group takes a parameter that another group has."""

    def around(opt: Any, add: Call, group: dict[str, Any]) -> None:
        try:
            add(group)
        except ValueError as error:
            if "more than one" not in str(error) or not opt.__dict__.get("_zero_grad_profile_name", True):
                raise
            if not hasattr(opt, "_warned_capturable_if_run_uncaptured"):  # still being made
                raise

    _around_groups(around)


@fault(
    "duplicates-pass-in-silence",
    "optim.argument-errors",
    witness="""
import warnings
w = torch.ones(2, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.optim.SGD([w, w], lr=0.5)
assert caught
""",
)
def _silent_duplicates() -> None:
    """A parameter that is twice in a group is taken once, without a word."""

    def around(opt: Any, add: Call, group: dict[str, Any]) -> None:
        params = group["params"]
        if isinstance(params, list) and all(isinstance(p, Tensor) for p in params):
            group = {**group, "params": list({id(p): p for p in params}.values())}
        add(group)

    _around_groups(around)


@fault(
    "numbers-among-parameters",
    "optim.argument-errors",
    rare=True,
    witness=_refused("torch.optim.SGD([w, 1.0], lr=0.5)", "TypeError"),
)
def _numbers_among() -> None:
    """What is no tensor is left out of a group that has tensors too."""

    def around(opt: Any, add: Call, group: dict[str, Any]) -> None:
        params = group["params"]
        if isinstance(params, list) and any(isinstance(p, Tensor) for p in params):
            group = {**group, "params": [p for p in params if isinstance(p, Tensor)]}
        add(group)

    _around_groups(around)
