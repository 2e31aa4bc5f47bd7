"""A graph that runs on other strides than it was traced for says nothing that depends on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from legality import IllegalRewrite
from legality.structure import value_of
from torch_scan_hop.body.strided import ONE_LAYOUT, has_known_strides

aten = torch.ops.aten
_FOR_ONE_STRIDE = {aten.view.default, aten._unsafe_view.default}


def _is_dense(value: torch.Tensor) -> bool:
    return bool(aten.is_non_overlapping_and_dense.default(value))


def check_any_layout(where: str, module: fx.GraphModule) -> None:
    """``view`` raises where strides are others; those of one layout may read other numbers."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _FOR_ONE_STRIDE:
            raise IllegalRewrite(
                f"{where}: {node} ({node.target}): expected reshape, which takes any strides"
            )
        if node.target is aten.as_strided.default and _is_dense(value_of(node.args[0])):
            raise IllegalRewrite(
                f"{where}: {node} ({node.target}): expected index; it counts from where the memory "
                "begins, and what it reads may be a row of a stack when it runs"
            )
        for position in ONE_LAYOUT.get(node.target, ()):
            if not _is_as_seen(node.args[position]):
                raise IllegalRewrite(
                    f"{where}: {node} ({node.target}): expected it to read a copy of known "
                    f"strides, got {node.args[position]}, which may have others when it runs"
                )


def _is_as_seen(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    value = value_of(node)
    if isinstance(value, torch.Tensor) and not _is_dense(value):
        return True  # no copy has gaps, or elements that share their memory
    return has_known_strides(node)
