"""tanh of float32 vectors, as operators of Inductor's."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop.inductor.step import StepOps

# (tanh(x) / x - 1) / x^2 as a polynomial in x^2 for |x| < SMALL, lowest degree first: least
# squares weighted until all extremes of the relative error were equal, 4e-9 (Lawson's algorithm)
TERMS = [-0.3333328068, 0.1333144158, -0.05373971537, 0.0206390880, -0.005704986863]
SMALL = 0.625


def tanh(inner: Any, x: Any) -> Any:
    """Return tanh of a float32, within 2 ulp; Inductor's vectorised one is within 1, and slow."""
    constant = lambda value: inner.constant(value, torch.float32)  # noqa: E731
    square = inner.mul(x, x)
    *terms, series = map(constant, TERMS)
    for term in reversed(terms):
        series = inner.add(inner.mul(series, square), term)
    near_zero = inner.add(x, inner.mul(x, inner.mul(square, series)))
    size = inner.abs(x)
    growth = inner.exp(inner.add(size, size))
    far = inner.sub(constant(1.0), inner.truediv(constant(2.0), inner.add(growth, constant(1.0))))
    far = inner.where(inner.lt(x, constant(0.0)), inner.neg(far), far)
    return inner.where(inner.lt(size, constant(SMALL)), near_zero, far)


class VectorOps(StepOps):
    """The operators of a step on the CPU."""

    def tanh(self, x: Any) -> Any:
        if getattr(x, "dtype", None) is torch.float32:
            return tanh(self._inner, x)
        return self._inner.tanh(x)
