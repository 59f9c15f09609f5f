"""Area agrad: ``torch.autograd.grad``, which returns gradients instead of adding them to ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograd_conformance.compare import HELD, Case, Findings, PassCase
from autograd_conformance.judge import claim
from autograd_conformance.oracle import executed_nodes
from autograd_conformance.paper import Paper
from autograd_conformance.program import Grad
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage


@claim("agrad.equals-backward")
def test_equals_backward(case: Case) -> Findings:
    """autograd.grad returns what backward would add to .grad, and adds nothing."""
    for p in case.grads:
        yield from (HELD for _ in case.carried(p))
        yield from _metadata(case, p)
        for name, after in p.after.items():
            before = p.before.get(name)
            if before is not None and after is not None:
                held = f"held = {name}.grad"
                yield case.judge(
                    p.at, f"{name}.grad is held", True, after.same_object, "no .grad is touched", before=held
                )


def _metadata(case: Case, p: PassCase) -> Findings:
    """What is returned has the shape and the dtype of its input."""
    for i, name in enumerate(p.statement.inputs or ()):
        returned, tensor = case.seen.returned[p.at][i], case.due.tensors[name]
        if returned is not None:
            g, why = f"g{p.at}[{i}]", f"{name} is like this"
            yield case.judge(p.at, f"tuple({g}.shape)", tensor.shape, returned.shape, why)
            yield case.judge(p.at, f"str({g}.dtype)", f"torch.{tensor.dtype}", f"torch.{returned.dtype}", why)


@claim("agrad.unused-input")
def test_unused_input(case: Case) -> Findings:
    """An input that the roots do not depend on is an error, None with allow_unused, zeros with materialize_grads."""
    for p in case.passes:
        s = p.statement
        if not isinstance(s, Grad):
            continue
        if p.due.why == "unused":
            if p.must_raise:
                yield case.judge_raise(
                    p.at, "an input is not reached and neither allow_unused nor materialize_grads is set"
                )
            continue
        if not p.judged:
            continue
        for i, name in enumerate(s.inputs):
            returned = case.seen.returned[p.at][i]
            if name not in p.due.deltas:
                yield case.judge(p.at, f"g{p.at}[{i}] is None", True, returned is None, f"{name} is not reached")
            elif s.materialize_grads:
                shape = None if returned is None else returned.shape
                yield case.judge(
                    p.at, f"tuple(g{p.at}[{i}].shape)", case.due.tensors[name].shape, shape, f"{name} is like this"
                )


@claim("agrad.nonrequiring-input")
def test_nonrequiring_input(case: Case) -> Findings:
    """An input that does not require grad is an error, allow_unused or not."""
    for p in case.passes:
        if isinstance(p.statement, Grad) and p.due.why == "input":
            yield case.judge_raise(p.at, "an input does not require grad")


def _was_materialized(p: PassCase, i: int) -> bool:
    """Is the i-th result zeros that were asked for in the place of None?"""
    s = p.statement
    return isinstance(s, Grad) and s.materialize_grads and not np.any(p.due.deltas[s.inputs[i]])


@claim("agrad.result-not-tracked")
def test_result_not_tracked(case: Case) -> Findings:
    """Without create_graph what autograd.grad returns does not require grad."""
    for p in case.grads:
        if p.statement.create_graph:
            continue
        for i, returned in enumerate(case.seen.returned[p.at]):
            if returned is not None:
                materialized = _was_materialized(p, i)
                yield case.judge(
                    p.at,
                    f"g{p.at}[{i}].requires_grad",
                    False,
                    returned.requires_grad,
                    "create_graph is not set",
                    mark="materialized" if materialized else "",
                )


@claim("agrad.frees-executed-part")
def test_frees_executed_part(case: Case) -> Findings:
    """autograd.grad frees what it executed, and nothing else."""
    passes = {p.at: p for p in case.passes}
    for p in case.passes:
        freeing = [passes.get(node.freed_by) for node in p.due.again if node.freed_by < p.at]
        if p.must_raise and not p.due.raises and any(q is not None and isinstance(q.statement, Grad) for q in freeing):
            yield case.judge_raise(p.at, "autograd.grad freed tensors that this pass needs")


@claim("agrad.sum-over-outputs")
def test_sum_over_outputs(case: Case) -> Findings:
    """With several roots autograd.grad returns the sum of their gradients."""
    for p in case.grads:
        if len(p.statement.roots) > 1 and case.carried(p):
            yield HELD


# --- scenes -----------------------------------------------------------------------------------------------------------


def _names(tensors: Sequence[Paper]) -> str:
    return f"[{', '.join(t.name for t in tensors)}]"


def _distinct(s: Stage, tensors: Sequence[Paper]) -> list[Paper]:
    """Some tensors, in some order."""
    chosen = s.some(tensors)
    start = s.number(0, len(chosen) - 1)
    chosen = chosen[start:] + chosen[:start]
    return chosen[::-1] if s.flip() else chosen


def _untouched(s: Stage) -> None:
    """No leaf has got a gradient."""
    for t in s.tracked:
        if t.is_leaf:
            s.equal(f"{t.name}.grad", None, "autograd.grad adds nothing to .grad, nor does a call that is refused")


@scene("agrad.empty-inputs")
def test_empty_inputs(s: Stage) -> None:
    """No inputs are refused in every form and every call, as often as it is tried, and no leaf gets a gradient."""
    root = s.root(interior=False)
    s.play()
    seed, _ = s.seed(root)
    for _ in range(s.number(1, 4)):
        empty = s.choose(("[]", "()", "[x for x in ()]", "list(torch.nn.ReLU().parameters())"))
        call = s.choose((
            f"torch.autograd.grad({root.name}, {empty}, {seed or None}",
            f"{root.name}.backward({seed or None}, inputs={empty}",
            f"torch.autograd.backward({root.name}, {seed or None}, inputs={empty}",
            f"torch.autograd.grad([{root.name}], {empty}, [{seed or None}]",
            f"torch.autograd.backward([{root.name}, {root.name}], [{seed or None}, {seed or None}], inputs={empty}",
        ))  # fmt: skip
        options = ["", ", retain_graph=True", ", create_graph=True"]
        if "grad(" in call and "backward" not in call:
            options += [", allow_unused=True", ", materialize_grads=True"]
        s.raises(f"{call}{s.choose(options)})", "RuntimeError | ValueError", "there are no inputs", fragment="empty")
        _untouched(s)


def _cuts(root: Paper, leaf: Paper, between: Sequence[Paper]) -> list[Paper]:
    """Tensors through which every path from the root to a leaf leads."""
    return [t for t in between if t is not leaf and t is not root and not _reaches(root, leaf, t)]


def _reaches(root: Paper, leaf: Paper, without: Paper) -> bool:
    """Is there a path from the root to a leaf that avoids a tensor?"""
    pending, done = [root], set()
    while pending:
        t = pending.pop()
        if t is leaf:
            return True
        if id(t) in done or t is without or t.node is None:
            continue
        done.add(id(t))
        pending += [x for x, edge in zip(t.node.inputs, t.node.edges, strict=True) if edge is not None]
    return False


@scene("agrad.nonleaf-cut")
def test_nonleaf_cut(s: Stage) -> None:
    """Where all paths lead through some tensors, the gradient may be taken from one to the next, with the same result."""
    root = s.root()
    reached = s.above(root)
    pairs = [(leaf, _cuts(root, leaf, reached)) for leaf in reached if leaf.is_leaf]
    leaf, cuts = s.choose(sorted(pairs, key=lambda pair: -len(pair[1])))
    s.play()
    y, v, bent = root.name, s.numbers(root.shape), s.flip() or not cuts
    g = v
    if bent:
        cuts = [*cuts, root]
        y, g = "y", 2.0 * root.value * v
        s.do(f"y = {root.name} * {root.name}")
    cuts = s.some(cuts)
    grads = s.grads((root, g))
    s.do(f"v = {s.tensor(v, root.dtype)}")
    options = s.choose((", retain_graph=True", ", create_graph=True"))
    if s.flip():
        s.do(f"whole, = torch.autograd.grad({y}, {leaf.name}, v{options})")
        s.close("whole", grads[leaf.name], f"the gradient of {y} by {leaf.name}")
    start, seed = y, "v"
    for t in [*cuts[::-1], leaf]:
        s.do(f"g, = torch.autograd.grad({start}, {t.name}, {seed}{options})")
        due = grads[t.name] if t is not root else g
        s.close("g", due, f"the gradient of {y} by {t.name}, through which all paths to {leaf.name} lead")
        start, seed = t.name, "g"
    _untouched(s)


@scene("agrad.only-inputs-deprecated")
def test_only_inputs(s: Stage) -> None:
    """only_inputs=False warns, gives the same gradients, and fills no .grad; True is silent."""
    root = s.root()
    inputs = _distinct(s, s.above(root))
    s.do("import warnings")
    s.play()
    seed, v = s.seed(root)
    grads = s.grads((root, v))
    for _ in range(s.number(1, 3)):
        flag = s.choose((False, False, True))
        options = s.choose(("retain_graph=True", "create_graph=True", "retain_graph=True, allow_unused=True"))
        call = f"torch.autograd.grad({root.name}, {_names(inputs)}, {seed or None}, only_inputs={flag}, {options})"
        s.do(
            f'with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter("always")\n    g = {call}'
        )
        told = "[w.category.__name__ for w in caught if 'only_inputs' in str(w.message)]"
        s.equal(told, [] if flag else ["FutureWarning"], f"only_inputs={flag}")
        for i, t in enumerate(inputs):
            s.close(f"g[{i}]", grads[t.name], f"the gradient of {root.name} by {t.name}, whatever only_inputs says")
        _untouched(s)


@scene("agrad.batched")
def test_batched(s: Stage) -> None:
    """Each slice of batched gradients gives what it gives alone; slices of another shape are refused."""
    roots = [s.root() for _ in range(s.number(1, 2))]
    reached = [t for t in s.above(roots[0], root_too=True) if _batchable(roots, t)]
    inputs = _distinct(s, reached)
    s.play()
    count = s.number(1, 4)
    batches = [np.stack([s.numbers(t.shape) * (1 + i) for i in range(count)]) for t in roots]
    seeds = [s.tensor(b, t.dtype) for b, t in zip(batches, roots, strict=True)]
    listed = f"{_names(roots)}, {_names(inputs)}, "
    if s.flip():
        wrong = s.choose([b[:, None] if s.flip() else b[..., None] for b in batches[:1]])
        bad = [s.tensor(wrong, roots[0].dtype), *seeds[1:]]
        s.raises(
            f"torch.autograd.grad({listed}[{', '.join(bad)}], is_grads_batched=True)",
            "RuntimeError",
            "a slice has not the shape of its output",
            fragment="is_grads_batched=True`, we interpret the first" if len(roots) == 1 else "",
        )
    options = s.choose(("", ", retain_graph=True", ", create_graph=True"))
    s.do(f"g = torch.autograd.grad({listed}[{', '.join(seeds)}], is_grads_batched=True, allow_unused=True{options})")
    alone = [s.grads(*((t, b[i]) for t, b in zip(roots, batches, strict=True))) for i in range(count)]
    for k, t in enumerate(inputs):
        due = np.stack([grads[t.name] for grads in alone])
        s.close(f"g[{k}]", due, f"{count} gradients by {t.name}, each as if it were alone")
    _untouched(s)


def _batchable(roots: Sequence[Paper], t: Paper) -> bool:
    """Formulas that have no rule for vmap are left out: of masks whose number of elements depends on the data."""
    return not any(node.op.name == "masked_select" for node in executed_nodes(roots, [t]))


_MAPPINGS = (
    "collections.OrderedDict({d})",
    "types.MappingProxyType({d})",
    "collections.UserDict({d})",
    "collections.ChainMap({d})",
    "collections.defaultdict(int, {d})",
)


@scene("agrad.dict-inputs")
def test_dict_inputs(s: Stage) -> None:
    """A dict of inputs gives a dict of gradients, with its keys in its order; other mappings are refused."""
    root = s.root()
    inputs = _distinct(s, s.above(root))
    outside = [t for t in s.tracked if t.name not in s.grads((root, np.ones(root.shape)))]
    unused = s.choose(outside) if outside and s.flip() else None
    s.do("import collections, types")
    s.play()
    seed, v = s.seed(root)
    form = s.choose(("{n}", "{i}", "block.{i}.{n}"))
    listed = [*inputs, *([unused] if unused is not None else [])]
    keys = [form.format(n=t.name, i=len(listed) - i) for i, t in enumerate(listed)]
    source = f"{{{', '.join(f'{key!r}: {t.name}' for key, t in zip(keys, listed, strict=True))}}}"
    call = f"torch.autograd.grad({root.name}, {{}}, {seed or None}, retain_graph=True"
    for _ in range(s.number(0, 2)):
        other = s.choose(_MAPPINGS).format(d=source)
        s.raises(f"{call.format(other)})", "TypeError", "this mapping is no plain dict", fragment="dict")
    zeros = unused is not None and s.flip()
    more = ", materialize_grads=True" if zeros else (", allow_unused=True" if unused is not None else "")
    s.do(f"g = {call.format(source)}{more})")
    s.true("type(g) is dict", "a dict goes in")
    s.equal("list(g)", keys, "these are the keys, in this order")
    grads = s.grads((root, v))
    for key, t in zip(keys, listed, strict=True):
        due = grads.get(t.name, np.zeros(t.shape) if zeros else None)
        s.close(f"g[{key!r}]", due, f"the gradient of {root.name} by {t.name}")
    _untouched(s)
