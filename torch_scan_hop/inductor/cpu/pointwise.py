"""The kernel of a pointwise body: each lane, an element of the carry, runs by itself.

A body qualifies if all of it is pointwise on the CPU, its carries and ys have one shape, and a
step reads the carry only where it writes it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.cpu.fits import are_on_cpu, are_stored_in_vectors
from torch_scan_hop.inductor.cpu.lanes import TimeLoop, emit_kernel
from torch_scan_hop.inductor.lane_body import independent_lanes, merged_dimensions
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import is_pointwise
from torch_scan_hop.inductor.spans import KernelInSpans, Span


def fits_lanes_of_the_cpu(examples: StepExamples) -> bool:
    return are_on_cpu(examples.flat()) and are_stored_in_vectors(examples.results())


class PointwiseKernel(KernelInSpans):
    joins_parts = True

    @staticmethod
    def may_qualify(body: fx.GraphModule) -> bool:
        return is_pointwise(body)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel | None:
        step = independent_lanes(call) if fits_lanes_of_the_cpu(call.examples) else None
        return None if step is None else cls(call, step)

    def call_span(self, wrapper: Any, span: Span) -> None:
        n = len(self.operands.carry)
        loop = TimeLoop(
            self.step, self.operands.carry, self.destinations[:n], self.destinations[n:]
        )
        layouts = [destination.layout for destination in self.destinations]
        sizes, index_of = merged_dimensions(self.step, layouts[0].size, layouts)
        emit_kernel(wrapper, self, loop, index_of, sizes, span)
