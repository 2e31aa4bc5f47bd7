"""Dtypes of results, as torch says them.

To torch a 0-d tensor has less weight than others: half plus a 0-d float64 tensor is half. In the
HLO of torch_xla 2.9.0 the sum is float64, although the tensor calls itself half. A scan, whose
results are those of the HLO, would return another dtype than the loop.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from torch_scan_hop.body.meta_values import call_recorded, value_of
from torch_scan_hop.body.node_kinds import is_tensor_node

aten = torch.ops.aten

_COMPUTES_IN_ONE_DTYPE = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.div.Tensor_mode,
    aten.pow.Tensor_Tensor,
    aten.remainder.Tensor,
    aten.fmod.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.atan2.default,
    aten.where.self,
}


def round_to_torchs_dtypes(graph: fx.Graph) -> None:
    """Where the HLO would be of a wider dtype than the result, compute in that one, and round."""
    for node in list(graph.nodes):
        if node.target not in _COMPUTES_IN_ONE_DTYPE:
            continue
        first = 1 if node.target is aten.where.self else 0
        dtypes = [value_of(a).dtype for a in node.args[first:] if is_tensor_node(a)]
        dtype = value_of(node).dtype
        widest = functools.reduce(torch.promote_types, dtypes, dtype)
        if widest == dtype:
            continue
        with graph.inserting_before(node):
            operands = [_as(a, widest) for a in node.args[first:]]
            wide = call_recorded(node.target, *node.args[:first], *operands, **node.kwargs)
            rounded = _as(wide, dtype)
        node.replace_all_uses_with(rounded)
        graph.erase_node(node)


def _as(value: fx.node.Argument, dtype: torch.dtype) -> fx.node.Argument:
    if not is_tensor_node(value) or value_of(value).dtype == dtype:
        return value
    return call_recorded(aten._to_copy.default, value, dtype=dtype)
