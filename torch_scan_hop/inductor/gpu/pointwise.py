"""The kernel of a pointwise body: each lane, an element of the carry, runs by itself.

The conditions are those on the CPU, but for devices and dtypes: all of the body is pointwise, its
carries and ys have one shape, and a step reads the carry only where it writes it.
"""

from __future__ import annotations

from typing import Any

from torch_scan_hop.inductor.gpu.lanes import emit_lanes
from torch_scan_hop.inductor.gpu.launch import call_lanes
from torch_scan_hop.inductor.gpu.serving import check_tensors
from torch_scan_hop.inductor.lane_body import independent_lanes
from torch_scan_hop.inductor.node import KernelNode, ScanCall
from torch_scan_hop.inductor.qualify import check_pointwise


class PointwiseKernel(KernelNode):
    """The node of such a kernel.

    ``step`` is its source, so that it is known before there is a node whether all can be emitted.
    """

    kind = "one Triton kernel, lane by lane"
    check = staticmethod(check_pointwise)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel:
        check_tensors(call.examples.flat())
        body = independent_lanes(call)
        layouts = call.result_layouts()
        return cls(call, emit_lanes(body, call.operands.carry, layouts, call.trip_count))

    def call_kernel(self, wrapper: Any) -> None:
        call_lanes(wrapper, self.step, [destination.name for destination in self.destinations])
