"""Sums over dimensions, kept as one sum for each lane until the loop is done.

::

    acc' = acc + sum_b g_t[b]     is     acc_b' = acc_b + g_t[b],     acc = acc_0 + sum_b acc_b

A step that sums over dimensions, as the gradient of a parameter does, reads other lanes than it
writes. Then its loop is no kernel in which each lane runs by itself, unless the terms are stacked
and summed after the loop. One sum for each lane needs no stack in memory.

So do gradients of weights, where a step is a kernel of small matrices: in ``acc + A^T @ B``, where
A and B have the rows of all lanes below each other, a lane adds ``A_b^T @ B_b``. What is small for
each lane is better added up in the kernel than stacked: a stack is written at every step, and read
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.sizes import are_all_known_equal, are_known_equal, likely_value
from torch_scan_hop.body.meta_values import call_recorded, placeholder, replace, value_of
from torch_scan_hop.body.node_kinds import addends, is_tensor_node
from torch_scan_hop.rewrites.accumulate import (
    SUMS,
    added_terms,
    argument_of_linear,
    is_matrix_transpose,
)
from torch_scan_hop.rewrites.classify import Dependence, classify
from torch_scan_hop.rewrites.parts import Part, extract, unique
from torch_scan_hop.rewrites.sizes import first_size
from torch_scan_hop.signature import Inputs, Signature, output_node, results_of

aten = torch.ops.aten

# Sums of narrower numbers are better made of all terms at once, in wider ones.
_DTYPES = {torch.float32, torch.float64, torch.int64}


@dataclass(frozen=True)
class LaneSums:
    """A body whose carries are those that are ``kept``, and one sum for each lane of ``operands``.

    Attributes:
        body: runs in place of the body that all nodes here belong to.
        like: a carry that has the shape of the lanes.
        added: for each other carry, what a step adds to it.
        after: computes what is added over all steps, from the sums of the operands: it is
            linear in them.
        used_outputs: for each result of ``body``, whether anything reads it.
    """

    body: fx.GraphModule
    roles: Inputs[fx.Node]
    kept: Sequence[int]
    like: int
    operands: Sequence[fx.Node]
    added: dict[int, fx.Node]
    after: Part
    used_outputs: Sequence[bool]

    @property
    def signature(self) -> Signature:
        n_carry = len(self.kept) + len(self.operands)
        return Signature(n_carry, len(self.roles.xs), len(self.roles.additional))

    def run(self, run: Callable[[Inputs[Any]], list[Any]], inputs: Inputs[Any]) -> list[Any]:
        """Return the results of the scan; ``run`` runs one of ``body``."""
        lanes = inputs.carry[self.like]
        zeros = (
            lanes.new_zeros([lanes.shape[0], *v.shape[1:]] if v.ndim else [], dtype=v.dtype)
            for v in (value_of(n) for n in self.operands)
        )
        carry = [*(inputs.carry[k] for k in self.kept), *zeros]
        results = run(dataclasses.replace(inputs, carry=carry))
        final = dict(zip(self.kept, results, strict=False))
        values = dict(zip(self.roles.additional, inputs.additional, strict=True))
        values |= dict(zip(self.operands, results[len(self.kept) :], strict=False))
        totals = self.after(values)
        final |= {k: inputs.carry[k] + totals[node] for k, node in self.added.items()}
        return [*map(final.get, range(len(inputs.carry))), *results[len(carry) :]]


def find_lane_sums(
    body: fx.GraphModule,
    signature: Signature,
    used_outputs: Sequence[bool],
    is_sum_like: Callable[[torch.Tensor, fx.Node], bool] | None = None,
) -> LaneSums | None:
    """Find carries that are sums over dimensions, by ``is_sum_like(carry, term)``; or None."""
    is_sum_like = is_sum_like or _is_sum_like
    roles, outputs = signature.inputs_of(body), signature.outputs_of(body)
    sums = {k: found for k, found in _sums_of(body, signature).items() if used_outputs[k]}
    others = (k for k in range(signature.n_carry) if roles.carry[k] is not outputs.carry[k])
    like = min((k for k in others if k not in sums), default=None)
    if like is None:
        return None
    lanes = value_of(roles.carry[like])
    added = {k: n for k, (n, terms) in sums.items() if all(is_sum_like(lanes, t) for t in terms)}
    if not added:
        return None
    operands = unique([t.args[0] for k in added for t in sums[k][1]])  # type: ignore[misc]
    kept = [k for k in range(signature.n_carry) if k not in added]
    used = [used_outputs[k] for k in kept] + [True] * len(operands)
    return LaneSums(
        body=_widened(body, signature, kept, operands),
        roles=roles,
        kept=kept,
        like=like,
        operands=operands,
        added=added,
        after=Part(body, [*operands, *roles.additional], unique([*added.values()]), "AfterSums"),
        used_outputs=[*used, *used_outputs[signature.n_carry :]],
    )


def _sums_of(
    body: fx.GraphModule, signature: Signature
) -> dict[int, tuple[fx.Node, list[fx.Node]]]:
    """Return what is added to each carry, and the terms in which that is linear."""
    roles = signature.inputs_of(body)
    dependence = classify(body.graph, roles)
    is_known = lambda n: dependence[n] is Dependence.INVARIANT  # noqa: E731
    added = added_terms(roles.carry, signature.outputs_of(body))
    return {k: (term, linear_terms(term, is_known)) for k, term in added.items()}


def linear_terms(node: fx.Node, is_known: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the terms in which ``node`` is linear."""
    parts: list[Any] = addends(node) or [argument_of_linear(node, is_known)]
    return [t for p in parts if p is not None for t in linear_terms(p, is_known)] or [node]


