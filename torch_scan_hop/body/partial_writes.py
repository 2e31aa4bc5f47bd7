"""Find writes to a part of a large value that can be made in place.

A captured body is functional, so ``cache[i] = x`` makes a new cache. If nothing reads the old one
after the write, and its memory is the loop's own, the loop writes to that memory, as the program
did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node, is_view, viewed

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
