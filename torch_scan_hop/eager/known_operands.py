"""Operands that are known before the loop are combined there, for all steps at once.

A step has one operator less where two in a row each take an operand that depends on no carry. Sums
of such terms, as a cell has them of its input and its biases::

    v + k + l            =  v + (k + l)
    addmm(k, v, w) + l   =  addmm(k + l, v, w)

And products with the derivative of an activation, which a backward reads of a saved value ``y``::

    tanh_backward(v * k, y)  =  v * tanh_backward(k, y)
    tanh_backward(v, y) * k  =  v * tanh_backward(k, y)

Such a derivative is at most 1, so that this product of known values overflows where the steps in
turn do; of other products that is not so, and they stay.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.body.meta_values import call_recorded, replace, same_strides, value_of
from torch_scan_hop.body.node_kinds import is_alike, is_tensor_node

aten = torch.ops.aten

_DERIVATIVES = (aten.tanh_backward.default, aten.sigmoid_backward.default)
# others are rounded after each operator, and so would be what is known
_DTYPES = (torch.float32, torch.float64)


class _Operands(NamedTuple):
    """What varies, and the operand that is known. What varies may be the product of two."""

    varying: tuple[Any, ...]
    known: Any


def combine_known_operands(graph: fx.Graph, carry: Collection[fx.Node]) -> None:
    """Rewrite the forms above in the body of a scan with these carries."""
    varying = set(carry)
    for node in list(graph.nodes):
        if varying.intersection(node.all_input_nodes):
            varying.add(node)
            combined = _combined(node, varying)
            if combined is not None:
                varying.add(combined)


def _combined(node: fx.Node, varying: set[fx.Node]) -> fx.Node | None:
    outer = _operands(node, varying)
    if outer is None or len(outer.varying) != 1:
        return None
    [inner] = outer.varying
    operands = _operands(inner, varying)
    if operands is None or len(inner.users) != 1:  # others would need both
        return None
    with node.graph.inserting_before(node):
        new = _of_sum(node, inner, outer.known, operands)
        new = new or _of_product(node, inner, outer.known, operands)
    if new is None:
        return None
    known, result = new
    if not same_strides(value_of(result), value_of(node)):
        node.graph.erase_node(result)
        node.graph.erase_node(known)
        return None
    for made in new:
        made.meta = {**node.meta, "val": value_of(made)}  # of the same line of the user's
    replace(node, result)
    node.graph.erase_node(inner)
    return result


def _operands(node: fx.Node, varying: set[fx.Node]) -> _Operands | None:
    """Return the operands of a node of which one is known, if it has the dtype and the shape of
    what varies."""
    if not is_tensor_node(node) or value_of(node).dtype not in _DTYPES or node.kwargs:
        return None
    if node.target is aten.addmm.default:
        added, *product = node.args
        return None if added in varying else _Operands(tuple(product), added)
    if node.target in (aten.add.Tensor, aten.mul.Tensor, *_DERIVATIVES):
        left, right = node.args
        # a derivative's cotangent comes first, and is what may vary
        orders = ((left, right), (right, left))[: 1 if node.target in _DERIVATIVES else 2]
        for operand, known in orders:
            if operand in varying and known not in varying and is_alike(operand, node):
                same_dtype = is_tensor_node(known) and value_of(known).dtype is value_of(node).dtype
                return _Operands((operand,), known) if same_dtype else None
    return None


def _of_sum(
    node: fx.Node, inner: fx.Node, known: Any, operands: _Operands
) -> tuple[fx.Node, fx.Node] | None:
    if node.target is not aten.add.Tensor:
        return None
    if inner.target not in (aten.add.Tensor, aten.addmm.default):
        return None
    total = call_recorded(aten.add.Tensor, operands.known, known)
    if inner.target is aten.addmm.default:
        return total, call_recorded(aten.addmm.default, total, *operands.varying)
    return total, call_recorded(aten.add.Tensor, *operands.varying, total)


def _of_product(
    node: fx.Node, inner: fx.Node, known: Any, operands: _Operands
) -> tuple[fx.Node, fx.Node] | None:
    derivatives = [n for n in (node, inner) if n.target in _DERIVATIVES]
    products = [n for n in (node, inner) if n.target is aten.mul.Tensor]
    if len(derivatives) != 1 or len(products) != 1:
        return None
    [derivative] = derivatives
    y, factor = (known, operands.known) if derivative is node else (operands.known, known)
    if not are_all_known_equal(value_of(factor).shape, value_of(y).shape):
        return None
    ahead = call_recorded(derivative.target, factor, y)
    return ahead, call_recorded(aten.mul.Tensor, *operands.varying, ahead)
