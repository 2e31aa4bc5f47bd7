"""Operators with no derivative in torch, or a poor one, written as operators that have one.

The former are in a body's graph because torch put them there: into a backward that it did not
expect to be differentiated, or in place of a write.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from torch_scan_hop._torch.operators import decompositions
from torch_scan_hop.autodiff.determinants import determinant, determinant_of_factors
from torch_scan_hop.body.copies import copied
from torch_scan_hop.op import Body

aten = torch.ops.aten

# Backwards that torch takes for the last ones.
_WITHOUT_DERIVATIVE = (
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.logit_backward.default,
    aten.native_group_norm_backward.default,
)


def _by_parts(operator: Any) -> Any:
    """Apply ``operator(into, src, ...)`` to the real and the imaginary part of complex values."""

    def run(into: Any, src: Any, *where: Any, **keywords: Any) -> Any:
        if not into.is_complex():
            return operator(into, src, *where, **keywords)
        return torch.complex(
            operator(into.real, src.real, *where, **keywords),
            operator(into.imag, src.imag, *where, **keywords),
        )

    return run


# Writes into a slice: torch's derivatives of them are for real numbers alone.
_OF_COMPLEX = {
    operator: _by_parts(operator)
    for operator in (aten.slice_scatter.default, aten.select_scatter.default)
}


def _index_fill(input: Any, dim: int, index: Any, value: Any) -> Any:
    """Do ``index_fill`` by a mask. torch's derivative by a tensor ``value`` sums over
    ``index.unique()``, of a size that a trace cannot know, as it does a mask's."""
    if not isinstance(value, torch.Tensor):
        return torch.index_fill(input, dim, index, value)
    size, shape = 1, [1] * input.dim()
    if shape:
        size = shape[dim] = input.shape[dim]
    is_filled = torch.zeros(size, dtype=torch.bool, device=input.device).index_fill(0, index, True)
    return torch.where(is_filled.view(shape), value.to(input.dtype), input)


def _cumulative_product(
    input: torch.Tensor, dim: Any = None, *, dtype: Any = None, axis: Any = None
) -> torch.Tensor:
    """Return ``torch.cumprod``, made by doubling, whose derivatives of any order are right.

    torch's own derivative divides by the factors. Where one is zero it takes another formula, which
    is right for the first derivative alone: for a second one it asks if gradients are on, but a
    step is traced once for both.

    >>> _cumulative_product(torch.tensor([2.0, 0.0, 3.0], requires_grad=True), 0).tolist()
    [2.0, 0.0, 0.0]
    """
    dim = axis if dim is None else dim
    if not input.requires_grad or input.ndim == 0:
        return aten.cumprod.default(input, dim, dtype=dtype)
    product = input if dtype is None else input.to(dtype)
    size, reach = product.shape[dim], 1
    while reach < size:
        first = product.narrow(dim, 0, reach)
        rest = product.narrow(dim, reach, size - reach) * product.narrow(dim, 0, size - reach)
        product, reach = torch.cat([first, rest], dim), 2 * reach
    return product


def _in_float32(norm: Any) -> Any:
    """Compute ``norm`` in float32 where a CPU's kernel would do so for a narrow input.

    It does for weights in float32, as autocast has them, and gives means and deviations in float32.
    torch's fakes say that those are as narrow as the input, so that a stack of them was, too, and
    the backward refused it.
    """

    def run(input: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        others = [a for a in (*args, *keywords.values()) if isinstance(a, torch.Tensor)]
        is_narrow = input.dtype in (torch.bfloat16, torch.float16) and input.device.type == "cpu"
        if not is_narrow or all(other.dtype is input.dtype for other in others):
            return norm(input, *args, **keywords)
        results = norm(input.float(), *args, **keywords)
        if isinstance(results, torch.Tensor):
            return results.to(input.dtype)
        return results[0].to(input.dtype), *results[1:]

    return run


_NORMS = {
    norm: _in_float32(norm)
    for norm in (
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        torch.layer_norm,
        torch.group_norm,
        torch.batch_norm,
        torch.instance_norm,
        F.layer_norm,
        F.group_norm,
        F.batch_norm,
        F.instance_norm,
    )
}

_STAND_INS: dict[Any, Any] = {
    **_OF_COMPLEX,
    **_NORMS,
    aten.cumprod.default: _cumulative_product,
    torch.cumprod: _cumulative_product,
    aten._linalg_det.default: determinant_of_factors,
    torch.det: determinant,
    torch.linalg.det: determinant,
    aten.index_fill.int_Tensor: _index_fill,
    torch.index_fill: _index_fill,
}
_METHODS = {
    "cumprod": _cumulative_product,
    "det": determinant,
    "index_fill": _index_fill,
    "index_fill_": lambda input, *args, **how: input.copy_(_index_fill(input, *args, **how)),
}


def with_differentiable_operators(body: Body) -> Body:
    """Return ``body`` with such operators written out; the same body if it has none."""
    if not isinstance(body, fx.GraphModule):
        return body
    if not any(_is_rewritten(node) for node in body.graph.nodes):
        return body
    copy = copied(body)
    known = {**decompositions(_WITHOUT_DERIVATIVE), **_STAND_INS, **_METHODS}
    for node in filter(_is_rewritten, copy.graph.nodes):
        node.op, node.target = "call_function", known[node.target]
    copy.recompile()
    return copy


def _is_rewritten(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    return node.op == "call_function" and (
        node.target in _STAND_INS or node.target in _WITHOUT_DERIVATIVE
    )
