"""Write ``add(a, b, alpha=k)`` as ``add(a, b * k)``.

Inductor's own passes, which run on bodies before ours, make ``addmm`` of an addition and a product,
and forget its ``alpha`` (torch 2.9 to 2.13; 2.15 does not).
"""

from __future__ import annotations

import torch
from torch import fx

from torch_scan_hop.body.meta_values import call_recorded, value_of

aten = torch.ops.aten


def write_out_alpha(graph: fx.Graph) -> None:
    for target in (aten.add.Tensor, aten.sub.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            alpha = node.kwargs.get("alpha", 1)
            other = node.args[1]
            if not isinstance(other, fx.Node) or isinstance(alpha, fx.Node) or alpha == 1:
                continue
            # a narrower operand would be scaled in its own dtype, and not in the result's
            if value_of(other).dtype != value_of(node).dtype:
                continue
            with graph.inserting_before(node):
                scaled = call_recorded(aten.mul.Tensor, other, alpha)
            node.args, node.kwargs = (node.args[0], scaled), {}
