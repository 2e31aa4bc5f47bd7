"""Attention without dropout hands its backward no state of a random generator.

The operators of a GPU return that state in any case, as tensors that lie on the CPU or on the GPU,
other than their fakes say. Saved for the backward they would be stacked, by a kernel of the GPU
that cannot read the CPU's memory. The backward does not read them where nothing is dropped.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.node_kinds import drops_nothing

_STATES = {"philox_seed", "philox_offset", "rng_state", "unused"}


def forget_random_states(graph: fx.Graph) -> None:
    """Let zeros stand for random states of attention that drops nothing."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.getitem:
            continue
        source, position = node.args
        if not isinstance(source, fx.Node) or not drops_nothing(source):
            continue
        returns: Any = source.target._schema.returns  # type: ignore[union-attr]
        if returns[position].name in _STATES:
            value = node.meta["val"]
            with graph.inserting_before(node):
                zeros = graph.call_function(
                    torch.ops.aten.full.default,
                    (list(value.shape), 0),
                    {"dtype": value.dtype, "device": value.device},
                )
            zeros.meta = {"val": value}
            node.replace_all_uses_with(zeros)
            graph.erase_node(node)
