"""Sums over dimensions, kept as one sum for each lane until the loop is done.

::

    acc' = acc + sum_b g_t[b]     is     acc_b' = acc_b + g_t[b],     acc = acc_0 + sum_b acc_b

A step that sums over dimensions, as the gradient of a parameter does, reads other lanes than it
writes. Then its loop is no kernel in which each lane runs by itself, unless the terms are stacked
and summed after the loop. One sum for each lane needs no stack in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.body.meta_values import placeholder, value_of
from torch_scan_hop.body.node_kinds import is_alike
from torch_scan_hop.rewrites.accumulate import SUMS, added_terms, argument_of_linear
from torch_scan_hop.rewrites.classify import Dependence, classify
from torch_scan_hop.rewrites.parts import Part, extract, unique
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
    dependence = classify(body.graph, roles)
    found = added_terms(roles.carry, outputs)
    added = {k: term for k, term in found.items() if used_outputs[k]}
    is_known = lambda n: dependence[n] is Dependence.INVARIANT  # noqa: E731
    terms = {k: linear_terms(term, is_known) for k, term in added.items()}
    others = (k for k in range(signature.n_carry) if roles.carry[k] is not outputs.carry[k])
    like = min((k for k in others if k not in terms), default=None)
    if like is None:
        return None
    lanes = value_of(roles.carry[like])
    added = {k: n for k, n in added.items() if all(is_sum_like(lanes, t) for t in terms[k])}
    if not added:
        return None
    operands = unique([t.args[0] for k in added for t in terms[k]])  # type: ignore[misc]
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


def linear_terms(node: fx.Node, is_known: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the terms in which ``node`` is linear."""
    if node.target is aten.add.Tensor and not node.kwargs:
        if all(is_alike(a, node) for a in node.args):
            return [term for a in node.args for term in linear_terms(a, is_known)]  # type: ignore[arg-type]
    base = argument_of_linear(node, is_known)
    return [node] if base is None else linear_terms(base, is_known)


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
