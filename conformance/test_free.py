"""Area free: what a pass frees, what retain_graph keeps, and what may run again."""

from __future__ import annotations

from collections.abc import Iterator

from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.program import Backward, Grad


def _again(case: Case) -> Iterator[tuple[PassCase, list[PassCase]]]:
    """Passes that must raise because they run freed nodes that saved tensors, with the passes that freed them."""
    passes = {p.at: p for p in case.passes}
    for p in case.passes:
        if p.must_raise and p.due.again and not p.due.raises:
            yield (
                p,
                [
                    passes[at]
                    for at in sorted({node.freed_by for node in p.due.again if node.freed_by < p.at})
                    if at in passes
                ],
            )


_WHY = "an earlier pass freed tensors that this one needs"


@claim("free.second-backward-error")
def test_second_backward_error(case: Case) -> Findings:
    """A second pass over a node that saved a tensor raises if the first did not retain the graph."""
    for p, freed_by in _again(case):
        if any(set(q.statement.roots) & set(p.statement.roots) for q in freed_by):
            yield case.judge_raise(p.at, _WHY)


@claim("free.shared-trunk")
def test_shared_trunk(case: Case) -> Findings:
    """Two roots that share a node that saved a tensor cannot both run backward unless the first retains the graph."""
    for p, freed_by in _again(case):
        if freed_by and not any(set(q.statement.roots) & set(p.statement.roots) for q in freed_by):
            yield case.judge_raise(p.at, _WHY)


@claim("free.retain-default-is-create-graph")
def test_retain_default(case: Case) -> Findings:
    """retain_graph that is not given is create_graph: alone it frees, with create_graph it keeps."""
    for p, freed_by in _again(case):
        if any(q.statement.retain_graph is None and not q.statement.create_graph for q in freed_by):
            yield case.judge_raise(p.at, _WHY)
    kept: set[int] = set()
    for p in case.passes:
        if p.must_raise is False and kept & {node.at for node in p.due.executed}:
            yield HELD  # raising here is a difference, and its controls find the claim
        if p.statement.create_graph and p.statement.retain_graph is None:
            kept |= {node.at for node in p.due.executed}


@claim("free.retain-graph-repeat")
def test_retain_graph_repeat(case: Case) -> Findings:
    """With retain_graph=True any number of passes over the same nodes succeed and give the same gradients."""
    done: set[int] = set()
    for p in case.passes:
        nodes = {node.at for node in p.due.executed}
        if p.judged and done & nodes and case.carried(p):
            yield HELD
        done |= nodes


@claim("free.disjoint-graphs")
def test_disjoint_graphs(case: Case) -> Findings:
    """A pass over one graph never frees or changes another that shares only leaves with it."""
    done: list[tuple[set[int], set[str]]] = []
    for p in case.passes:
        nodes = {node.at for node in p.due.executed}
        leaves = set(p.due.deltas)
        if p.judged and case.carried(p) and any(leaves & others and not nodes & ran for ran, others in done):
            yield HELD
        done.append((nodes, leaves))


@claim("free.forward-backward-pairing")
def test_forward_backward_pairing(case: Case) -> Findings:
    """A graph that is built anew before each pass never needs retain_graph."""
    freed = False
    for p in case.passes:
        rebuilt = any("_r" in root for root in p.statement.roots)
        if rebuilt and freed and p.judged and case.carried(p) and not p.due.again:
            yield HELD
        freed = freed or (isinstance(p.statement, Backward | Grad) and bool(p.due.executed))
