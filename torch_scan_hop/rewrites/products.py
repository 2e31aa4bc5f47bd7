"""Write products as the planner knows them.

``split_fused_products``    ``addmm`` as ``mm`` and ``add``: a fused product hides which of its
                            operands vary. Inductor fuses ``x @ W + h @ U`` and ``acc + a.t() @ b``
                            before scans are rewritten. With them split, each product is judged on
                            its own, and the addition joins the pointwise work around it.
``write_outer_products``    ``mm`` for the gradient of a weight of one row, which Inductor writes as
                            ``column * row`` on a GPU: then its sum over steps is one product, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.body.meta_values import record_again, replace, value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.rewrites.accumulate import added_terms
from torch_scan_hop.signature import Signature

aten = torch.ops.aten

_PRODUCTS: dict[Any, Any] = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
}

#: through these a term is only added to others
_PASSED_ON = {aten.add.Tensor, *operators("linear"), *operators("cast")}


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


def write_outer_products(body: fx.GraphModule, signature: Signature) -> None:
    """Write as products what is only added up; elsewhere a kernel of lanes may have them."""
    terms = added_terms(signature.inputs_of(body).carry, signature.outputs_of(body))
    found = list(terms.values())
    for node in found:  # grows
        if len(node.users) > 1:
            continue
        factors = _factors_of_outer(node)
        if factors is not None:
            with body.graph.inserting_before(node):
                product = body.graph.call_function(aten.mm.default, factors)
            product.meta = dict(node.meta)
            replace(node, product)
        elif node.target in _PASSED_ON:
            found += node.all_input_nodes
    legality.checked("write_outer_products", body)


def _factors_of_outer(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the column and the row that ``node`` is the product of, in their own dtype."""
    product = _through_casts(node)
    if product.target is not aten.mul.Tensor or not all(map(is_tensor_node, product.args)):
        return None
    left, right = map(_through_casts, product.args)
    if len({value_of(n).dtype for n in (node, left, right)}) > 1:
        return None
    column, row = (value_of(n).shape for n in (left, right))
    if len(column) != 2 or len(row) != 2 or 1 in (column[0], row[1]):
        return None
    return (left, right) if are_all_known_equal((column[1], row[0]), (1, 1)) else None


def _through_casts(node: Any) -> Any:
    """Return what is cast; Inductor multiplies bfloat16 in float32."""
    while node.target is torch.ops.prims.convert_element_type.default:
        node = node.args[0]
    return node
