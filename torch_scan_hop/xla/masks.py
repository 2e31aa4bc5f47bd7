"""``h[mask] = value`` as a choice, where one value is for all places.

torch_xla looks for the places with ``nonzero``, which has no shape while a loop is compiled: the
scan would run step by step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import call_recorded, value_of
from torch_scan_hop.body.node_kinds import is_tensor_node

aten = torch.ops.aten


def choose_by_masks(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        target, indices, value, *accumulate = node.args
        *whole, mask = indices
        is_mask = is_tensor_node(mask) and value_of(mask).dtype == torch.bool
        is_plain = not any(accumulate) and all(index is None for index in whole)
        if is_mask and is_plain and value_of(value).dim() == 0:
            with graph.inserting_before(node):
                chosen = _chosen(target, mask, value, len(whole))
            node.replace_all_uses_with(chosen)
            graph.erase_node(node)


def _chosen(target: Any, mask: Any, value: Any, first: int) -> fx.Node:
    """Return ``value`` where ``mask`` says so, which begins at dimension ``first``."""
    shape = value_of(mask).shape
    after = value_of(target).dim() - first - len(shape)
    if after:
        mask = call_recorded(aten.reshape.default, mask, [*shape, *[1] * after])
    return call_recorded(aten.where.self, mask, value, target)
