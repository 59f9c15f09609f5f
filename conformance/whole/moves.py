"""The kinds of statements, each as often as a byte picks it."""

from __future__ import annotations

from collections.abc import Callable

from autograd_conformance.whole.inference import infer
from autograd_conformance.whole.modules import module, optimize, zeroed
from autograd_conformance.whole.passes import backward, grad, second
from autograd_conformance.whole.functions import doubled, halves, marked, product
from autograd_conformance.whole.recorded import apply, checkpointed, detach
from autograd_conformance.whole.settings import flag, forget, hook, mode, reset, retain
from autograd_conformance.whole.tell import Author, Dials
from autograd_conformance.whole.writes import step, write

MOVES: tuple[Callable[[Author, Dials], None], ...] = (
    apply, apply, apply, apply, apply, apply, apply, backward, backward, backward, write, write, write, write,
    hook, hook, retain, grad, detach, second, second, reset, mode, flag, product, halves, marked, doubled, checkpointed, step, forget, apply,
    apply, apply, write, backward, module, module, optimize, zeroed, infer, infer,
)  # fmt: skip
"""One is chosen by a byte; the first are what a program shrinks to."""
