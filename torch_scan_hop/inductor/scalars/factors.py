"""Factorisations and solves of one matrix of scalars, as LAPACK's unblocked routines compute them.

G. H. Golub, C. F. Van Loan, *Matrix Computations*, 4th ed.: substitution 3.1.1 and 3.1.2, LU with
partial pivoting 3.4.1, Cholesky 4.2.2. Where LAPACK would look at a number and go on in another
way, all ways are computed and ``where`` chooses.
"""

from __future__ import annotations

from typing import Any

import torch

Rows = list[list[Any]]


def substituted(rows: Rows, right: Rows, lower: bool, unit: bool = False) -> Rows:
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


def cholesky(rows: Rows) -> tuple[Rows, Rows]:
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


class LU:
    """Gaussian elimination with row exchanges."""

    def __init__(self, rows: Rows) -> None:
        self.rows = [list(r) for r in rows]
        self.n = len(rows)
        self.info: Any = torch.zeros_like(rows[0][0], dtype=torch.int32)
        self.pivots: list[Any] = []
        for k in range(self.n):
            self._exchange(k)
            self._eliminate(k)

    def _exchange(self, k: int) -> None:
        """Exchange row ``k`` with the row below whose entry in column ``k`` is the largest."""
        rows, below = self.rows, range(k + 1, self.n)
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
            swap(rows, k, i, here)
        self.pivots.append(pivot)

    def _eliminate(self, k: int) -> None:
        rows, pivot = self.rows, self.rows[k][k]
        is_zero = pivot == 0
        is_first = torch.logical_and(is_zero, self.info == 0)
        self.info = torch.where(is_first, k + 1, self.info)
        divisor = torch.where(is_zero, 1.0, pivot)
        for i in range(k + 1, self.n):
            factor = rows[i][k] / divisor
            rows[i][k] = factor
            for j in range(k + 1, self.n):
                rows[i][j] = rows[i][j] - factor * rows[k][j]


def swap(rows: Rows, k: int, i: int, here: Any) -> None:
    for j, (above, below) in enumerate(zip(rows[k], rows[i], strict=True)):
        rows[k][j] = torch.where(here, below, above)
        rows[i][j] = torch.where(here, above, below)
