"""Factorisations, and solves with their factors, as calls of ``matrix_source``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.matrix_memory import Called, Made, Matrix

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float64)


def _turned(lowering: Any, matrix: Any) -> Any:
    rank = len(matrix.get_size())
    return lowering.apply(aten.permute.default, matrix, [*range(rank - 2), rank - 1, rank - 2])


def _copy(lowering: Any, matrix: Any, rank: int = 2) -> Any:
    """Return scratch memory that a function may change; a Refusal for what is no matrix.

    What has lanes has a copy for each, even if those are alike: all matrices of a call lie alike.
    """
    sizes = matrix.get_size()
    if rank == 2 and matrix.get_dtype() not in _FLOATS:
        raise Refusal(f"a factorisation of {matrix.get_dtype()}")
    varies = lowering.varies(sizes) and len(sizes) > rank
    found = lowering.scratch(sizes, matrix.get_dtype(), varies)
    lowering.actions.append(Made(found, matrix))
    return found


def _beside(lowering: Any, x: Any, value: Any, rank: int = 2) -> Any:
    """Return scratch memory with ``value``, for each lane if ``x`` is, which a function reads."""
    held = lowering.held(value)
    return held if held and held.varies == x.varies else _copy(lowering, value, rank)


def _together(lowering: Any, *matrices: Any) -> list[Any]:
    """Repeat each of ``matrices`` for the batch of the others."""
    batch = max((list(m.get_size()[:-2]) for m in matrices), key=len)
    for matrix in matrices:
        own = matrix.get_size()[:-2]
        for k, n in enumerate(reversed(own), 1):
            batch[-k] = n if batch[-k] == 1 else batch[-k]
    return [_expanded(lowering, m, batch, 2) for m in matrices]


def _expanded(lowering: Any, value: Any, batch: Any, rank: int) -> Any:
    sizes = list(value.get_size())
    if sizes[:-rank] == list(batch):
        return value
    return lowering.apply(aten.expand.default, value, [*batch, *sizes[-rank:]])


def _note(lowering: Any, like: Any, *more: int) -> Any:
    """Return scratch memory for integers beside the matrices ``like``."""
    return lowering.scratch([*like.size[:-2], *more], torch.int32, like.varies)


def _call(lowering: Any, *args: Any) -> None:
    called = Called(*args)
    memory = [*(m.scratch for m in called.matrices), *called.notes]
    if len({s.varies for s in memory}) > 1:
        raise Refusal("matrices of which some have lanes")
    lowering.actions.append(called)


def _substitute(
    lowering: Any, triangle: Any, x: Any, upper: bool, unit: bool, turned: bool, left: bool
) -> None:
    """Solve in place; ``turned``: with the transpose of ``triangle``; not ``left``: ``X A = B``."""
    if not left:  # X A = B is A^T X^T = B^T
        turned = not turned
    n, m = x.size[-2:] if left else reversed(x.size[-2:])
    matrices = [Matrix(triangle, turned), Matrix(x, not left)]
    flags = (upper != turned, unit)
    _call(lowering, "scan_substitute", (int(n), int(m)), matrices, (), flags)


def _exchange(lowering: Any, pivots: Any, x: Any, left: bool, back: bool) -> None:
    n, m = x.size[-2:] if left else reversed(x.size[-2:])
    _call(lowering, "scan_exchange", (int(n), int(m)), [Matrix(x, not left)], (pivots,), (back,))


def factor(
    lowering: Any, matrix: Any, *, pivot: bool = True, check_errors: bool = False
) -> list[Any]:
    if not pivot:
        raise Refusal("a factorisation without pivots")
    factors = _copy(lowering, matrix)
    n, m = factors.size[-2:]
    if n != m:
        raise Refusal("a factorisation of what is not square")
    notes = pivots, info = _note(lowering, factors, int(n)), _note(lowering, factors)
    _call(lowering, "scan_lu", (int(n),), [Matrix(factors)], notes)
    return [factors.tensor(), pivots.tensor(), info.tensor()]


def solve_factored(
    lowering: Any,
    factors: Any,
    pivots: Any,
    right: Any,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Any:
    """Return the solution of ``A X = B``, ``A^T X = B`` if ``adjoint``, or with ``X A``."""
    factors, right = _together(lowering, factors, right)
    x = _copy(lowering, right)
    factors = _beside(lowering, x, factors)
    pivots = _beside(lowering, x, _expanded(lowering, pivots, x.size[:-2], 1), 1)
    if adjoint == left:  # by the transpose: U^T, then L^T, then the rows as they were
        _substitute(lowering, factors, x, True, False, adjoint, left)
        _substitute(lowering, factors, x, False, True, adjoint, left)
        _exchange(lowering, pivots, x, left, True)
    else:
        _exchange(lowering, pivots, x, left, False)
        _substitute(lowering, factors, x, False, True, adjoint, left)
        _substitute(lowering, factors, x, True, False, adjoint, left)
    return x.tensor()


def solve_triangular(
    lowering: Any,
    matrix: Any,
    right: Any,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Any:
    triangle, right = _together(lowering, matrix, right)
    x = _copy(lowering, right)
    triangle = _beside(lowering, x, triangle)
    _substitute(lowering, triangle, x, upper, unitriangular, False, left)
    return x.tensor()


def cholesky(
    lowering: Any, matrix: Any, *, upper: bool = False, check_errors: bool = False
) -> list[Any]:
    lower = _copy(lowering, _turned(lowering, matrix) if upper else matrix)
    info = _note(lowering, lower)
    _call(lowering, "scan_cholesky", (int(lower.size[-2]),), [Matrix(lower)], (info,))
    found = lower.tensor()
    return [_turned(lowering, found) if upper else found, info.tensor()]


FACTORISATIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky_ex.default: cholesky,
    aten.linalg_lu_factor_ex.default: factor,
    aten.linalg_lu_solve.default: solve_factored,
    aten.linalg_solve_triangular.default: solve_triangular,
}
