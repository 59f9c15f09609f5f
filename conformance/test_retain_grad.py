"""Area retain-grad: gradients of tensors that are no leaves, kept where somebody asked for them."""

from __future__ import annotations

from autograd_conformance.scenes import scene
from autograd_conformance.stage import Stage


@scene("retain-grad.populates")
def test_populates(s: Stage) -> None:
    """A retained non-leaf gets the gradient of the root with respect to it, however many are retained."""
    root = s.root()
    kept = s.some([t for t in s.above(root, root_too=True) if t.node is not None])
    s.play()
    for t in kept:
        s.do(f"{t.name}.retain_grad()")
    grads = s.grads((root, s.backward(root)))
    for t in kept:
        s.close(
            f"{t.name}.grad", grads[t.name], f"{t.name} retains its gradient, which is that of the root by {t.name}"
        )
