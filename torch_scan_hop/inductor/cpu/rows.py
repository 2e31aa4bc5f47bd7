"""The kernel of a body with products with weights: each row of the batch runs by itself.

The rows of a product are independent of one another, so each thread takes some of them through
all steps: no thread waits for another one within the loop, a step is a few calls into code that is
inlined, and the weights, packed once per loop, stay in a core's cache.

A body qualifies if it is pointwise on the CPU but for float32 products of a row with
loop-invariant matrices, which fit a core's cache, and if a row reads no other row of the carry.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from torch_scan_hop._torch.inductor_cpp import vector_lanes
from torch_scan_hop._torch.inductor_values import bounds_of
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.fits import check_tensors
from torch_scan_hop.inductor.cpu.places import Matrix, Product, Store, product_position
from torch_scan_hop.inductor.cpu.row_body import RowBody
from torch_scan_hop.inductor.cpu.row_code import RowCode
from torch_scan_hop.inductor.lane_body import READS_ELSEWHERE
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import PRODUCTS, check_pointwise_around_products, is_plain
from torch_scan_hop.inductor.spans import KernelInSpans
from torch_scan_hop.inductor.step import STEP, are_static, carry_position


def rows_are_independent(body: RowBody) -> bool:
    return (
        all(s.shape[:1] == (body.rows,) and are_static(s.shape[1:]) for s in body.stores)
        and all(p.left.get_size()[0] == body.rows for p in body.products)
        and all(_is_invariant(body, p.weight) for p in body.products)
        and all(
            _multiplies_own_row(body, operand, product)
            for operand, product in zip(body.operands, body.products, strict=True)
        )
        and all(_reads_own_row(body, store) for store in body.stores)
    )


def _is_invariant(body: RowBody, value: Any) -> bool:
    reads = body.reads(value)
    return all(_row_stride(body, name) is None and not at.has(STEP) for name, at in reads)


def _row_stride(body: RowBody, name: str) -> Any:
    """Return the stride of a row in a carry or a product; None for a value that no step changes."""
    carry, product = carry_position(name), product_position(name)
    if carry is not None:
        return body.carry[carry].layout.stride[0]
    return None if product is None else sympy.Integer(body.products[product].padded)


def _multiplies_own_row(body: RowBody, operand: Matrix, product: Product) -> bool:
    """Return True if a product reads the carry's own rows: a view may put others together."""
    stride = _row_stride(body, operand.name)
    if stride is None:
        return True
    if not are_static([stride, operand.offset, operand.row_stride]):
        return False
    same_rows = body.rows == 1 or operand.row_stride == stride
    return bool(same_rows and operand.offset + product.sizes[0] <= stride)


def _reads_own_row(body: RowBody, store: Store) -> bool:
    row = store.lanes[0]
    sizes = {symbol: size for symbol, size in store.ranges.items() if symbol != row}
    if not are_static(sizes.values()):
        return False
    for name, at in store.reads:
        stride = _row_stride(body, name)
        if stride is None:
            continue
        within = sympy.expand(at - (0 if body.rows == 1 else row * stride))
        if not (within.free_symbols <= set(sizes) and are_static([stride])):
            return False
        least, greatest = bounds_of(within, sizes)
        if not (least >= 0 and greatest < stride):
            return False
    return True


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
        if not rows_are_independent(step):
            raise Refusal(READS_ELSEWHERE)
        return cls(call, step)

    def call_span(self, wrapper: Any) -> None:
        RowCode(self).emit(wrapper)
