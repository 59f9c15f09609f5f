"""A wrong gradient alone says little; blame finds the promise that was broken, on torch patched in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autograd_conformance import runner
from autograd_conformance.claims import register
from autograd_conformance.compare import Case
from autograd_conformance.judge import blamed_violations
from autograd_conformance.program import (
    Apply,
    Backward,
    Constant,
    DetachInPlace,
    Grad,
    Leaf,
    Program,
    Rewrap,
    SetGrad,
    SetRequiresGrad,
    Statement,
)

torch.set_num_threads(1)

Patch = Callable[[pytest.MonkeyPatch], None]
Tensor = torch.Tensor


def leaf(name: str, *values: float, grad: bool = True) -> Leaf:
    """A vector, or a 0-dim tensor for one value."""
    return Leaf(name, Constant((len(values),) if len(values) != 1 else (), "float64", values), grad)


def op(out: str, name: str, *args: str, no_grad: bool = False) -> Apply:
    """An op with one output and no parameters."""
    return Apply((out,), name, args, (), no_grad)


def seed(*values: float) -> Constant:
    """A cotangent for a vector."""
    return Constant((len(values),), "float64", values)


def blamed(*statements: Statement) -> set[str]:
    """Claims that a program is seen to break."""
    found = blamed_violations(Case(Program(statements), "cpu"))
    assert all(violation.claim == claim for claim, rows in found.items() for violation in rows)
    assert all(rows for rows in found.values())
    return set(found)


# --- faults -----------------------------------------------------------------------------------------------------------


def leaves_below(roots: list[Tensor]) -> list[Tensor]:
    """Leaves that the graph of some roots ends in."""
    found: dict[int, Tensor] = {}
    pending = [r.grad_fn for r in roots]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        pending.extend(next_node for next_node, _ in node.next_functions)
    return list(found.values())


def doubled_grad(patch: pytest.MonkeyPatch) -> None:
    """autograd.grad returns twice what it should."""
    true = torch.autograd.grad
    patch.setattr(torch.autograd, "grad", lambda *a, **k: tuple(None if g is None else g * 2 for g in true(*a, **k)))


def grad_fills(patch: pytest.MonkeyPatch) -> None:
    """autograd.grad accumulates what it returns."""
    true = torch.autograd.grad

    def wrong(outputs: Any, inputs: Any, *a: Any, **k: Any) -> Any:
        found = true(outputs, inputs, *a, **k)
        for t, g in zip(inputs, found, strict=True):
            if t.is_leaf and g is not None:
                t.grad = g.clone() if t.grad is None else t.grad + g
        return found

    patch.setattr(torch.autograd, "grad", wrong)


def _around_backward(patch: pytest.MonkeyPatch, change: Callable[..., None]) -> None:
    """Tensor.backward as ``change(true, root, gradient, keywords)``."""
    true = Tensor.backward
    patch.setattr(Tensor, "backward", lambda self, gradient=None, **k: change(true, self, gradient, k))


def inputs_ignored(patch: pytest.MonkeyPatch) -> None:
    """backward fills every leaf, whatever inputs= says."""
    _around_backward(patch, lambda true, t, g, k: true(t, g, **{word: v for word, v in k.items() if word != "inputs"}))


def second_doubled(patch: pytest.MonkeyPatch) -> None:
    """What is added to a .grad that is there is added twice."""

    def change(true: Any, root: Tensor, gradient: Any, k: Any) -> None:
        held = [(t, t.grad.clone()) for t in leaves_below([root]) if t.grad is not None]
        true(root, gradient, **k)
        for t, before in held:
            t.grad = t.grad + (t.grad - before)

    _around_backward(patch, change)


def implicit_seed_two(patch: pytest.MonkeyPatch) -> None:
    """backward() starts from two."""
    _around_backward(
        patch, lambda true, t, g, k: true(t, torch.full_like(t, 2.0) if g is None and t.numel() == 1 else g, **k)
    )


def seeds_ignored(patch: pytest.MonkeyPatch) -> None:
    """backward(v) starts from ones."""
    _around_backward(patch, lambda true, t, g, k: true(t, None if g is None else torch.ones_like(t), **k))


def retain_ignored(patch: pytest.MonkeyPatch) -> None:
    """retain_graph=True frees the graph all the same."""
    _around_backward(patch, lambda true, t, g, k: true(t, g, **{**k, "retain_graph": False}))


def second_root_forgotten(patch: pytest.MonkeyPatch) -> None:
    """backward of a list of roots starts from the first alone."""
    true = torch.autograd.backward

    def wrong(tensors: Any, grads: Any = None, *a: Any, **k: Any) -> None:
        several = isinstance(tensors, list | tuple) and len(tensors) > 1
        true(tensors[:1] if several else tensors, grads[:1] if several else grads, *a, **k)

    patch.setattr(torch.autograd, "backward", wrong)


def second_output_forgotten(patch: pytest.MonkeyPatch) -> None:
    """autograd.grad of several outputs starts from the first alone."""
    true = torch.autograd.grad

    def wrong(outputs: Any, inputs: Any, grad_outputs: Any = None, **k: Any) -> Any:
        if isinstance(outputs, list) and len(outputs) > 1:
            return true(outputs[0], inputs, grad_outputs[0] if grad_outputs else None, **k)
        return true(outputs, inputs, grad_outputs, **k)

    patch.setattr(torch.autograd, "grad", wrong)


def detach_leaks(patch: pytest.MonkeyPatch) -> None:
    """detach() hands back a tensor that the gradient still passes."""
    patch.setattr(Tensor, "detach", lambda self: self * 1.0)


def detach_in_place_forgotten(patch: pytest.MonkeyPatch) -> None:
    """detach_() does nothing."""
    patch.setattr(Tensor, "detach_", lambda self: self)


def no_grad_forgotten(patch: pytest.MonkeyPatch) -> None:
    """no_grad() does nothing."""
    patch.setattr(torch, "no_grad", contextlib.nullcontext)


def zeroing_forgotten(patch: pytest.MonkeyPatch) -> None:
    """backward adds to what .grad held after the last backward, though it was zeroed since."""
    totals: dict[int, Tensor] = {}

    def change(true: Any, root: Tensor, gradient: Any, k: Any) -> None:
        leaves = leaves_below([root])
        held = [(t, t.grad.clone()) for t in leaves if t.grad is not None]
        true(root, gradient, **k)
        for t, before in held:
            t.grad.copy_(totals[id(t)] + t.grad - before)
        totals.update({id(t): t.grad.clone() for t in leaves})

    _around_backward(patch, change)


def _scaled(y: Tensor, factor: float) -> Tensor:
    """The same number, and ``factor`` times its gradient."""
    return y * factor - (y * (factor - 1)).detach()


def sine_wrong(patch: pytest.MonkeyPatch) -> None:
    """The derivative of sin is half as large again."""
    true = Tensor.sin
    patch.setattr(Tensor, "sin", lambda self: _scaled(true(self), 1.5))


def clone_opaque(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a clone is doubled."""
    true = Tensor.clone
    patch.setattr(Tensor, "clone", lambda self, **k: _scaled(true(self, **k), 2.0))


