"""The kernel of a pointwise body: each lane, an element of the carry, runs by itself.

A body qualifies if all of it is pointwise on the CPU, its carries and ys have one shape, and a
step reads the carry only where it writes it.
"""

from __future__ import annotations

from typing import Any

from torch_scan_hop.inductor.cpu.fits import check_tensors
from torch_scan_hop.inductor.cpu.lanes import TimeLoop, emit_kernel
from torch_scan_hop.inductor.lane_body import independent_lanes, merged_dimensions
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_pointwise
from torch_scan_hop.inductor.spans import KernelInSpans


class PointwiseKernel(KernelInSpans):
    kind = "one kernel, lane by lane"
    joins_parts = True
    check = staticmethod(check_pointwise)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel:
        check_tensors(call.examples)
        return cls(call, independent_lanes(call))

    def call_span(self, wrapper: Any) -> None:
        n = len(self.operands.carry)
        loop = TimeLoop(
            self.step, self.operands.carry, self.destinations[:n], self.destinations[n:]
        )
        layouts = [destination.layout for destination in self.destinations]
        sizes, index_of = merged_dimensions(self.step, layouts[0].size, layouts)
        emit_kernel(wrapper, self, loop, index_of, sizes)
