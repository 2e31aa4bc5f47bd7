"""Small values of a step that the next step computes in the same memory.

New memory costs a small operator a quarter of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.meta_values import value_of

SMALL_BYTES = 2**16
MOST_BYTES = 2**19  # of all of them, which is what caches hold


def renewed_values(
    graph: fx.Graph,
    carry: Collection[fx.Node],
    may_be: Callable[[fx.Node], bool],
    is_new: Callable[[fx.Node], bool],
) -> list[fx.Node]:
    """Return those that ``may_be`` and whose memory no carry shares, which the next step reads.

    A node that ``is_new`` shares no memory with its operands.
    """
    shared = {*carry}
    for node in reversed(graph.nodes):
        if node in shared and not is_new(node):
            shared.update(node.all_input_nodes)
    found = []
    room = MOST_BYTES
    for node in graph.nodes:
        if node not in shared and may_be(node) and _is_small(value_of(node)):
            room -= _likely_bytes(value_of(node))
            if room < 0:
                break
            found.append(node)
    return found


def _is_small(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and _likely_bytes(value) <= SMALL_BYTES


def _likely_bytes(value: torch.Tensor) -> int:
    return likely_value(value.numel()) * value.element_size()  # ``nbytes`` would fix the sizes