def twice_counts_once(patch: pytest.MonkeyPatch) -> None:
    """A product of a tensor with itself differentiates by one of its operands only."""
    true = Tensor.__mul__
    patch.setattr(Tensor, "__mul__", lambda a, b: true(a, b.detach() if a is b else b))


def broadcast_wrong(patch: pytest.MonkeyPatch) -> None:
    """The gradient of an operand that is broadcast is doubled."""
    true = Tensor.__mul__

    def wrong(a: Any, b: Any) -> Tensor:
        if isinstance(b, Tensor) and b.shape != a.shape and b.numel() < a.numel():
            return true(a, b.detach() + 2 * (b - b.detach()))
        return true(a, b)

    patch.setattr(Tensor, "__mul__", wrong)


def flag_frozen(patch: pytest.MonkeyPatch) -> None:
    """requires_grad_(False) does nothing."""
    true = Tensor.requires_grad_
    patch.setattr(Tensor, "requires_grad_", lambda self, value=True: true(self, True) if value else self)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """A healthy torch."""


# --- what is blamed ---------------------------------------------------------------------------------------------------

SQUARE = (leaf("a", 3.0), op("b", "square", "a"))
PRODUCT = (leaf("a", 3.0), leaf("b", 5.0), op("c", "mul", "a", "b"))
VECTOR = (leaf("a", 1.0, 2.0), op("b", "square", "a"))
KEEP = Backward(("b",), retain_graph=True)

