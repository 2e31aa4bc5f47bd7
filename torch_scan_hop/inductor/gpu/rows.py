"""The kernel of a body with products with weights, or norms: each row of the batch runs by itself.

A body qualifies if it is pointwise but for products of rows with loop-invariant matrices, in
float32, bfloat16 or float16, and for reductions of rows: their sums, means, variances and extremes.
Its carries are rows of one static width, and all that it makes is as wide, made of parts that are,
or one number of each row. The weights fit a program: for an LSTM, up to a width of 128 with few
rows, and with many 64 in float32, 128 in bfloat16. Without weights, a row fits its registers.
"""

from __future__ import annotations

from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.launch import GpuKernel
from torch_scan_hop.inductor.gpu.row_body import RowBody
from torch_scan_hop.inductor.gpu.row_code import RowCode
from torch_scan_hop.inductor.gpu.serving import check_devices, check_tensors
from torch_scan_hop.inductor.lane_body import have_one_shape
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_rows, is_plain, is_pointwise


class RowsKernel(GpuKernel):
    kind = "one Triton kernel, row by row"
    unit = "rows"

    @staticmethod
    def check(body: fx.GraphModule) -> None:
        check_devices(value_of(n) for n in body.graph.find_nodes(op="placeholder"))
        check_rows(body)
        if not all(map(is_plain, body.graph.nodes)):
            raise Refusal("neither pointwise nor a product with a weight: a scaled addmm")

    @classmethod
    def lower(cls, call: ScanCall) -> RowsKernel:
        check_tensors(call.examples.flat())
        if not call.operands.carry:
            raise Refusal("it has no carry")
        if is_pointwise(call.body) and have_one_shape(call.examples):
            raise Refusal("neither a product nor a reduction of rows")
        return cls(call, RowCode(RowBody(call), call).launch())
