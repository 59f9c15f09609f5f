"""Where a claim writes its script: it reads the graph on paper, turns dials, adds lines and says what is due. No torch.

A claim that is judged on scenes is a function of a :class:`Stage`. It is called anew for each scene, and again with
random rounding where a number is not as due, so it must be a pure function of the scene.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from autograd_conformance.algebra import Differentiable, Traced, gradient
from autograd_conformance.ops import ADDED
from autograd_conformance.oracle import predict
from autograd_conformance.paper import Array, Due, Noise, Paper
from autograd_conformance.program import Apply, Constant, Leaf, Statement
from autograd_conformance.reports.statements import constant_source, statement_source
from autograd_conformance.reverse import Rewrite, cotangents, traced
from autograd_conformance.scene import Check, CheckKind, Line, Scene, Script

T = TypeVar("T")
FACTORS = (2.0, -1.0, 0.5, 3.0, -0.25)


class Unfit(Exception):
    """A scene that a claim can do nothing with: it has no tensor of the kind that the claim is about, say."""


class DeviceLike(Protocol):
    """What a stage has to know of a device."""

    @property
    def name(self) -> str:
        """Torch's device string."""

    def has(self, trait: str) -> bool:
        """Does the device have a trait?"""


class Stage:
    """The desk of a claim: one scene, one device, one script in the making.

    Args:
        scene: the graph and the dials.
        device: where the script is to run.
        noise: random rounding on paper, or None.
        due: the graph on paper, for whoever has it already.

    """

    def __init__(self, scene: Scene, device: DeviceLike, *, noise: Noise | None = None, due: Due | None = None) -> None:
        self.scene, self.device, self.noise, self._due = scene, device, noise, due
        self.script = Script()
        self.narrow = False  # set by whoever adds float32 of its own: the checks that follow allow for its rounding
        self.mark = ""  # set by whoever knows that an implementation deviates: the checks that follow carry it
        self._turned = 0
        self._names: dict[str, int] = {}

    # --- choices --------------------------------------------------------------------------------------------------

    def choose(self, options: Sequence[T]) -> T:
        """One of the options, by the next dial; the first is what counterexamples shrink to.

        Raises:
            Unfit: there is none.

        """
        if not options:
            raise Unfit
        dials, at = self.scene.dials, self._turned
        self._turned += 1
        dial = dials[at] if at < len(dials) else 0
        return options[dial * len(options) // 256]

    def flip(self) -> bool:
        """False or True, by the next dial."""
        return self.choose((False, True))

    def number(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included, by the next dial."""
        return self.choose(range(low, high + 1))

    def factor(self) -> float:
        """A number that is neither 0 nor 1, and exact in every dtype."""
        return self.choose(FACTORS)

    def some(self, options: Sequence[T], *, least: int = 1) -> list[T]:
        """At least ``least`` of the options, in their order, by one dial each."""
        chosen = [self.flip() for _ in options]
        missing = least - sum(chosen)
        for i in range(len(options)):
            if missing > 0 and not chosen[i]:
                chosen[i], missing = True, missing - 1
        if missing > 0:
            raise Unfit
        return [option for option, taken in zip(options, chosen, strict=True) if taken]

    def require(self, condition: object) -> None:
        """Give the scene up unless the condition holds.

        Raises:
            Unfit: it does not.

        """
        if not condition:
            raise Unfit

    @property
    def added(self) -> bool:
        """Does the graph contain ops that users added? Some claims promise more of torch's own."""
        names = {op.name for op in ADDED}
        return any(isinstance(s, Apply) and s.op in names for s in self.scene.graph)

    def name(self, stem: str) -> str:
        """A name that nothing in the script has: the stem, and a number from the second one on."""
        count = self._names[stem] = self._names.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}{count}"

    # --- the graph on paper ---------------------------------------------------------------------------------------

    @cached_property
    def due(self) -> Due:
        """The graph on paper."""
        return self._due or predict(self.scene.graph, self.noise)

    @cached_property
    def tensors(self) -> list[Paper]:
        """All floating tensors of the graph in the order in which they are made, each once."""
        unique = {id(t): t for t in self.due.tensors.values() if t.dtype.startswith("float")}
        return list(unique.values())

    @property
    def leaves(self) -> list[Paper]:
        """Floating tensors that the user makes, whatever their flag."""
        made = {s.name for s in self.scene.graph if isinstance(s, Leaf)}
        return [t for t in self.tensors if t.name in made and t.is_leaf]

    @property
    def tracked(self) -> list[Paper]:
        """Tensors that require grad, leaves or not."""
        return [t for t in self.tensors if t.requires_grad]

    @property
    def interior(self) -> list[Paper]:
        """Tensors that a recorded op made."""
        return [t for t in self.tensors if t.node is not None]

    def root(self, *, interior: bool = True, empty: bool = False) -> Paper:
        """A tensor to differentiate: one that requires grad, the newest first.

        Raises:
            Unfit: there is none.

        """
        fitting = [t for t in (self.interior if interior else self.tracked) if empty or np.size(t.value)]
        return self.choose(fitting[::-1])

    def above(self, root: Paper, *, root_too: bool = False) -> list[Paper]:
        """Tensors that backward from a root reaches, in the order of the graph."""
        reached = self.grads((root, np.ones(root.shape)))
        return [t for t in self.tensors if t.name in reached and (root_too or t is not root)]

    def grads(self, *roots: tuple[Paper, Array], rewrite: Mapping[str, Rewrite] | None = None) -> dict[str, Array]:
        """The gradient of each tensor that backward from the roots reaches; see :func:`reverse.cotangents`."""
        return cotangents(roots, rewrite=rewrite, noise=self.noise)

    @cached_property
    def differentiable(self) -> dict[str, Traced]:
        """Every tensor as a value that can be differentiated to any order."""
        return traced(self.scene.graph, self.noise)

    def derivative(self, root: Traced, seed: Any, wrt: Sequence[Traced]) -> list[Traced]:
        """Gradients as values that can be differentiated again; zeros where ``root`` does not depend."""
        found: list[Traced] = gradient(root, seed, wrt, Differentiable)
        return found

    # --- lines ----------------------------------------------------------------------------------------------------

    def play(self, statements: Iterable[Statement] | None = None) -> None:
        """Add the statements of the graph, or those that are given."""
        self.script.items.extend(self.scene.graph if statements is None else statements)

    def play_leaves(self) -> None:
        """Add the statements that make leaves; the rest is for :meth:`rest`."""
        self.play(s for s in self.scene.graph if isinstance(s, Leaf))

    def rest(self) -> list[Statement]:
        """The statements of the graph that make no leaves."""
        return [s for s in self.scene.graph if not isinstance(s, Leaf)]

    def source(self, statement: Statement) -> str:
        """A statement of the graph as a line of Python, to be put into a block."""
        return statement_source(statement, self.device.name)

    def do(self, text: str) -> int:
        """Add lines of Python that must not raise; returns the index of the item."""
        self.script.items.append(Line(text))
        return len(self.script.items) - 1

    def may(self, text: str) -> int:
        """Add lines that may raise or not: nobody promises."""
        self.script.items.append(Line(text, "may"))
        return len(self.script.items) - 1

    def raises(self, text: str, error: str, because: str, *, fragment: str = "") -> int:
        """Add lines that must raise an exception of a class (``"RuntimeError"``), perhaps with a word in its message."""
        self.script.items.append(Line(text, "must"))
        return self._check("", error, "raises", because, fragment=fragment)

    def succeeds(self, text: str, because: str) -> int:
        """Add lines whose success is itself what the claim promises."""
        self.do(text)
        return self._check("", "", "raises", because)

    def block(self, head: str, *bodies: str | Statement) -> int:
        """Add a compound statement: ``head`` such as ``with torch.no_grad():`` and its lines."""
        return self.do(self.block_source(head, *bodies))

    def block_source(self, head: str, *bodies: str | Statement) -> str:
        """The source of a compound statement."""
        texts = [body if isinstance(body, str) else self.source(body) for body in bodies] or ["pass"]
        inner = [f"    {line}" for text in texts for line in text.splitlines()]
        return "\n".join([head, *inner])

    # --- tensors in lines -----------------------------------------------------------------------------------------

    @property
    def on(self) -> str:
        """``", device='cuda:0'"``, to go into a call that makes a tensor; empty for cpu."""
        return "" if self.device.name == "cpu" else f", device={self.device.name!r}"

    @property
    def to(self) -> str:
        """``".to('cuda:0')"``, for what is made elsewhere, a module say; empty for cpu."""
        return "" if self.device.name == "cpu" else f".to({self.device.name!r})"

    @property
    def wide(self) -> str:
        """The widest floating dtype of the device: ``float64``, or ``float32``."""
        return "float64" if self.device.has("float64") else "float32"

    def tensor(self, values: Any, dtype: str = "", *, requires_grad: bool = False) -> str:
        """The source of a call that makes a tensor of these numbers (default dtype: :attr:`wide`)."""
        array = np.asarray(values, dtype=np.float64)
        constant = Constant(tuple(array.shape), dtype or self.wide, tuple(array.ravel().tolist()))
        return constant_source(constant, self.device.name, requires_grad=requires_grad)

    def numbers(self, shape: Sequence[int]) -> Array:
        """Exact numbers between -2 and 2, no two neighbours equal, none of them zero; which ones a dial says."""
        size, seed = int(np.prod(shape)), self.number(0, 15)
        return np.array([(2 * ((seed * 5 + i * 7) % 16) - 15) / 8 for i in range(size)]).reshape(tuple(shape))

    def seed(self, root: Paper) -> tuple[str, Array]:
        """A ``gradient`` argument for a root: the text to put into the call, and its numbers.

        The text is empty for a root of one element, half of the time: then backward takes 1.
        """
        if np.size(root.value) == 1 and not self.flip():
            return "", np.ones(root.shape)
        values, name = self.numbers(root.shape), self.name("v")
        self.do(f"{name} = {self.tensor(values, root.dtype)}")
        return name, values

    def backward(self, root: Paper, *options: str) -> Array:
        """Add ``root.backward(v, options)``; returns the numbers of ``v``."""
        text, values = self.seed(root)
        arguments = ", ".join([*([text] if text else []), *options])
        self.do(f"{root.name}.backward({arguments})")
        return values

    # --- what is due after the last item --------------------------------------------------------------------------

    def equal(self, probe: str, due: Any, because: str, *, telling: bool = True) -> None:
        """``probe`` must be equal to a plain value: a bool, number, text, None, or lists and tuples of these."""
        self._check(probe, due, "equal", because, telling=telling)

    def true(self, probe: str, because: str) -> None:
        """``probe`` must be True."""
        self.equal(probe, True, because)

    def false(self, probe: str, because: str) -> None:
        """``probe`` must be False."""
        self.equal(probe, False, because)

    def same(self, one: str, other: str, because: str) -> None:
        """Two tensors must be equal bit by bit. Left out on devices without values."""
        if self.device.has("values"):
            self.true(f"torch.equal({one}, {other})", because)

    def close(self, probe: str, due: Array | None, because: str) -> None:
        """A tensor must have these numbers, up to rounding; None: it must be None. Numbers are left out without values."""
        if due is None:
            self._check(probe, None, "close", because)
        elif self.device.has("values"):
            telling = bool(np.any(np.asarray(due)))
            self._check(probe, np.array(due, dtype=np.float64), "close", because, telling=telling)
        else:
            self.equal(f"{probe} is not None", True, because)

    def _check(
        self, probe: str, due: Any, kind: CheckKind, because: str, *, fragment: str = "", telling: bool = True
    ) -> int:
        at = len(self.script.items) - 1
        self.script.checks.append(Check(at, probe, due, kind, because, fragment, telling, self.narrow, self.mark))
        return at


Write = Callable[[Stage], None]


def ops_of(statements: Iterable[Statement]) -> list[Apply]:
    """The ops among some statements."""
    return [s for s in statements if isinstance(s, Apply)]
