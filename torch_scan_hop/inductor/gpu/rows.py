"""The kernel of a body with products with weights: each row of the batch runs by itself.

A body qualifies if it is pointwise but for products of rows with loop-invariant matrices, in
float32, bfloat16 or float16; if its carries are rows of one static width, and all that it makes is
as wide, or made of parts that are; and if the weights fit the memory of a program, which is up
to a width of 64 for an LSTM in float32, and 128 in bfloat16.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_scan_hop.inductor.gpu.launch import call_program
from torch_scan_hop.inductor.gpu.row_body import RowBody
from torch_scan_hop.inductor.gpu.row_code import ROWS, emit_rows
from torch_scan_hop.inductor.gpu.serving import are_served
from torch_scan_hop.inductor.node import KernelNode, ScanCall
from torch_scan_hop.inductor.qualify import CAT, PRODUCTS, is_plain, is_pointwise
from torch_scan_hop.inductor.step import step_index


class RowsKernel(KernelNode):
    """The node of such a kernel; ``step`` is its source, and the warps of a program."""

    @staticmethod
    def may_qualify(body: fx.GraphModule) -> bool:
        nodes = body.graph.nodes
        return (
            any(n.target in PRODUCTS for n in nodes)
            and all(map(is_plain, nodes))
            and is_pointwise(body, {*PRODUCTS, CAT})
        )

    @classmethod
    def lower(cls, call: ScanCall) -> RowsKernel | None:
        if not are_served(call.examples.flat()) or not call.operands.carry:
            return None
        body = RowBody(call.body, call.operands, step_index(call.trip_count, call.reverse))
        return cls(
            call, emit_rows(body, call.operands.carry, call.result_layouts(), call.trip_count)
        )

    def call_kernel(self, wrapper: Any) -> None:
        source, warps = self.step
        names = [destination.name for destination in self.destinations]
        call_program(wrapper, source, names, ROWS, warps)
