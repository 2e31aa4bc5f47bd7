"""Factorisations of matrices of entries, and solves, as LAPACK's unblocked routines compute them.

G. H. Golub, C. F. Van Loan, *Matrix Computations*, 4th ed.: substitution 3.1.1 and 3.1.2, LU with
partial pivoting 3.4.1, Cholesky 4.2.2. Where LAPACK would look at a number and go on in another
way, all ways are computed and ``where`` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars.entries import Entries, Lanes, broadcast

aten = torch.ops.aten

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


def _turned(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def solve_triangular(
    rows: Rows, right: Rows, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Rows:
    if left:
        return _substituted(rows, right, not upper, unitriangular)
    # X A = B is A^T X^T = B^T
    return _turned(_substituted(_turned(rows), _turned(right), upper, unitriangular))


def cholesky(rows: Rows, *, upper: bool = False, check_errors: bool = False) -> tuple[Rows, Any]:
    """Return the factor, and the order of the first minor that is not positive, or 0.

    A matrix that has such a minor keeps its own entries from there on, as LAPACK leaves it: what
    selects other lanes' results multiplies the gradients of these by zero.
    """
    rows, n = _turned(rows) if upper else rows, len(rows)
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
    return _turned(factor) if upper else factor, info


def factor(
    matrix: Rows, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Rows, list[Any], Any]:
    """Eliminate with row exchanges; return the factors, the pivots and the first that is zero."""
    rows, n = [list(r) for r in matrix], len(matrix)
    if not pivot or len(rows[0]) != n:
        raise Refusal("a factorisation without pivots, or of what is not square")
    pivots = []
    info: Any = torch.zeros_like(rows[0][0], dtype=torch.int32)
    for k in range(n):
        pivots.append(_exchange(rows, k))
        is_zero = rows[k][k] == 0
        info = torch.where(torch.logical_and(is_zero, info == 0), k + 1, info)
        divisor = torch.where(is_zero, 1.0, rows[k][k])
        for i in range(k + 1, n):
            rows[i][k] = rows[i][k] / divisor
            for j in range(k + 1, n):
                rows[i][j] = rows[i][j] - rows[i][k] * rows[k][j]
    return rows, pivots, info


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


def solve_factored(
    factors: Rows, pivots: list[Any], right: Rows, *, left: bool = True, adjoint: bool = False
) -> Rows:
    if not left:  # X A = B is A^T X^T = B^T
        return _turned(solve_factored(factors, pivots, _turned(right), adjoint=not adjoint))
    columns = [list(r) for r in right]
    swaps = [(k, i) for k in range(len(pivots)) for i in range(k + 1, len(pivots))]
    if adjoint:
        columns = _substituted(_turned(factors), columns, lower=True)
        columns = _substituted(_turned(factors), columns, lower=False, unit=True)
        swaps.reverse()
    for k, i in swaps:
        _swap(columns, k, i, pivots[k] == i + 1)
    if not adjoint:
        columns = _substituted(factors, columns, lower=True, unit=True)
        columns = _substituted(factors, columns, lower=False)
    return columns


# --- stacks of matrices of entries ---


def _stack_of(entries: Entries, rank: int) -> Entries:
    """Return a stack of matrices, or of lists of pivots, as one of lists."""
    batch, own = entries.shape[:-rank], entries.shape[-rank:]
    if entries.lane is not None and entries.lane >= len(batch):
        raise Refusal("matrices across lanes")
    found = entries.rows(math.prod(own))
    if rank == 2:
        found = [[flat[p : p + own[1]] for p in range(0, len(flat), own[1])] for flat in found]
    return Entries(batch, found, entries.lane)


def _of_each(fn: Callable[..., Any], *ranks: int) -> Callable[..., Any]:
    """Make a rule of a function of one matrix; ``ranks``: of its operands."""

    def rule(lanes: Lanes, like: Any, *operands: Entries, **options: Any) -> Any:
        stacks = broadcast(*map(_stack_of, operands, ranks))
        matrices = zip(*(stack.flat for stack in stacks), strict=True)
        found = [fn(*own, **options) for own in matrices]
        batch, lane = stacks[0].shape, stacks[0].lane

        def of_result(like: Any, values: Any) -> Entries:
            shape = (*batch, *like.shape[len(batch) :])
            return Entries(shape, pytree.tree_leaves(values), lane)

        if isinstance(like, torch.Tensor):
            return of_result(like, found)
        return [of_result(*pair) for pair in zip(like, zip(*found, strict=True), strict=True)]

    return rule


LINALG: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky_ex.default: _of_each(cholesky, 2),
    aten.linalg_lu_factor_ex.default: _of_each(factor, 2),
    aten.linalg_lu_solve.default: _of_each(solve_factored, 2, 1, 2),
    aten.linalg_solve_triangular.default: _of_each(solve_triangular, 2, 2),
}
