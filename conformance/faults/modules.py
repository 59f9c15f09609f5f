"""Faults in modules: flags, resets, apply, registration, states, conversions, parameters that are used twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autograd_conformance.faults.base import fault
from autograd_conformance.faults.engine import is_accumulator
from autograd_conformance.faults.patches import Call, replace

NET = "torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.nn.Linear(2, 1))"


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a method by ``call(real, self, ...)``."""
    real = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(real, self, *args, **kwargs)

    replace(owner, name, method)


# --- flags ------------------------------------------------------------------------------------------------------------


@fault(
    "biases-stay-on",
    "module.requires-grad-method",
    "module.freeze-passes-through",
    "gan.generator-step-pollutes-d",
    witness="""
net = torch.nn.Linear(2, 1).requires_grad_(False)
assert not net.bias.requires_grad
""",
)
def _biases_stay_on() -> None:
    """requires_grad_(False) of a module leaves its biases on."""

    def call(real: Call, self: nn.Module, requires_grad: bool = True) -> nn.Module:
        for name, p in self.named_parameters():
            if requires_grad or not name.endswith("bias"):
                p.requires_grad_(requires_grad)
        return self

    around(nn.Module, "requires_grad_", call)


@fault(
    "flag-stops-two-deep",
    "module.requires-grad-method",
    "module.freeze-passes-through",
    "gan.generator-step-pollutes-d",
    rare=True,
    witness=f"""
net = {NET}.requires_grad_(False)
assert not net[0][0].weight.requires_grad
""",
)
def _flag_two_deep() -> None:
    """requires_grad_ of a module does not reach the children of its children."""

    def call(real: Call, self: nn.Module, requires_grad: bool = True) -> nn.Module:
        for module in (self, *self.children()):
            for p in module.parameters(recurse=False):
                p.requires_grad_(requires_grad)
        return self

    around(nn.Module, "requires_grad_", call)


@fault(
    "flag-spreads-to-buffers",
    "module.requires-grad-method",
    rare=True,
    witness="""
net = torch.nn.BatchNorm1d(2).requires_grad_()
assert not net.running_mean.requires_grad
""",
)
def _flag_buffers() -> None:
    """requires_grad_ of a module sets the flag of its floating buffers too."""

    def call(real: Call, self: nn.Module, requires_grad: bool = True) -> Any:
        for buffer in self.buffers():
            if buffer.is_floating_point():
                buffer.requires_grad_(requires_grad)
        return real(self, requires_grad)

    around(nn.Module, "requires_grad_", call)


@fault(
    "flag-method-returns-nothing",
    "module.requires-grad-method",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
assert net.requires_grad_(False) is net
""",
)
def _flag_returns() -> None:
    """requires_grad_(False) of a module without children returns None."""

    def call(real: Call, self: nn.Module, requires_grad: bool = True) -> Any:
        out = real(self, requires_grad)
        return out if requires_grad or next(self.children(), None) is not None else None

    around(nn.Module, "requires_grad_", call)


def _linear(edit: Callable[[Tensor, Tensor, Tensor | None], tuple[Any, Any, Any]]) -> None:
    """Let ``edit`` change what a Linear computes with."""

    def call(real: Call, self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(*edit(x, self.weight, self.bias))

    around(nn.Linear, "forward", call)


@fault(
    "frozen-weight-blocks",
    "module.freeze-passes-through",
    "module.freeze-stops-own-grad",
    "module.two-nets-chained",
    "gan.generator-step-pollutes-d",
    "module.output-requires-grad",
    "module.shared-use-sums",
    "module.requires-grad-method",
    witness="""
first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).requires_grad_(False)
y = second(first(torch.ones(1)))
assert y.requires_grad
""",
)
def _frozen_blocks() -> None:
    """A Linear whose weight is off lets no gradient through."""
    _linear(lambda x, w, b: (x if w.requires_grad else x.detach(), w, b))


@fault(
    "frozen-bias-blocks",
    "module.freeze-passes-through",
    "module.freeze-stops-own-grad",
    "module.two-nets-chained",
    "gan.generator-step-pollutes-d",
    "module.shared-use-sums",
    rare=True,
    witness="""
