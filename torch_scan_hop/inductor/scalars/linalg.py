"""Factorisations of matrices of entries, and solves, as LAPACK's unblocked routines compute them.

G. H. Golub, C. F. Van Loan, *Matrix Computations*, 4th ed.: substitution 3.1.1 and 3.1.2, LU with
partial pivoting 3.4.1, Cholesky 4.2.2. Where LAPACK would look at a number and go on in another
way, all ways are computed and ``where`` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars.entries import Entries, Index, common_lane, expanded
from torch_scan_hop.inductor.scalars.moves import alone, moved

Rows = list[list[Any]]


# --- one matrix ---


def _substituted(rows: Rows, right: Rows, lower: bool, unit: bool = False) -> Rows:
    """Return ``X`` of ``rows @ X = right``."""
    n = len(rows)
    found: Rows = [[] for _ in range(n)]
    for i in range(n) if lower else reversed(range(n)):
        before = range(i) if lower else range(i + 1, n)
        for j in range(len(right[0])):
            value = right[i][j]
            for k in before:
                value = value - rows[i][k] * found[k][j]
            found[i].append(value if unit else value / rows[i][i])
    return found


def _cholesky(rows: Rows) -> tuple[Rows, Rows]:
    n = len(rows)
    zero = torch.zeros_like(rows[0][0])
    factor = [[zero] * n for _ in range(n)]
    failed = torch.zeros_like(rows[0][0], dtype=torch.bool)
    info = torch.zeros_like(rows[0][0], dtype=torch.int32)
    for j in range(n):
        pivot = rows[j][j]
        for k in range(j):
            pivot = pivot - factor[j][k] * factor[j][k]
        fails = torch.logical_or(failed, torch.logical_not(pivot > 0))
        info = torch.where(torch.logical_and(fails, torch.logical_not(failed)), j + 1, info)
        failed = fails
        root = torch.sqrt(torch.where(failed, 1.0, pivot))
        factor[j][j] = torch.where(failed, pivot, root)
        for i in range(j + 1, n):
            value = rows[i][j]
            for k in range(j):
                value = value - factor[i][k] * factor[j][k]
            factor[i][j] = torch.where(failed, rows[i][j], value / root)
    return factor, [[info]]


def _lu(matrix: Rows) -> tuple[Rows, Rows, Rows]:
    """Eliminate with row exchanges; return the factors, the pivots and the first that is zero."""
    rows, n = [list(r) for r in matrix], len(matrix)
    pivots: Rows = []
    info: Any = torch.zeros_like(rows[0][0], dtype=torch.int32)
    for k in range(n):
        pivots.append([_exchange(rows, k)])
        pivot = rows[k][k]
        is_zero = pivot == 0
        info = torch.where(torch.logical_and(is_zero, info == 0), k + 1, info)
        divisor = torch.where(is_zero, 1.0, pivot)
        for i in range(k + 1, n):
            rows[i][k] = factor = rows[i][k] / divisor
            for j in range(k + 1, n):
                rows[i][j] = rows[i][j] - factor * rows[k][j]
    return rows, pivots, [[info]]


def _exchange(rows: Rows, k: int) -> Any:
    """Exchange row ``k`` with the one whose entry below is the largest; return its number, from
    1."""
    below = range(k + 1, len(rows))
    largest, is_larger = torch.abs(rows[k][k]), []
    for i in below:
        size = torch.abs(rows[i][k])
        is_larger.append(size > largest)
        largest = torch.where(is_larger[-1], size, largest)
    later = None
    taken: list[tuple[int, Any]] = []
    for i, larger in zip(reversed(below), reversed(is_larger), strict=True):
        here = larger if later is None else torch.logical_and(larger, torch.logical_not(later))
        later = larger if later is None else torch.logical_or(later, larger)
        taken.append((i, here))
    pivot = torch.full_like(rows[k][k], k + 1, dtype=torch.int32)
    for i, here in taken:
        pivot = torch.where(here, i + 1, pivot)
        _swap(rows, k, i, here)
    return pivot


def _swap(rows: Rows, k: int, i: int, here: Any) -> None:
    for j, (above, below) in enumerate(zip(rows[k], rows[i], strict=True)):
        rows[k][j] = torch.where(here, below, above)
        rows[i][j] = torch.where(here, above, below)


aten = torch.ops.aten


# --- stacks of matrices of entries ---


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


def _beside(notes: Entries, drops: int) -> Entries:
    """Return notes about matrices, which lie in one column, or are one number, without that."""
    return Entries(notes.shape[:-drops], notes.flat, notes.lane)


# --- triangular matrices ---


def solve_triangular(
    matrix: Entries, right: Entries, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Entries:
    n = _square(matrix)
    if not left:  # X A = B is A^T X^T = B^T
        matrix, right = _turned(matrix), _turned(right)
        found = solve_triangular(matrix, right, upper=not upper, unitriangular=unitriangular)
        return _turned(found)

    def solve(rows: Rows) -> list[Rows]:
        triangle, columns = [r[:n] for r in rows], [r[n:] for r in rows]
        return [_substituted(triangle, columns, not upper, unitriangular)]

    return _of_matrices(_side_by_side(matrix, right), solve)[0]


# --- Cholesky ---


def cholesky(matrix: Entries, *, upper: bool = False, check_errors: bool = False) -> list[Entries]:
    """Return the factor, and the order of the first minor that is not positive, or 0.

    A matrix that has such a minor keeps its own entries from there on, as LAPACK leaves it: what
    selects other lanes' results multiplies the gradients of these by zero.
    """
    _square(matrix)
    factor, info = _of_matrices(_turned(matrix) if upper else matrix, _cholesky)
    return [_turned(factor) if upper else factor, _beside(info, 2)]


# --- LU ---


def factor(matrix: Entries, *, pivot: bool = True, check_errors: bool = False) -> list[Entries]:
    n = _square(matrix)
    if not pivot or matrix.shape[-2] != n:
        raise Refusal("a factorisation without pivots, or of what is not square")

    factors, pivots, info = _of_matrices(matrix, _lu)
    return [factors, _beside(pivots, 1), _beside(info, 2)]


def solve_factored(
    factors: Entries, pivots: Entries, right: Entries, *, left: bool = True, adjoint: bool = False
) -> Entries:
    n = _square(factors)
    if not left:  # X A = B is A^T X^T = B^T
        right = _turned(right)
        return _turned(solve_factored(factors, pivots, right, adjoint=not adjoint))
    column = Entries((*pivots.shape, 1), pivots.flat, pivots.lane)

    def run(rows: Rows) -> list[Rows]:
        matrix = [r[:n] for r in rows]
        order, columns = [r[n] for r in rows], [list(r[n + 1 :]) for r in rows]
        swaps = [(k, i) for k in range(n) for i in range(k + 1, n)]
        if adjoint:
            turned = [list(c) for c in zip(*matrix, strict=True)]
            columns = _substituted(turned, columns, lower=True)
            columns = _substituted(turned, columns, lower=False, unit=True)
            swaps.reverse()
        for k, i in swaps:
            _swap(columns, k, i, order[k] == i + 1)
        if not adjoint:
            columns = _substituted(matrix, columns, lower=True, unit=True)
            columns = _substituted(matrix, columns, lower=False)
        return [columns]

    return _of_matrices(_side_by_side(factors, _side_by_side(column, right)), run)[0]


LINALG: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky_ex.default: alone(cholesky),
    aten.linalg_lu_factor_ex.default: alone(factor),
    aten.linalg_lu_solve.default: alone(solve_factored),
    aten.linalg_solve_triangular.default: alone(solve_triangular),
}
