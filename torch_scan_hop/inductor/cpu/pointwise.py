"""The kernel of a pointwise body: each lane, an element of the carry, runs by itself.

A body qualifies if all of it is pointwise on the CPU, its carries and ys have one shape, and a
step reads the carry only where it writes it.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from torch_scan_hop._torch.inductor import size_expression
from torch_scan_hop._torch.tracing import are_all_known_equal
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.cpu.lanes import (
    PointwiseBody,
    TimeLoop,
    emit_kernel,
    merged_dimensions,
)
from torch_scan_hop.inductor.cpu.qualify import are_on_cpu, are_stored_in_vectors, is_pointwise
from torch_scan_hop.inductor.cpu.step import CARRY, lane_symbols, step_index
from torch_scan_hop.inductor.node import KernelNode, ScanCall, Span


def has_one_shape(examples: StepExamples) -> bool:
    carry = examples.inputs.carry
    if not carry:
        return False
    shape = carry[0].shape
    return (
        # without a guard: two symbolic sizes may have met by chance
        all(are_all_known_equal(c.shape, shape) for c in carry)
        and all(are_all_known_equal(y.shape[1:], shape) for y in examples.ys)
        and are_on_cpu(examples.flat())
        and are_stored_in_vectors(examples.results())
    )


def _lanes_are_independent(step: PointwiseBody, examples: StepExamples) -> bool:
    like = examples.inputs.carry[0]
    index = lane_symbols(like.ndim)
    # Inductor leaves the index of a dimension of size 1 out
    strides = [
        0 if n == 1 else size_expression(s) for n, s in zip(like.shape, like.stride(), strict=True)
    ]
    own = sum((i * s for i, s in zip(index, strides, strict=True)), sympy.Integer(0))
    carry_reads = [at for name, at in step.reads(index).found if name.startswith(CARRY)]
    return all(sympy.expand(at - own) == 0 for at in carry_reads)


class PointwiseKernel(KernelNode):
    @staticmethod
    def may_qualify(body: fx.GraphModule) -> bool:
        return is_pointwise(body)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel | None:
        if not has_one_shape(call.examples):
            return None
        step = PointwiseBody(call.body, call.operands, step_index(call.trip_count, call.reverse))
        return cls(call, step) if _lanes_are_independent(step, call.examples) else None

    def call_kernel(self, wrapper: Any, span: Span) -> None:
        n = len(self.operands.carry)
        loop = TimeLoop(
            self.step, self.operands.carry, self.destinations[:n], self.destinations[n:]
        )
        layouts = [output.layout for output in self.outputs]
        sizes, index_of = merged_dimensions(self.step, layouts[0].size, layouts)
        emit_kernel(wrapper, self, loop, index_of, sizes, span)
