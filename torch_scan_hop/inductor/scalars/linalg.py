"""Factorisations of matrices of entries, and solves with their factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars import factors
from torch_scan_hop.inductor.scalars.entries import Entries, Index, Lanes, common_lane, expanded
from torch_scan_hop.inductor.scalars.factors import LU, Rows, substituted, swap
from torch_scan_hop.inductor.scalars.moves import moved, reshape

aten = torch.ops.aten


# --- matrices of entries ---


def _batch_of(matrices: Entries) -> Index:
    """Return the shape of a stack of matrices; refuse a matrix that is spread over lanes."""
    batch = matrices.shape[:-2]
    if matrices.lane is not None and matrices.lane >= len(batch):
        raise Refusal("matrices across lanes")
    return batch


def _of_matrices(matrices: Entries, fn: Callable[[Rows], Sequence[Rows]]) -> list[Entries]:
    """Apply ``fn`` to each matrix; each of its results is a matrix, too."""
    batch, (n, m) = _batch_of(matrices), matrices.shape[-2:]
    rows = matrices.rows(m)
    results = zip(*(fn(rows[p : p + n]) for p in range(0, len(rows), n)), strict=True)
    return [
        Entries(
            (*batch, len(found[0]), len(found[0][0])),
            [value for matrix in found for row in matrix for value in row],
            matrices.lane,
        )
        for found in results
    ]


def _side_by_side(left: Entries, right: Entries) -> Entries:
    """Return ``[left, right]``, each repeated for the batch of the other."""
    rank = max(len(left.shape), len(right.shape))
    left, right = left.padded(rank), right.padded(rank)
    lane = common_lane([left, right])
    batch = tuple(map(max, zip(left.shape[:-2], right.shape[:-2], strict=True)))
    parts = [expanded(e, (*batch, *e.shape[-2:]), lane) for e in (left, right)]
    return moved(aten.cat.default, parts, rank - 1)


def _turned(matrices: Entries) -> Entries:
    return moved(aten.transpose.int, matrices, -2, -1)


def _square(matrices: Entries) -> int:
    if len(matrices.shape) < 2 or not matrices.shape[-1]:
        raise Refusal("no matrices")
    _batch_of(matrices)
    return matrices.shape[-1]


# --- triangular matrices ---


def solve_triangular(
    lanes: Lanes,
    like: Any,
    matrix: Entries,
    right: Entries,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Entries:
    n = _square(matrix)
    if not left:  # X A = B is A^T X^T = B^T
        matrix, right = _turned(matrix), _turned(right)
        found = solve_triangular(
            lanes, like, matrix, right, upper=not upper, unitriangular=unitriangular
        )
        return _turned(found)

    def solve(rows: Rows) -> list[Rows]:
        triangle, columns = [r[:n] for r in rows], [r[n:] for r in rows]
        return [substituted(triangle, columns, not upper, unitriangular)]

    return _of_matrices(_side_by_side(matrix, right), solve)[0]


# --- Cholesky ---


def cholesky(
    lanes: Lanes, like: Any, matrix: Entries, *, upper: bool = False, check_errors: bool = False
) -> list[Entries]:
    """Return the factor, and the order of the first minor that is not positive, or 0.

    A matrix that has such a minor keeps its own entries from there on, as LAPACK leaves it: what
    selects other lanes' results multiplies the gradients of these by zero.
    """
    _square(matrix)
    factor, info = _of_matrices(_turned(matrix) if upper else matrix, factors.cholesky)
    return [_turned(factor) if upper else factor, reshape(lanes, like[1], info)]


# --- LU ---


def factor(
    lanes: Lanes, like: Any, matrix: Entries, *, pivot: bool = True, check_errors: bool = False
) -> list[Entries]:
    n = _square(matrix)
    if not pivot or matrix.shape[-2] != n:
        raise Refusal("a factorisation without pivots, or of what is not square")

    def run(rows: Rows) -> tuple[Rows, Rows, Rows]:
        found = LU(rows)
        return found.rows, [[p] for p in found.pivots], [[found.info]]

    factors, pivots, info = _of_matrices(matrix, run)
    return [factors, reshape(lanes, like[1], pivots), reshape(lanes, like[2], info)]


def solve_factored(
    lanes: Lanes,
    like: Any,
    factors: Entries,
    pivots: Entries,
    right: Entries,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Entries:
    n = _square(factors)
    if not left:  # X A = B is A^T X^T = B^T
        right = _turned(right)
        return _turned(solve_factored(lanes, like, factors, pivots, right, adjoint=not adjoint))
    column = Entries((*pivots.shape, 1), pivots.flat, pivots.lane)

    def run(rows: Rows) -> list[Rows]:
        matrix = [r[:n] for r in rows]
        order, columns = [r[n] for r in rows], [list(r[n + 1 :]) for r in rows]
        swaps = [(k, i) for k in range(n) for i in range(k + 1, n)]
        if adjoint:
            turned = [list(c) for c in zip(*matrix, strict=True)]
            columns = substituted(turned, columns, lower=True)
            columns = substituted(turned, columns, lower=False, unit=True)
            swaps.reverse()
        for k, i in swaps:
            swap(columns, k, i, order[k] == i + 1)
        if not adjoint:
            columns = substituted(matrix, columns, lower=True, unit=True)
            columns = substituted(matrix, columns, lower=False)
        return [columns]

    return _of_matrices(_side_by_side(factors, _side_by_side(column, right)), run)[0]


LINALG: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky_ex.default: cholesky,
    aten.linalg_lu_factor_ex.default: factor,
    aten.linalg_lu_solve.default: solve_factored,
    aten.linalg_solve_triangular.default: solve_triangular,
}
