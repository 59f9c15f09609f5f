"""Area graph: nodes, edges between them, what they show of themselves, and how long they live."""

from __future__ import annotations

import numpy as np

from autograd_conformance.paper import Paper
from autograd_conformance.program import Leaf, writes
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

WALK = """
def walk(root):
    found, waiting = [], [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if not any(node is other for other in found):
            found.append(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found
""".strip()
LOOPS = """
def loops(node, path=(), done=None):
    done = {} if done is None else done
    if any(node is other for other in path):
        return True
    if id(node) in done:
        return False
    done[id(node)] = node
    return any(loops(n, (*path, node), done) for n, _ in node.next_functions if n is not None)
""".strip()


def _list(names: list[str]) -> str:
    return f"[{', '.join(names)}]"


@scene("graph.grad-fn-node")
def test_grad_fn_node(s: Stage) -> None:
    """grad_fn is a Node, and the same one whenever it is read."""
    root = s.root()
    s.play()
    tensors = _list([t.name for t in s.some(s.interior[::-1])])
    s.do(f"held = [t.grad_fn for t in {tensors}]")
    s.true("all(isinstance(node, torch.autograd.graph.Node) for node in held)", "grad_fn is a node of the graph")
    for _ in range(s.number(0, 3)):
        what = s.number(0, 6)
        if what == 0:
            s.backward(root, "retain_graph=True")
        elif what == 1:
            s.do(f"new = [t * 2.0 for t in {tensors}]")
        elif what == 2:
            s.do(f"with torch.no_grad(): new = [t.detach() for t in {tensors}]")
        elif what == 3:
            s.do(f"new = [t.register_hook(lambda g: g) for t in {tensors}]")
        elif what == 4:
            s.do(f"new = [t[...] for t in {tensors}]")
        elif what == 5:
            s.do(f"for t in {tensors}: t.retain_grad()")
        else:
            s.do(f"with torch.no_grad(): new = [t.clone().mul_(2.0) for t in {tensors}]")
        s.true(f"all(t.grad_fn is node for t, node in zip({tensors}, held))", "nothing was written to these tensors")
    if s.flip():
        s.do("del held")
    s.true(f"all(t.grad_fn is t.grad_fn for t in {tensors})", "two readings give one object")


@scene("graph.edges-mirror-dag")
def test_edges(s: Stage) -> None:
    """The edges lead from the root to exactly the leaves it depends on, and nowhere in circles."""
    root = s.root(empty=True)
    s.play()
    s.do(WALK)
    s.do(LOOPS)
    reached = s.above(root)
    made = {st.name for st in s.scene.graph if isinstance(st, Leaf)}
    leaves = [t for t in s.leaves if t.requires_grad]
    inside = sum(t.is_leaf and t.name not in made for t in reached)  # leaves that the graph makes on its way
    due = [any(t is other for other in reached) for t in leaves]
    s.do(f"found = [node.variable for node in walk({root.name}) if hasattr(node, 'variable')]")
    s.equal(f"[sum(v is t for v in found) for t in {_list([t.name for t in leaves])}]", [int(d) for d in due],
            "an accumulation node for each leaf that the root depends on, and for no other")  # fmt: skip
    s.equal("len(found)", sum(due) + inside, "no other leaf is reached")
    s.false(f"loops({root.name}.grad_fn)", "a graph that ops record has no circle")
    t = s.choose(s.tracked[::-1])
    s.do(f"k = torch.full_like({t.name}, 0.5, requires_grad=False)")
    texts = [
        ("{t} + k", "tk"),
        ("k - {t}", "kt"),
        ("{t} * k", "tk"),
        ("torch.stack([k, {t}, k])", "ktk"),
        ("torch.where(k > 0.0, k, {t})", "kt"),
        ("torch.addcmul(k, {t}, k)", "ktk"),
        ("k / ({t} * {t} + 1.0).detach() + {t}", "kt"),
    ]
    for _ in range(s.number(1, 2)):
        text, pattern = s.choose(texts)
        s.do(f"made = {text.format(t=t.name)}")
        s.equal(
            "[edge == (None, 0) for edge in made.grad_fn.next_functions]", [letter == "k" for letter in pattern],
            "an input that does not require grad has the edge (None, 0), any other leads to a node",
        )  # fmt: skip
        at = pattern.index("t")
        if t.node is not None:
            s.true(
                f"made.grad_fn.next_functions[{at}] == ({t.name}.grad_fn, {t.name}.output_nr)",
                "the edge leads to its node",
            )
        else:
            s.true(f"made.grad_fn.next_functions[{at}][0].variable is {t.name}", "the edge leads to the leaf")


