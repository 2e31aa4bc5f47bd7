"""Additions to a part of a value, made by writing that part only.

The derivative of reading a part, ``c[i]``, is a value of zeros except for that part. It is added to
the cotangent of ``c``. If ``c`` is large, that writes and reads all of it twice::

    add(c, index_put(zeros, [i], v, accumulate=True))  =  index_put(c, [i], v, accumulate=True)
    add(c, select_backward(v, sizes, dim, k))  =  select_scatter(c, select(c, dim, k) + v, dim, k)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.meta_values import call_recorded, replace, value_of
from torch_scan_hop.body.node_kinds import is_alike, is_view
from torch_scan_hop.body.operator_table import operators

aten = torch.ops.aten

LARGE_BYTES = 2**14

_ZEROS = operators("zeros")
# operators of (into, where..., added values) that add to ``into``, be it zeros or anything else
_ADDING = {aten.index_add.default, aten.scatter_add.default, aten.index_put.default}


def add_at_indices(graph: fx.Graph) -> None:
    """Rewrite the first form above; drop an addition of a value that is zero everywhere."""
    _rewrite_additions(graph, _added_at_indices)


def add_to_slices(graph: fx.Graph) -> None:
    """Rewrite the second form above."""
    _rewrite_additions(graph, _added_to_slice)


def _rewrite_additions(graph: fx.Graph, total_of: Callable[[Any, Any], fx.Node | None]) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if node.kwargs or not all(is_alike(operand, node) for operand in node.args):
            continue
        if not is_large(value_of(node)):
            continue
        for into, added in (node.args, reversed(node.args)):
            with graph.inserting_before(node):
                total = total_of(into, added) if len(added.users) == 1 else None
            if total is not None:
                replace(node, total)
                break
    erase_unread(graph)


def is_large(value: torch.Tensor) -> bool:
    """Return True if copying ``value`` takes longer than one or two calls that avoid the copy."""
    return likely_value(value.numel()) * value.element_size() >= LARGE_BYTES


def _is_zero(node: Any) -> bool:
    """Return True if all entries are zero, also through views and through writes of zeros."""
    if not isinstance(node, fx.Node):
        return False
    if node.target in _ZEROS:
        return True
    if node.target is aten.index_put.default:
        return _is_zero(node.args[0]) and _is_zero(node.args[2])
    return is_view(node) and node.target in _VIEWS_OF_ONE and _is_zero(node.args[0])


_VIEWS_OF_ONE = {aten.reshape.default, aten.expand.default, aten.permute.default}


def _added_at_indices(into: Any, added: Any) -> fx.Node | None:
    if _is_zero(added):
        return into
    if added.target not in _ADDING or not _is_zero(added.args[0]):
        return None
    if added.target is aten.index_put.default and added.args[3:] != (True,):
        return None
    return call_recorded(added.target, into, *added.args[1:], **added.kwargs)


def _added_to_slice(into: Any, added: Any) -> fx.Node | None:
    if added.target not in _OF_SLICES or into.target in _OF_SLICES:
        return None
    read, write = _OF_SLICES[added.target]
    part, _, *where = added.args
    total = call_recorded(aten.add.Tensor, call_recorded(read, into, *where), part)
    return call_recorded(write, into, total, *where)


# the derivatives of reading a slice: what reads the same one, and what writes it
_OF_SLICES = {
    aten.select_backward.default: (aten.select.int, aten.select_scatter.default),
    aten.slice_backward.default: (aten.slice.Tensor, aten.slice_scatter.default),
}
