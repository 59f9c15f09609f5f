"""Reductions over one dimension or all, and normalisations along one."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from autograd_conformance.ops.entry import (
    Op,
    Range,
    a_dim,
    a_dim_keepdim,
    a_full_dim,
    a_full_dim_keepdim,
    hull,
    nonempty,
    op,
    positive,
    reduced,
    same,
    scalar,
    summed,
    two_or_more,
)
from autograd_conformance.program import Shape


def _kept(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], 1, *shape[dim + 1 :])


def _spread(A: Any, g: Any, x: Any, dim: int) -> Any:
    """A cotangent of the reduced shape, along ``dim`` again."""
    return A.broadcast_to(A.reshape(g, _kept(x.shape, dim)), x.shape)


def _largest(A: Any, x: Any, y: Any, dim: int) -> Any:
    """1/n at each of the n elements that are largest (or least) along ``dim``."""
    hit = A.raw(x) == A.raw(y).reshape(_kept(x.shape, dim))
    return hit / np.maximum(hit.sum(axis=dim, keepdims=True), 1)


def _var_vjp(A: Any, g: Any, y: Any, x: Any, dim: int, keepdim: bool) -> Any:
    n = x.shape[dim]
    mean = A.sum_to(x, _kept(x.shape, dim)) * (1.0 / n)
    return _spread(A, g, x, dim) * (x - mean) * (2.0 / (n - 1))


def _along(A: Any, x: Any, dim: int) -> Any:
    """The sum along ``dim``, with size 1 there."""
    return A.sum_to(x, _kept(x.shape, dim))


def variance(x: np.ndarray, dim: int, keepdim: bool) -> Any:
    """The unbiased variance; there is none of a single element."""
    if x.shape[dim] < 2:
        raise ValueError("the variance of fewer than two elements")
    return x.var(axis=dim, keepdims=keepdim, ddof=1)


def _log_sum_exp(x: np.ndarray, dim: int, keepdim: bool) -> Any:
    top = x.max(axis=dim, keepdims=True)
    y = np.log(np.exp(x - top).sum(axis=dim, keepdims=True)) + top
    return y if keepdim else y.squeeze(dim)


def _softmax(x: np.ndarray, dim: int) -> Any:
    e = np.exp(x - x.max(axis=dim, keepdims=True)) if x.shape[dim] else x
    return e / e.sum(axis=dim, keepdims=True)


def _log_softmax(x: np.ndarray, dim: int) -> Any:
    return x - _log_sum_exp(x, dim, keepdim=True)


def _small_product(ranges: Any) -> bool:
    low, high = ranges[0]
    return bool(low >= 0.25 and high <= 4.0)


def _square_sum(ranges: Any, terms: int) -> Range:
    return 0.0, max(map(abs, ranges[0])) ** 2 * max(terms, 1)


def _reduction(name: str, call: str, value: Any, vjp: Any, **rules: Any) -> Op:
    return op(name, call, value, vjp, "reduction", **({"shapes": reduced, "params": a_dim_keepdim, "bounds": summed} | rules))


def _whole(name: str, call: str, value: Any, vjp: Any, **rules: Any) -> Op:
    return op(name, call, value, vjp, "reduction", **({"shapes": scalar, "bounds": summed} | rules))


REDUCTIONS: tuple[Op, ...] = (
    _whole("sum", "{a}.sum()", np.sum, lambda A, g, y, x: A.broadcast_to(g, x.shape), hands_on=True),
    _whole("mean", "{a}.mean()", np.mean, lambda A, g, y, x: A.broadcast_to(g, x.shape) * (1.0 / prod(x.shape)),
           params=nonempty, bounds=hull),
    _whole("norm", "torch.linalg.vector_norm({a})", lambda x: np.sqrt(np.sum(x * x)), lambda A, g, y, x: g / y * x,
           params=nonempty, domain=positive, bounds=lambda r, n: (r[0][0], r[0][1] * max(n, 1) ** 0.5)),
    _reduction("sum_dim", "{a}.sum(dim={dim}, keepdim={keepdim})", lambda x, dim, keepdim: x.sum(axis=dim, keepdims=keepdim),
               lambda A, g, y, x, dim, keepdim: _spread(A, g, x, dim), hands_on=True),
    _reduction("mean_dim", "{a}.mean(dim={dim}, keepdim={keepdim})",
               lambda x, dim, keepdim: x.mean(axis=dim, keepdims=keepdim),
               lambda A, g, y, x, dim, keepdim: _spread(A, g, x, dim) * (1.0 / x.shape[dim]),
               params=a_full_dim_keepdim, bounds=hull),
    _reduction("prod_dim", "{a}.prod(dim={dim}, keepdim={keepdim})",
               lambda x, dim, keepdim: x.prod(axis=dim, keepdims=keepdim),
               lambda A, g, y, x, dim, keepdim: _spread(A, g * y, x, dim) / x,
               domain=_small_product, bounds=lambda r, n: (min(1.0, r[0][0] ** n), max(1.0, r[0][1] ** n))),
    _reduction("amax", "{a}.amax(dim={dim}, keepdim={keepdim})", lambda x, dim, keepdim: x.max(axis=dim, keepdims=keepdim),
               lambda A, g, y, x, dim, keepdim: _spread(A, g, x, dim) * _largest(A, x, y, dim),
               params=a_full_dim_keepdim, bounds=hull),
    _reduction("amin", "{a}.amin(dim={dim}, keepdim={keepdim})", lambda x, dim, keepdim: x.min(axis=dim, keepdims=keepdim),
               lambda A, g, y, x, dim, keepdim: _spread(A, g, x, dim) * _largest(A, x, y, dim),
               params=a_full_dim_keepdim, bounds=hull),
    _reduction("logsumexp", "{a}.logsumexp(dim={dim}, keepdim={keepdim})", _log_sum_exp,
               lambda A, g, y, x, dim, keepdim: _spread(A, g, x, dim) * A.exp(x - _spread(A, y, x, dim)),
               params=a_full_dim_keepdim, bounds=lambda r, n: (r[0][0], r[0][1] + np.log(max(n, 1)))),
    _reduction("var", "{a}.var(dim={dim}, keepdim={keepdim})",
               variance, _var_vjp,
               params=two_or_more, bounds=_square_sum),
    op("cumsum", "{a}.cumsum(dim={dim})", lambda x, dim: np.cumsum(x, axis=dim),
       lambda A, g, y, x, dim: A.flip(A.cumsum(A.flip(g, dim), dim), dim), "reduction", params=a_dim, bounds=summed, hands_on=True),
    op("softmax", "{a}.softmax(dim={dim})", _softmax, lambda A, g, y, x, dim: y * (g - _along(A, g * y, dim)), "reduction",
       shapes=same, params=a_full_dim, bounds=lambda r, _: (0.0, 1.0)),
    op("log_softmax", "{a}.log_softmax(dim={dim})", _log_softmax,
       lambda A, g, y, x, dim: g - A.exp(y) * _along(A, g, dim), "reduction",
       shapes=same, params=a_full_dim, bounds=lambda r, n: (r[0][0] - r[0][1] - np.log(max(n, 1)), 0.0)),
)
