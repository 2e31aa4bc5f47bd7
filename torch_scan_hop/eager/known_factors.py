"""Products with values that are known before the loop, made for all steps at once.

The derivative of an activation is a product with a value that the loop of a backward reads, since
it was saved. So is the one before it or after it, as a gate has them::

    tanh_backward(cotangent * a, y)  =  cotangent * tanh_backward(a, y)
    tanh_backward(cotangent, y) * a  =  cotangent * tanh_backward(a, y)

Where ``a`` and ``y`` depend on no carry, ``tanh_backward(a, y)`` leaves the loop, and a step has
one operator less. Such a factor is at most 1, so that the product of both overflows where the steps
in turn do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import call_recorded, replace, same_strides, value_of
from torch_scan_hop.body.node_kinds import is_alike

aten = torch.ops.aten

_DERIVATIVES = (aten.tanh_backward.default, aten.sigmoid_backward.default)
# others are rounded after each operator, and so would be the factor
_DTYPES = (torch.float32, torch.float64)


def multiply_known_factors(graph: fx.Graph, carry: Collection[fx.Node]) -> None:
    """Rewrite both forms above in the body of a scan with these carries."""
    varying = set(carry)
    for node in list(graph.nodes):
        if varying.intersection(node.all_input_nodes):
            varying.add(node)
            _rewrite(node, varying)


def _rewrite(node: fx.Node, varying: set[fx.Node]) -> None:
    inner, factor = _product(node, varying)
    if inner is None or len(inner.users) != 1:  # others would need both
        return
    cotangent, other = _product(inner, varying)
    derivatives = [n for n in (node, inner) if n.target in _DERIVATIVES]
    if cotangent is None or len(derivatives) != 1:
        return
    [derivative] = derivatives
    y, a = (factor, other) if derivative is node else (other, factor)
    with node.graph.inserting_before(node):
        known = call_recorded(derivative.target, a, y)
        product = call_recorded(aten.mul.Tensor, cotangent, known)
    if not same_strides(value_of(product), value_of(node)):
        node.graph.erase_node(product)
        node.graph.erase_node(known)
        return
    varying.add(product)
    replace(node, product)
    node.graph.erase_node(inner)


def _product(node: fx.Node, varying: set[fx.Node]) -> tuple[fx.Node | None, fx.Node]:
    """Return what varies in a product with a known factor, and that factor."""
    if node.target in (aten.mul.Tensor, *_DERIVATIVES) and value_of(node).dtype in _DTYPES:
        left: Any
        right: Any
        left, right = node.args
        if all(is_alike(operand, node) for operand in node.args):
            if left in varying and right not in varying:
                return left, right
            if right in varying and left not in varying and node.target is aten.mul.Tensor:
                return right, left
    return None, node
