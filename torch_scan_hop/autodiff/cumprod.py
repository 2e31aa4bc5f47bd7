"""Cumulative products with derivatives of any order, also where a factor is zero.

torch's own derivative divides by the factors. Where one is zero it takes another formula, which is
right for the first derivative alone. For a second derivative it asks if gradients are on, but a
step is traced once for both.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def cumulative_product(
    input: torch.Tensor, dim: Any = None, *, dtype: Any = None, axis: Any = None
) -> torch.Tensor:
    """Return the cumulative product of ``input`` along ``dim``, made by doubling.

    Each round multiplies twice as many neighbours, so there are as many rounds as the size has
    binary digits. The arguments have the names that a call of ``torch.cumprod`` may use.

    >>> cumulative_product(torch.tensor([2.0, 0.0, 3.0], requires_grad=True), 0).tolist()
    [2.0, 0.0, 0.0]
    """
    dim = axis if dim is None else dim
    if not input.requires_grad or input.ndim == 0:
        return aten.cumprod.default(input, dim, dtype=dtype)
    product = input if dtype is None else input.to(dtype)
    size, reach = product.shape[dim], 1
    while reach < size:
        first = product.narrow(dim, 0, reach)
        rest = product.narrow(dim, reach, size - reach) * product.narrow(dim, 0, size - reach)
        product, reach = torch.cat([first, rest], dim), 2 * reach
    return product
