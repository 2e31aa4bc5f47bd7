"""Rules for products of matrices and for reductions.

For `C = A B` and a cotangent D of C: `dA = D B^T`, `dB = A^T D`. (Giles, "Collected matrix
derivative results for forward and reverse mode algorithmic differentiation", 2008, section 2.2.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..shapes import ndim, shape, unbroadcast
from ..table import Rule


def _rows(x: Any) -> Any:
    """Reshape [..., N] to [rows, N]: leading dimensions of a product with a matrix are rows."""
    return x.flatten(0, -2) if ndim(x) > 2 else x


def _t(x: Any) -> Any:
    """Transpose the last two dimensions."""
    return x.t() if ndim(x) == 2 else x.transpose(-2, -1)


def matmul_fwd(a: Any, b: Any) -> Any:
    """a: [K] or [..., M, K], b: [K] or [..., K, N]."""
    return a @ b, (a, b)


def matmul_bwd(saved: Any, d: Any) -> Any:
    a, b = saved
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


def linear_fwd(x: Any, weight: Any, bias: Any = None) -> Any:
    """x: [..., K], weight: [N, K], bias: [N] -> [..., N]."""
    return F.linear(x, weight, bias), (x, weight, bias)


def linear_bwd(saved: Any, d: Any) -> Any:
    x, weight, bias = saved
    d_weight = d.unsqueeze(-1) * x if ndim(x) == 1 else _rows(d).t() @ _rows(x)
    return d @ weight, d_weight, unbroadcast(d, bias)


def addmm_fwd(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * c + alpha * (a @ b) for a: [M, K], b: [K, N], c that broadcasts to [M, N]."""
    return torch.addmm(c, a, b, beta=beta, alpha=alpha), (c, a, b, beta, alpha)


def addmm_bwd(saved: Any, d: Any) -> Any:
    c, a, b, beta, alpha = saved
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


def sum_fwd(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    saved = shape(x), _reduced(x, dim), keepdim
    if dtype is not None:
        x = x.to(dtype)
    return (torch.sum(x) if dim is None else torch.sum(x, dim, keepdim=keepdim)), saved


def sum_bwd(saved: Any, d: Any) -> Any:
    return _spread(d, *saved)


def mean_fwd(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    saved = shape(x), _reduced(x, dim), keepdim
    if dtype is not None:
        x = x.to(dtype)
    return (torch.mean(x) if dim is None else torch.mean(x, dim, keepdim=keepdim)), saved


def mean_bwd(saved: Any, d: Any) -> Any:
    x_shape, dims, keepdim = saved
    count = 1
    for i in dims if x_shape else []:
        count *= x_shape[i]
    return _spread(d / count, x_shape, dims, keepdim)


def trace_fwd(x: Any) -> Any:
    """x: [M, N] -> []."""
    return torch.trace(x), shape(x)


def trace_bwd(x_shape: Any, d: Any) -> Any:
    """d on the diagonal (Giles 2008, section 2.2.4 of the long version: dTr(X)/dX = I)."""
    rows, columns = x_shape
    diagonal = d.expand(min(rows, columns))
    if rows == columns:
        return torch.diag(diagonal)
    return torch.diagonal_scatter(d.new_zeros(x_shape), diagonal)


_MATMUL = Rule(matmul_fwd, matmul_bwd)

LINEAR: dict[Any, Rule] = {
    torch.matmul: _MATMUL,
    torch.mm: _MATMUL,
    torch.bmm: _MATMUL,
    torch.mv: _MATMUL,
    torch.dot: _MATMUL,
    torch.addmm: Rule(addmm_fwd, addmm_bwd),
    F.linear: Rule(linear_fwd, linear_bwd),
    torch.sum: Rule(sum_fwd, sum_bwd),
    torch.mean: Rule(mean_fwd, mean_bwd),
    torch.trace: Rule(trace_fwd, trace_bwd),
}
