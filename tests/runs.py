"""Runs that never were, for the tests of reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from autograd_conformance.claims import AREAS, TRAITS, Claim
from autograd_conformance.program import Apply, Backward, Constant, Leaf, Program, Rewrap, Write
from autograd_conformance.scene import Scene
from autograd_conformance.verdicts import Counterexample, Result, Run, Verdict, Violation

HOSTILE = (
    "</script></style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "]]>'\"`|*_[x](javascript:alert(1))\n\n# h\x1b[2J\u202eevil\u2066\ud800\x00\x7f\u2028{{ 7 * 7 }}"
)
RAW = set("\x1b\x00\x7f\u202e\u2066\u2028\ud800")

ABOUT: dict[str, Any] = {
    "name": "torch",
    "version": "2.13.0",
    "timestamp": "2026-01-02T03:04:05+00:00",
    "platform": "Linux-x86_64",
    "python": "3.11.7",
    "test_suite": {"name": "autograd-conformance", "version": "0.1.0"},
    "execution_target": dict.fromkeys(("kind", "backend", "device_model", "runtime_version", "driver_version"), "cpu"),
    "torch": {"version": "2.13.0+cpu"},
    "packages": {"numpy": "2.0"},
    "profile": "default",
    "seed": 0,
    "threads": 1,
    "wall_seconds": 1.5,
    "cpu_seconds": 2.5,
}
PROGRAM = Program(
    (
        Leaf("a", Constant((2,), "float64", (0.5, -1.25)), True),
        Leaf("k", Constant((2,), "float64", (2.0, 3.0))),
        Apply(("b",), "mul", ("a", "k")),
        Apply(("v",), "reshape", ("b",), (("shape", (2, 1)),)),
        Rewrap("d", "b", "detach"),
        Apply(("c",), "sum", ("v",)),
        Write("d"),
        Backward(("c",), retain_graph=True),
        Backward(("c",)),
    )
)
SCENE = Scene(
    Program(PROGRAM.statements[:1]),
    claim="hook.order",
    lines=(
        "a = torch.tensor([0.5, -1.25], dtype=torch.float64, requires_grad=True)",
        "a.register_hook(lambda g: g * 2)",
        "a.sum().backward()",
    ),
)
VIOLATION = Violation(
    "x", 8, "a.grad", "[4.0, 6.0]", "[2.0, 6.0]", "close", 1e-9, because="The sum of the gradients of both passes."
)


def broken(claim: str, device: str = "cpu", **changes: Any) -> Result:
    """A result with a counterexample."""
    violation = dataclasses.replace(VIOLATION, claim=claim, **changes)
    example = Counterexample(PROGRAM, violation, found="0123456789ab")
    counts = {"programs": 200, "evidence": 150, "checks": 4000, "violations": 3}
    return Result(claim, device, Verdict.BROKEN, False, "", family="graphs", counterexample=example, **counts)


def run_of(*results: Result, **changes: Any) -> tuple[Run, dict[str, Claim]]:
    """A run with these results, and its claims."""
    claims = {
        r.claim: Claim(r.claim, f"Promise {r.claim} holds.", ("docs notes/autograd: x",), r.claim.split(".")[0], False)
        for r in results
    }
    names = dict.fromkeys(result.device for result in results)
    devices = {name: {"found": "built in", "traits": list(TRAITS)[:4], "missing": {}} for name in names}
    generated = {"view": 60, "0-dim": 40, "op add": 120, "op sum": 30}
    families = [
        {"family": "graphs", "device": name, "programs": 200, "digest": "d1", "generated": generated} for name in names
    ]
    return Run(ABOUT, devices, families, results, **changes), claims


def large(claims: int = 300, devices: int = 10, examples: int = 200) -> tuple[Run, dict[str, Claim]]:
    """Many claims on many devices, with many counterexamples."""
    results = []
    for number in range(claims * devices):
        claim = f"{AREAS[number // devices % len(AREAS)]}.claim-{number // devices}"
        device = f"device:{number % devices}"
        if number % (claims * devices // examples) == 0:
            results.append(broken(claim, device))
        else:
            results.append(Result(claim, device, Verdict.HOLDS, family="graphs", programs=200, evidence=150, checks=99))
    return run_of(*results)
