"""The kinds of statements, each as often as a byte picks it; a program has a theme, so that things meet that rarely do."""

from __future__ import annotations

from collections.abc import Callable

from autograd_conformance.whole.functions import doubled, halves, marked, product
from autograd_conformance.whole.inference import infer
from autograd_conformance.whole.modules import module, optimize, train, zeroed
from autograd_conformance.whole.passes import backward, grad, second
from autograd_conformance.whole.recorded import apply, checkpointed, detach, look
from autograd_conformance.whole.settings import flag, forget, hook, mode, reset, retain
from autograd_conformance.whole.tell import Author, Dials
from autograd_conformance.whole.writes import step, write

Move = Callable[[Author, Dials], None]
_ALL: tuple[Move, ...] = (
    apply, apply, apply, apply, apply, apply, apply, backward, backward, backward, write, write, write, write,
    hook, hook, retain, grad, detach, second, second, reset, mode, flag, product, halves, marked, doubled, checkpointed,
    step, forget, apply, apply, apply, write, backward, module, module, optimize, zeroed, infer, infer, train, look,
)  # fmt: skip
_WATCHED: tuple[Move, ...] = (
    apply, apply, apply, apply, backward, backward, backward, hook, hook, hook, hook, retain, grad, grad, checkpointed,
    checkpointed, product, halves, marked, second, forget, write, module, mode,
)  # fmt: skip
_WRITTEN: tuple[Move, ...] = (
    apply, apply, apply, look, look, look, backward, backward, backward, write, write, write, write, write, detach, hook, doubled,
    product, reset, infer, mode, flag, checkpointed, second, step,
)  # fmt: skip
_TRAINED: tuple[Move, ...] = (
    apply, apply, apply, backward, backward, train, train, train, module, module, module, optimize, optimize, zeroed, reset,
    hook, write, retain, grad, forget, halves, checkpointed,
)  # fmt: skip
THEMES: tuple[tuple[Move, ...], ...] = (_ALL, _ALL, _ALL, _WATCHED, _WATCHED, _WRITTEN, _WRITTEN, _TRAINED)
"""Per theme the kinds of statements: one is chosen by a byte, and the first are what a program shrinks to."""
