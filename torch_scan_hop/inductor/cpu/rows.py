"""The kernel of a body with products with weights: each row of the batch runs by itself.

The rows of a product are independent of one another, so each thread takes some of them through
all steps: no thread waits for another one within the loop, a step is a few calls into code that is
inlined, and the weights, packed once per loop, stay in a core's cache.

A body qualifies if it is pointwise on the CPU but for float32 products of a row with
loop-invariant matrices, which fit a core's cache, and if a row reads no other row of the carry.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_scan_hop._torch.inductor_cpp import vector_lanes
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.fits import check_tensors
from torch_scan_hop.inductor.cpu.row_body import RowBody
from torch_scan_hop.inductor.cpu.row_code import RowCode
from torch_scan_hop.inductor.lane_body import READS_ELSEWHERE
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import PRODUCTS, check_pointwise_around_products, is_plain
from torch_scan_hop.inductor.spans import KernelInSpans

# The part of a core's cache that the weights may take. With more a step waits for memory, and
# threads that share the columns of a product read less of it.
WEIGHT_BYTES = 2**20


class RowsKernel(KernelInSpans):
    kind = "one kernel, row by row"

    @staticmethod
    def check(body: fx.GraphModule) -> None:
        check_pointwise_around_products(body)
        weights = [value_of(n.args[-1]) for n in body.graph.nodes if n.target in PRODUCTS]
        static = all(isinstance(n, int) for w in weights for n in w.shape)
        nbytes = sum(w.numel() * w.element_size() for w in weights) if static else 0
        if nbytes > WEIGHT_BYTES:
            limit = f"more than {WEIGHT_BYTES:,}: not a core's cache"
            raise Refusal(f"its weights take {nbytes:,} bytes, {limit}")
        if not nbytes or not all(map(is_plain, body.graph.nodes)):
            raise Refusal("a product with sizes or scales that it does not know")

    @classmethod
    def lower(cls, call: ScanCall) -> RowsKernel:
        if not call.examples.inputs.carry:
            raise Refusal("it has no carry")
        check_tensors(call.examples)
        if not vector_lanes():
            raise Refusal("no vector instructions that it knows")
        step = RowBody(call)
        if not step.rows_are_independent():
            raise Refusal(READS_ELSEWHERE)
        return cls(call, step)

    def call_span(self, wrapper: Any) -> None:
        RowCode(self).emit(wrapper)
