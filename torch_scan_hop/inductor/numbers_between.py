"""Numbers that steps leave in attributes, between a scan and the program around it.

They are Python numbers there, read from scalars in double. Inductor hands a number to a kernel as a
float32, and torch 2.9 generates code that does not compile. So a scalar that is made of such a
number again (to return it, or to begin the next scan) becomes the scalar that it was read from.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def keep_numbers_as_scalars(gm: fx.GraphModule) -> None:
    """Let no kernel make a scalar in double of a number that was read from one."""
    graph = gm.graph
    for target, place in ((aten.scalar_tensor.default, 0), (aten.full.default, 1)):
        for node in graph.find_nodes(op="call_function", target=target):
            number = node.args[place]
            if getattr(number, "target", None) is aten._local_scalar_dense.default:
                scalar = number.args[0]
                if _is_double(node) and _is_double(scalar):
                    node.replace_all_uses_with(scalar)
                    graph.erase_node(node)


def _is_double(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.dtype == torch.float64 and value.dim() == 0 and value.device.type == "cpu")
