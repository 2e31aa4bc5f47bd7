"""The kernel of a pointwise body: each lane, an element of the carry, runs by itself.

The conditions are those on the CPU, but for devices and dtypes: all of the body is pointwise, its
carries and ys have one shape, and a step reads the carry only where it writes it.
"""

from __future__ import annotations

from torch_scan_hop.inductor.gpu.lanes import LaneCode
from torch_scan_hop.inductor.gpu.launch import GpuKernel, launch_of_lanes
from torch_scan_hop.inductor.gpu.serving import check_tensors
from torch_scan_hop.inductor.lane_body import independent_lanes
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_pointwise


class PointwiseKernel(GpuKernel):
    kind = "one Triton kernel, lane by lane"
    check = staticmethod(check_pointwise)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel:
        check_tensors(call.examples.flat())
        return cls(call, launch_of_lanes(LaneCode(independent_lanes(call), call).source()))
