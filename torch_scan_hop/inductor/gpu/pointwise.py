"""The kernel of a pointwise body: each lane, an element of the carry, runs by itself.

A body qualifies if all of it is pointwise, its carries and ys have one shape, and a step reads the
carry only where it writes it: as on the CPU, but for devices and types.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_scan_hop._torch.inductor import layout_like
from torch_scan_hop.inductor.gpu.lanes import emit_lanes
from torch_scan_hop.inductor.gpu.launch import call_lanes
from torch_scan_hop.inductor.gpu.serving import are_served
from torch_scan_hop.inductor.lane_body import PointwiseBody, has_one_shape, lanes_are_independent
from torch_scan_hop.inductor.node import KernelNode, ScanCall
from torch_scan_hop.inductor.qualify import is_pointwise
from torch_scan_hop.inductor.step import step_index


class PointwiseKernel(KernelNode):
    """``step`` is the source: what cannot be emitted is known before the node is there."""

    @staticmethod
    def may_qualify(body: fx.GraphModule) -> bool:
        return is_pointwise(body)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel | None:
        if not are_served(call.examples.flat()) or not has_one_shape(call.examples):
            return None
        body = PointwiseBody(call.body, call.operands, step_index(call.trip_count, call.reverse))
        if not lanes_are_independent(body, call.examples):
            return None
        layouts = [
            layout_like(like) if place is None else place.data.layout
            for like, place in zip(call.examples.results(), call.into, strict=True)
        ]
        return cls(call, emit_lanes(body, call.operands.carry, layouts, call.trip_count))

    def call_kernel(self, wrapper: Any) -> None:
        call_lanes(wrapper, self.step, [destination.name for destination in self.destinations])
