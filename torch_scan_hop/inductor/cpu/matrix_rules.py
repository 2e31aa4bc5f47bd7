"""Factorisations and solves as calls of ``matrix_source``, and what torch's operators return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_values import NotPointwise, ops, pointwise_like
from torch_scan_hop.inductor.cpu.matrix_steps import Called, Made, Matrix

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float64)


def _turned(lowering: Any, matrix: Any) -> Any:
    rank = len(matrix.get_size())
    return lowering.apply(aten.permute.default, matrix, [*range(rank - 2), rank - 1, rank - 2])


def _copy(lowering: Any, matrix: Any, rank: int = 2) -> Any:
    """Return scratch memory that a function may change; NotPointwise for what is no matrix.

    What has lanes has a copy for each, even if those are alike: all matrices of a call lie alike.
    """
    sizes = matrix.get_size()
    if rank == 2 and matrix.get_dtype() not in _FLOATS:
        raise NotPointwise(f"a factorisation of {matrix.get_dtype()}")
    varies = lowering.varies(sizes) and len(sizes) > rank
    found = lowering.scratch(sizes, matrix.get_dtype(), varies)
    lowering.actions.append(Made(found, matrix))
    return found


def _together(lowering: Any, *matrices: Any, rank: int = 2) -> list[Any]:
    """Repeat each of ``matrices`` for the batch of the others."""
    longest = max((m.get_size()[:-rank] for m in matrices), key=len)
    batch = list(longest)
    for matrix in matrices:
        own = matrix.get_size()[:-rank]
        for k, n in enumerate(reversed(own), 1):
            batch[-k] = n if batch[-k] == 1 else batch[-k]
    return [_expanded(lowering, m, batch, rank) for m in matrices]


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
        raise NotPointwise("matrices of which some have lanes")
    lowering.actions.append(called)


class _LU:
    """The factors of a copy of ``matrix``, in scratch memory."""

    def __init__(self, lowering: Any, matrix: Any) -> None:
        self.factors = _copy(lowering, matrix)
        n, m = self.factors.size[-2:]
        if n != m:
            raise NotPointwise("a factorisation of what is not square")
        self.n = int(n)
        self.pivots = _note(lowering, self.factors, self.n)
        self.info = _note(lowering, self.factors)
        notes = (self.pivots, self.info)
        _call(lowering, "scan_lu", (self.n,), [Matrix(self.factors)], notes)


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


def _solved(lowering: Any, factors: Any, pivots: Any, right: Any, left: bool, adjoint: bool) -> Any:
    """Return the solution of ``A X = B``, ``A^T X = B`` if ``adjoint``, or with ``X A``."""
    whole, right = _together(lowering, factors.tensor(), right)
    x = _copy(lowering, right)
    if (factors.size[:-2], factors.varies) != (x.size[:-2], x.varies):  # one matrix, many sides
        pivots = _expanded(lowering, pivots.tensor(), x.size[:-2], 1)
        factors, pivots = _copy(lowering, whole), _copy(lowering, pivots, 1)
    if adjoint == left:  # by the transpose: U^T, then L^T, then the rows as they were
        _substitute(lowering, factors, x, True, False, adjoint, left)
        _substitute(lowering, factors, x, False, True, adjoint, left)
        _exchange(lowering, pivots, x, left, True)
    else:
        _exchange(lowering, pivots, x, left, False)
        _substitute(lowering, factors, x, False, True, adjoint, left)
        _substitute(lowering, factors, x, True, False, adjoint, left)
    return x.tensor()


def solve(
    lowering: Any, matrix: Any, right: Any, *, left: bool = True, check_errors: bool = False
) -> list[Any]:
    """Solve without returning the factors, whose layout depends on that of the matrix."""
    sizes = list(right.get_size())
    is_vector = len(sizes) == 1 or sizes == list(matrix.get_size())[:-1]
    if is_vector:
        right = lowering.apply(aten.unsqueeze.default, right, -1)
    found = _LU(lowering, matrix)
    x = _solved(lowering, found.factors, found.pivots, right, left or is_vector, False)
    if is_vector:
        x = lowering.apply(aten.squeeze.dim, x, -1)
    return [x, None, None, found.info.tensor()]


def inverse(lowering: Any, matrix: Any, *, check_errors: bool = False) -> list[Any]:
    found = _LU(lowering, matrix)
    dtype = matrix.get_dtype()

    def entry(index: Any) -> Any:
        i, j = (ops.index_expr(k, torch.int64) for k in index[-2:])
        return ops.where(ops.eq(i, j), ops.constant(1.0, dtype), ops.constant(0.0, dtype))

    identity = pointwise_like(matrix, entry, matrix.get_size())
    x = _solved(lowering, found.factors, found.pivots, identity, True, False)
    return [x, found.info.tensor()]


def factor(
    lowering: Any, matrix: Any, *, pivot: bool = True, check_errors: bool = False
) -> list[Any]:
    if not pivot:
        raise NotPointwise("a factorisation without pivots")
    found = _LU(lowering, matrix)
    return [found.factors.tensor(), found.pivots.tensor(), found.info.tensor()]


def solve_factored(
    lowering: Any,
    factors: Any,
    pivots: Any,
    right: Any,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Any:
    own = _copy(lowering, factors), _copy(lowering, pivots, 1)
    return _solved(lowering, *own, right, left, adjoint)


def solve_triangular(
    lowering: Any,
    matrix: Any,
    right: Any,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Any:
    triangle, x = (_copy(lowering, m) for m in _together(lowering, matrix, right))
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


def cholesky_solve(lowering: Any, right: Any, factor: Any, upper: bool = False) -> Any:
    triangle, x = (_copy(lowering, m) for m in _together(lowering, factor, right))
    _substitute(lowering, triangle, x, upper, False, upper, True)
    _substitute(lowering, triangle, x, upper, False, not upper, True)
    return x.tensor()


def _diagonal(lowering: Any, found: _LU) -> Any:
    return lowering.apply(aten.diagonal.default, found.factors.tensor(), 0, -2, -1)


def _sign(lowering: Any, found: _LU, dtype: torch.dtype) -> Any:
    """Return 1 or -1: whether the number of exchanges is even."""
    load = found.pivots.tensor().make_loader()

    def term(index: Any, k: int) -> Any:
        stays = ops.eq(load([*index, sympy.Integer(k)]), ops.constant(k + 1, torch.int32))
        return ops.where(stays, ops.constant(1.0, dtype), ops.constant(-1.0, dtype))

    like = found.factors.tensor()
    return lowering.joined_terms(like, found.info.size, found.n, term, ops.mul)


def determinant(lowering: Any, matrix: Any) -> list[Any]:
    found = _LU(lowering, matrix)
    product = lowering.apply(aten.prod.dim_int, _diagonal(lowering, found), -1)
    sign = _sign(lowering, found, matrix.get_dtype())
    return [lowering.apply(aten.mul.Tensor, product, sign), None, None]


def log_determinant(lowering: Any, matrix: Any) -> list[Any]:
    """Sign and logarithm of the size; of a singular matrix, 0 and minus infinity."""
    found = _LU(lowering, matrix)
    diagonal = _diagonal(lowering, found)
    signs = lowering.apply(aten.sign.default, diagonal)
    sign = lowering.apply(aten.prod.dim_int, signs, -1)
    sign = lowering.apply(aten.mul.Tensor, sign, _sign(lowering, found, matrix.get_dtype()))
    sizes = lowering.apply(aten.log.default, lowering.apply(aten.abs.default, diagonal))
    return [sign, lowering.apply(aten.sum.dim_IntList, sizes, [-1]), None, None]


FACTORISATIONS: dict[Any, Callable[..., Any]] = {
    aten.cholesky_solve.default: cholesky_solve,
    aten.linalg_cholesky_ex.default: cholesky,
    aten.linalg_inv_ex.default: inverse,
    aten.linalg_lu_factor_ex.default: factor,
    aten.linalg_lu_solve.default: solve_factored,
    aten.linalg_solve_triangular.default: solve_triangular,
    aten._linalg_det.default: determinant,
    aten._linalg_slogdet.default: log_determinant,
    aten._linalg_solve_ex.default: solve,
}
