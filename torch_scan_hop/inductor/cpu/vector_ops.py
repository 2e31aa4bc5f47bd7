"""Operators of a step on the CPU that are not Inductor's.

They are tanh of float32 vectors, and in steps of a few scalars a carry's product and sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop._torch.inductor_vectors import multiply_add
from torch_scan_hop.inductor.step import StepOps, carry_position

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


class FusedCarries(VectorOps):
    """Operators that make a carry's product and the sum with it one instruction, in either order.

    The next step waits for the carry, and the time of a small step is this wait. ``(h + y) * a``,
    as in the backward of ``a * h + x``, becomes ``a * h`` with ``a * y`` added. Neither ``a`` nor
    ``y`` may depend on a carry: one instruction does not round its product, so a product minus
    itself would not always be zero.
    """

    def __init__(self, inner: Any, lowering: Any, read: Any) -> None:
        super().__init__(inner, lowering, read)
        self._carries: set[str] = set()
        self._dependent: set[str] = set()
        # each by its name: the carry in it, and what that is multiplied by or added to
        self._products: dict[str, tuple[Any, Any]] = {}
        self._sums: dict[str, tuple[Any, Any]] = {}

    def _default(self, name: str, args: Any, kwargs: Any) -> Any:
        return self._noted(super()._default(name, args, kwargs), *args)

    def load(self, name: str, index: Any) -> Any:
        value = super().load(name, index)
        if carry_position(name) is not None:
            self._carries.add(str(value))
            self._dependent.add(str(value))
        return value

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        result = super().masked(mask, body, other)
        self._dependent.add(str(result))  # for all that is known
        return result

    def tanh(self, x: Any) -> Any:
        return self._noted(super().tanh(x), x)

    def mul(self, x: Any, y: Any) -> Any:
        for total, factor in ((x, y), (y, x)):
            carry, term = self._sums.get(str(total), (None, None))
            if carry is not None and self._is_apart(factor, carry, term):
                product = self._inner.mul(factor, term)
                return self._noted(multiply_add(factor, carry, product), total)
        return self._noted_with_carry(self._products, self._inner.mul(x, y), x, y)

    def add(self, x: Any, y: Any) -> Any:
        for product, term in ((x, y), (y, x)):
            carry, factor = self._products.get(str(product), (None, None))
            if carry is not None and self._is_apart(term, carry, factor):
                return self._noted(multiply_add(carry, factor, term), product)
        return self._noted_with_carry(self._sums, self._inner.add(x, y), x, y)

    def _noted(self, result: Any, *arguments: Any) -> Any:
        if any(str(a) in self._dependent for a in arguments):
            results = result if isinstance(result, tuple) else (result,)
            self._dependent.update(map(str, results))
        return result

    def _noted_with_carry(
        self, results: dict[str, tuple[Any, Any]], result: Any, x: Any, y: Any
    ) -> Any:
        for carry, other in ((x, y), (y, x)):
            if str(carry) in self._carries and str(other) not in self._dependent:
                results[str(result)] = carry, other
        return self._noted(result, x, y)

    def _is_apart(self, value: Any, *values: Any) -> bool:
        """Return True if ``value`` depends on no carry, and all are floats of one dtype."""
        dtypes = {getattr(v, "dtype", None) for v in (value, *values)}
        return str(value) not in self._dependent and dtypes in ({torch.float32}, {torch.float64})
