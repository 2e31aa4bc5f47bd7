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
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.cpu.fits import are_on_cpu, are_stored_in_vectors
from torch_scan_hop.inductor.cpu.row_body import RowBody
from torch_scan_hop.inductor.cpu.row_code import emit_rows
from torch_scan_hop.inductor.cpu.row_independence import rows_are_independent
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import CAT, PRODUCTS, is_plain, is_pointwise
from torch_scan_hop.inductor.spans import KernelInSpans, Span
from torch_scan_hop.inductor.step import step_index

# The part of a core's cache that the weights may take. With more a step waits for memory, and
# threads that share the columns of a product read less of it.
WEIGHT_BYTES = 2**20


def has_small_products(body: fx.GraphModule) -> bool:
    if not all(map(is_plain, body.graph.nodes)):
        return False
    weights = [n.args[-1].meta["val"] for n in body.graph.nodes if n.target in PRODUCTS]
    if not all(isinstance(n, int) for w in weights for n in w.shape):
        return False
    return 0 < sum(w.numel() * w.element_size() for w in weights) <= WEIGHT_BYTES


def fits_vectors_of_the_cpu(examples: StepExamples) -> bool:
    return (
        bool(examples.inputs.carry)
        and are_on_cpu(examples.flat())
        and are_stored_in_vectors(examples.results())
        and vector_lanes() > 0
    )


class RowsKernel(KernelInSpans):
    @staticmethod
    def may_qualify(body: fx.GraphModule) -> bool:
        return has_small_products(body) and is_pointwise(body, {*PRODUCTS, CAT})

    @classmethod
    def lower(cls, call: ScanCall) -> RowsKernel | None:
        if not fits_vectors_of_the_cpu(call.examples):
            return None
        index = step_index(call.trip_count, call.reverse)
        step = RowBody(call.body, call.operands, call.result_layouts(), index)
        return cls(call, step) if rows_are_independent(step) else None

    def call_span(self, wrapper: Any, span: Span) -> None:
        emit_rows(wrapper, self, self.step, self.operands.carry, span)
