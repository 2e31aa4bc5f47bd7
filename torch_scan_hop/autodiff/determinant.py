"""Determinants of small matrices, written with operators that have derivatives of any order.

torch's own derivative of a determinant looks at the numbers, which a trace cannot do. A trace gets
its formula for any matrix, which uses singular vectors. They cost more than the step, and their
derivative is nan if two singular values are equal (the identity, a rotation).
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

# Beyond, the terms are many, and cancel.
MOST_ROWS = 3


def _is_small(matrix: torch.Tensor) -> bool:
    return 1 <= matrix.shape[-1] <= MOST_ROWS


def determinant(matrix: torch.Tensor) -> torch.Tensor:
    """Return the determinant of up to three rows, expanded along the first row.

    >>> determinant(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor(-2.)
    """
    if not _is_small(matrix):
        return torch.linalg.det(matrix)
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


def determinant_of_factors(matrix: torch.Tensor) -> Any:
    """Return the results of ``aten._linalg_det``, but None for the factors of a small matrix.

    The factors are for the operator's own derivative, which a small matrix does not use.
    """
    if not _is_small(matrix):
        return aten._linalg_det.default(matrix)
    return determinant(matrix), None, None
