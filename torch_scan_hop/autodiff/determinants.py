"""Determinants, with derivatives that a trace can hold.

torch's derivative of a determinant looks at the numbers: where a matrix is singular it takes
another formula. A trace cannot look. There torch takes the formula for any matrix, which uses
singular vectors: they cost more than the rest of a step, and their derivative is nan where two
singular values are equal (the identity, a rotation).

So a matrix of up to three rows is expanded along the first, and the gradient of a larger one is
the operator ``cofactors``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_scan_hop._torch.isolation import torch_functions_disabled
from torch_scan_hop._torch.transforms import unpack_dual
from torch_scan_hop.body.cofactors import cofactors

aten = torch.ops.aten

# Beyond, the terms are many, and cancel.
_MOST_ROWS = 3


def _is_small(matrix: Tensor) -> bool:
    return 1 <= matrix.shape[-1] <= _MOST_ROWS


def determinant(matrix: Tensor) -> Tensor:
    """Return the determinant, of shape ``[...]`` for a matrix of ``[..., n, n]``.

    >>> determinant(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor(-2.)
    """
    if not _is_small(matrix):
        is_differentiated = matrix.requires_grad and unpack_dual(matrix)[1] is None
        return _Determinant.apply(matrix) if is_differentiated else torch.linalg.det(matrix)
    n = matrix.shape[-1]
    rows = [[matrix.select(-2, i).select(-1, j) for j in range(n)] for i in range(n)]
    if n == 1:
        return rows[0][0]
    if n == 2:
        return rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0]
    a, b, c = rows
    # minors of columns in cyclic order have their signs
    minors = (b[j - 2] * c[j - 1] - b[j - 1] * c[j - 2] for j in range(3))
    return torch.stack([x * minor for x, minor in zip(a, minors, strict=True)]).sum(0)


def determinant_of_factors(matrix: Tensor) -> Any:
    """Return the results of ``aten._linalg_det``; None for a small matrix's factors, which are for
    the operator's own derivative."""
    factors = (None, None) if _is_small(matrix) else aten._linalg_det.default(matrix)[1:]
    return determinant(matrix), *factors


class _Determinant(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> Tensor:
        with torch_functions_disabled():  # to a trace that marks what no_grad stops, this is none
            return torch.linalg.det(matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent[..., None, None] * cofactors(*ctx.saved_tensors)
