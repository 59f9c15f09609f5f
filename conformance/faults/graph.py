"""Faults in nodes and in the edges between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, pass_fault
from autograd_conformance.faults.patches import (
    Call,
    edit_results,
    is_tracked,
    recorded,
    replace,
    replace_property,
    wrap_calls,
)

_kept: list[Any] = []


@fault(
    "view-node-made-anew",
    "graph.grad-fn-node",
    "graph.metadata-dict",
    rare=True,
    witness="""
y = (torch.ones(2, 2, requires_grad=True) * 2.0).t()
assert y.grad_fn is y.grad_fn
""",
)
def _anew() -> None:
    """The grad_fn of a non-contiguous view is another node at each reading."""
    real: Any = torch._C.TensorBase.grad_fn

    def read(t: Tensor, value: Any) -> Any:
        if value is None or not t._is_view() or t.is_contiguous():
            return value
        with torch.enable_grad():
            return real.__get__(t.view_as(t))

    replace_property("grad_fn", read)


class _Stand:
    """Stands for a node, and is none."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


@fault(
    "scalar-node-wrapped",
    "graph.grad-fn-node",
    "graph.edges-mirror-dag",
    rare=True,
    witness="""
y = torch.ones(2, requires_grad=True).sum()
assert isinstance(y.grad_fn, torch.autograd.graph.Node)
""",
)
def _wrapped() -> None:
    """The grad_fn of a 0-dim result is no Node."""
    replace_property("grad_fn", lambda t, value: _Stand(value) if value is not None and t.dim() == 0 else value)


@fault(
    "where-tracks-plain-input",
    "graph.edges-mirror-dag",
    rare=True,
    witness="""
x, k = torch.ones(2, requires_grad=True), torch.ones(2)
assert torch.where(k > 0.0, k, x).grad_fn.next_functions[0] == (None, 0)
""",
)
def _where() -> None:
    """torch.where keeps an edge for an input that does not require grad."""

    def wrap(original: Call) -> Call:
        def call(mask: Any, one: Any = None, other: Any = None) -> Any:
            if recorded(other) and isinstance(one, Tensor) and not one.requires_grad and one.is_floating_point():
                return original(mask, one.detach().requires_grad_(), other)
            return original(mask, one, other)

        return call

    replace(torch, "where", wrap(torch.where))


@fault(
    "stack-tracks-plain-input",
    "graph.edges-mirror-dag",
    rare=True,
    witness="""
x, k = torch.ones(2, requires_grad=True), torch.ones(2)
assert torch.stack([k, x]).grad_fn.next_functions[0] == (None, 0)
""",
)
def _stack() -> None:
    """torch.stack keeps edges for inputs that do not require grad."""
    real: Call = torch.stack

    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        several = list(tensors)
        if any(recorded(t) for t in several):
            several = [
                t if t.requires_grad or not t.is_floating_point() else t.detach().requires_grad_() for t in several
            ]
        return real(several, *args, **kwargs)

    replace(torch, "stack", call)


@fault(
    "sine-hangs-on-alias",
    "graph.edges-mirror-dag",
    "graph.accumulate-grad-unique",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
assert x.sin().grad_fn.next_functions[0][0].variable is x
""",
)
def _detour() -> None:
    """The sine of a leaf hangs on another leaf in the same memory."""

    def wrap(original: Call) -> Call:
        def call(x: Tensor) -> Tensor:
            if not is_tracked(x) or not x.is_leaf or not recorded(x):
                return original(x)  # type: ignore[no-any-return]
            return original(x.detach().requires_grad_())  # type: ignore[no-any-return]

        return call

    wrap_calls(("sin",), wrap)


@fault(
    "clone-hangs-on-alias",
    "graph.accumulate-grad-unique",
    "graph.edges-mirror-dag",
    "backward.chain-rule",
    "leaf.clone-is-differentiable",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
assert x.clone().grad_fn.next_functions[0][0].variable is x
""",
)
def _clone_alias() -> None:
    """The clone of a 0-dim leaf hangs on another leaf in the same memory."""

    def wrap(original: Call) -> Call:
        def call(x: Tensor, **kwargs: Any) -> Tensor:
            odd = is_tracked(x) and x.is_leaf and x.dim() == 0 and recorded(x)
            return original(x.detach().requires_grad_() if odd else x, **kwargs)  # type: ignore[no-any-return]

        return call

    wrap_calls(("clone",), wrap)


