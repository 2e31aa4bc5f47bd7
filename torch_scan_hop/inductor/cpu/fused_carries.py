"""Steps of a few scalars: a carry's product and sum are one instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop._torch.inductor_vectors import multiply_add
from torch_scan_hop.inductor.cpu.tanh import VectorOps
from torch_scan_hop.inductor.step import carry_position


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
        return str(value) not in self._dependent and _are_floats(value, *values)


def _are_floats(*values: Any) -> bool:
    dtypes = {getattr(value, "dtype", None) for value in values}
    return dtypes in ({torch.float32}, {torch.float64})
