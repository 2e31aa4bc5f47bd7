"""A pointwise step as functions of a lane, an element of the carry, whatever the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from torch_scan_hop._torch.inductor import size_expression
from torch_scan_hop._torch.inductor_inline import InlineLowering
from torch_scan_hop._torch.inductor_values import (
    Reads,
    handled_by,
    is_tensor,
    merged_sizes,
    ops,
)
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.step import CARRY, lane_symbols, step_index, step_inputs
from torch_scan_hop.signature import Inputs

# nodes of a body
LONG = 100


def has_one_shape(examples: StepExamples) -> bool:
    """Return True if carries and ys all have the shape of the lanes."""
    carry = examples.inputs.carry
    if not carry:
        return False
    shape = carry[0].shape
    return (
        # without a guard: two symbolic sizes may have met by chance
        all(are_all_known_equal(c.shape, shape) for c in carry)
        and all(are_all_known_equal(y.shape[1:], shape) for y in examples.ys)
    )


class PointwiseBody:
    """Step ``index`` as functions of a lane; NotPointwise if it needs a buffer."""

    def __init__(self, gm: fx.GraphModule, roles: Inputs[Any], index: Any) -> None:
        self.index = index
        self.lowering = InlineLowering(gm)
        self.results = self.lowering.lower(step_inputs(roles, index))

    def values(self, lane: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
        """Return the first results, next carries and then ys: as many as there are ``dtypes``."""
        with self.lowering.fresh_values():
            if self.lowering.n_nodes > LONG:
                self.lowering.compute_in_order(lane, self.results[0].get_size())
            return [
                result.make_loader()(lane) if is_tensor(result) else ops.constant(result, dtype)
                for result, dtype in zip(self.results, dtypes, strict=False)
            ]

    def reads(self, lane: Sequence[Any]) -> Reads:
        """Return what a step reads for ``lane``."""
        reads = Reads()
        with handled_by(reads):
            self.values(lane, [torch.float32] * len(self.results))
        return reads


def merged_dimensions(
    body: PointwiseBody, sizes: Sequence[Any], layouts: Sequence[Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Merge dimensions of ``sizes`` where every access allows it; return indices for them, too."""
    index = lane_symbols(len(sizes))
    accesses = body.reads(index).indices
    accesses += [
        layout.make_indexer()(index) for layout in layouts if len(layout.size) == len(index)
    ]
    merged, reindex = merged_sizes(index, sizes, accesses)
    # a scalar carry is one lane
    return merged or [sympy.Integer(1)], lambda lanes: reindex(lanes[: len(merged)])


def independent_lanes(call: ScanCall) -> PointwiseBody | None:
    """Return the step if its lanes have one shape and read no other lane; else None."""
    if not has_one_shape(call.examples):
        return None
    index = step_index(call.trip_count, call.reverse)
    step = PointwiseBody(call.body, call.operands, index)
    return step if _read_no_other(step, call.examples) else None


def _read_no_other(step: PointwiseBody, examples: StepExamples) -> bool:
    """Return True if a lane of a step reads the carry only at the lane that it writes."""
    like = examples.inputs.carry[0]
    index = lane_symbols(like.ndim)
    # Inductor leaves the index of a dimension of size 1 out
    strides = [
        0 if n == 1 else size_expression(s) for n, s in zip(like.shape, like.stride(), strict=True)
    ]
    own = sum((i * s for i, s in zip(index, strides, strict=True)), sympy.Integer(0))
    carry_reads = [at for name, at in step.reads(index).found if name.startswith(CARRY)]
    return all(sympy.expand(at - own) == 0 for at in carry_reads)
