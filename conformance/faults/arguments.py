"""Faults in what backward and autograd.grad make of their arguments, and in what runs while they run."""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import Pass, Run, interpose
from autograd_conformance.faults.patches import Call, replace

Arguments = dict[str, Any]


def wrap_function(name: str, change: Callable[[Call, tuple[Any, ...], Arguments], Any]) -> None:
    """Let ``change(original, args, kwargs)`` stand for a function of torch.autograd, which the method of tensors calls too."""
    original: Call = getattr(torch.autograd, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return change(original, args, kwargs)

    replace(torch.autograd, name, call)


def _make_grads(change: Callable[[Call, Any, Any, bool], Any]) -> None:
    """Let ``change`` stand for the check of gradient arguments."""
    original: Call = torch.autograd._make_grads
    replace(
        torch.autograd,
        "_make_grads",
        lambda outputs, grads, is_grads_batched: change(original, outputs, grads, is_grads_batched),
    )


# --- shapes and kinds of gradients ------------------------------------------------------------------------------------


def _expanding(when: Callable[[Tensor, Tensor], bool]) -> None:
    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        fitted = [
            g.expand(y.shape) if isinstance(g, Tensor) and not batched and g.shape != y.shape and when(y, g) else g
            for y, g in zip(outputs, grads, strict=False)
        ]
        return original(outputs, tuple(fitted) if len(fitted) == len(grads) else grads, batched)

    _make_grads(change)


@fault(
    "scalar-gradient-broadcast",
    "backward.gradient-shape",
    witness="""
x = torch.ones(3, requires_grad=True)
try:
    (x * 2.0).backward(torch.tensor(1.0))
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _scalar_gradient() -> None:
    """A gradient without dimensions is broadcast to the shape of its root."""
    _expanding(lambda y, g: g.dim() == 0)


@fault(
    "one-element-gradient-reshaped",
    "backward.gradient-shape",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    (x * 2.0).backward(torch.ones(1))
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _one_element() -> None:
    """A gradient of one element is taken for a root of one element, whatever the shapes."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        if len(outputs) == len(grads) == 1 and isinstance(grads[0], Tensor) and not batched:
            y, g = outputs[0], grads[0]
            if isinstance(y, Tensor) and y.numel() == g.numel() == 1:
                grads = (g.reshape(y.shape),)
        return original(outputs, grads, batched)

    _make_grads(change)


@fault(
    "gradient-of-transposed-shape-taken",
    "backward.gradient-shape",
    rare=True,
    witness="""
x = torch.ones(2, 3, requires_grad=True)
try:
    (x * 2.0).backward(torch.ones(3, 2))
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _transposed_gradient() -> None:
    """A gradient whose shape is that of the root backwards is transposed without a word."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        if len(outputs) == len(grads) and not batched:
            turned = [
                g.permute(*range(g.dim())[::-1]) if isinstance(g, Tensor) and g.shape[::-1] == y.shape != g.shape else g
                for y, g in zip(outputs, grads, strict=True)
            ]
            grads = tuple(turned)
        return original(outputs, grads, batched)

    _make_grads(change)


@fault(
    "number-as-gradient",
    "backward.gradient-shape",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.backward([x * 2.0], [1.0])
    raise SystemExit(1)
except TypeError:
    pass
""",
)
def _number() -> None:
    """A Python number in a list of gradients stands for a tensor filled with it."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        made = [torch.full_like(y, g) if type(g) is float else g for y, g in zip(outputs, grads, strict=False)]
        return original(outputs, tuple(made) if len(made) == len(grads) else grads, batched)

    _make_grads(change)


@fault(
    "real-part-of-complex-gradient",
    "backward.gradient-complexness",
    witness="""
x = torch.ones(2, requires_grad=True)
try:
    (x * 2.0).backward(torch.ones(2, dtype=torch.complex64))
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _real_part() -> None:
    """Of a complex gradient for a real root the real part is taken."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        made = [
            g.real if isinstance(g, Tensor) and isinstance(y, Tensor) and g.is_complex() and not y.is_complex() else g
            for y, g in zip(outputs, grads, strict=False)
        ]
        return original(outputs, tuple(made) if len(made) == len(grads) else grads, batched)

    _make_grads(change)


@fault(
    "complex-scalar-implicit-one",
    "backward.gradient-complexness",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    (x * (1 + 2j)).backward()
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _complex_one() -> None:
    """A complex root without dimensions takes 1 for its gradient if none is given."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        made = [
            torch.ones_like(y) if g is None and isinstance(y, Tensor) and y.is_complex() and y.dim() == 0 else g
            for y, g in zip(outputs, grads, strict=False)
        ]
        return original(outputs, tuple(made) if len(made) == len(grads) else grads, batched)

    _make_grads(change)


# --- lists ------------------------------------------------------------------------------------------------------------


@fault(
    "short-list-filled-up",
    "backward.list-length",
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.backward([x * 2.0, x * 3.0], [torch.ones(())])
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _short_list() -> None:
    """A list of gradients that is too short is filled up with ones."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        missing = tuple(torch.ones_like(y) for y in outputs[len(grads) :] if isinstance(y, Tensor))
        return original(outputs, (*grads, *missing), batched)

    _make_grads(change)


@fault(
    "one-gradient-for-three",
    "backward.list-length",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.backward([x * 2.0, x * 3.0, x * 4.0], [torch.ones(()), torch.ones(())])
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _one_for_three() -> None:
    """With three roots or more, those that are left without a gradient are left out."""

    def around(p: Pass, run: Run) -> Any:
        if len(p.roots) > 2 and len(p.seeds) < len(p.roots) and p.seeds:
            p = p.but(roots=p.roots[: len(p.seeds)])
        return run(p)

    interpose(around)


@fault(
    "none-skips-untracked-root",
    "backward.list-none-for-nonrequiring",
    "backward.no-requires-grad-error",
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.backward([x * 2.0, torch.ones(())], [None, None])
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _none_skips() -> None:
    """Among several roots, one that does not require grad and whose gradient is None is passed over."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        roots, seeds = args[0], (args[1] if len(args) > 1 else kwargs.get("grad_tensors"))
        if isinstance(roots, list) and isinstance(seeds, list) and len(seeds) == len(roots) > 1:
            kept = [(r, g) for r, g in zip(roots, seeds, strict=True) if g is not None or r.requires_grad]
            if kept:
                return original([r for r, _ in kept], [g for _, g in kept], *args[2:], **kwargs)
        return original(*args, **kwargs)

    wrap_function("backward", change)


@fault(
    "none-in-list-is-zero",
    "backward.list-none-for-nonrequiring",
    "backward.list-of-roots",
    "backward.scalar-implicit-one",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
torch.autograd.backward([x * 2.0, x * 3.0], [torch.ones(()), None])
assert x.grad == 5.0
""",
)
def _none_is_zero() -> None:
    """None after the first place of a list of gradients stands for zeros."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        made = original(outputs, grads, batched)
        return tuple(
            torch.zeros_like(m)
            if i and g is None and any(h is not None for h in grads) and isinstance(m, Tensor)
            else m
            for i, (m, g) in enumerate(zip(made, grads, strict=False))
        )

    _make_grads(change)


# --- inputs -----------------------------------------------------------------------------------------------------------


@fault(
    "dict-loses-last-input",
    "backward.inputs-dict",
    rare=True,
    witness="""
x, y, z = (torch.ones((), requires_grad=True) for _ in range(3))
(x * y * z).backward(inputs={"x": x, "y": y, "z": z})
assert z.grad is not None
""",
)
def _dict_last() -> None:
    """Of a dict of three inputs or more, backward forgets the last."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        inputs = kwargs.get("inputs")
        if type(inputs) is dict and len(inputs) > 2:
            kwargs = kwargs | {"inputs": list(inputs.values())[:-1]}
        return original(*args, **kwargs)

    wrap_function("backward", change)


def _plain_dict(mapping: Any) -> dict[Any, Any]:
    return mapping if type(mapping) is dict else dict(mapping)


def _any_mapping(name: str, kinds: tuple[type, ...]) -> None:
    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        args = tuple(_plain_dict(a) if isinstance(a, kinds) else a for a in args)
        kwargs = {k: _plain_dict(v) if isinstance(v, kinds) else v for k, v in kwargs.items()}
        return original(*args, **kwargs)

    wrap_function(name, change)


@fault(
    "any-mapping-of-inputs",
    "backward.inputs-dict",
    witness="""
import collections
x = torch.ones((), requires_grad=True)
try:
    (x * 2.0).backward(inputs=collections.OrderedDict(x=x))
    raise SystemExit(1)
except TypeError:
    pass
""",
)
def _backward_mapping() -> None:
    """Backward takes any mapping of inputs for a dict."""
    _any_mapping("backward", (Mapping,))


@fault(
    "grad-takes-ordered-dict",
    "agrad.dict-inputs",
    rare=True,
    witness="""
import collections
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.grad(x * 2.0, collections.OrderedDict(x=x))
    raise SystemExit(1)
except TypeError:
    pass
""",
)
def _grad_mapping() -> None:
    """autograd.grad takes an OrderedDict of inputs for a dict."""
    _any_mapping("grad", (collections.OrderedDict,))


@fault(
    "dict-of-gradients-sorted",
    "agrad.dict-inputs",
    witness="""
x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
assert list(torch.autograd.grad(x * y, {"b": x, "a": y})) == ["b", "a"]
""",
)
def _dict_sorted() -> None:
    """The dict that autograd.grad returns is sorted by its keys."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        found = original(*args, **kwargs)
        return {k: found[k] for k in sorted(found, key=str)} if isinstance(found, dict) else found

    wrap_function("grad", change)


@fault(
    "dict-drops-unused",
    "agrad.dict-inputs",
    rare=True,
    witness="""
x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
assert torch.autograd.grad(x * 2.0, {"x": x, "y": y}, allow_unused=True) == {"x": torch.tensor(2.0), "y": None}
""",
)
def _dict_drops() -> None:
    """Keys of inputs that are not used are missing in the dict that autograd.grad returns."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        found = original(*args, **kwargs)
        return {k: g for k, g in found.items() if g is not None} if isinstance(found, dict) else found

    wrap_function("grad", change)


def _empty(name: str, instead: Callable[[], Any]) -> None:
    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        inputs = kwargs.get("inputs", args[1] if name == "grad" and len(args) > 1 else None)
        return instead() if isinstance(inputs, list | tuple) and not inputs else original(*args, **kwargs)

    wrap_function(name, change)


@fault(
    "no-inputs-no-gradients",
    "agrad.empty-inputs",
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.grad(x * 2.0, [])
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _grad_empty() -> None:
    """autograd.grad of no inputs returns no gradients."""
    _empty("grad", lambda: ())


@fault(
    "empty-tuple-means-all-leaves",
    "agrad.empty-inputs",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    (x * 2.0).backward(inputs=())
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _empty_tuple() -> None:
    """An empty tuple of inputs of backward stands for all leaves."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        return original(*args, **(kwargs | {"inputs": None} if kwargs.get("inputs") == () else kwargs))

    wrap_function("backward", change)


@fault(
    "cut-counts-gradient-twice",
    "agrad.nonleaf-cut",
    "agrad.equals-backward",
    "backward.vector-jacobian",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
t = x * 3.0
(g,) = torch.autograd.grad((t * t).sum(), t)
(h,) = torch.autograd.grad(t, x, g)
assert h.tolist() == [18.0, 18.0]
""",
)
def _cut_twice() -> None:
    """A gradient that autograd.grad returned counts twice as the seed of autograd.grad."""

    def around(p: Pass, run: Run) -> Any:
        seeds = tuple(g * 2.0 if isinstance(g, Tensor) and hasattr(g, "_found") else g for g in p.seeds)
        found = run(p.but(seeds=seeds) if not p.accumulate else p)
        for g in found if not p.accumulate else ():
            if g is not None:
                g._found = True
        return found

    interpose(around)


# --- words of old -----------------------------------------------------------------------------------------------------


@fault(
    "only-inputs-silent",
    "agrad.only-inputs-deprecated",
    witness="""
import warnings
x = torch.ones((), requires_grad=True)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    torch.autograd.grad(x * 2.0, x, only_inputs=False)
assert [w.category for w in seen] == [FutureWarning]
""",
)
def _only_inputs_silent() -> None:
    """only_inputs=False is ignored without a warning."""
    wrap_function("grad", lambda original, args, kwargs: original(*args, **(kwargs | {"only_inputs": True})))


@fault(
    "only-inputs-accumulates",
    "agrad.only-inputs-deprecated",
    rare=True,
    witness="""
import warnings
warnings.simplefilter("ignore")
x = torch.ones((), requires_grad=True)
torch.autograd.grad(x * 2.0, x, only_inputs=False)
assert x.grad is None
""",
)
def _only_inputs_fills() -> None:
    """only_inputs=False fills the .grad of the inputs that are leaves, as it once did."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        found = original(*args, **kwargs)
        if kwargs.get("only_inputs") is False:
            inputs = args[1] if isinstance(args[1], list | tuple) else [args[1]]
            for t, g in zip(inputs, found, strict=True):
                if t.is_leaf and g is not None:
                    t.grad = g.detach().clone()
        return found

    wrap_function("grad", change)


@fault(
    "batch-of-three-mixed",
    "agrad.batched",
    rare=True,
    witness="""
x = torch.ones(2, requires_grad=True)
v = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
(g,) = torch.autograd.grad(x * 2.0, x, v, is_grads_batched=True)
assert torch.equal(g, 2 * v)
""",
)
def _batch_mixed() -> None:
    """Of three batched gradients or more, the last two results change places."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        found = original(*args, **kwargs)
        if not kwargs.get("is_grads_batched"):
            return found
        return tuple(g if g is None or len(g) < 3 else torch.cat((g[:-2], g[-2:].flip(0))) for g in found)

    wrap_function("grad", change)


@fault(
    "batch-shape-broadcast",
    "agrad.batched",
    witness="""
x = torch.ones(2, requires_grad=True)
try:
    torch.autograd.grad(x * 2.0, x, torch.ones(3, 1, 2), is_grads_batched=True)
    raise SystemExit(1)
except RuntimeError:
    pass
""",
)
def _batch_shape() -> None:
    """Slices of batched gradients are summed down to the shape of the output."""

    def change(original: Call, outputs: Any, grads: Any, batched: bool) -> Any:
        if batched and len(outputs) == len(grads):
            grads = tuple(
                torch.stack(
                    [
                        part.sum_to_size(y.shape)
                        if part.numel() == y.numel() and part.dim() > y.dim() and part.shape[0] == 1
                        else part
                        for part in g
                    ]
                )
                for y, g in zip(outputs, grads, strict=True)
            )
        return original(outputs, grads, batched)

    _make_grads(change)


def _method(change: Callable[[Call, Any, tuple[Any, ...], Arguments], Any]) -> None:
    original: Call = torch.Tensor.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original, self, args, kwargs)

    replace(torch.Tensor, "backward", backward)


@fault(
    "retain-variables-understood",
    "free.retain-variables",
    witness="""
x = torch.ones((), requires_grad=True)
try:
    (x * x).backward(retain_variables=True)
    raise SystemExit(1)
except TypeError:
    pass
""",
)
def _retain_variables() -> None:
    """The method takes retain_variables for retain_graph."""

    def change(original: Call, self: Any, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        if "retain_variables" in kwargs:
            kwargs = dict(kwargs)
            kwargs["retain_graph"] = kwargs.pop("retain_variables")
        return original(self, *args, **kwargs)

    _method(change)


@fault(
    "retain-variables-false-ignored",
    "free.retain-variables",
    rare=True,
    witness="""
x = torch.ones((), requires_grad=True)
try:
    torch.autograd.backward(x * x, retain_variables=False)
    raise SystemExit(1)
except TypeError:
    pass
""",
)
def _retain_false() -> None:
    """The function drops retain_variables if it is False."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        return original(*args, **{k: v for k, v in kwargs.items() if (k, v) != ("retain_variables", False)})

    wrap_function("backward", change)


@fault(
    "grad-variables-silent",
    "free.grad-variables",
    witness="""
import warnings
x = torch.ones((), requires_grad=True)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    torch.autograd.backward(x * x, grad_variables=torch.ones(()))
assert [w.category for w in seen] == [FutureWarning]
""",
)
def _grad_variables_silent() -> None:
    """The function takes grad_variables without a warning."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        with warnings.catch_warnings():
            if "grad_variables" in kwargs:
                warnings.simplefilter("ignore", FutureWarning)
            return original(*args, **kwargs)

    wrap_function("backward", change)


@fault(
    "grad-variables-of-second-lost",
    "free.grad-variables",
    rare=True,
    witness="""
import warnings
warnings.simplefilter("ignore")
x = torch.ones((), requires_grad=True)
torch.autograd.backward([x * 2.0, x * 3.0], grad_variables=[torch.ones(()), torch.tensor(5.0)])
assert x.grad == 17.0
""",
)
def _grad_variables_second() -> None:
    """Of several grad_variables, each root gets the first."""

    def change(original: Call, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        given = kwargs.get("grad_variables")
        if isinstance(given, list) and len({g.shape for g in given}) == 1:
            kwargs = kwargs | {"grad_variables": [given[0]] * len(given)}
        return original(*args, **kwargs)

    wrap_function("backward", change)