def _saving(original: Call, pack: Call) -> Call:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorded(x):
            return original(x, *args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return original(x, *args, **kwargs)

    return call


@fault(
    "exp-saves-copy",
    "graph.saved-attributes",
    "inplace.saved-modified-error",
    "saved.pack-unpack-calls",
    "saved.per-tensor-hooks",
    witness="""
y = torch.ones(2, requires_grad=True).exp()
assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()
""",
)
def _exp_copy() -> None:
    """exp saves a copy of its result."""
    wrap_calls(("exp",), lambda original: _saving(original, lambda t: t.clone()))


@fault(
    "power-saves-late-value",
    "graph.saved-attributes",
    "inplace.saved-modified-error",
    "backward.chain-rule",
    rare=True,
    witness="""
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).t()
assert (x ** 2).grad_fn._saved_self.tolist() == x.tolist()
""",
)
def _power_late() -> None:
    """A power of a non-contiguous tensor saves it with rows and columns in the order of memory."""

    def wrap(original: Call) -> Call:
        odd = _saving(
            original, lambda t: t.t().reshape(t.shape) if t.dim() == 2 and not t.is_contiguous() else t.clone()
        )
        return lambda x, *args: odd(x, *args) if recorded(x) and not x.is_contiguous() else original(x, *args)

    wrap_calls(("__pow__",), wrap)


@pass_fault(
    "metadata-cleared-by-backward",
    "graph.metadata-dict",
    "graph.lifetime",
    witness="""
y = torch.ones(2, requires_grad=True).sum()
y.grad_fn.metadata["key"] = 1
y.backward(retain_graph=True)
assert y.grad_fn.metadata == {"key": 1}
""",
)
def _cleared(p: Pass, run: Run) -> Any:
    """Backward empties the metadata of the nodes that it runs."""
    nodes = p.nodes()
    result = run(p)
    for node in nodes:
        node.metadata.clear()
    return result


@fault(
    "metadata-shared",
    "graph.metadata-dict",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
y, z = x * 2.0, x * 3.0
y.grad_fn.metadata["key"] = 1
y.grad_fn
assert "key" not in z.grad_fn.metadata
""",
)
def _shared() -> None:
    """Nodes of 0-dim results see what was put into the metadata of each other."""
    shared: dict[Any, Any] = {}

    def read(t: Tensor, value: Any) -> Any:
        if value is not None and t.dim() == 0:
            shared.update(value.metadata)
            value.metadata.update(shared)
        return value

    replace_property("grad_fn", read)


@fault(
    "edge-of-first-output",
    "graph.gradient-edge",
    rare=True,
    witness="""
y = (torch.ones(2, requires_grad=True) * 2.0).unbind(0)
assert torch.autograd.graph.get_gradient_edge(y[1]).output_nr == 1
""",
)
def _first_output() -> None:
    """The edge of any output of an op with several is that of the first."""
    real: Call = torch.autograd.graph.get_gradient_edge
    replace(torch.autograd.graph, "get_gradient_edge", lambda t: real(t)._replace(output_nr=0))


@fault(
    "edge-of-plain-tensor",
    "graph.gradient-edge",
    rare=True,
    witness="""
try:
    torch.autograd.graph.get_gradient_edge(torch.ones(()))
except RuntimeError:
    pass
else:
    raise SystemExit(1)
""",
)
def _plain_edge() -> None:
    """A 0-dim tensor that does not require grad has an edge."""
    real: Call = torch.autograd.graph.get_gradient_edge

    def call(t: Any) -> Any:
        odd = isinstance(t, Tensor) and not t.requires_grad and t.dim() == 0
        return real(t.detach().requires_grad_() if odd else t)

    replace(torch.autograd.graph, "get_gradient_edge", call)


@fault(
    "edge-root-ignores-seed",
    "graph.gradient-edge",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
y = x * 1.0
torch.autograd.backward([torch.autograd.graph.get_gradient_edge(y)], [torch.full((2,), 3.0)])
assert x.grad.tolist() == [3.0, 3.0]
""",
)
def _edge_seed() -> None:
    """Backward from an edge starts with ones whatever gradient is given."""
    from autograd_conformance.faults.engine import interpose

    def around(p: Pass, run: Run) -> Any:
        odd = [seed is not None and not isinstance(root, Tensor) for root, seed in zip(p.roots, p.seeds, strict=True)]
        seeds = tuple(torch.ones_like(seed) if o else seed for o, seed in zip(odd, p.seeds, strict=True))
        return run(p.but(seeds=seeds))

    interpose(around)


@fault(
    "square-is-kept",
    "graph.lifetime",
    witness="""
import weakref
x = torch.ones(2, requires_grad=True)
inner = x * 1.0
ref, y = weakref.ref(inner), inner ** 2
del inner, y
assert ref() is None
""",
)
def _square_kept() -> None:
    """The node of a power lives for ever."""

    def edit(out: Any, *_: Any, **__: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None:
            _kept.append(out.grad_fn)
        return out

    edit_results(("__pow__",), edit)


@fault(
    "scalar-cycle",
    "graph.lifetime",
    rare=True,
    witness="""
import gc, weakref
gc.disable()
x = torch.ones((), requires_grad=True)
inner = x.clone()
ref = weakref.ref(inner)
del inner
assert ref() is None
""",
)
def _cycle() -> None:
    """The clone of a 0-dim tensor is part of a cycle."""

    def edit(out: Any, *_: Any, **__: Any) -> Any:
        if isinstance(out, Tensor) and out.grad_fn is not None and out.dim() == 0:
            out._cycle = [out]  # type: ignore[attr-defined]
        return out

    edit_results(("clone",), edit)
