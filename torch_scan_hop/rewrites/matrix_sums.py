"""Gradients of weights as sums for each lane, where a step is a kernel of small matrices.

::

    acc' = acc + A^T @ B, where A and B have the rows of all lanes, below each other
    acc_b' = acc_b + A_b^T @ B_b;  acc = acc_0 + sum_b acc_b

What is small for each lane is better added up in the kernel than stacked: a stack is written at
every step, and read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.sizes import are_known_equal, likely_value
from torch_scan_hop.body.meta_values import call_recorded, replace, value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.rewrites.accumulate import SUMS, added_terms, is_matrix_transpose
from torch_scan_hop.rewrites.classify import Dependence, classify
from torch_scan_hop.rewrites.lane_sums import LaneSums, find_lane_sums, linear_terms
from torch_scan_hop.rewrites.sizes import first_size
from torch_scan_hop.signature import Signature

aten = torch.ops.aten

_ACROSS_ROWS = {aten.mm.default, aten.addmm.default}

# numbers of a value for each lane
MOST_ENTRIES = 1024


def lanes_of_matrices(body: fx.GraphModule, signature: Signature) -> Any:
    """Return the size that all values of a step that vary have first, or None: it is no batch.

    Carries that are only added to do not count, nor do numbers.
    """
    roles, outputs = signature.inputs_of(body), signature.outputs_of(body)
    added = added_terms(roles.carry, outputs)
    carry = [n for k, n in enumerate(roles.carry) if k not in added and value_of(n).ndim]
    size = first_size(map(value_of, carry))
    if size is None:
        return None
    terms = {t for term in added.values() for t in linear_terms(term, lambda _: False)}
    varying = set(carry)
    for node in body.graph.nodes:
        if varying.isdisjoint(node.all_input_nodes):
            continue
        varying.add(node)
        # in a batch, no lane is multiplied by another
        if node.target in _ACROSS_ROWS and node.args[-1] in varying and node not in terms:
            return None
    return size


def are_small(body: fx.GraphModule, lanes: Any) -> bool:
    """Return True if the values of a step have few numbers for each lane."""
    n = 1 if lanes is None else likely_value(lanes)
    tensors = filter(is_tensor_node, body.graph.nodes)
    return all(likely_value(value_of(t).numel()) <= MOST_ENTRIES * n for t in tensors)


def find_matrix_sums(
    body: fx.GraphModule, signature: Signature, used_outputs: Sequence[bool], lanes: Any
) -> LaneSums | None:
    """Find carries to which a step adds a sum over lanes, or a product of all lanes' rows.

    It writes such products of ``body`` as sums.
    """
    if lanes is None:
        return None
    roles = signature.inputs_of(body)
    dependence = classify(body.graph, roles)
    added = added_terms(roles.carry, signature.outputs_of(body))
    is_known = lambda n: dependence[n] is Dependence.INVARIANT  # noqa: E731
    terms = {t for term in added.values() for t in linear_terms(term, is_known)}

    def products_by_lane(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node in terms and node.target is aten.mm.default:
                _write_by_lane(graph, node, lanes)

    legality.run_passes(body, [products_by_lane])
    return find_lane_sums(body, signature, used_outputs, _is_sum_of_lanes)


def _write_by_lane(graph: fx.Graph, node: fx.Node, lanes: Any) -> None:
    left, right = node.args
    depth, columns = value_of(right).shape
    rows = likely_value(depth) // likely_value(lanes)
    if rows < 1 or not are_known_equal(depth, lanes * rows) or not isinstance(columns, int):
        return
    n_results = value_of(node).shape[0]
    if not isinstance(n_results, int):
        return

    with graph.inserting_before(node):
        turned = left.args[0] if is_matrix_transpose(left) else call_recorded(aten.t.default, left)  # type: ignore[union-attr]
        own_left = call_recorded(aten.reshape.default, turned, [-1, rows, n_results])
        own_left = call_recorded(aten.permute.default, own_left, [0, 2, 1])
        own_right = call_recorded(aten.reshape.default, right, [-1, rows, columns])
        product = call_recorded(aten.bmm.default, own_left, own_right)
        total = call_recorded(aten.sum.dim_IntList, product, [0])
    replace(node, total)


def _is_sum_of_lanes(lanes: torch.Tensor, term: fx.Node) -> bool:
    if term.target not in SUMS or len(term.args) < 2:
        return False
    operand = value_of(term.args[0])
    dims: Any = term.args[1]
    over_lanes = bool(dims) and 0 in ([dims] if isinstance(dims, int) else dims)
    return (
        over_lanes
        and operand.dtype is value_of(term).dtype
        and operand.dtype in (torch.float32, torch.float64)
        and operand.device == lanes.device
        and are_known_equal(operand.shape[0], lanes.shape[0])
    )
