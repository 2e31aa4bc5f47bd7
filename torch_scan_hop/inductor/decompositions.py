"""Operators of torch's written as several, which kernels have.

On a CPU ``nn.LSTMCell`` and ``nn.GRUCell`` are products and pointwise work. On a GPU torch does
that work by an operator of its own, forward and backward, which a kernel of ours cannot contain.
Taken apart, the whole scan is one kernel. In eager mode the operator stays, since it is one launch
instead of ten. The backward reads the operator's ``workspace``, rows of gates side by side, which
the parts keep as it is.

The kernels of small matrices have LU and Cholesky factors, and solves with those. Other solves,
inverses and determinants are made of them. A kernel of rows on a GPU has sums and extremes of them,
and makes variances and their like of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop import legality
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.inductor_passes import trace_decomposed
from torch_scan_hop.body.cofactors import cofactors, cofactors_by_factors, sign_of_exchanges
from torch_scan_hop.body.copies import copy_of
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.inductor.inline import inline
from torch_scan_hop.rewrites.batchable import greatest_and_sum
from torch_scan_hop.signature import results_of

aten, prims = torch.ops.aten, torch.ops.prims


def _write_in_parts(
    body: fx.GraphModule, parts: Mapping[Any, Callable[..., Any]], name: str
) -> fx.GraphModule:
    """Write each operator in ``parts`` as its function does, and return ``body``, which is changed;
    but not where something reads a result that the function does not return."""
    for node in [n for n in body.graph.nodes if n.target in parts]:
        given = node.all_input_nodes

        def run(*values: Any, node: fx.Node = node, given: Sequence[fx.Node] = given) -> Any:
            known = dict(zip(given, values, strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            return parts[node.target](*args, **kwargs)

        traced = trace_decomposed(run, [value_of(n) for n in given])
        made = results_of(traced.graph)
        if isinstance(made, fx.Node) or all(made[u.args[1]] for u in node.users if u.users):
            inline(body, node, traced, given)
    erase_unread(body.graph)
    body.recompile()
    return legality.checked(name, body)


# --- the cells that torch runs as one operator on a GPU ---


def _parts(gates: Tensor, bias: Tensor | None, count: int) -> Any:
    return (gates if bias is None else gates + bias).chunk(count, -1)


def _lstm(
    of_input: Tensor,
    of_hidden: Tensor,
    c: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    """Return ``(h', c', workspace)``; the workspace is the gates i, f, g, o."""
    parts = zip(_parts(of_input, input_bias, 4), _parts(of_hidden, hidden_bias, 4), strict=True)
    i, f, g, o = (x + h for x, h in parts)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    c = f * c + i * g
    return o * torch.tanh(c), c, torch.cat([i, f, g, o], -1)


def _lstm_backward(
    h_grad: Tensor | None,
    c_grad: Tensor | None,
    c: Tensor,
    next_c: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Any:
    """Return ``(gradient of the gates, of c, of each bias)``."""
    if h_grad is None and c_grad is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, -1)
    tanh = torch.tanh(next_c)
    through_c = torch.zeros_like(c) if c_grad is None else c_grad
    of_o = torch.zeros_like(o)
    if h_grad is not None:
        through_c = through_c + h_grad * o * (1 - tanh * tanh)
        of_o = h_grad * tanh * (1 - o) * o
    of_i = through_c * g * (1 - i) * i
    of_f = through_c * c * (1 - f) * f
    of_g = through_c * i * (1 - g * g)
    gates = torch.cat([of_i, of_f, of_g, of_o], -1)
    return gates, through_c * f, gates.sum(0) if has_bias else None


def _gru(
    of_input: Tensor,
    of_hidden: Tensor,
    h: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    """Return ``(h', workspace)``: the gates r, z, n, then h, and the hidden part of n."""
    x_r, x_z, x_n = _parts(of_input, input_bias, 3)
    h_r, h_z, h_n = _parts(of_hidden, hidden_bias, 3)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return n + z * (h - n), torch.cat([r, z, n, h, h_n], -1)


def _gru_backward(h_grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """Return ``(gradients of the input's gates, of the hidden ones, of h, of either bias)``."""
    r, z, n, h, h_n = workspace.chunk(5, -1)
    of_z = h_grad * (h - n) * (1 - z) * z
    of_n = h_grad * (1 - z) * (1 - n * n)
    of_r = of_n * h_n * (1 - r) * r
    of_input = torch.cat([of_r, of_z, of_n], -1)
    of_hidden = torch.cat([of_r, of_z, of_n * r], -1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, h_grad * z, *biases


CELLS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}


def write_fused_cells(body: fx.GraphModule) -> None:
    """Write each operator of ``CELLS`` in ``body`` in parts."""
    if any(node.target in CELLS for node in body.graph.nodes):
        _write_in_parts(body, CELLS, "write_fused_cells")


# --- the gradient of a greatest element, which is written where that was ---


def _scatter(value: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Write one element of each row by a comparison, which is pointwise."""
    own = [*value.shape]
    own[dim] = 1
    if not (own == [*index.shape] == [*source.shape]):
        return aten.scatter.src(value, dim, index, source)
    place = [1] * value.dim()
    place[dim] = value.shape[dim]
    places = torch.arange(value.shape[dim], device=value.device).reshape(place)
    return torch.where(places == index, source, value)


def write_scatters(body: fx.GraphModule) -> None:
    """Write the scatters in ``body`` that write one element of each row as comparisons, if all are
    to new tensors: one to a cache may be in place, and touches one element."""
    nodes = body.graph.find_nodes(op="call_function", target=aten.scatter.src)
    if nodes and all(node.args[0].target is aten.full.default for node in nodes):
        _write_in_parts(body, {aten.scatter.src: _scatter}, "write_scatters")


# --- solves, inverses and determinants of small matrices ---

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
    return factors.diagonal(0, -2, -1), sign_of_exchanges(pivots, matrix)


def _determinant(matrix: Tensor) -> tuple[Any, ...]:
    diagonal, sign = _diagonal_and_sign(matrix)
    return (diagonal.prod(-1) * sign, *_NO_FACTORS)


def _log_determinant(matrix: Tensor) -> tuple[Any, ...]:
    """Return the sign and the logarithm of the size: 0 and -inf for a singular matrix."""
    diagonal, sign = _diagonal_and_sign(matrix)
    return (diagonal.sign().prod(-1) * sign, diagonal.abs().log().sum(-1), *_NO_FACTORS)


MATRICES: dict[Any, Callable[..., Any]] = {
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_inv_ex.default: _inverse,
    aten._linalg_det.default: _determinant,
    aten._linalg_slogdet.default: _log_determinant,
    cofactors: cofactors_by_factors,
    aten._linalg_solve_ex.default: _solve,
}


# --- operators on rows, for kernels that have a row in registers ---


def _variance_and_mean(
    value: Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Pass over the row twice. In float32 at least, as Inductor's."""
    wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    distance = wide - wide.mean(dims, True)
    count = value.shape[-1] - (1 if correction is None else correction)
    variance = (distance * distance).sum(dims, keepdim) / float(max(0, count))
    return variance.to(value.dtype), wide.mean(dims, keepdim).to(value.dtype)


def _variance(value: Tensor, dims: Any = None, **options: Any) -> Tensor:
    return _variance_and_mean(value, dims, **options)[0]


def _with_part(
    value: Tensor, part: Tensor, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Tensor:
    """Write columns as parts side by side: a block that is not written is not looked at."""
    size, written = value.shape[dim], part.shape[dim]
    known = all(isinstance(n, int) for n in (size, written, start or 0))
    if step != 1 or not known or dim % value.ndim != value.ndim - 1:
        return aten.slice_scatter.default(value, part, dim, start, end, step)
    first = slice(start, end).indices(size)[0]
    before, after = value[..., :first], value[..., first + written :]
    return torch.cat([p for p in (before, part, after) if p.shape[-1]], -1)


ROWS: dict[Any, Callable[..., Any]] = {
    aten.max.dim: lambda v, dim, keep=False: (v.amax(dim, keep), v.argmax(dim, keep)),
    aten.min.dim: lambda v, dim, keep=False: (v.amin(dim, keep), v.argmin(dim, keep)),
    aten.slice_scatter.default: _with_part,
    aten.var.correction: _variance,
    aten.var_mean.correction: _variance_and_mean,
    prims.prepare_softmax_online.default: greatest_and_sum,
}


def in_parts(
    body: fx.GraphModule, parts: Mapping[Any, Callable[..., Any]] = MATRICES
) -> fx.GraphModule:
    """Return ``body`` with the operators of ``parts`` in parts; the same body if it has none."""
    if not any(node.target in parts for node in body.graph.nodes):
        return body
    return _write_in_parts(copy_of(body), parts, "in_parts")
