"""Writes to a part of a large value, in place of copies of all of it.

A captured body is functional, so ``cache[i] = x`` makes a new cache. If nothing reads the old one
after the write, and its memory is the loop's own, the loop writes to that memory, as the program
did.

The derivative of reading a part, ``c[i]``, is a value of zeros except for that part. It is added to
the cotangent of ``c``, which writes and reads all of it twice. So the addition becomes a write::

    add(c, index_put(zeros, [i], v, accumulate=True))  =  index_put(c, [i], v, accumulate=True)
    add(c, select_backward(v, sizes, dim, k))  =  select_scatter(c, select(c, dim, k) + v, dim, k)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop._torch.sizes import likely_bytes
from torch_scan_hop.body.meta_values import call_recorded, replace, value_of
from torch_scan_hop.body.node_kinds import addends, is_tensor_node, is_view, viewed
from torch_scan_hop.body.operator_table import operators

aten = torch.ops.aten


#: for operators that return a value with a part of it written: the operator that reads that part
PART_OF: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
#: or what writes to the value
WRITE_OF: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}


def is_partial_write(node: fx.Node) -> bool:
    return node.target in PART_OF or node.target in WRITE_OF


def writes_in_place(
    graph: fx.Graph,
    own: Collection[fx.Node],
    lent: Collection[fx.Node],
    pays: Callable[[fx.Node], bool],
    copied: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """Return the writes that can be made where their value lies, and for which that ``pays``.

    The memory of ``own`` inputs is the loop's; that of ``lent`` results is not; ``copied`` values
    are copied where they are made. First, writes are moved to where they are needed, behind
    everything that still reads the old value.
    """
    for node in list(graph.nodes):
        if is_partial_write(node) and pays(node):
            _delay(node)
    last_read = _last_reads(graph, copied)
    found: list[Any] = []
    for node in list(graph.nodes):
        if not is_partial_write(node) or node in lent or not pays(node):
            continue
        value: fx.Node
        value, *others = node.all_input_nodes
        if value is not node.args[0] or last_read.get(value) is not node:
            continue  # a view of what it writes to is no value that it can write to
        is_own = value in own or (is_fresh(value) and value not in lent)
        if is_own and value not in map(viewed, filter(is_tensor_node, others)):
            found.append(node)
    return found


def _delay(node: fx.Node) -> None:
    for later in iter(lambda: node.next, None):
        if later.op == "output" or node in later.all_input_nodes:
            return
        later.append(node)


def _last_reads(graph: fx.Graph, copied: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return for each value the last node that reads it or a view of it."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for value in node.all_input_nodes:
            if node.op != "output" or value not in copied:
                found[viewed(value)] = node
    return found


def is_fresh(node: fx.Node) -> bool:
    """Return True if ``node`` makes a new dense tensor at each step."""
    if not isinstance(node.target, OpOverload) or is_view(node):
        return False
    returns: Sequence[Any] = node.target._schema.returns
    is_new = len(returns) == 1 and returns[0].alias_info is None
    return is_new and bool(value_of(node).is_contiguous())


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
        if not addends(node) or not is_large(value_of(node)):
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
    return likely_bytes(value) >= LARGE_BYTES


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
