"""Factorisations, and solves with their factors, as calls of ``matrix_source``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.matrix_memory import Called, EntriesLowering, Made, Matrix

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float64)


class FactorLowering(EntriesLowering):
    """A body whose factorisations and solves are calls."""

    def _turned(self, matrix: Any) -> Any:
        rank = len(matrix.get_size())
        return self.apply(aten.permute.default, matrix, [*range(rank - 2), rank - 1, rank - 2])

    def _copy(self, matrix: Any, rank: int = 2) -> Any:
        """Return scratch memory that a function may change, for each lane if there are lanes: the
        matrices of a call lie alike. Refuse what is no matrix."""
        sizes = matrix.get_size()
        if rank == 2 and matrix.get_dtype() not in _FLOATS:
            raise Refusal(f"a factorisation of {matrix.get_dtype()}")
        varies = self.varies(sizes) and len(sizes) > rank
        found = self.scratch(sizes, matrix.get_dtype(), varies)
        self.actions.append(Made(found, matrix))
        return found

    def _beside(self, x: Any, value: Any, rank: int = 2) -> Any:
        """Return scratch memory to read ``value`` from, for each lane if ``x`` is."""
        held = self.held(value)
        return held if held and held.varies == x.varies else self._copy(value, rank)

    def _together(self, *matrices: Any) -> list[Any]:
        """Repeat each of ``matrices`` for the batch of the others."""
        batch = max((list(m.get_size()[:-2]) for m in matrices), key=len)
        for matrix in matrices:
            own = matrix.get_size()[:-2]
            for k, n in enumerate(reversed(own), 1):
                batch[-k] = n if batch[-k] == 1 else batch[-k]
        return [self._expanded(m, batch, 2) for m in matrices]

    def _expanded(self, value: Any, batch: Any, rank: int) -> Any:
        sizes = list(value.get_size())
        if sizes[:-rank] == list(batch):
            return value
        return self.apply(aten.expand.default, value, [*batch, *sizes[-rank:]])

    def _note(self, like: Any, *more: int) -> Any:
        """Return scratch memory for integers beside the matrices ``like``."""
        return self.scratch([*like.size[:-2], *more], torch.int32, like.varies)

    def _call(self, *args: Any) -> None:
        called = Called(*args)
        memory = [*(m.scratch for m in called.matrices), *called.notes]
        if len({s.varies for s in memory}) > 1:
            raise Refusal("matrices of which some have lanes")
        self.actions.append(called)

    def _substitute(
        self, triangle: Any, x: Any, upper: bool, unit: bool, turned: bool, left: bool
    ) -> None:
        """Solve in place; ``turned``: by the transpose of ``triangle``; not ``left``: X A = B."""
        if not left:  # X A = B is A^T X^T = B^T
            turned = not turned
        n, m = x.size[-2:] if left else reversed(x.size[-2:])
        matrices = [Matrix(triangle, turned), Matrix(x, not left)]
        flags = (upper != turned, unit)
        self._call("scan_substitute", (int(n), int(m)), matrices, (), flags)

    def _exchange(self, pivots: Any, x: Any, left: bool, back: bool) -> None:
        n, m = x.size[-2:] if left else reversed(x.size[-2:])
        self._call("scan_exchange", (int(n), int(m)), [Matrix(x, not left)], (pivots,), (back,))

    def factor(self, matrix: Any, *, pivot: bool = True, check_errors: bool = False) -> list[Any]:
        if not pivot:
            raise Refusal("a factorisation without pivots")
        factors = self._copy(matrix)
        n, m = factors.size[-2:]
        if n != m:
            raise Refusal("a factorisation of what is not square")
        notes = pivots, info = self._note(factors, int(n)), self._note(factors)
        self._call("scan_lu", (int(n),), [Matrix(factors)], notes)
        return [factors.tensor(), pivots.tensor(), info.tensor()]

    def solve_factored(
        self, factors: Any, pivots: Any, right: Any, *, left: bool = True, adjoint: bool = False
    ) -> Any:
        """Return the solution of ``A X = B``, ``A^T X = B`` if ``adjoint``, or with ``X A``."""
        factors, right = self._together(factors, right)
        x = self._copy(right)
        factors = self._beside(x, factors)
        pivots = self._beside(x, self._expanded(pivots, x.size[:-2], 1), 1)
        if adjoint == left:  # by the transpose: U^T, then L^T, then the rows as they were
            self._substitute(factors, x, True, False, adjoint, left)
            self._substitute(factors, x, False, True, adjoint, left)
            self._exchange(pivots, x, left, True)
        else:
            self._exchange(pivots, x, left, False)
            self._substitute(factors, x, False, True, adjoint, left)
            self._substitute(factors, x, True, False, adjoint, left)
        return x.tensor()

    def solve_triangular(
        self, matrix: Any, rhs: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
    ) -> Any:
        triangle, rhs = self._together(matrix, rhs)
        x = self._copy(rhs)
        triangle = self._beside(x, triangle)
        self._substitute(triangle, x, upper, unitriangular, False, left)
        return x.tensor()

    def cholesky(
        self, matrix: Any, *, upper: bool = False, check_errors: bool = False
    ) -> list[Any]:
        lower = self._copy(self._turned(matrix) if upper else matrix)
        info = self._note(lower)
        self._call("scan_cholesky", (int(lower.size[-2]),), [Matrix(lower)], (info,))
        found = lower.tensor()
        return [self._turned(found) if upper else found, info.tensor()]


FACTORISATIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky_ex.default: FactorLowering.cholesky,
    aten.linalg_lu_factor_ex.default: FactorLowering.factor,
    aten.linalg_lu_solve.default: FactorLowering.solve_factored,
    aten.linalg_solve_triangular.default: FactorLowering.solve_triangular,
}