@scene("graph.accumulate-grad-unique")
def test_accumulate_unique(s: Stage) -> None:
    """All uses of a leaf lead to one accumulation node, which knows the leaf."""
    leaves = s.some([t for t in s.leaves if t.requires_grad])
    s.play()
    s.do("nodes = []")
    uses = (
        "{} * 2.0",
        "{}.sum()",
        "{}.clone()",
        "{}[...]",
        "{}.sin()",
        "torch.stack([{}, {}])",
        "{} + {}",
        "{}.unsqueeze(0)",
        "{}.expand(2, *{}.shape)",
    )
    for leaf in leaves:
        s.do("uses, nodes = [], []")
        for _ in range(s.number(2, 4)):
            text = s.choose(uses)
            within = "with torch.enable_grad(): " if s.number(0, 3) == 3 else ""
            s.do(f"{within}uses.append({text.replace('{}', leaf.name)})")
            s.do("nodes += [node for node, _ in uses[-1].grad_fn.next_functions if node is not None]")
            if s.number(0, 7) == 7:
                s.do("uses[-1].sum().backward(retain_graph=True)")
        s.true("all(node is nodes[0] for node in nodes)", f"all uses of {leaf.name} lead to one node")
        s.true(f"nodes[0].variable is {leaf.name}", "the node that accumulates into a leaf knows it")
    root = s.root()
    s.do(WALK)
    s.do(f"found = [node.variable for node in walk({root.name}) if hasattr(node, 'variable')]")
    s.true("len({id(v) for v in found}) == len(found)", "no leaf has two nodes in one graph")


SAVED = """
def saved(node):
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [value for value in values if isinstance(value, torch.Tensor)]

def same(one, other):
    return one.shape == other.shape and torch.equal(one, other) and one.data_ptr() == other.data_ptr()
""".strip()


@scene("graph.saved-attributes")
def test_saved_attributes(s: Stage) -> None:
    """What a node saved can be read: the values, in the same memory."""
    t = s.choose([x for x in s.tracked[::-1] if np.size(x.value)])
    s.play()
    s.do(SAVED)
    x = t.name
    if s.flip():
        x = "part"
        s.do(
            "part = "
            + s.choose(
                (
                    f"{t.name}[...]",
                    f"{t.name}.unsqueeze(0)",
                    f"{t.name}.expand(2, *{t.name}.shape)",
                    f"{t.name}.clone()",
                )
            )
        )
    kinds = [
        (f"{x} ** 2", ["_saved_self"], [x]),
        (f"{x}.exp()", ["_saved_result"], ["{made}"]),
        (f"{x} ** 3", ["_saved_self"], [x]),
        (f"{x} * {x}", [], []),
        (f"{x}.sin()", [], []),
        (f"{x}.tanh()", [], []),
        (f"{x} / ({x} * {x} + 1.0)", [], []),
    ]
    made: list[tuple[str, list[str], list[str]]] = []
    for _ in range(s.number(1, 3)):
        text, names, sources = s.choose(kinds)
        name = s.name("made")
        s.do(f"{name} = {text}")
        made.append((name, names, [source.format(made=name) for source in sources]))
    retained = s.number(0, 2)
    for name, names, sources in made[::-1] if s.flip() else made:
        if retained:
            s.do(f"{name}.sum().backward(retain_graph=True)")
        for attribute, source in zip(names, sources, strict=True):
            s.true(
                f"same({name}.grad_fn.{attribute}, {source})",
                "the node shows what it saved: these values, in this memory",
            )
            s.true(f"same({name}.grad_fn.{attribute}, {source})", "a second reading shows the same")
        if not names and "/" not in name:
            s.true(
                f"all(same(v, {x}) or same(v, {name}) or v.data_ptr() not in ({x}.data_ptr(), {name}.data_ptr()) for v in saved({name}.grad_fn))",
                "what lies in the memory of an input or output has its values",
            )


@scene("graph.metadata-dict")
def test_metadata(s: Stage) -> None:
    """Each node has a dict, and it keeps what is put in."""
    root = s.root()
    s.play()
    nodes = s.some([t for t in s.above(root, root_too=True) if t.node is not None][::-1])
    unique: list[Paper] = []
    for t in nodes:  # outputs of one op share its node
        if not any(t.node is other.node for other in unique):
            unique.append(t)
    for i, t in enumerate(unique):
        s.true(f"isinstance({t.name}.grad_fn.metadata, dict)", "the metadata of a node is a dict")
        s.false(f"'key' in {t.name}.grad_fn.metadata", "nothing was put into it, for it belongs to this node alone")
        s.do(f"{t.name}.grad_fn.metadata['key'] = [{i}]")
    if s.flip():
        s.do(f"leaf = {root.name}.grad_fn.next_functions[0][0]")
        s.do("if leaf is not None: leaf.metadata['other'] = 1")
    for _ in range(s.number(0, 2)):
        what = s.number(0, 3)
        if what == 0:
            s.do(f"new = {root.name} * 2.0")
        elif what == 1:
            s.backward(root, "retain_graph=True")
        elif what == 2:
            s.do(f"new = [t.grad_fn.next_functions for t in {_list([t.name for t in unique])}]")
        else:
            s.do(f"{unique[0].name}.grad_fn.metadata['more'] = 'text'")
    for i, t in enumerate(unique):
        s.equal(f"{t.name}.grad_fn.metadata.get('key')", [i], "the node lives, and with it what was put in")
        s.true(f"{t.name}.grad_fn.metadata is {t.name}.grad_fn.metadata", "it is one dict")


