"""Sums over dimensions, kept as one sum for each lane until the loop is done.

::

    acc' = acc + sum_b g_t[b]     is     acc_b' = acc_b + g_t[b],     acc = acc_0 + sum_b acc_b

A step that sums over dimensions, as the gradient of a parameter does, reads other lanes than it
writes: its loop is no kernel in which each lane runs by itself, unless what is summed is stacked
and summed after it. Of one sum for each lane nothing travels to memory.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.rewrites.accumulate import Accumulator, find_accumulator
from torch_scan_hop.rewrites.classify import Dependence, classify
from torch_scan_hop.rewrites.parts import Part, unique
from torch_scan_hop.signature import Inputs, Signature

aten = torch.ops.aten

# Sums of narrower numbers are better made of all terms at once, in wider ones.
_DTYPES = {torch.float32, torch.float64, torch.int64}


@dataclass(frozen=True)
class LaneSums:
    """A body whose carries ``sums`` are as large as what they are sums of.

    Attributes:
        like: position of a carry that has the shape of the lanes.
        additional: of the body that this one was made of.
        known: what the sums read besides, computed of those.
    """

    body: fx.GraphModule
    sums: Sequence[Accumulator]
    like: int
    additional: Sequence[fx.Node]
    known: Part

    def run(self, run: Callable[[Inputs[Any]], list[Any]], inputs: Inputs[Any]) -> list[Any]:
        """The results of the scan; ``run`` runs one of ``body``."""
        carry, lanes = list(inputs.carry), inputs.carry[self.like]
        for a in self.sums:
            carry[a.index] = lanes.new_zeros(lanes.shape, dtype=a.dtype)
        results = run(dataclasses.replace(inputs, carry=carry))
        values = dict(zip(self.additional, inputs.additional, strict=True))
        values |= self.known(values)
        for a in self.sums:
            if results[a.index] is not None:  # something reads it
                total = a.total([results[a.index].unsqueeze(0)], values)
                results[a.index] = inputs.carry[a.index] + total
        return results


def find_lane_sums(body: fx.GraphModule, signature: Signature) -> LaneSums | None:
    """None where no carry is a sum over dimensions of something as large as another carry."""
    roles, outputs = signature.inputs_of(body), signature.outputs_of(body)
    dependence = classify(body.graph, roles)

    def is_known(node: fx.Node) -> bool:
        return dependence[node] is Dependence.INVARIANT

    results = outputs.flat()
    found = [
        find_accumulator(k, before, after, is_known)
        for k, (before, after) in enumerate(zip(roles.carry, outputs.carry, strict=True))
        if results.count(after) == 1
    ]
    reduced = [a for a in found if a is not None and a.operand is not a.term]
    others = {*range(signature.n_carry)} - {a.index for a in reduced}
    like = min((k for k in others if roles.carry[k] is not outputs.carry[k]), default=None)
    if like is None:
        return None
    lanes = roles.carry[like].meta["val"]
    sums = [
        dataclasses.replace(a, leaves=(a.operand,))
        for a in reduced
        if _is_like(lanes, a.operand.meta["val"], a.dtype) and not is_known(a.operand)
    ]
    if not sums:
        return None
    read = unique([n for a in sums for m in a.maps for n in m.all_input_nodes if is_known(n)])
    known = Part(body, roles.additional, [n for n in read if n.op != "placeholder"], "SumsKnown")
    return LaneSums(_widened(body, signature, sums), sums, like, roles.additional, known)


def _is_like(lanes: torch.Tensor, operand: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        operand.dtype is dtype
        and dtype in _DTYPES
        and operand.device == lanes.device
        and are_all_known_equal(operand.shape, lanes.shape)
    )


def _widened(
    body: fx.GraphModule, signature: Signature, sums: Sequence[Accumulator]
) -> fx.GraphModule:
    """``body`` with a carry for each lane in place of each of the ``sums``."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, env))
    widened = fx.GraphModule(body, graph)
    roles, outputs = signature.inputs_of(widened), signature.outputs_of(widened)
    for a in sums:
        operand, before, after = env[a.operand], roles.carry[a.index], outputs.carry[a.index]
        value = operand.meta["val"]
        before.meta = {"val": value.new_empty(value.shape)}
        with graph.inserting_after(after):
            added = graph.call_function(aten.add.Tensor, (before, operand))
        added.meta = copy.copy(before.meta)
        after.replace_all_uses_with(added)
    graph.eliminate_dead_code()
    widened.recompile()
    legality.checked("lane_sums", widened, signature)
    return widened
