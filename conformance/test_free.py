"""Area free: what a pass frees, what retain_graph keeps, and what may run again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.oracle import executed_nodes
from autograd_conformance.program import Backward, Grad, writes
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage


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


# --- scenes -----------------------------------------------------------------------------------------------------------

_NONLINEAR = ("{t} * {t}", "{t}.sin()", "{t}.exp()", "{t} ** 3", "{t}.sigmoid()", "({t} * {t}).sum()")
_WALK = """def walk(node, found):
    if node is not None and node not in found:
        found.append(node)
        for following, _ in node.next_functions:
            walk(following, found)
    return found"""


@scene("free.whole-graph")
def test_whole_graph(s: Stage) -> None:
    """After a pass that frees, the same nodes can be walked, and what it did not execute can still be executed."""
    root = s.root()
    some = s.some([t for t in s.above(root) if t.is_leaf])
    way = s.choose(("backward", "grad", "inputs"))
    s.do(_WALK)
    s.play()
    y, side = root.name, way != "backward" and s.flip()
    if side:  # a branch of its own, that leads to none of the inputs
        own = s.numbers((2,))
        s.do(f"w = {s.tensor(own, requires_grad=True)}")
        s.do(f"u = {s.choose(('w * w', 'w ** 2'))}\ny = {root.name} + u.sum()")
        y = "y"
    wide = s.wide if side and not root.shape else root.dtype
    s.do(f"v = {s.tensor(s.numbers(root.shape), wide)}")
    names = ", ".join(t.name for t in some)
    s.do(f"before = walk({y}.grad_fn, [])\nedges = [node.next_functions for node in before]")
    targets = None if way == "backward" else some
    executed = executed_nodes([root], targets)
    if way == "backward":
        s.do(f"{y}.backward(v)")
    elif way == "inputs":
        s.do(f"{y}.backward(v, inputs=[{names}])")
    else:
        s.do(f"torch.autograd.grad({y}, [{names}], v)")
    s.true(f"walk({y}.grad_fn, []) == before", "nodes live as long as an output does")
    s.true("[node.next_functions for node in before] == edges", "so do edges")
    for t in s.tracked:
        if t.is_leaf:
            s.do(f"{t.name}.grad = None")
    if side:
        s.succeeds("u.backward(torch.ones_like(u))", "the first pass executed none of this")
        s.close("w.grad", 2.0 * own, "the gradient of the sum of w ** 2, of which nothing was freed")
    rest = [t for t in s.interior if np.size(t.value) and not set(executed_nodes([t])) & set(executed)]
    count = s.number(1, 2)
    for other in [t for t in rest if s.flip()][:count] or rest[-1:]:
        w = s.numbers(other.shape)
        s.succeeds(
            f"{other.name}.backward({s.tensor(w, other.dtype)}, retain_graph=True)",
            "the first pass executed none of this",
        )
        grads = s.grads((other, w))
        for t in s.tracked:
            if t.is_leaf:
                s.close(
                    f"{t.name}.grad", grads.get(t.name), f"the gradient of {other.name}, of which nothing was freed"
                )
                s.do(f"{t.name}.grad = None")


_KEEPING = ("retain_graph=True", "create_graph=True", "True", "None, True", "retain_graph=None, create_graph=True")
_BOXES = """class Box:
    def __init__(self, t):
        self.t = t.detach()


def pack(t):
    box = Box(t)
    boxes.append((now, weakref.ref(box)))
    return box