@scene("graph.gradient-edge")
def test_gradient_edge(s: Stage) -> None:
    """An edge stands for its tensor: as an input, as a root, and in backward."""
    root = s.root()
    targets = s.some(s.above(root, root_too=True))
    kind = s.number(0, 4)
    s.play()
    if kind == 4:
        plain = [t.name for t in s.tensors if not t.requires_grad]
        made = [f"{root.name}.detach()", f"torch.zeros_like({root.name}, requires_grad=False)"]
        for name in s.some(plain + made):
            s.raises(
                f"torch.autograd.graph.get_gradient_edge({name})", "RuntimeError", "it does not require grad, so there is no edge",
                fragment="for a Tensor that does not require gradients",
            )  # fmt: skip
        return
    edges = [f"torch.autograd.graph.get_gradient_edge({t.name})" for t in targets]
    mixed = [edge if i == 0 or s.flip() else t.name for i, (t, edge) in enumerate(zip(targets, edges, strict=True))]
    text, seed = s.seed(root)
    start = root.name if kind == 0 else f"torch.autograd.graph.get_gradient_edge({root.name})"
    grads = s.grads((root, seed))
    if kind in (0, 1):
        for _ in range(s.number(1, 2)):
            s.do(f"got = torch.autograd.grad([{start}], {_list(mixed)}, [{text or 'None'}], retain_graph=True)")
            for i, t in enumerate(targets):
                s.close(f"got[{i}]", grads[t.name], f"the edge stands for {t.name}")
        return
    leaves = [t for t in targets if t.is_leaf] if kind == 3 else []
    inputs = f", inputs={_list([edge for t, edge in zip(targets, edges, strict=True) if t.is_leaf])}" if leaves else ""
    s.do(f"torch.autograd.backward([{start}], [{text or 'None'}]{inputs})")
    for leaf in s.leaves:
        if leaf.requires_grad:
            due = grads.get(leaf.name) if not leaves or any(leaf is t for t in leaves) else None
            s.close(f"{leaf.name}.grad", due, "edges as roots and inputs mean the tensors that they stand for")


@scene("graph.lifetime")
def test_lifetime(s: Stage) -> None:
    """The nodes, and what they saved, live as long as an output does, and no longer."""
    root = s.root(empty=True)
    s.play()
    s.do("import weakref")
    s.do("class Token: pass")
    nodes = s.some([t for t in s.above(root, root_too=True) if t.node is not None][::-1])
    s.do("tokens = []")
    s.do(
        f"for t in {_list([t.name for t in nodes])}:\n    one = Token()\n    tokens.append(weakref.ref(one))\n    t.grad_fn.metadata[id(one)] = one"
    )
    s.do("del t, one")
    s.do(f"inner = {root.name}.clone()")
    s.do("kept = weakref.ref(inner)")
    s.do("out = " + s.choose(("inner ** 2", "inner.clone() * inner", "torch.stack([inner ** 2, inner])")))
    made = [name for st in s.scene.graph if not isinstance(st, Leaf) for name in writes(st)]
    s.do(f"del {', '.join(dict.fromkeys([*made, 'inner']))}")
    s.true("all(ref() is not None for ref in tokens)", "the last output refers to the graph")
    if "inner ** 2" in str(s.script.items[-2]):
        s.true("kept() is not None", "the node that saved this tensor lives")
    for i in range(s.number(0, 2)):
        s.do(f"out.backward(torch.ones_like(out), retain_graph={i < 2})")
        s.true("all(ref() is not None for ref in tokens)", "the last output still refers to the graph")
    if s.flip():
        s.do("last = out.sum()")
        s.do("del out")
        s.true("all(ref() is not None for ref in tokens)", "what was made from it refers to the graph")
        s.do("del last")
    else:
        s.do("del out")
    s.equal(
        "[ref() for ref in tokens]", [None] * len(nodes), "nothing refers to the graph any more, so it is gone at once"
    )
    s.equal("kept()", None, "what the graph saved went with it")
