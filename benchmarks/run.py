"""What a program costs, as ratios to raw torch running the same statements in the same process.

    python benchmarks/run.py [--programs N] [--closings N]

CPU time of one thread. ``raw`` plays the statements and observes nothing. An example is drawn, decoded, recorded, run
and judged by the core claims. ``gradcheck`` is torch's own fast mode on the same graphs, from the leaves to the roots of
the passes. Ratios repeat well, microseconds do not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from autograd_conformance import runner
from autograd_conformance.claims import register
from autograd_conformance.compare import Case
from autograd_conformance.devices import discover
from autograd_conformance.gradchecked import followed, passes
from autograd_conformance.judge import ClaimCheck, judge
from autograd_conformance.oracle import predict
from autograd_conformance.player import code
from autograd_conformance.program import Program, Rewrap, Statement, Write
from autograd_conformance.replay import all_checks
from autograd_conformance.strategies.drawing import draw
from autograd_conformance.strategies.payload import FIELD
from autograd_conformance.strategies.programs import decode
from autograd_conformance.whole import family
from autograd_conformance.whole.play import play
from autograd_conformance.whole.words import Whole

BOUNDS = {"example / raw": 10.0, "oracle / raw": 0.5, "example / gradcheck": 1 / 3}
WHOLE_BOUND = 8.0  # a whole program, drawn, written, played and looked at after each line, to its bare lines


class Raw(runner.Runner):
    """Plays statements and looks at nothing."""

    def _keep(self, name: str, t: torch.Tensor) -> None:
        self.live[name] = t

    def _look_at_grads(self, _: int, __: Statement) -> None:
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


def gradcheck(program: Program) -> None:
    """What torch's own check of the same graph costs."""
    with contextlib.suppress(RuntimeError, ValueError):  # what it cost until then counts
        passes(program)


def example(program: Program) -> None:
    """Run and judge a program by all claims."""
    judge(Case(program, "cpu", trusted=True), CHECKS)


def core_example(program: Program) -> None:
    """Run and judge a program by the core claims."""
    judge(Case(program, "cpu", trusted=True), CORE)


def measure(nodes: int, count: int, closings: int) -> dict[str, float]:
    """Microseconds for one program of so many nodes, part by part."""
    size = (1 + 4 + nodes + closings) * FIELD
    source = random.Random(nodes)  # noqa: S311 - payloads, not secrets
    payloads = [source.randbytes(size) for _ in range(count)]
    programs = [decode(p, nodes=nodes, closings=closings) for p in payloads]
    cases = [Case(p, "cpu") for p in programs]
    graphs = [followed(p) for p in programs]
    found = {
        "raw": timed(lambda p: Raw("cpu").play(p), programs),
        "draw": timed(lambda _: draw(count, nodes, size), [0]) / count,
        "decode": timed(lambda p: decode(p, nodes=nodes, closings=closings), payloads),
        "record": timed(lambda p: p.digest(), programs),
        "torch": timed(lambda p: runner.run(p, "cpu"), programs),
        "oracle": timed(lambda p: predict(p, trusted=True), programs),
        "compare": timed(lambda case: judge(case, CHECKS), cases),
        "all claims": timed(example, programs),
        "core claims": timed(core_example, programs),
        "gradcheck": timed(gradcheck, graphs),
        "core, same graphs": timed(core_example, graphs),
    }
    drawn = found["draw"] + found["decode"] + found["record"]
    found["example / raw"] = (drawn + found["core claims"]) / found["raw"]
    found["all claims / raw"] = (drawn + found["all claims"]) / found["raw"]
    found["oracle / raw"] = found["oracle"] / found["raw"]
    found["example / gradcheck"] = (drawn + found["core, same graphs"]) / found["gradcheck"]
    return found


CHECKS = [check for check in all_checks() if isinstance(check, ClaimCheck)]  # those that judge programs
CORE = [check for check in CHECKS if register()[check.claim].core]


def bare(program: Whole) -> None:
    """The lines of a whole program, and no look at anything."""
    before = runner.modes()
    names: dict[str, Any] = {"torch": torch, "__name__": "script"}
    with runner.quiet():
        for told in program.lines:
            with contextlib.suppress(Exception):
                exec(code(told.text), names)  # noqa: S102 - our own lines
    runner.restore(before)


def measure_whole(count: int) -> dict[str, float]:
    """Microseconds for one whole program, part by part."""
    (cpu,) = discover(["cpu"])
    scenes = family.drawn(count, 0)
    wholes = [family.written(scene, cpu) for scene in scenes]
    found = {
        "raw": timed(bare, wholes),
        "draw": timed(lambda _: family.drawn(count, 0), [0]) / count,
        "write": timed(lambda scene: family.written(scene, cpu), scenes),
        "play": timed(lambda whole: play(whole, "cpu", values=True), wholes),
        "examine": timed(lambda scene: family.examined(scene, cpu), scenes),
    }
    found["example / raw"] = (found["draw"] + found["examine"]) / found["raw"]
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--closings", type=int, default=7, help="passes and resets after the graph (the suite: 7)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    columns = {nodes: measure(nodes, options.programs, options.closings) for nodes in (5, 10, 20, 40)}
    print(f"torch {torch.__version__}; CPU microseconds a program, and ratios")
    print(f"{'nodes':22s}" + "".join(f"{nodes:>10d}" for nodes in columns))
    for row in columns[5]:
        bound = f"   bound {BOUNDS[row]:.2f} at 20 nodes" if row in BOUNDS else ""
        print(f"{row:22s}" + "".join(f"{column[row]:10.2f}" for column in columns.values()) + bound)
    print("whole programs; write, play and other readings are parts of examine")
    for row, value in measure_whole(options.programs).items():
        bound = f"   bound {WHOLE_BOUND:.2f}" if row == "example / raw" else ""
        print(f"{row:22s}{value:10.2f}{bound}")


if __name__ == "__main__":
    main()
