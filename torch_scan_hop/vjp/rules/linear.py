"""Rules for products of matrices and for reductions.

For `C = A B` and a cotangent D of C: `dA = D B^T`, `dB = A^T D`. (Giles, "Collected matrix
derivative results for forward and reverse mode algorithmic differentiation", 2008, section 2.2.)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..shapes import ndim, shape, unbroadcast
from ..table import Rule, saving_arguments


def _rows(x: Any) -> Any:
    """Reshape [..., N] to [rows, N]: leading dimensions of a product with a matrix are rows."""
    return x.flatten(0, -2) if ndim(x) > 2 else x


def _t(x: Any) -> Any:
    """Transpose the last two dimensions."""
    return x.t() if ndim(x) == 2 else x.transpose(-2, -1)


def matmul_bwd(d: Any, a: Any, b: Any) -> Any:
    """a: [K] or [..., M, K], b: [K] or [..., K, N]."""
    if ndim(a) == 1 and ndim(b) == 1:
        return d * b, d * a
    if ndim(b) == 1:  # d: [..., M]
        flat = d.flatten() if ndim(d) > 1 else d
        return d.unsqueeze(-1) * b, _rows(a).t() @ flat
    if ndim(a) == 1:  # d: [..., N]
        da = (b @ d.unsqueeze(-1)).squeeze(-1)
        return unbroadcast(da, a), unbroadcast(a.unsqueeze(-1) * d.unsqueeze(-2), b)
    # A batch times one matrix is one product of tall matrices: no [..., K, N] to sum up.
    db = _rows(a).t() @ _rows(d) if ndim(b) == 2 else _t(a) @ d
    return unbroadcast(d @ _t(b), a), unbroadcast(db, b)


def linear_bwd(d: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """x: [..., K], weight: [N, K], bias: [N] -> [..., N]."""
    d_weight = d.unsqueeze(-1) * x if ndim(x) == 1 else _rows(d).t() @ _rows(x)
    return d @ weight, d_weight, unbroadcast(d, bias)


def addmm_bwd(d: Any, c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * c + alpha * (a @ b) for a: [M, K], b: [K, N], c that broadcasts to [M, N]."""
    dc = d if beta == 1 else beta * d
    dab = d if alpha == 1 else alpha * d
    return unbroadcast(dc, c), dab @ b.t(), a.t() @ dab


def _reduced(x: Any, dim: Any) -> list[int]:
    """Return the dimensions that a reduction over `dim` removes, ascending and not negative."""
    if dim is None or dim == [] or dim == ():
        return list(range(ndim(x)))
    return sorted(i % max(ndim(x), 1) for i in ([dim] if isinstance(dim, int) else dim))


def _spread(d: Any, x_shape: tuple[int, ...], dims: list[int], keepdim: bool) -> Any:
    """Apply the transpose of a sum over `dims`: repeat `d` along them.

    Only the sizes of these dimensions appear in the code; -1 leaves a dimension as it is.
    """
    if not x_shape:
        return d
    if not keepdim and ndim(d):
        for i in dims:
            d = d.unsqueeze(i)
    return d.expand([n if i in dims else -1 for i, n in enumerate(x_shape)])


def _reduction(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def fn(x: Any, dim: Any, keepdim: bool, *, dtype: Any) -> Any:
        if dtype is not None:
            x = x.to(dtype)
        return reduce(x) if dim is None else reduce(x, dim, keepdim=keepdim)

    return fn


def sum_bwd(d: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _spread(d, shape(x), _reduced(x, dim), keepdim)


def mean_bwd(d: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    count = math.prod(shape(x)[i] for i in _reduced(x, dim) if shape(x))
    return sum_bwd(d / count, x, dim, keepdim)


def trace_bwd(d: Any, x: Any) -> Any:
    """d on the diagonal (Giles 2008, section 2.2.4 of the long version: dTr(X)/dX = I)."""
    rows, columns = shape(x)
    diagonal = d.expand(min(rows, columns))
    if rows == columns:
        return torch.diag(diagonal)
    return torch.diagonal_scatter(d.new_zeros((rows, columns)), diagonal)


_MATMUL = saving_arguments(operator.matmul, matmul_bwd)

LINEAR: dict[Any, Rule] = {
    torch.matmul: _MATMUL,
    torch.mm: _MATMUL,
    torch.bmm: _MATMUL,
    torch.mv: _MATMUL,
    torch.dot: _MATMUL,
    torch.addmm: saving_arguments(torch.addmm, addmm_bwd),
    F.linear: saving_arguments(F.linear, linear_bwd),
    torch.sum: saving_arguments(_reduction(torch.sum), sum_bwd),
    torch.mean: saving_arguments(_reduction(torch.mean), mean_bwd),
    torch.trace: saving_arguments(torch.trace, trace_bwd),
}