BLAME: dict[str, tuple[Patch, tuple[Statement, ...], set[str]]] = {
    "grad doubled": (doubled_grad, (*SQUARE, Grad(("b",), ("a",))), {"agrad.equals-backward"}),
    "grad accumulates": (grad_fills, (*SQUARE, Grad(("b",), ("a",))), {"agrad.equals-backward"}),
    "grad forgets an output": (
        second_output_forgotten,
        (*SQUARE, leaf("z", 2.0), op("c", "cube", "z"), Grad(("b", "c"), ("a", "z"), (None, None))),
        {"agrad.equals-backward", "agrad.sum-over-outputs"},
    ),
    "inputs= ignored": (inputs_ignored, (*PRODUCT, Backward(("c",), inputs=("a",))), {"backward.inputs-restricts"}),
    "second accumulation doubled": (second_doubled, (*SQUARE, KEEP, KEEP), {"grad.accumulates-sum"}),
    "two losses accumulate wrongly": (
        second_doubled,
        (*SQUARE, op("c", "cube", "a"), Backward(("b",)), Backward(("c",))),
        {"grad.accumulates-sum", "grad.multi-loss-equals-sum-loss"},
    ),
    "base assigned by the user": (
        second_doubled,
        (*SQUARE, SetGrad("a", "assign", Constant((), "float64", (7.0,))), KEEP),
        {"grad.user-assigned-is-base"},
    ),
    "implicit seed of two": (implicit_seed_two, (*SQUARE, Backward(("b",))), {"backward.scalar-implicit-one"}),
    "seeds ignored": (seeds_ignored, (*VECTOR, Backward(("b",), (seed(1.0, 5.0),))), {"backward.vector-jacobian"}),
    "retain ignored": (retain_ignored, (*SQUARE, KEEP, KEEP), {"free.retain-graph-repeat"}),
    "a root forgotten": (
        second_root_forgotten,
        (*SQUARE, op("c", "cube", "a"), Backward(("b", "c"), (None, None))),
        {"backward.list-of-roots"},
    ),
    "detach leaks": (
        detach_leaks,
        (*SQUARE, Rewrap("d", "b", "detach"), op("c", "mul", "a", "d"), Backward(("c",))),
        {"detach.cuts"},
    ),
    "detach leaks into another leaf": (
        detach_leaks,
        (leaf("a", 3.0), leaf("b", 5.0), Rewrap("d", "b", "detach"), op("c", "mul", "a", "d"), Backward(("c",))),
        {"detach.cuts"},
    ),
    "detach_ does nothing": (
        detach_in_place_forgotten,
        (*SQUARE, DetachInPlace("b"), op("c", "mul", "a", "b"), Backward(("c",))),
        {"detach.inplace-variant"},
    ),
    "no_grad does nothing": (
        no_grad_forgotten,
        (leaf("a", 3.0), op("b", "square", "a", no_grad=True), op("c", "mul", "a", "b"), Backward(("c",))),
        {"requires-grad.propagates-none"},
    ),
    "zeroing is forgotten": (
        zeroing_forgotten,
        (*SQUARE, KEEP, SetGrad("a", "zero"), KEEP),
        {"grad.reset-none-or-zero"},
    ),
    "a derivative is wrong": (
        sine_wrong,
        (leaf("a", 0.5), op("b", "sin", "a"), Backward(("b",))),
        {"backward.chain-rule"},
    ),
    "a derivative is wrong, in autograd.grad": (
        sine_wrong,
        (leaf("a", 0.5), op("b", "sin", "a"), Grad(("b",), ("a",))),
        {"backward.chain-rule"},
    ),
    "a clone is no identity": (
        clone_opaque,
        (leaf("a", 3.0), op("b", "clone", "a"), op("c", "square", "b"), Backward(("c",))),
        {"leaf.clone-is-differentiable"},
    ),
    "used twice counts once": (
        twice_counts_once,
        (leaf("a", 3.0), op("b", "mul", "a", "a"), Backward(("b",))),
        {"backward.fan-out-sums"},
    ),
    "broadcast is summed wrongly": (
        broadcast_wrong,
        (leaf("a", 1.0, 2.0), leaf("b", 5.0), op("c", "mul", "a", "b"), Backward(("c",), (seed(1.0, 1.0),))),
        {"backward.broadcast-sums"},
    ),
    "the flag cannot be cleared": (
        flag_frozen,
        (leaf("a", 3.0), leaf("b", 5.0), SetRequiresGrad("a", False), op("c", "mul", "a", "b"), Backward(("c",))),
        {"requires-grad.off-after-forward"},
    ),
}


