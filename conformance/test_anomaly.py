"""Area anomaly: the mode that looks for nan in backward."""

from __future__ import annotations

import numpy as np

from autograd_conformance.modes import ERRORS
from autograd_conformance.paper import Array, Paper
from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage

# Managers, whether they switch the mode on, and whether it then looks for nan.
MANAGERS: tuple[tuple[str, bool, bool], ...] = (
    ("torch.autograd.detect_anomaly()", True, True),
    ("torch.autograd.detect_anomaly(check_nan=False)", True, False),
    ("torch.autograd.set_detect_anomaly(True)", True, True),
    ("torch.autograd.set_detect_anomaly(False)", False, True),
    ("torch.autograd.set_detect_anomaly(True, check_nan=False)", True, False),
    ("torch.autograd.detect_anomaly(check_nan=True)", True, True),
)
# Ops whose derivative at zero is infinite, so that a gradient of zero becomes nan.
STEEP = (
    "h.sqrt()",
    "h.log()",
    "h.reciprocal()",
    "h.rsqrt()",
    "h ** 0.5",
    "h.detach() / h",
    "Steep.apply(h)",
)
HIDDEN = ("(y * 0.0).sum()", "torch.where(h > 0, y, 0.0).sum()", "y.masked_fill(h <= 0, 0.0).sum()")
CUSTOM = """class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 1.0
    @staticmethod
    def backward(ctx, g):
        return g * 0.0 / 0.0"""
# Ways to run backward from ``z``, which leave a gradient in ``g``.
CALLS = (
    "g, = torch.autograd.grad(z, {t}, retain_graph=True)",
    "g, = torch.autograd.grad(z, [{t}], create_graph=True)",
    "z.backward(retain_graph=True, inputs=[h])\ng, h.grad = h.grad, None",
    "g, = torch.autograd.grad([z, z], [{t}], retain_graph=True)",
)
STATE = "(torch.is_anomaly_enabled(), torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled())"


@scene("anomaly.nan-detection")
def test_nan_detection(s: Stage) -> None:
    """A nan that backward makes raises where it is looked for; all else is as without, and the setting comes back."""
    t = s.choose([t for t in s.tracked[::-1] if np.size(t.value) and np.all(np.isfinite(t.value))])
    s.play()
    mask = np.ones(t.shape)
    flat = mask.reshape(-1)
    flat[s.number(0, flat.size - 1)] = 0.0
    if s.flip():
        s.do("torch.autograd.set_detect_anomaly(True, check_nan=False)")
        before = (True, False)
    else:
        before = (False, False)
    s.do(f"m = {s.tensor(mask, t.dtype)}\nh = {t.name} * {t.name} * m")
    op = s.choose(STEEP)
    if op.startswith("Steep"):
        s.do(CUSTOM)
    s.do(f"y = {op}\nz = {s.choose(HIDDEN)}")
    total = np.zeros(t.shape)
    for _ in range(s.number(1, 3)):
        chosen = [s.choose(MANAGERS) for _ in range(s.number(1, 2))]
        head = f"with {', '.join(text for text, _, _ in chosen)}:"
        state = chosen[-1][1], chosen[-1][1] and chosen[-1][2]
        what = s.choose(("nan", "finite", "nan", "warns", "raises"))
        if what == "nan":
            _makes_nan(s, t, head, state)
        elif what == "finite":
            total = _finite(s, t, head, state, total)
        elif what == "warns":
            _warns(s)
        else:
            error = s.choose(ERRORS)
            s.do(f"try:\n    {head}\n        state = {STATE}\n        raise {error}\nexcept {error}:\n    pass")
            s.equal("state", state, "the innermost one decides")
        s.equal(STATE, before, "the setting from before is back")
    if before[0]:
        s.do("torch.autograd.set_detect_anomaly(False)")
        s.equal(STATE, (False, False), "a plain call holds until the next one")


def _makes_nan(s: Stage, t: Paper, head: str, state: tuple[bool, bool]) -> None:
    """Backward through the steep op: it must raise, or hand the nan on."""
    call = s.choose(CALLS).format(t=t.name)
    block = s.block_source(head, f"state = {STATE}", call)
    if state[1]:
        lines = [f"    {line}" for line in block.splitlines()]
        s.do("\n".join(["said = ''", "try:", *lines, "except RuntimeError as error:", "    said = str(error)"]))
        s.true("'returned nan values' in said", "the derivative is infinite where the gradient is zero")
        s.true("y.grad_fn.name() in said", "the message names the node")
    else:
        s.succeeds(block, "nobody looks for nan")
        s.true("g.isnan().any().item()", "nothing times infinity")
    s.equal("state", state, "the innermost one decides")


def _finite(s: Stage, t: Paper, head: str, state: tuple[bool, bool], total: Array) -> Array:
    """Backward without nan; its forward may run in the mode, too."""
    factor, within = s.factor(), s.flip()
    forward = f"r = ({t.name} * {factor}).sum()"
    if not within:
        s.do(forward)
    lines = [forward] if within else []
    s.succeeds(s.block_source(head, *lines, f"state = {STATE}", "r.backward(retain_graph=True)"), "there is no nan")
    s.equal("state", state, "the innermost one decides")
    total = total + factor
    grads = s.grads((t, total))
    for leaf in s.leaves:
        if leaf.requires_grad:
            s.close(f"{leaf.name}.grad", grads.get(leaf.name), "the gradients that are due without the mode")
    return total


def _warns(s: Stage) -> None:
    manager = s.choose(("torch.autograd.detect_anomaly()", "torch.autograd.detect_anomaly(check_nan=False)"))
    s.do("import warnings")
    s.block(
        "with warnings.catch_warnings(record=True) as caught:",
        "warnings.simplefilter('always')",
        f"with {manager}:\n    pass",
    )
    s.true("any(issubclass(w.category, UserWarning) for w in caught)", "detect_anomaly warns when it is entered")
