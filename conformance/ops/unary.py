"""Elementwise ops of one operand, smooth and kinked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autograd_conformance.ops.entry import Op, Range, hull_with_zero, op, positive, rising, within


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _square_range(ranges: Sequence[Range], _: int) -> Range:
    low, high = ranges[0]
    least = 0.0 if low <= 0.0 <= high else min(low * low, high * high)
    return least, max(low * low, high * high)


SMOOTH: tuple[Op, ...] = (
    op("neg", "-{a}", np.negative, lambda A, g, y, x: -g, "smooth", bounds=lambda r, _: (-r[0][1], -r[0][0])),
    op("double", "{a} * 2.0", lambda x: x * 2.0, lambda A, g, y, x: g * 2.0, "smooth",
       bounds=rising(lambda v: 2 * v)),
    op("shift", "{a} + 0.5", lambda x: x + 0.5, lambda A, g, y, x: g, "smooth",
       bounds=rising(lambda v: v + 0.5), hands_on=True),
    op("rsub", "1.0 - {a}", lambda x: 1.0 - x, lambda A, g, y, x: -g, "smooth",
       bounds=lambda r, _: (1 - r[0][1], 1 - r[0][0])),
    op("square", "{a} ** 2", lambda x: x**2, lambda A, g, y, x: g * 2.0 * x, "smooth", bounds=_square_range),
    op("cube", "{a} ** 3", lambda x: x**3, lambda A, g, y, x: g * 3.0 * x**2, "smooth", bounds=rising(lambda v: v**3)),
    op("sin", "{a}.sin()", np.sin, lambda A, g, y, x: g * A.cos(x), "smooth", bounds=within(-1, 1)),
    op("cos", "{a}.cos()", np.cos, lambda A, g, y, x: -(g * A.sin(x)), "smooth", bounds=within(-1, 1)),
    op("tanh", "{a}.tanh()", np.tanh, lambda A, g, y, x: g * (1.0 - y**2), "smooth", bounds=rising(math.tanh)),
    op("sigmoid", "{a}.sigmoid()", _sigmoid, lambda A, g, y, x: g * y * (1.0 - y), "smooth",
       bounds=rising(lambda v: 1 / (1 + math.exp(-max(v, -40.0))))),
    op("atan", "{a}.atan()", np.arctan, lambda A, g, y, x: g / (1.0 + x**2), "smooth", bounds=rising(math.atan)),
    op("exp", "{a}.exp()", np.exp, lambda A, g, y, x: g * y, "smooth",
       bounds=rising(lambda v: math.exp(min(v, 20.0))), domain=lambda r: r[0][1] <= 5.0),
    op("expm1", "{a}.expm1()", np.expm1, lambda A, g, y, x: g * (y + 1.0), "smooth",
       bounds=rising(lambda v: math.expm1(min(v, 20.0))), domain=lambda r: r[0][1] <= 5.0),
    op("log", "{a}.log()", np.log, lambda A, g, y, x: g / x, "smooth",
       bounds=rising(lambda v: math.log(max(v, 1e-9))), domain=positive),
    op("log1p", "{a}.log1p()", np.log1p, lambda A, g, y, x: g / (x + 1.0), "smooth",
       bounds=rising(lambda v: math.log1p(max(v, -0.99))), domain=lambda r: r[0][0] >= -0.9),
    op("sqrt", "{a}.sqrt()", np.sqrt, lambda A, g, y, x: g / (2.0 * y), "smooth",
       bounds=rising(lambda v: math.sqrt(max(v, 0.0))), domain=positive),
    op("rsqrt", "{a}.rsqrt()", lambda x: 1.0 / np.sqrt(x), lambda A, g, y, x: g * -0.5 * y**3, "smooth",
       bounds=lambda r, _: (r[0][1] ** -0.5, r[0][0] ** -0.5), domain=positive),
    op("reciprocal", "{a}.reciprocal()", lambda x: 1.0 / x, lambda A, g, y, x: -(g * y**2), "smooth",
       bounds=lambda r, _: (1 / r[0][1], 1 / r[0][0]), domain=positive),
    op("softplus", "torch.nn.functional.softplus({a})", lambda x: np.logaddexp(x, 0.0),
       lambda A, g, y, x: g * (1.0 - A.exp(-y)), "smooth", bounds=rising(lambda v: math.log1p(math.exp(min(v, 30.0)))),
       domain=lambda r: r[0][1] <= 15.0),
    op("silu", "torch.nn.functional.silu({a})", lambda x: x * _sigmoid(x),
       lambda A, g, y, x: g * (A.sigmoid(x) + y * (1.0 - A.sigmoid(x))), "smooth", bounds=hull_with_zero,
       domain=lambda r: r[0][0] >= -30.0),
    op("clone", "{a}.clone()", np.copy, lambda A, g, y, x: g, "smooth", hands_on=True),
)

KINKED: tuple[Op, ...] = (
    op("relu", "{a}.relu()", lambda x: np.maximum(x, 0.0), lambda A, g, y, x: A.where(A.raw(x) > 0, g, 0.0), "kinked",
       bounds=rising(lambda v: max(v, 0.0))),
    op("abs", "{a}.abs()", np.abs, lambda A, g, y, x: g * np.sign(A.raw(x)), "kinked",
       bounds=lambda r, _: (max(0.0, r[0][0], -r[0][1]), max(abs(r[0][0]), abs(r[0][1])))),
    op("leaky_relu", "torch.nn.functional.leaky_relu({a}, 0.25)", lambda x: np.where(x > 0, x, 0.25 * x),
       lambda A, g, y, x: g * np.where(A.raw(x) > 0, 1.0, 0.25), "kinked",
       bounds=rising(lambda v: v if v > 0 else v / 4)),
    op("clamp", "{a}.clamp(-1.0, 1.0)", lambda x: np.clip(x, -1.0, 1.0),
       lambda A, g, y, x: A.where(abs(A.raw(x)) <= 1.0, g, 0.0), "kinked", bounds=rising(lambda v: min(max(v, -1.0), 1.0))),
)
