"""Solves, inverses and determinants of small matrices, written with factorisations.

The kernels of small matrices have LU and Cholesky factors, and solves with those. Here the other
operators are made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop.body.copies import copy_of
from torch_scan_hop.inductor.inline import write_in_parts

aten = torch.ops.aten

# A solve does not return the factors: their layout depends on that of the matrix.
_NO_FACTORS = (None, None)


def _solve(
    matrix: Tensor, right: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Any, ...]:
    is_vector = right.ndim == 1 or right.shape == matrix.shape[:-1]
    factors, pivots, info = aten.linalg_lu_factor_ex.default(matrix)
    sides = right.unsqueeze(-1) if is_vector else right
    x = aten.linalg_lu_solve.default(factors, pivots, sides, left=left or is_vector)
    return (x.squeeze(-1) if is_vector else x, *_NO_FACTORS, info)


def _inverse(matrix: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    factors, pivots, info = aten.linalg_lu_factor_ex.default(matrix)
    n = matrix.shape[-1]
    identity = matrix.new_zeros(n, n).diagonal_scatter(matrix.new_ones(n))
    return aten.linalg_lu_solve.default(factors, pivots, identity), info


def _cholesky_solve(right: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    lower = factor.mT if upper else factor
    half = aten.linalg_solve_triangular.default(lower, right, upper=False)
    return aten.linalg_solve_triangular.default(lower.mT, half, upper=True)


def _diagonal_and_sign(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal of the factors, and 1 or -1 for an even or odd number of exchanges."""
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(matrix)
    rows = torch.arange(1, matrix.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    signs = 1 - 2 * (pivots != rows).to(matrix.dtype)
    return factors.diagonal(0, -2, -1), signs.prod(-1)


def _determinant(matrix: Tensor) -> tuple[Any, ...]:
    diagonal, sign = _diagonal_and_sign(matrix)
    return (diagonal.prod(-1) * sign, *_NO_FACTORS)


def _log_determinant(matrix: Tensor) -> tuple[Any, ...]:
    """Return the sign and the logarithm of the size: 0 and -inf for a singular matrix."""
    diagonal, sign = _diagonal_and_sign(matrix)
    return (diagonal.sign().prod(-1) * sign, diagonal.abs().log().sum(-1), *_NO_FACTORS)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_inv_ex.default: _inverse,
    aten._linalg_det.default: _determinant,
    aten._linalg_slogdet.default: _log_determinant,
    aten._linalg_solve_ex.default: _solve,
}


def in_parts(body: fx.GraphModule) -> fx.GraphModule:
    """Return ``body`` with these operators written out; the same body if it has none."""
    if not any(node.target in DECOMPOSITIONS for node in body.graph.nodes):
        return body
    return write_in_parts(copy_of(body), DECOMPOSITIONS, "in_parts")