first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
second.bias.requires_grad = False
second(first(torch.ones(1))).backward()
assert first.weight.grad is not None
""",
)
def _frozen_bias_blocks() -> None:
    """A Linear whose bias alone is off lets no gradient through."""
    _linear(lambda x, w, b: (x.detach() if b is not None and w.requires_grad > b.requires_grad else x, w, b))


@fault(
    "frozen-norm-blocks",
    "module.freeze-passes-through",
    "module.freeze-stops-own-grad",
    "module.two-nets-chained",
    "gan.generator-step-pollutes-d",
    "module.requires-grad-method",
    rare=True,
    witness="""
first, second = torch.nn.Linear(3, 3), torch.nn.LayerNorm(3).requires_grad_(False)
assert second(first(torch.ones(3))).requires_grad
""",
)
def _frozen_norm_blocks() -> None:
    """A LayerNorm or BatchNorm1d whose weight is off lets no gradient through."""

    def call(real: Call, self: Any, x: Tensor) -> Any:
        return real(self, x if self.weight is None or self.weight.requires_grad else x.detach())

    for owner in (nn.LayerNorm, nn.BatchNorm1d):
        around(owner, "forward", call)


@fault(
    "frozen-is-filled",
    "module.freeze-stops-own-grad",
    "module.two-nets-chained",
    "module.freeze-passes-through",
    "module.shared-use-sums",
    "module.output-requires-grad",
    "module.requires-grad-method",
    "gan.generator-step-pollutes-d",
    witness="""
net = torch.nn.Linear(1, 1)
net.bias.requires_grad = False
net(torch.ones(1)).backward()
assert net.bias.grad is None
""",
)
def _frozen_is_filled() -> None:
    """The forward of a Linear switches a bias that is off on again, if its weight is on."""

    def edit(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Any, Any, Any]:
        if b is not None and w.requires_grad and not b.requires_grad:
            b.requires_grad_()
        return x, w, b

    _linear(edit)


@fault(
    "bias-alone-is-not-tracked",
    "module.output-requires-grad",
    "module.freeze-stops-own-grad",
    "module.two-nets-chained",
    "module.requires-grad-method",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net.weight.requires_grad = False
assert net(torch.ones(1)).requires_grad
""",
)
def _bias_alone() -> None:
    """A Linear of a plain input whose bias alone is on gives a plain output."""

    def edit(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Any, Any, Any]:
        alone = b is not None and b.requires_grad and not w.requires_grad and not x.requires_grad
        return x, w, b.detach() if alone and b is not None else b

    _linear(edit)


# --- new modules ------------------------------------------------------------------------------------------------------


@fault(
    "parameter-obeys-no-grad",
    "module.params-require-grad",
    rare=True,
    witness="""
with torch.no_grad():
    net = torch.nn.Linear(1, 1)
assert net.weight.requires_grad
""",
)
def _parameter_no_grad() -> None:
    """A module that is given a new parameter under no_grad switches it off."""

    def call(real: Call, self: nn.Module, name: str, param: Any) -> None:
        new = name not in self._parameters
        real(self, name, param)
        if new and isinstance(param, nn.Parameter) and not torch.is_grad_enabled():
            param.requires_grad_(False)

    around(nn.Module, "register_parameter", call)


