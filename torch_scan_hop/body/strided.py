"""Operators that read memory or want one layout, in graphs where only values count.

A graph is traced with one layout and runs with others: in a loop an x is a slice of all xs, with
their memory, an offset and their strides, and a cotangent has whatever strides autograd gives it.

- ``as_strided`` and its scatter read memory. Users write them, and functionalization does
  (``fill_diagonal_``).
- Other operators take one layout only, and raise for another one, or read it wrongly. torch's own
  callers call ``contiguous()`` first, but a trace of contiguous examples does not keep that.

So what such an operator reads gets a copy with the strides that were seen, and a scatter becomes an
``index_put`` of a flat copy. An ``as_strided`` becomes an ``index`` of it: its offset counts from
where the memory begins, and a copy that is made before the loop is a row of a stack there.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.fakes import FakeTensor
from torch_scan_hop._torch.sizes import are_known_equal, likely_value
from torch_scan_hop.body.meta_values import call_recorded, replace, replace_by_source, value_of
from torch_scan_hop.body.node_kinds import argument, is_tensor_node, is_view
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.body.stop_gradient import is_stop

aten = torch.ops.aten


def dense_order(value: torch.Tensor) -> list[int] | None:
    """Return the permutation that makes ``value`` contiguous; None if it has gaps or overlaps.

    >>> dense_order(torch.ones(2, 3).t()), dense_order(torch.ones(2, 1).expand(2, 3))
    ([1, 0], None)
    """
    if value.is_contiguous():
        return list(range(value.ndim))
    strides, shape = map(likely_value, value.stride()), map(likely_value, value.shape)
    descending = [(-stride, -size) for stride, size in zip(strides, shape, strict=True)]
    order = sorted(range(value.ndim), key=descending.__getitem__)
    return order if _is_known_contiguous(value, order) else None


def _is_known_contiguous(value: torch.Tensor, order: list[int]) -> bool:
    """Return True if ``value``, permuted to ``order``, is contiguous; no size gets a guard."""
    stride: Any = 1
    for dim in reversed(order):
        if are_known_equal(value.shape[dim], 1):
            continue
        if not are_known_equal(value.stride(dim), stride):
            return False
        stride = stride * value.shape[dim]
    return True


def is_dense_copy(node: Any) -> bool:
    """Return True if ``node`` is a copy whose strides are known, or a permutation of one."""
    while node.target is aten.permute.default:
        node = node.args[0]
    is_copy = node.target is aten.clone.default
    return is_copy and node.kwargs.get("memory_format") is torch.contiguous_format


#: operands by position, whose strides must be those that were seen
ONE_LAYOUT = {
    aten.as_strided.default: (0,),
    aten.as_strided_scatter.default: (0,),
    aten.view_as_complex.default: (0,),
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1),
}


def has_known_strides(node: Any) -> bool:
    """Return True if ``node`` has the strides of its example, however the inputs are laid out."""
    return is_dense_copy(node) or node.target in operators("contiguous")


def own_strided_memory(graph: fx.Graph) -> None:
    """Give operands of the operators in :data:`ONE_LAYOUT` the strides that the trace saw."""
    for target, positions in ONE_LAYOUT.items():
        for node in graph.find_nodes(op="call_function", target=target):
            for position in positions:
                _own(node, node.args[position])


def _own(node: fx.Node, source: Any) -> None:
    value = source.meta.get("val")
    order = dense_order(value) if isinstance(value, torch.Tensor) else None
    if order is None or has_known_strides(source):
        return
    with node.graph.inserting_before(node):
        copy = _permuted(source, order)
        copy = call_recorded(aten.clone.default, copy, memory_format=torch.contiguous_format)
        node.replace_input_with(source, _permuted(copy, _inverse(order)))


def index_strided_scatters(graph: fx.Graph) -> None:
    """Replace ``as_strided_scatter`` by ``index_put`` where its sizes are known.

    torch's own derivative of it keeps of the cotangent what was overwritten, and drops the rest
    (``as_strided_scatter_backward``, torch 2.9 to 2.15).
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        source, _, size, stride, *_ = node.args
        value = source.meta.get("val")
        order = dense_order(value) if isinstance(value, torch.Tensor) else None
        if order is None or not all(map(_are_ints, (size, stride, value.shape))):
            continue
        offset = _offset(node, 4, value, value)
        if offset is None:
            continue
        with graph.inserting_before(node):
            replacement = _as_index_put(node, order, offset)
        replace(node, replacement)


