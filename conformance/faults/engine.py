"""An engine in front of the engine: it sees every pass that Python starts, and may change what goes in or comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autograd_conformance.faults.base import add


@dataclass(slots=True)
class Pass:
    """What the engine is asked to do."""

    roots: tuple[Any, ...]
    seeds: tuple[Any, ...]
    keep: bool
    create: bool
    inputs: tuple[Any, ...]
    unused: bool
    accumulate: bool

    def but(self, **changes: Any) -> Pass:
        """The same pass with some fields changed."""
        return dataclasses.replace(self, **changes)

    def nodes(self) -> list[Any]:
        """The nodes that the roots reach, from the roots down, each once."""
        found: dict[int, Any] = {}
        waiting = [node for node in map(node_of, self.roots) if node is not None]
        while waiting:
            node = waiting.pop(0)
            if id(node) not in found:
                found[id(node)] = node
                waiting += [following for following, _ in node.next_functions if following is not None]
        return list(found.values())

    def leaves(self) -> list[Tensor]:
        """The leaves that the roots reach, whether they still require grad or not."""
        return [node.variable for node in self.nodes() if is_accumulator(node)]

    def targets(self) -> list[Tensor]:
        """The leaves whose ``.grad`` this pass fills."""
        if not self.accumulate:
            return []
        wanted = {id(given) for given in self.inputs}
        return [leaf for leaf in self.leaves() if leaf.requires_grad and (not wanted or id(leaf) in wanted)]


Run = Callable[[Pass], Any]
Around = Callable[[Pass, Run], Any]


def node_of(root: Any) -> Any:
    """The node at which a pass from ``root`` starts; None for a tensor that requires no grad."""
    if isinstance(root, GradientEdge):
        return root.node
    if root.grad_fn is not None:
        return root.grad_fn
    return get_gradient_edge(root).node if root.requires_grad else None


def is_accumulator(node: Any) -> bool:
    """Is it the node of a leaf?"""
    return type(node).__name__ == "AccumulateGrad"


class Proxy:
    """Stands where torch looks for its engine."""

    def __init__(self, real: Any, around: Around) -> None:
        self._real = real
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run_backward(self, roots: Any, seeds: Any, keep: bool, create: bool, inputs: Any = (),
                     allow_unreachable: bool = False, accumulate_grad: bool = False) -> Any:  # fmt: skip
        """The engine's entry point, with the parameters it has in torch."""
        asked = Pass(tuple(roots), tuple(seeds), keep, create, tuple(inputs), allow_unreachable, accumulate_grad)
        return self._around(asked, self._run)

    def _run(self, p: Pass) -> Any:
        return self._real.run_backward(
            p.roots, p.seeds, p.keep, p.create, p.inputs, allow_unreachable=p.unused, accumulate_grad=p.accumulate
        )


def interpose(around: Around) -> None:
    """Let ``around`` have every pass from now on."""
    owner: Any = torch.autograd.Variable
    owner._execution_engine = Proxy(owner._execution_engine, around)


def pass_fault(name: str, *claims: str, witness: str, rare: bool = False) -> Callable[[Around], Around]:
    """Enter the decorated function, which gets every pass, as a fault."""

    def enter(around: Around) -> Around:
        add(name, around.__doc__, claims, partial(interpose, around), witness, rare)
        return around

    return enter


@pass_fault(
    "null-engine",
    witness="""
x = torch.tensor([1.0, 2.0], requires_grad=True)
y = (x * x).sum()
y.backward(retain_graph=True)
y.backward()
assert x.grad.tolist() == [4.0, 8.0]
""",
)
def _null(p: Pass, run: Run) -> Any:
    """Nothing: every pass goes through the proxy unchanged."""
    p.targets()
    return run(p)