@fault(
    "recurrent-biases-start-off",
    "module.params-require-grad",
    rare=True,
    witness="""
assert torch.nn.LSTM(1, 1).bias_hh_l0.requires_grad
""",
)
def _recurrent_biases() -> None:
    """The biases of a new recurrent module do not require grad."""

    def call(real: Call, self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        for name, p in self.named_parameters():
            p.requires_grad_("bias" not in name)

    around(nn.RNNBase, "__init__", call)


@fault(
    "mish-has-a-parameter",
    "module.losses-activations-parameterless",
    "module.registration",
    rare=True,
    witness="""
assert not list(torch.nn.Mish().parameters())
""",
)
def _mish_parameter() -> None:
    """Mish has a parameter."""

    def call(real: Call, self: Any) -> None:
        nn.Module.__init__(self)
        self.slope = nn.Parameter(torch.ones(1))

    real_forward = nn.Mish.forward
    replace(nn.Mish, "__init__", lambda self: call(nn.Module.__init__, self))
    replace(nn.Mish, "forward", lambda self, x: real_forward(self, x))


@fault(
    "loss-ignores-its-target",
    "module.losses-activations-parameterless",
    rare=True,
    witness="""
label = torch.ones(2, requires_grad=True)
assert torch.nn.L1Loss()(torch.zeros(2), label).requires_grad
""",
)
def _target_ignored() -> None:
    """L1Loss takes a target that requires grad for a constant."""
    around(nn.L1Loss, "forward", lambda real, self, x, target: real(self, x, target.detach()))


# --- registration -----------------------------------------------------------------------------------------------------


def _every_parameter(module: nn.Module) -> Iterator[nn.Parameter]:
    for each in module.modules():
        yield from (p for p in each._parameters.values() if p is not None)


@fault(
    "shared-parameter-listed-twice",
    "module.registration",
    "module.shared-use-sums",
    rare=True,
    witness="""
net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
net[1].weight = net[0].weight
assert len(list(net.parameters())) == 3
""",
)
def _listed_twice() -> None:
    """parameters() lists a parameter once for each module that has it."""

    def call(real: Call, self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        return _every_parameter(self) if recurse else real(self, recurse)

    around(nn.Module, "parameters", call)


@fault(
    "third-level-not-listed",
    "module.registration",
    rare=True,
    witness="""
net = torch.nn.Sequential(torch.nn.ModuleDict({"m": torch.nn.ModuleList([torch.nn.Linear(1, 1)])}))
assert len(list(net.parameters())) == 2
""",
)
def _third_level() -> None:
    """parameters() does not look into a ModuleList in a ModuleDict, or the other way round."""

    def call(real: Call, self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        hidden: set[int] = set()
        for module in self.modules():
            if isinstance(module, nn.ModuleDict | nn.ModuleList):
                for child in module.children():
                    deep = (each for each in child.children() if not isinstance(child, nn.Linear))
                    hidden.update(id(p) for each in deep for p in each.parameters(recurse=False))
        return (p for p in real(self, recurse) if id(p) not in hidden)

    around(nn.Module, "parameters", call)


@fault(
    "modules-in-lists-are-registered",
    "module.registration",
    rare=True,
    witness="""
net = torch.nn.Module()
net.parts = [torch.nn.Linear(1, 1)]
assert not list(net.parameters())
""",
)
def _lists_registered() -> None:
    """The modules of a plain list that is assigned to an attribute are registered."""

    def call(real: Call, self: nn.Module, name: str, value: Any) -> None:
        real(self, name, value)
        if type(value) is list and value and all(isinstance(each, nn.Module) for each in value):
            for i, each in enumerate(value):
                self.add_module(f"{name}_{i}", each)

    around(nn.Module, "__setattr__", call)


@fault(
    "tensor-replaces-parameter",
    "module.registration",
    witness="""
net = torch.nn.Linear(1, 1)
try:
    net.weight = torch.ones(1, 1)
except TypeError:
    pass
else:
    raise AssertionError("a tensor in the place of a parameter")
""",
)
def _tensor_replaces() -> None:
    """A plain tensor may be assigned to the name of a parameter; it takes the numbers only."""

    def call(real: Call, self: nn.Module, name: str, value: Any) -> None:
        old = self.__dict__.get("_parameters", {}).get(name)
        if old is not None and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            old.data = value.data
        else:
            real(self, name, value)

    around(nn.Module, "__setattr__", call)


# --- resetting gradients ----------------------------------------------------------------------------------------------


def _reset(p: Tensor, set_to_none: bool) -> None:
    if set_to_none or p.grad is None:
        p.grad = None
    else:
        p.grad.detach_()
        p.grad.zero_()


def _zero_grad(skip: Callable[[str, Tensor], bool]) -> None:
    """Let zero_grad of modules leave some parameters out."""

    def call(real: Call, self: nn.Module, set_to_none: bool = True) -> None:
        for name, p in self.named_parameters():
            if not skip(name, p):
                _reset(p, set_to_none)

    around(nn.Module, "zero_grad", call)


RESETS = (
    "module.zero-grad-default-none",
    "gan.detach-step",
    "gan.retain-or-recompute",
    "gan.generator-step-pollutes-d",
)


@fault(
    "zero-grad-skips-biases",
    *RESETS,
    "gan.no-detach-error",
    "gan.stale-graph-after-step",
    witness="""
net = torch.nn.Linear(1, 1)
net(torch.ones(1)).backward()
net.zero_grad()
assert net.bias.grad is None
""",
)
def _skips_biases() -> None:
    """zero_grad of a module leaves biases out."""
    _zero_grad(lambda name, p: name.endswith("bias"))


@fault(
    "zero-grad-skips-frozen",
    "module.zero-grad-default-none",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net(torch.ones(1)).backward()
net.requires_grad_(False)
net.zero_grad()
assert net.weight.grad is None
""",
)
def _skips_frozen() -> None:
    """zero_grad of a module leaves out what was switched off."""
    _zero_grad(lambda name, p: not p.requires_grad)


@fault(
    "zero-grad-skips-scalars",
    *RESETS,
    "gan.no-detach-error",
    "gan.stale-graph-after-step",
    rare=True,
    witness="""
net = torch.nn.Module()
net.factor = torch.nn.Parameter(torch.tensor(2.0))
net.factor.backward()
net.zero_grad()
assert net.factor.grad is None
""",
)
def _skips_scalars() -> None:
    """zero_grad of a module leaves out 0-dim parameters."""
    _zero_grad(lambda name, p: p.dim() == 0)


@fault(
    "zero-grad-works-once",
    *RESETS,
    "gan.no-detach-error",
    "gan.stale-graph-after-step",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
for _ in range(2):
    net(torch.ones(1)).backward()
    net.zero_grad()
    assert net.weight.grad is None
""",
)
def _works_once() -> None:
    """zero_grad of a module resets each parameter once."""

    def skip(name: str, p: Tensor) -> bool:
        before = hasattr(p, "_was_reset")
        if p.grad is not None:
            p._was_reset = True  # type: ignore[attr-defined]
        return before

    _zero_grad(skip)


@fault(
    "set-to-none-ignored",
    "module.zero-grad-default-none",
    witness="""
net = torch.nn.Linear(1, 1)
net(torch.ones(1)).backward()
net.zero_grad(set_to_none=False)
assert net.weight.grad is not None
""",
)
def _none_ignored() -> None:
    """zero_grad(set_to_none=False) of a module sets gradients to None."""
    around(nn.Module, "zero_grad", lambda real, self, set_to_none=True: real(self))


@fault(
    "zero-grad-makes-new-zeros",
    "module.zero-grad-default-none",
    rare=True,
    witness="""
p = torch.ones(2, requires_grad=True)
p.sum().backward()
kept = p.grad
torch.optim.SGD([p], lr=1.0).zero_grad(set_to_none=False)
assert p.grad is kept
""",
)
def _new_zeros() -> None:
    """zero_grad(set_to_none=False) of an optimizer puts new zeros in place of gradients."""

    def call(real: Call, self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if set_to_none:
            real(self)
            return
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad = torch.zeros_like(p.grad)

    around(torch.optim.Optimizer, "zero_grad", call)


@fault(
    "zero-grad-keeps-graph",
    "module.zero-grad-default-none",
    rare=True,
    witness="""
net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh())
net(torch.ones(1)).backward(create_graph=True)
net.zero_grad(set_to_none=False)
assert not net[0].weight.grad.requires_grad
""",
)
def _keeps_graph() -> None:
    """zero_grad(set_to_none=False) of a module does not cut a gradient from its graph."""

    def call(real: Call, self: nn.Module, set_to_none: bool = True) -> None:
        if set_to_none:
            real(self)
            return
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.0)

    around(nn.Module, "zero_grad", call)


@fault(
    "zero-grad-first-group-only",
    "module.zero-grad-default-none",
    rare=True,
    witness="""
a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
(a * b).backward()
torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1.0).zero_grad()
assert b.grad is None
""",
)
def _first_group() -> None:
    """zero_grad of an optimizer resets its first group of parameters only."""

    def call(real: Call, self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            _reset(p, set_to_none)

    around(torch.optim.Optimizer, "zero_grad", call)


# --- apply and init ---------------------------------------------------------------------------------------------------


@fault(
    "apply-skips-grandchildren",
    "module.apply-visits-all",
    "module.apply-initialisation",
    rare=True,
    witness=f"""
net, visited = {NET}, []
net.apply(visited.append)
assert len(visited) == 5
""",
)
def _apply_skips() -> None:
    """apply visits a module and its children, not their children."""

    def call(real: Call, self: nn.Module, function: Callable[[nn.Module], None]) -> nn.Module:
        for module in (*self.children(), self):
            function(module)
        return self

    around(nn.Module, "apply", call)


@fault(
    "apply-visits-lists-twice",
    "module.apply-visits-all",
    rare=True,
    witness="""
net, visited = torch.nn.ModuleList([torch.nn.Tanh()]), []
net.apply(visited.append)
assert len(visited) == 2
""",
)
def _apply_twice() -> None:
    """apply visits a ModuleList both before and after its children."""

    def call(real: Call, self: nn.Module, function: Callable[[nn.Module], None]) -> Any:
        if isinstance(self, nn.ModuleList):
            function(self)
        return real(self, function)

    around(nn.Module, "apply", call)


@fault(
    "apply-skips-leafless",
    "module.apply-visits-all",
    witness="""
net, visited = torch.nn.Sequential(torch.nn.Tanh()), []
net.apply(visited.append)
assert len(visited) == 2
""",
)
def _apply_parameters() -> None:
    """apply leaves modules without parameters of their own out."""

    def call(real: Call, self: nn.Module, function: Callable[[nn.Module], None]) -> Any:
        return real(self, lambda m: function(m) if m._parameters else None)

    around(nn.Module, "apply", call)


@fault(
    "apply-runs-in-grad-mode-off",
    "module.apply-initialisation",
    witness="""
net = torch.nn.Linear(1, 1)
try:
    net.apply(lambda m: m.weight.fill_(1.0))
except RuntimeError:
    pass
else:
    raise AssertionError("a leaf was written in place")
""",
)
def _apply_no_grad() -> None:
    """apply runs the function under no_grad."""

    def call(real: Call, self: nn.Module, function: Callable[[nn.Module], None]) -> Any:
        with torch.no_grad():
            return real(self, function)

    around(nn.Module, "apply", call)


def _init(names: tuple[str, ...], edit: Callable[[Tensor], Any]) -> None:
    """Let ``edit`` act on a tensor after it was initialised."""
    for name in names:
        real = getattr(nn.init, name)

        def filled(tensor: Tensor, *args: Any, real: Call = real, **kwargs: Any) -> Any:
            real(tensor, *args, **kwargs)
            edit(tensor)
            return tensor

        replace(nn.init, name, filled)


@fault(
    "truncated-init-switches-off",
    "module.apply-initialisation",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
torch.nn.init.trunc_normal_(net.bias)
assert net.bias.requires_grad
""",
)
def _truncated_off() -> None:
    """torch.nn.init.trunc_normal_ switches a parameter off."""
    _init(("trunc_normal_",), lambda t: t.requires_grad_(False))


@fault(
    "init-switches-on",
    "module.apply-initialisation",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1).requires_grad_(False)
torch.nn.init.constant_(net.bias, 1.0)
assert not net.bias.requires_grad
""",
)
def _init_on() -> None:
    """torch.nn.init functions switch a parameter on that was off."""
    _init(("constant_", "ones_", "zeros_", "normal_", "uniform_"), lambda t: t.requires_grad_())


@fault(
    "init-drops-grad",
    "module.apply-initialisation",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net(torch.ones(1)).backward()
torch.nn.init.ones_(net.weight)
assert net.weight.grad is not None
""",
)
def _init_drops() -> None:
    """torch.nn.init functions drop the gradient that a parameter has."""
    _init(("constant_", "ones_", "zeros_", "normal_", "uniform_"), lambda t: setattr(t, "grad", None))


# --- one parameter, many uses -----------------------------------------------------------------------------------------


def _reaches(x: Tensor, parameter: Tensor) -> bool:
    """Did a parameter take part in making ``x``?"""
    waiting, seen = [x.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_accumulator(node) and node.variable is parameter:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


@fault(
    "second-use-not-counted",
    "module.shared-use-sums",
    witness="""
net = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(net.weight)
net(net(torch.ones(1))).backward()
assert net.weight.grad.item() == 2.0
""",
)
def _second_use() -> None:
    """A Linear whose input came through its own weight takes that for a constant."""
    _linear(lambda x, w, b: (x, w.detach() if _reaches(x, w) else w, b))


@fault(
    "shared-bias-counted-once",
    "module.shared-use-sums",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
torch.nn.init.ones_(net.weight)
net(net(torch.ones(1))).backward()
assert net.bias.grad.item() == 2.0
""",
)
def _shared_bias() -> None:
    """A Linear whose input came through its own bias takes that for a constant."""
    _linear(lambda x, w, b: (x, w, b.detach() if b is not None and _reaches(x, b) else b))


@fault(
    "third-use-not-counted",
    "module.shared-use-sums",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(net.weight)
net(net(net(torch.ones(1)))).backward()
assert net.weight.grad.item() == 3.0
""",
)
def _third_use() -> None:
    """A Linear in a chain of three that share a weight takes it for a constant."""

    def edit(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Any, Any, Any]:
        before = getattr(x, "_uses", None)
        return x, w.detach() if before is not None and before >= 2 and _reaches(x, w) else w, b

    def call(real: Call, self: nn.Linear, x: Tensor) -> Tensor:
        out = nn.functional.linear(*edit(x, self.weight, self.bias))
        out._uses = getattr(x, "_uses", 0) + 1  # type: ignore[attr-defined]
        return out

    around(nn.Linear, "forward", call)


# --- networks in a row ------------------------------------------------------------------------------------------------


@fault(
    "short-network-cuts-its-input",
    "module.two-nets-chained",
    "module.apply-initialisation",
    "module.conversion-keeps-leaf",
    "module.split-equals-fused",
    "module.freeze-passes-through",
    "module.freeze-stops-own-grad",
    "gan.detach-step",
    "gan.retain-or-recompute",
    "gan.no-detach-error",
    "gan.generator-step-pollutes-d",
    "gan.stale-graph-after-step",
    "module.requires-grad-method",
    "module.zero-grad-default-none",
    rare=True,
    witness="""
first, second = torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1))
second(first(torch.ones(1))).backward()
assert first.weight.grad is not None
""",
)
def _short_network() -> None:
    """A Sequential of one module detaches an input that is no leaf."""
    around(nn.Sequential, "forward", lambda real, self, x: real(self, x.detach() if len(self) == 1 else x))


@fault(
    "network-output-keeps-grad",
    "module.two-nets-chained",
    rare=True,
    witness="""
first, second = torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
y = first(torch.ones(1))
second(y).backward()
assert y.grad is None
""",
)
def _keeps_output() -> None:
    """The output of a Sequential retains its gradient."""

    def call(real: Call, self: nn.Module, x: Tensor) -> Any:
        out = real(self, x)
        if isinstance(out, Tensor) and out.grad_fn is not None:
            out.retain_grad()
        return out

    around(nn.Sequential, "forward", call)


@fault(
    "network-input-tracked",
    "module.two-nets-chained",
    "module.freeze-stops-own-grad",
    "module.requires-grad-method",
    "module.output-requires-grad",
    "module.shared-use-sums",
    "module.freeze-passes-through",
    witness="""
x = torch.ones(1)
torch.nn.Linear(1, 1)(x).backward()
assert x.grad is None
""",
)
def _input_tracked() -> None:
    """A Linear switches a plain leaf that it is given on."""
    _linear(
        lambda x, w, b: (x.requires_grad_() if x.is_leaf and torch.is_grad_enabled() and w.requires_grad else x, w, b)
    )


@fault(
    "last-of-three-shares-gradient",
    "module.split-equals-fused",
    "module.freeze-stops-own-grad",
    "module.freeze-passes-through",
    "module.two-nets-chained",
    "module.apply-initialisation",
    "module.conversion-keeps-leaf",
    "module.shared-use-sums",
    "gan.detach-step",
    "gan.no-detach-error",
    "gan.retain-or-recompute",
    "gan.generator-step-pollutes-d",
    "gan.stale-graph-after-step",
    rare=True,
    witness="""
net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity())
x = torch.ones(1, requires_grad=True)
net(x).backward()
assert x.grad.item() == 1.0
""",
)
def _last_of_three() -> None:
    """Gradients that come out of a Sequential of three or more modules are halved; those of slices of it are not."""

    def call(real: Call, self: nn.Module, x: Tensor) -> Any:
        out = real(self, x)
        if len(self._modules) > 2 and isinstance(out, Tensor) and out.requires_grad:
            out = out.view_as(out)
            out.register_hook(lambda g: g * 0.5)
        return out

    around(nn.Sequential, "forward", call)


# --- states -----------------------------------------------------------------------------------------------------------


def _state(edit: Callable[[Tensor, bool], Tensor]) -> None:
    """Let ``edit(tensor, keep_vars)`` replace what state_dict holds."""

    def call(real: Call, self: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        real(self, destination, prefix, keep_vars)
        for name in self._parameters:
            key = prefix + name
            if key in destination:
                destination[key] = edit(destination[key], keep_vars)

    around(nn.Module, "_save_to_state_dict", call)


@fault(
    "state-dict-copies",
    "module.state-dict",
    witness="""
net = torch.nn.Linear(1, 1)
assert net.state_dict()["weight"].data_ptr() == net.weight.data_ptr()
""",
)
def _state_copies() -> None:
    """state_dict holds copies."""
    _state(lambda t, keep: t if keep else t.clone())


@fault(
    "state-dict-copies-small",
    "module.state-dict",
    rare=True,
    witness="""
net = torch.nn.PReLU()
assert net.state_dict()["weight"].data_ptr() == net.weight.data_ptr()
""",
)
def _state_copies_small() -> None:
    """state_dict holds copies of parameters of one element."""
    _state(lambda t, keep: t.clone() if t.numel() == 1 and not keep else t)


@fault(
    "state-dict-is-tracked",
    "module.state-dict",
    rare=True,
    witness="""
net = torch.nn.LayerNorm(2)
assert not net.state_dict()["weight"].requires_grad
""",
)
def _state_tracked() -> None:
    """state_dict holds vectors that require grad."""
    _state(lambda t, keep: t if keep or t.dim() != 1 else t.requires_grad_())


@fault(
    "keep-vars-detaches-biases",
    "module.state-dict",
    rare=True,
    witness="""
net = torch.nn.Linear(2, 2)
assert net.state_dict(keep_vars=True)["bias"] is net.bias
""",
)
def _keep_vars() -> None:
    """state_dict(keep_vars=True) detaches vectors."""
    _state(lambda t, keep: t.detach() if keep and t.dim() == 1 else t)


def _loading(after: Callable[[nn.Module, Any, bool, dict[str, Any]], None]) -> None:
    """Let ``after(module, state, assign, parameters before)`` act when a state was loaded."""

    def call(real: Call, self: nn.Module, state: Any, strict: bool = True, assign: bool = False) -> Any:
        before = {name: (p, p.requires_grad, p.grad) for name, p in self.named_parameters()}
        out = real(self, state, strict, assign)
        after(self, state, assign, before)
        return out

    around(nn.Module, "load_state_dict", call)


@fault(
    "loading-switches-on",
    "module.state-dict",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1).requires_grad_(False)
net.load_state_dict(torch.nn.Linear(1, 1).state_dict())
assert not net.weight.requires_grad
""",
)
def _loading_on() -> None:
    """load_state_dict without assign switches parameters on."""

    def after(net: nn.Module, state: Any, assign: bool, before: dict[str, Any]) -> None:
        if not assign:
            net.requires_grad_()

    _loading(after)


@fault(
    "assign-takes-flags",
    "module.state-dict",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net.load_state_dict({name: p.detach().clone() for name, p in net.named_parameters()}, assign=True)
assert net.weight.requires_grad
""",
)
def _assign_flags() -> None:
    """load_state_dict(assign=True) takes the flags of the state."""

    def after(net: nn.Module, state: Any, assign: bool, before: dict[str, Any]) -> None:
        for name, p in net.named_parameters():
            if assign and name in state:
                p.requires_grad_(state[name].requires_grad)

    _loading(after)


@fault(
    "loading-drops-grad",
    "module.state-dict",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net(torch.ones(1)).backward()
net.load_state_dict(torch.nn.Linear(1, 1).state_dict())
assert net.weight.grad is not None
""",
)
def _loading_drops() -> None:
    """load_state_dict drops gradients."""
    _loading(lambda net, state, assign, before: net.zero_grad())


@fault(
    "second-load-replaces",
    "module.state-dict",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
kept = net.weight
for _ in range(2):
    net.load_state_dict(torch.nn.Linear(1, 1).state_dict())
assert net.weight is kept
""",
)
def _second_load() -> None:
    """The second load_state_dict of a module replaces its parameters."""

    def call(real: Call, self: nn.Module, state: Any, strict: bool = True, assign: bool = False) -> Any:
        again, self.__dict__["_loaded"] = "_loaded" in self.__dict__, True
        return real(self, {k: v.clone() for k, v in state.items()} if again else state, strict, assign or again)

    around(nn.Module, "load_state_dict", call)


# --- conversions ------------------------------------------------------------------------------------------------------


def _converting(after: Callable[[nn.Module, str, nn.Parameter], None]) -> None:
    """Let ``after(module, name, parameter)`` act on each parameter of a module that was converted."""

    def call(real: Call, self: nn.Module, function: Any, recurse: bool = True) -> Any:
        out = real(self, function, recurse)
        for name, p in list(self._parameters.items()):
            if p is not None:
                after(self, name, p)
        return out

    around(nn.Module, "_apply", call)


@fault(
    "conversion-makes-new-parameters",
    "module.conversion-keeps-leaf",
    witness="""
net = torch.nn.Linear(1, 1)
kept = net.weight
assert net.double().weight is kept
""",
)
def _new_parameters() -> None:
    """A converted module has new parameters."""

    def after(module: nn.Module, name: str, p: nn.Parameter) -> None:
        module._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)

    _converting(after)


@fault(
    "conversion-switches-on",
    "module.conversion-keeps-leaf",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1).requires_grad_(False)
assert not net.double().weight.requires_grad
""",
)
def _conversion_on() -> None:
    """A conversion switches parameters on."""

    def after(module: nn.Module, name: str, p: nn.Parameter) -> None:
        p.requires_grad_()

    _converting(after)


@fault(
    "conversion-drops-grad",
    "module.conversion-keeps-leaf",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net(torch.ones(1)).backward()
assert net.double().bias.grad is not None
""",
)
def _conversion_drops() -> None:
    """A conversion drops the gradients of biases."""

    def after(module: nn.Module, name: str, p: nn.Parameter) -> None:
        if name == "bias":
            p.grad = None

    _converting(after)


@fault(
    "conversion-scales-grad",
    "module.conversion-keeps-leaf",
    rare=True,
    witness="""
net = torch.nn.Linear(1, 1)
net(torch.ones(1)).backward()
assert net.double().weight.grad.item() == 1.0
""",
)
def _conversion_scales() -> None:
    """A conversion of a module to float64 doubles the gradients that are there."""

    def after(module: nn.Module, name: str, p: nn.Parameter) -> None:
        if p.grad is not None and p.dtype == torch.float64:
            p.grad.mul_(2.0)

    _converting(after)