def index_strided_reads(graph: fx.Graph) -> None:
    """Replace ``as_strided`` by ``index``, where what has the memory leaves no gaps in it."""
    strided = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    for node in reversed(strided):  # one may be read by another, whose offset is that in memory
        read: Any = node.args[0]
        owner = _owner(read)
        value: Any = owner.meta.get("val")
        order = dense_order(value) if isinstance(value, torch.Tensor) else None
        offset = None if order is None else _offset(node, 3, value_of(read), value)
        if order is None or offset is None:
            continue
        with graph.inserting_before(node):
            replacement = _as_index(node, owner, order, offset)
        replace_by_source(node, replacement)


def _owner(read: fx.Node) -> fx.Node:
    """Return the value that ``read`` is a view of: beyond the ends of a view is more to be read."""
    node: Any = read
    while is_view(node) and not is_stop(node) and node.target is not aten.reshape.default:
        node = node.args[0]
    dtypes = [n.meta["val"].dtype if is_tensor_node(n) else None for n in (node, read)]
    is_other = dtypes[0] is not dtypes[1] or (dtypes[0] is not None and dtypes[0].is_complex)
    return read if is_other else node


def _offset(node: fx.Node, position: int, read: torch.Tensor, owner: torch.Tensor) -> Any:
    """Return where a view by strides begins in ``owner``; None if the graph has no such number."""
    given = argument(node, position, "storage_offset", None)
    begin: Any = read.storage_offset() if given is None else given
    before: Any = owner.storage_offset()
    if isinstance(begin, fx.Node):
        return begin if are_known_equal(before, 0) else None
    offset = begin - before
    return offset if isinstance(offset, int) else None


def _as_index(node: Any, owner: fx.Node, order: list[int], offset: Any) -> fx.Node:
    value, (_, size, stride, *_) = value_of(owner), node.args
    flat = call_recorded(aten.reshape.default, _permuted(owner, order), [-1])
    seen: torch.Tensor = value_of(node)
    if offset == 0 and seen.is_contiguous() and are_known_equal(seen.numel(), value.numel()):
        return call_recorded(aten.reshape.default, flat, size)
    positions = _positions(node, value, size, stride, offset)
    return call_recorded(aten.index.Tensor, flat, [positions])


def _as_index_put(node: Any, order: list[int], offset: Any) -> fx.Node:
    source, values, size, stride, *_ = node.args
    positions = _positions(node, value_of(source), size, stride, offset)
    index = call_recorded(aten.reshape.default, positions, [-1])
    ordered = _permuted(source, order)
    flat = call_recorded(aten.reshape.default, ordered, [-1])
    written = call_recorded(aten.reshape.default, values, [-1])
    put = call_recorded(aten.index_put.default, flat, [index], written)
    shaped = call_recorded(aten.reshape.default, put, list(value_of(ordered).shape))
    return _permuted(shaped, _inverse(order))


def _positions(node: fx.Node, value: torch.Tensor, size: Any, stride: Any, offset: Any) -> fx.Node:
    """Insert the positions in a flat copy of ``value`` that a view by strides reads."""
    device = value.device
    positions: Any = None
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        along = _like(value, node.graph, aten.arange.default, length, device=device)
        along = call_recorded(aten.mul.Tensor, along, step)
        along = call_recorded(aten.reshape.default, along, [-1, *[1] * (len(size) - dim - 1)])
        positions = along if positions is None else call_recorded(aten.add.Tensor, positions, along)
    if positions is None:
        positions = _like(
            value, node.graph, aten.zeros.default, [], dtype=torch.long, device=device
        )
    return call_recorded(aten.add.Tensor, positions, offset)


def _are_ints(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _permuted(node: fx.Node, order: list[int]) -> fx.Node:
    return node if order == sorted(order) else call_recorded(aten.permute.default, node, order)


def _like(value: Any, graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a node that makes a tensor from nothing, recorded as a fake like ``value``."""
    node = graph.call_function(target, args, kwargs)
    with value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext():
        node.meta["val"] = target(*map(value_of, args), **kwargs)
    return node
