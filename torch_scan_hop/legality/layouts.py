"""A graph that runs on other strides than it was traced for says nothing that depends on them."""

from __future__ import annotations

import torch
from torch import fx

from torch_scan_hop.legality import IllegalRewrite
from torch_scan_hop.legality.structure import value_of

aten = torch.ops.aten
_FOR_ONE_STRIDE = {aten.view.default, aten._unsafe_view.default}


def check_any_layout(where: str, module: fx.GraphModule) -> None:
    """``view`` raises where strides are others; ``as_strided`` reads other numbers."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _FOR_ONE_STRIDE:
            raise IllegalRewrite(
                f"{where}: {node} ({node.target}): expected reshape, which takes any strides"
            )
        if node.target is aten.as_strided.default and not _is_contiguous_copy(node.args[0]):
            raise IllegalRewrite(
                f"{where}: {node} ({node.target}): expected it to read a contiguous copy, got "
                f"{node.args[0]}, which may have other strides when it runs"
            )


def _is_contiguous_copy(node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    value = value_of(node)
    if isinstance(value, torch.Tensor) and not value.is_contiguous():
        return True  # its strides are the ones that it was traced with: nothing says others
    is_copy = node.target is aten.clone.default
    return is_copy and node.kwargs.get("memory_format") is torch.contiguous_format
