"""Pairs of operators that torch has one kernel for: where each dispatch costs, half of them go.

``x + a * b`` is ``addcmul``, ``x + a @ b`` is ``addmm``, ``x + a * 2`` is ``add`` with an alpha.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop.body.meta_values import run_node, same_strides
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.eager.calls import value_of

aten = torch.ops.aten


def fused(body: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``body`` with such pairs as one operator."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, env))
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not node.kwargs:
            _fuse_addition(graph, node)
    return legality.checked("fused", fx.GraphModule(body, graph, "FusedBody"))


def _fuse_addition(graph: fx.Graph, node: fx.Node) -> None:
    left, right = node.args
    for term, other in ((left, right), (right, left)):
        if not (isinstance(term, fx.Node) and is_tensor_node(term) and is_tensor_node(other)):
            continue
        assert isinstance(other, fx.Node)
        call = _sum_with(other, term)
        if call is None or len(term.users) != 1:
            continue
        if not _same_type(node, other, *term.all_input_nodes):
            continue
        with graph.inserting_before(node):
            replacement = graph.call_function(*call)
        replacement.meta = dict(node.meta)
        if not _keeps_layout(replacement):
            graph.erase_node(replacement)
            continue
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
        graph.erase_node(term)
        return


def _sum_with(other: fx.Node, term: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """``other + term`` as a call of one operator."""
    if term.target is aten.mul.Tensor:
        left, right = term.args
        if is_tensor_node(left) and is_tensor_node(right):
            return aten.addcmul.default, (other, left, right), {}
        if is_tensor_node(left) and isinstance(right, (int, float)) and not isinstance(right, bool):
            return aten.add.Tensor, (other, left), {"alpha": right}
    if term.target is aten.mm.default and value_of(other).shape == value_of(term).shape:
        return aten.addmm.default, (other, *term.args), {}
    return None


def _keeps_layout(replacement: fx.Node) -> bool:
    """Whether it lays out its result as recorded: what reads it was traced for that.

    Each operator has its own way with operands that are not contiguous.
    """
    value = value_of(replacement)
    if all(value_of(n).is_contiguous() for n in [replacement, *replacement.all_input_nodes]):
        return True
    return same_strides(run_node(replacement), value)


def _same_type(node: fx.Node, *inputs: fx.Node) -> bool:
    """No promotion takes place, and rounding in between makes no difference to speak of."""
    dtype = value_of(node).dtype
    exact_enough = dtype in (torch.float32, torch.float64)
    return exact_enough and all(value_of(n).dtype == dtype for n in inputs)
