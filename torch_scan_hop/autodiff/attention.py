"""Attention without dropout hands its backward no state of a random generator.

The operators of a GPU return that state in any case, as tensors that lie on the CPU or on the GPU,
other than their fakes say. Saved for the backward they would be stacked, by a kernel of the GPU
that cannot read the CPU's memory. The backward does not read them where nothing is dropped.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from torch_scan_hop._torch.impure import is_random
from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop.body.meta_values import replace, value_of

_STATES = {"philox_seed", "philox_offset", "rng_state", "unused"}


def forget_random_states(graph: fx.Graph) -> None:
    """Let zeros stand for random states of attention that drops nothing."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.getitem:
            continue
        source, position = node.args
        if not isinstance(source, fx.Node) or not isinstance(source.target, OpOverload):
            continue
        names = dict(enumerate(result.name for result in source.target._schema.returns))
        if names.get(position) in _STATES and not is_random(source):
            value = value_of(node)
            with graph.inserting_before(node):
                zeros = graph.call_function(
                    torch.ops.aten.full.default,
                    (list(value.shape), 0),
                    {"dtype": value.dtype, "device": value.device},
                )
            zeros.meta = {"val": value}
            replace(node, zeros)