def left():
    return sorted({name for name, box in boxes if box() is not None})"""


@scene("free.buffers-released")
def test_buffers_released(s: Stage) -> None:
    """What nodes saved lives until a pass that frees executes them, or until the last output is gone."""
    root = s.root()
    s.do(f"import weakref\n\nboxes = []\n\n\n{_BOXES}")
    s.play_leaves()
    rest, lines = s.rest(), []
    for x in rest:
        lines += [f"now = {next(iter(writes(x)), '')!r}", s.source(x)]
    extra = s.flip()
    if extra:
        lines += ["now = 'y'", f"y = {s.choose(_NONLINEAR[:5]).format(t=root.name)}"]
    s.block("with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.t):", *lines)
    y, executed = (
        "y" if extra else root.name,
        {writes(s.scene.graph.statements[n.at])[0] for n in executed_nodes([root])},
    )
    executed |= {"y"} if extra else set()
    s.do("packed = left()")
    if extra:
        s.true("'y' in packed", "a formula that is not linear needs its operand or its result")
    v = s.tensor(s.numbers(root.shape), root.dtype)
    for _ in range(s.number(0, 2)):
        s.do(f"{y}.backward({v}, {s.choose(_KEEPING)})")
        s.true("left() == packed", "the pass retains the graph")
        for t in s.tracked:
            if t.is_leaf:
                s.do(f"{t.name}.grad = None")
    if s.flip():
        s.do(
            s.choose(
                (
                    f"{y}.backward({v})",
                    f"torch.autograd.backward([{y}, {y}], [{v}, {v}])",
                    f"{y}.backward({v}, False, True)",
                )
            )
        )
        s.true(f"left() == [n for n in packed if n not in {sorted(executed)}]", "the pass frees what it executed")
    made = [name for x in rest for name in writes(x)] + ["y"] * extra
    s.do(f"del {', '.join(made)}")
    s.equal("left()", [], "no output is left")


_SAVED = """def saved(node):
    found = []
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue
            if isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value)):
                found.append(name)
    return found"""


@scene("free.saved-attr-after-free")
def test_saved_attr_after_free(s: Stage) -> None:
    """No node that a pass freed gives a saved tensor any more; before, and after passes that retain, all do."""
    root = s.root()
    s.do(_SAVED)
    s.play()
    s.do(f"y = {s.choose(_NONLINEAR[:5]).format(t=root.name)}")
    names = {writes(s.scene.graph.statements[n.at])[0]: n for n in executed_nodes([root])}
    direct = [out for out, n in names.items() if any(o.name == out and o.node is n for o in n.outs)]
    watched = ["y", *(s.some(direct) if direct else [])]
    s.do(f"nodes = [t.grad_fn for t in [{', '.join(watched)}]]\nheld = [saved(node) for node in nodes]")
    v = s.tensor(s.numbers(root.shape), root.dtype)
    for _ in range(s.number(0, 2)):
        s.do(f"y.backward({v}, {s.choose(_KEEPING)})")
        s.true("[saved(node) for node in nodes] == held", "the pass retains the graph")
        for t in s.tracked:
            if t.is_leaf:
                s.do(f"{t.name}.grad = None")
    leaves = ", ".join(t.name for t in s.above(root) if t.is_leaf)
    s.do(
        s.choose(
            (
                f"y.backward({v})",
                f"torch.autograd.grad(y, [{leaves}], {v})",
                f"torch.autograd.backward([y, y], [{v}, {v}])",
                f"torch.autograd.grad([y, y], [{leaves}], [{v}, {v}])",
                f"y.backward({v}, False, True)",
                f"y.backward({v}, create_graph=True, retain_graph=False)",
            )
        )
    )
    for i in range(len(watched)):
        s.equal(f"saved(nodes[{i}])", [], f"the pass freed the node of {watched[i]}")
    s.do("names = held[0] or ['_saved_self']")
    s.raises(
        "getattr(nodes[0], names[-1])",
        "RuntimeError",
        "the node was freed",
        fragment="Trying to backward through the graph a second time",
    )


@scene("free.old-message")
def test_old_message(s: Stage) -> None:
    """However a graph comes to be used a second time, the error names retain_graph=True and not retain_variables."""
    root = s.root()
    leaves = ", ".join(t.name for t in s.above(root) if t.is_leaf)
    s.play()
    s.do(f"u = {s.choose(_NONLINEAR[:5]).format(t=root.name)}")
    v = s.tensor(s.numbers(root.shape), root.dtype)
    trunk = s.flip()
    if trunk:
        s.do("y, z = u * 2.0, u * 3.0")
    y, z = ("y", "z") if trunk else ("u", "u")
    ways = ("{y}.backward({v})", "torch.autograd.backward([{y}], [{v}])", "torch.autograd.grad({y}, [{x}], {v})",
            "torch.autograd.backward([{y}, {y}], [{v}, {v}])", "torch.autograd.grad([{y}, {y}], [{x}], [{v}, {v}])",
            "{y}.backward({v}, create_graph=True, retain_graph=False)")  # fmt: skip
    for _ in range(s.number(0, 2)):
        s.do(f"{y}.backward({v}, retain_graph=True)")
        for t in s.tracked:
            if t.is_leaf:
                s.do(f"{t.name}.grad = None")
    s.do(s.choose(ways).format(y=y, v=v, x=leaves))
    for _ in range(s.number(1, 2)):
        again = s.choose((*ways, "{y}.backward({v}, retain_graph=True)")).format(y=z, v=v, x=leaves)
        s.do(f"message = ''\ntry:\n    {again}\nexcept RuntimeError as error:\n    message = str(error)")
        s.true("'retain_graph=True' in message", "the message says how to avoid the error")
        s.false("'retain_variables' in message", "that is no argument any more")


@scene("free.retain-variables")
def test_retain_variables(s: Stage) -> None:
    """The old keyword is refused by the method and the function, with whatever value and company; the new one works."""
    root = s.root(interior=False)
    s.play()
    seed, _ = s.seed(root)
    for _ in range(s.number(1, 3)):
        value = s.choose(("True", "False", "None", "1"))
        options = s.choose(("", ", create_graph=True", ", retain_graph=True", ", inputs=[]"))
        call = s.choose(
            (f"{root.name}.backward({seed or None}, ", f"torch.autograd.backward({root.name}, {seed or None}, ")
        )
        s.raises(
            f"{call}retain_variables={value}{options})",
            "TypeError",
            "there is no such argument",
            fragment="retain_variables",
        )
    s.succeeds(f"{root.name}.backward({seed or None}, retain_graph=True)", "retain_graph is its name")
    s.succeeds(f"{root.name}.backward({seed or None})", "the graph was retained")


@scene("free.grad-variables")
def test_grad_variables(s: Stage) -> None:
    """The function takes the old name with a FutureWarning, and not both; the method takes neither form of it."""
    roots = [s.root(interior=False) for _ in range(s.number(1, 2))]
    s.do("import warnings")
    s.play()
    seeds = [s.numbers(t.shape) for t in roots]
    given = f"[{', '.join(s.tensor(v, t.dtype) for v, t in zip(seeds, roots, strict=True))}]"
    names = f"[{', '.join(t.name for t in roots)}]"
    if len(roots) == 1 and s.flip():
        given, names = given[1:-1], names[1:-1]
    for _ in range(s.number(0, 2)):
        if s.flip():
            word = s.choose(("grad_variables", "grad_variable"))
            first = s.tensor(seeds[0], roots[0].dtype)
            s.raises(
                f"{roots[0].name}.backward({word}={first})",
                "TypeError",
                "the method has no such argument",
                fragment="grad_variable",
            )
        else:
            both = s.choose((f"{given}, grad_variables={given}", f"grad_tensors={given}, grad_variables={given}"))
            s.raises(f"torch.autograd.backward({names}, {both})", "RuntimeError", "one of the two is enough")
    call = f"torch.autograd.backward({names}, grad_variables={given}{s.choose(('', ', retain_graph=True'))})"
    s.do(f'with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter("always")\n    {call}')
    s.true("'FutureWarning' in [w.category.__name__ for w in caught]", "the name is deprecated")
    grads = s.grads(*zip(roots, seeds, strict=True))
    for t in s.tracked:
        if t.is_leaf:
            s.close(f"{t.name}.grad", grads.get(t.name), f"the gradient of {names} by {t.name}")