def _is_sum_like(lanes: torch.Tensor, term: fx.Node) -> bool:
    """Return True if ``term`` sums a tensor shaped as ``lanes``, and keeps its dtype."""
    if term.target not in SUMS:
        return False
    operand = value_of(term.args[0])
    return (
        operand.dtype is value_of(term).dtype
        and operand.dtype in _DTYPES
        and operand.device == lanes.device
        and are_all_known_equal(operand.shape, lanes.shape)
    )


def _widened(
    body: fx.GraphModule, signature: Signature, kept: Sequence[int], operands: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return ``body`` with the carries that are ``kept``, and a sum of each of the ``operands``."""
    roles, outputs = signature.inputs_of(body), signature.outputs_of(body)
    inputs = [*(roles.carry[k] for k in kept), *roles.xs, *roles.additional]
    results = [*(outputs.carry[k] for k in kept), *operands, *outputs.ys]
    module = extract(body, inputs, results, "GraphModule")
    graph, output = module.graph, output_node(module.graph)
    first_x = graph.find_nodes(op="placeholder")[len(kept)]
    results = list(results_of(graph))
    for k, node in enumerate(operands, len(kept)):
        value = value_of(node)
        with graph.inserting_before(first_x):
            before = placeholder(graph, f"sum_of_{node.name}", value.new_empty(value.shape))
        with graph.inserting_before(output):
            results[k] = graph.call_function(aten.add.Tensor, (before, results[k]))
        results[k].meta = dict(before.meta)
    output.args = (tuple(results),)
    module.recompile()
    return legality.checked("lane_sums", module)


_ACROSS_ROWS = {aten.mm.default, aten.addmm.default}

# numbers of a value for each lane
MOST_ENTRIES = 1024


def lanes_of_matrices(body: fx.GraphModule, signature: Signature) -> Any:
    """Return the size that all values which vary have first, or None: it is no batch. Carries that
    are only added to do not count, nor do numbers."""
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
    """Find carries to which a step adds a sum over lanes, or a product of all lanes' rows, which is
    written as a sum in ``body``."""
    if lanes is None:
        return None
    terms = {t for _, found in _sums_of(body, signature).values() for t in found}

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
