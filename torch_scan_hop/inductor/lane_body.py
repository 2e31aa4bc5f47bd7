"""A pointwise step as functions of a lane, an element of the carry, whatever the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor import size_expression
from torch_scan_hop._torch.inductor_inline import InlineLowering
from torch_scan_hop._torch.inductor_values import (
    Reads,
    handled_by,
    handler_at_hand,
    is_tensor,
    merged_sizes,
    ops,
)
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.step import CARRY, StepOps, lane_symbols, step_inputs

# nodes of a body
LONG = 100


READS_ELSEWHERE = "a step reads the carry elsewhere than where it writes it"


def check_one_shape(examples: StepExamples) -> None:
    """Refuse carries and ys that have not all the shape of the lanes."""
    if not have_one_shape(examples):
        raise Refusal("its carries and ys have not one shape")


def have_one_shape(examples: StepExamples) -> bool:
    shapes = [*(c.shape for c in examples.inputs.carry), *(y.shape[1:] for y in examples.ys)]
    # without a guard: two symbolic sizes may have met by chance
    same = all(are_all_known_equal(shape, shapes[0]) for shape in shapes)
    return bool(examples.inputs.carry) and same


class PointwiseBody:
    """A step as functions of a lane; NotPointwise if it needs a buffer."""

    def __init__(self, call: ScanCall) -> None:
        self.index = call.index
        self.lowering = InlineLowering(call.body)
        self.results = self.lowering.lower(step_inputs(call.operands, call.index))

    def values(self, lane: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
        """Return the first results, next carries and then ys: as many as there are ``dtypes``."""
        with self.lowering.fresh_values():
            if self.lowering.n_nodes > LONG:
                self.lowering.compute_in_order(lane, self.results[0].get_size())
            return [
                result.make_loader()(lane) if is_tensor(result) else ops.constant(result, dtype)
                for result, dtype in zip(self.results, dtypes, strict=False)
            ]

    def step(
        self,
        lane: Sequence[Any],
        carry: Sequence[Any],
        dtypes: Sequence[torch.dtype],
        operators: type[StepOps] = StepOps,
    ) -> list[Any]:
        """Return :meth:`values` of the ops handler at hand, where carries are ``carry``."""
        with handled_by(operators(handler_at_hand(), self.lowering, lambda k, _: carry[k])):
            return self.values(lane, dtypes)

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


def independent_lanes(call: ScanCall) -> PointwiseBody:
    """Return the step; refuse lanes that have not one shape, or read another lane."""
    check_one_shape(call.examples)
    step = PointwiseBody(call)
    if not _read_no_other(step, call.examples):
        raise Refusal(READS_ELSEWHERE)
    return step


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
