"""The words for scenes: a graph and a few dials, out of which the test of a claim writes a script. No torch.

A graph alone cannot say everything that autograd promises: hooks, modes, modules and optimizers are used by programs
with statements of their own. Their programs are scenes. A :class:`Scene` is plain data; what a claim makes of it is a
:class:`Script`: statements of the graph and lines of Python in the order in which they run, and checks between them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from autograd_conformance.program import Program, ProgramError, Statement

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """What a script is made of.

    Attributes:
        graph: leaves and ops, no passes.
        dials: one byte for each choice that the script has to make; choices beyond them take the first option.
        claim: id of the claim whose script it is; empty for a scene that any claim of its family may use.
        lines: the script as it ran, a statement each; empty until somebody asked for it.
        raising: indices of the lines that are to raise, or may.

    """

    graph: Program
    dials: tuple[int, ...] = ()
    claim: str = ""
    lines: tuple[str, ...] = field(default=(), compare=False)
    raising: tuple[int, ...] = field(default=(), compare=False)

    def __len__(self) -> int:
        return len(self.lines) or len(self.graph)

    def __iter__(self) -> Iterator[Statement]:
        """The statements of the graph."""
        return iter(self.graph)

    def size(self) -> int:
        """Lines that a reader has to think about: those that make leaves are not counted."""
        return sum(not _makes_leaf(line) for line in self.lines) or self.graph.size()

    def digest(self) -> str:
        """Twelve hex digits that name this scene on every machine."""
        text = f"{self.claim}\n{self.dials}\n{self.graph.digest()}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Canonical JSON text: equal scenes give equal text, the lines aside."""
        body = {
            "scene": FORMAT,
            "claim": self.claim,
            "dials": self.dials,
            "graph": json.loads(self.graph.to_json()),
            "lines": self.lines,
            "raising": self.raising,
        }
        return json.dumps(body, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_plain(cls, body: dict[str, Any]) -> Scene:
        """The scene that :meth:`to_json` wrote, as parsed JSON.

        Raises:
            ProgramError: it is not of this format.

        """
        if body.get("scene") != FORMAT:
            raise ProgramError(f"scene format {body.get('scene')!r}, this version reads {FORMAT}")
        try:
            dials = tuple(int(dial) for dial in body["dials"])
            graph = Program.from_json(json.dumps(body["graph"]))
            lines, raising = tuple(map(str, body.get("lines", ()))), tuple(map(int, body.get("raising", ())))
            return cls(graph, dials, str(body["claim"]), lines, raising)
        except (KeyError, TypeError, ValueError) as error:
            raise ProgramError(f"not a scene: {type(error).__name__}: {error}") from None


def parse(text: str) -> Program | Scene:
    """A program or a scene from its JSON.

    Raises:
        ProgramError: the text is neither.

    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ProgramError(f"not JSON: {error}") from None
    if isinstance(body, dict) and "scene" in body:
        return Scene.from_plain(body)
    return Program.from_json(text)


def _makes_leaf(line: str) -> bool:
    name, _, value = line.partition(" = ")
    made = name.isidentifier() and value.startswith(("torch.tensor(", "torch.zeros("))
    return made or line.startswith("import ")


CheckKind = Literal["equal", "close", "raises"]


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is due after an item of a script.

    Attributes:
        at: index of the item.
        probe: Python source that gives what is to be seen; empty for ``raises``.
        due: what is due: a plain value for ``equal``, an array or None for ``close``, the name of the class for
            ``raises``, where the empty name means that the item must not raise.
        kind: how the two are compared.
        because: why it is due.
        fragment: a part of the message that a raised error must have.
        telling: would a wrong result show? Without a telling check a scene is no evidence.
        narrow: have the numbers been through float32, whatever the graph has?
        mark: a word for expectations to recognise its violations by.

    """

    at: int
    probe: str
    due: Any
    kind: CheckKind
    because: str
    fragment: str = ""
    telling: bool = True
    narrow: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Lines of Python that run as one statement; ``raises`` says whether they must, must not, or may raise."""

    text: str
    raises: Literal["must", "never", "may"] = "never"


Item = Statement | Line


@dataclass(slots=True)
class Script:
    """What a claim makes of a scene: items in the order in which they run, and the checks among them."""

    items: list[Item] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
