"""Split ``addmm`` into ``mm`` and ``add``: a fused product hides which of its operands vary.

Inductor fuses ``x @ W + h @ U`` and ``acc + a.t() @ b`` before scans are rewritten. With them
split, each product is judged on its own, and the addition joins the pointwise work around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import record_again, replace

aten = torch.ops.aten

_PRODUCTS: dict[Any, Any] = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
}


def split_fused_products(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or not _is_plain(node):
            continue
        added, left, right = node.args
        with graph.inserting_before(node):
            product = graph.call_function(_PRODUCTS[node.target], (left, right))
            total = graph.call_function(aten.add.Tensor, (added, product))
        product.meta = dict(node.meta)
        total.meta = dict(node.meta)
        replace(node, total)
        record_again([total])  # laid out as what was added, not as a product


def _is_plain(node: fx.Node) -> bool:
    return all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta")) and len(node.args) == 3