@pytest.mark.parametrize("fault", BLAME)
def test_the_right_claim_is_blamed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim that a fault breaks is blamed, and no other."""
    patch, program, claims = BLAME[fault]
    assert claims <= set(register())
    with monkeypatch.context() as here:
        patch(here)
        found = blamed(*program)
    assert found == claims


@pytest.mark.parametrize("fault", BLAME)
def test_a_healthy_torch_is_not_blamed(fault: str) -> None:
    """The same programs on torch as it is: nothing is blamed."""
    assert blamed(*BLAME[fault][1]) == set()


@pytest.mark.parametrize("fault", BLAME)
def test_noise_around_a_fault_does_not_move_the_blame(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements that have nothing to do with a fault, before it, change nothing about who is blamed."""
    patch, program, claims = BLAME[fault]
    around = (leaf("y", 2.0), leaf("z", 4.0), op("x", "exp", "y"), op("w", "mul", "x", "z"))
    with monkeypatch.context() as here:
        patch(here)
        found = blamed(*around, *program)
    assert found == claims


def test_sharing_is_not_blamed_for_a_forgotten_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two outputs share a leaf, its uses are summed rightly; it is the sum over outputs that is wrong."""
    with monkeypatch.context() as here:
        second_output_forgotten(here)
        found = blamed(*SQUARE, op("c", "cube", "a"), Grad(("b", "c"), ("a",), (None, None)))
    assert found == {"agrad.equals-backward", "agrad.sum-over-outputs"}


REWRAP_CLAIMS = (
    ("detach", "detach.cuts"),
    ("data", "detach.data-attribute"),
    ("copy", "detach.cuts"),
    ("reattach", "detach.reattach-as-leaf"),
    ("parameter", "leaf.parameter-of-nonleaf"),
    ("new_tensor", "leaf.torch-tensor-copies"),
    ("tensor", "leaf.torch-tensor-copies"),
)


@pytest.mark.parametrize(("how", "claim"), REWRAP_CLAIMS)
def test_each_rewrap_has_its_claim(how: str, claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that passes a form of detach is the fault of that form."""
    leak: Callable[[Tensor], Tensor] = lambda t: t * 1.0  # noqa: E731
    true = runner._rewrap_call
    monkeypatch.setattr(runner, "_rewrap_call", lambda name: leak if name == how else true(name))
    program = (
        leaf("a", 3.0),
        op("b", "square", "a"),
        Rewrap("d", "b", how),
        op("c", "mul", "a", "d"),
        Backward(("c",)),
    )
    assert blamed(*program) == {claim}


def test_a_name_for_the_same_tensor_is_no_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that converts nothing does not stand in the way of finding who is to blame."""
    with monkeypatch.context() as here:
        sine_wrong(here)
        program = (leaf("a", 0.5), Rewrap("s", "a", "same"), op("b", "sin", "s"), Backward(("b",)))
        assert blamed(*program) == {"backward.chain-rule"}
