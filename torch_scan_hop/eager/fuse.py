"""Make fewer operators of a body, because each dispatch takes time.

Pairs for which torch has one kernel become one operator: ``x + a * b`` is ``addcmul``, ``x + a @
b`` is ``addmm``, ``x + a * 2`` is ``add`` with an alpha, ``x + -y`` is ``x - y``. Views that change
nothing are dropped. A check of a factorisation just raises, since steps run in order, and is not
added to the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.linalg_checks import linalg_check, raise_if_failed
from torch_scan_hop.body.meta_values import replace, run_node, same_strides, value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.body.operator_table import operators

aten = torch.ops.aten


def fused(body: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``body`` in which such pairs are one operator."""
    copy = copied(body, name="FusedBody")
    graph = copy.graph
    for node in graph.nodes:
        if node.target in operators("reshaping"):
            _drop_identity(graph, node)
    for node in graph.find_nodes(op="call_function", target=linalg_check):
        _check_in_order(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not node.kwargs:
            _fuse_addition(graph, node)
    copy.recompile()
    return legality.checked("fused", copy)


def _drop_identity(graph: fx.Graph, node: fx.Node) -> None:
    """Drop a view of the same shape and strides; a batched product is traced with three of them."""
    base = node.args[0]
    assert isinstance(base, fx.Node)
    value, like = value_of(node), value_of(base)
    if are_all_known_equal(value.shape, like.shape) and same_strides(value, like):
        node.replace_all_uses_with(base, lambda user: user.op != "output")
        if not node.users:
            graph.erase_node(node)


def _check_in_order(graph: fx.Graph, check: fx.Node) -> None:
    """Replace a check by one that only raises, if its readers just add its zero to a result."""
    results = {
        user: user.args[0]
        for user in check.users
        if user.target is aten.add.Tensor and user.args[1] is check and not user.kwargs
    }
    if len(results) != len(check.users):
        return
    for user, result in results.items():
        if not isinstance(result, fx.Node) or not same_strides(value_of(user), value_of(result)):
            return
    info, name, is_matrix = check.args
    with graph.inserting_before(check):
        raising = graph.call_function(raise_if_failed, (info, name), {"is_matrix": is_matrix})
    raising.meta["val"] = None
    for user, result in results.items():
        replace(user, result)  # type: ignore[arg-type]
    graph.erase_node(check)


def _fuse_addition(graph: fx.Graph, node: fx.Node) -> None:
    left, right = node.args
    for term, other in ((left, right), (right, left)):
        if not (isinstance(term, fx.Node) and is_tensor_node(term) and is_tensor_node(other)):
            continue
        assert isinstance(other, fx.Node)
        call = _sum_with(other, term)
        if call is None or other is term or len(term.users) != 1:
            continue
        if not _same_type(node, other, *term.all_input_nodes):
            continue
        with graph.inserting_before(node):
            replacement = graph.call_function(*call)
        replacement.meta = dict(node.meta)
        if not _keeps_layout(replacement):
            graph.erase_node(replacement)
            continue
        replace(node, replacement)
        graph.erase_node(term)
        return


def _sum_with(other: fx.Node, term: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return ``other + term`` as a call of one operator."""
    if term.target is aten.mul.Tensor:
        left, right = term.args
        if is_tensor_node(left) and is_tensor_node(right):
            return aten.addcmul.default, (other, left, right), {}
        if is_tensor_node(left) and isinstance(right, (int, float)) and not isinstance(right, bool):
            return aten.add.Tensor, (other, left), {"alpha": right}
    if term.target is aten.neg.default:
        return aten.sub.Tensor, (other, term.args[0]), {}
    if term.target is aten.mm.default and value_of(other).shape == value_of(term).shape:
        return aten.addmm.default, (other, *term.args), {}
    return None


def _keeps_layout(replacement: fx.Node) -> bool:
    """Return True if the result is laid out as recorded, as its readers were traced for.

    Operators differ in the layout that they make of operands that are not contiguous.
    """
    value = value_of(replacement)
    if all(value_of(n).is_contiguous() for n in [replacement, *replacement.all_input_nodes]):
        return True
    return same_strides(run_node(replacement), value)


def _same_type(node: fx.Node, *inputs: fx.Node) -> bool:
    """Return True if dtypes are not promoted, and rounding in between makes hardly a difference."""
    dtype = value_of(node).dtype
    exact_enough = dtype in (torch.float32, torch.float64)
    return exact_enough and all(value_of(n).dtype == dtype for n in inputs)
