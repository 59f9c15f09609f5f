"""What a program costs, as ratios to raw torch running the same statements in the same process.

    python benchmarks/run.py [--programs N]

CPU time of one thread. ``raw`` plays the statements and observes nothing. ``gradcheck`` is torch's own fast mode on the
same graph, from its leaves to its last root. Ratios repeat well, microseconds do not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from autograd_conformance import runner
from autograd_conformance.compare import Case
from autograd_conformance.judge import judge
from autograd_conformance.oracle import predict
from autograd_conformance.program import Apply, Backward, Leaf, Program, Rewrap, Write
from autograd_conformance.replay import all_checks
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.payload import FIELD
from autograd_conformance.strategies.programs import decode
from autograd_conformance.transform import needed

BOUNDS = {"example / raw": 10.0, "oracle / raw": 0.5, "example / gradcheck": 1 / 3}


class Raw(runner.Runner):
    """Plays statements and looks at nothing."""

    def _keep(self, name: str, t: torch.Tensor) -> None:
        self.live[name] = t

    def _look_at_grads(self, _: int) -> None:
        pass

    def _look_for_kept_grads(self) -> None:
        pass

    def _rewrap(self, _: int, s: Rewrap) -> None:
        self.live[s.out] = runner._rewrap_call(s.how)(self.live[s.arg])

    def _write(self, _: int, s: Write) -> None:
        with torch.no_grad():
            self.live[s.arg].mul_(2.0)


def timed(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """CPU microseconds for one item, the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        gc.collect()
        gc.freeze()
        start = time.process_time()
        for item in items:
            work(item)
        best = min(best, (time.process_time() - start) / len(items) * 1e6)
    return best


def checkable(programs: Iterable[Program]) -> list[tuple[Program, Backward]]:
    """Parts of programs that lead to a root that depends on a float64 leaf, for gradcheck."""
    found = []
    for program in programs:
        for at, s in enumerate(program):
            if isinstance(s, Backward) and len(s.roots) == 1 and s.inputs is None:
                part = needed(program, at)
                kinds = all(isinstance(t, Leaf | Apply | Backward) for t in part)
                floats = all(t.data.dtype == "float64" for t in part if isinstance(t, Leaf))
                casts = any(isinstance(t, Apply) and (t.no_grad or t.op == "to_float32") for t in part)
                if kinds and floats and not casts and len(part) > 4:
                    found.append((part, s))
                break
    return found


def gradcheck(part: tuple[Program, Backward]) -> None:
    """torch.autograd.gradcheck in fast mode on the graph of a program."""
    program, backward = part
    raw = Raw("cpu")
    for s in program:
        if isinstance(s, Leaf):
            raw._leaf(s)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in raw.live.items() if t.requires_grad}

    def root(*tensors: torch.Tensor) -> torch.Tensor:
        raw.live.update(zip(leaves, tensors, strict=True))
        for at, s in enumerate(program):
            if isinstance(s, Apply):
                raw._apply(at, s)
        return raw.live[backward.roots[0]]

    with contextlib.suppress(RuntimeError, ValueError):  # a root that no leaf reaches; what it cost until then counts
        torch.autograd.gradcheck(root, tuple(leaves.values()), fast_mode=True, raise_exception=False)


def example(program: Program) -> None:
    """Run and judge a program by all claims."""
    judge(Case(program, "cpu"), CHECKS)


def measure(nodes: int, count: int) -> dict[str, float]:
    """Microseconds for one program of so many nodes, part by part."""
    closings = 7
    size = (1 + 4 + nodes + closings) * FIELD
    source = random.Random(nodes)  # noqa: S311 - payloads, not secrets
    payloads = [source.randbytes(size) for _ in range(count)]
    programs = [decode(p, nodes=nodes, closings=closings) for p in payloads]
    cases = [Case(p, "cpu") for p in programs]
    parts = checkable(programs)[: count // 4]
    found = {
        "raw": timed(lambda p: Raw("cpu").play(p), programs),
        "draw": timed(lambda _: draw(count, nodes, size), [0]) / count,
        "decode": timed(lambda p: decode(p, nodes=nodes, closings=closings), payloads),
        "record": timed(lambda p: p.digest(), programs),
        "torch": timed(lambda p: runner.run(p, "cpu"), programs),
        "oracle": timed(predict, programs),
    }
    fresh = [Case(p, "cpu") for p in programs]
    found["compare"] = timed(lambda case: judge(case, CHECKS), cases)
    found["run and judge"] = timed(example, programs)
    found["example"] = found["draw"] + found["decode"] + found["record"] + found["run and judge"]
    found["gradcheck"] = timed(gradcheck, parts) if parts else float("nan")
    found["same graphs"] = timed(lambda part: example(part[0]), parts) if parts else float("nan")
    found["example / raw"] = found["example"] / found["raw"]
    found["oracle / raw"] = found["oracle"] / found["raw"]
    found["example / gradcheck"] = (found["same graphs"] + found["draw"] + found["decode"]) / found["gradcheck"]
    del fresh
    return found


CHECKS = all_checks()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    columns = {nodes: measure(nodes, options.programs) for nodes in (5, 10, 20, 40)}
    print(f"torch {torch.__version__}; CPU microseconds a program, and ratios")
    print(f"{'nodes':22s}" + "".join(f"{nodes:>10d}" for nodes in columns))
    for row in columns[5]:
        bound = f"   bound {BOUNDS[row]:.2f} at 20 nodes" if row in BOUNDS else ""
        print(f"{row:22s}" + "".join(f"{column[row]:10.2f}" for column in columns.values()) + bound)


if __name__ == "__main__":
    main()
