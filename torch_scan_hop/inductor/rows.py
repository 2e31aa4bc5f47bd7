"""One kernel for a whole loop whose body is pointwise work around products with weights.

The rows of a product (the batch) are independent of one another, so each thread takes some of
them through all steps: no thread waits for another one within the loop, a step is a few calls
into code that is inlined, and the weights, packed once per loop, stay in a core's cache.

A body qualifies if it is pointwise on the CPU but for float32 products of a row with
loop-invariant matrices, which fit a core's cache, and if a row reads no other row of the carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.inductor import FixedLayout, size_expression
from torch_scan_hop._torch.inductor_cpp import NotPointwise, step_of
from torch_scan_hop._torch.inductor_rows import RowBody, vector_lanes
from torch_scan_hop._torch.inductor_rows_kernel import emit_rows_kernel
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.kernel import DTYPES, LoopKernelNode, may_be_pointwise
from torch_scan_hop.rewrites import current_options
from torch_scan_hop.signature import Signature

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default}

# What the weights may take of a core's cache: from there on a step waits for memory, and
# threads that share the columns of a product read less of it.
WEIGHT_BYTES = 2**20


def rows_kernel(
    body: torch.fx.GraphModule,
    signature: Signature,
    operands: Sequence[Any],
    examples: StepExamples,
    reverse: bool,
    into: Sequence[Any],
) -> RowsKernel | None:
    """The node of the kernel, or None if the body does not qualify."""
    if not (current_options().one_kernel and _is_on_cpu(examples) and _has_small_products(body)):
        return None
    if not (vector_lanes() and may_be_pointwise(body, besides={*_PRODUCTS, aten.cat.default})):
        return None
    roles = signature.split_inputs(operands)
    trip_count = size_expression(examples.xs[0].shape[0])
    layouts = [
        *(_layout(c) for c in examples.carry),
        *(
            _layout(y) if place is None else place.data.layout
            for y, place in zip(examples.ys, into, strict=True)
        ),
    ]
    try:
        rows = RowBody(body, roles, layouts, step_of(trip_count, reverse))
    except NotPointwise:
        return None
    if not rows.are_independent():
        return None
    return RowsKernel(operands, signature, rows, reverse, examples, into)


def _layout(like: torch.Tensor) -> FixedLayout:
    sizes = [size_expression(s) for s in like.shape]
    return FixedLayout(like.device, like.dtype, sizes, [size_expression(s) for s in like.stride()])


def _has_small_products(body: torch.fx.GraphModule) -> bool:
    if not all(map(_is_plain, body.graph.nodes)):
        return False
    weights = [_value(n.args[-1]) for n in body.graph.nodes if n.target in _PRODUCTS]
    if not all(isinstance(n, int) for w in weights for n in w.shape):
        return False
    return 0 < sum(w.numel() * w.element_size() for w in weights) <= WEIGHT_BYTES


def _value(node: Any) -> Any:
    return node.meta["val"]


def _is_plain(node: torch.fx.Node) -> bool:
    """``addmm`` may scale what it adds."""
    return node.target not in _PRODUCTS or not node.kwargs


def _is_on_cpu(examples: StepExamples) -> bool:
    tensors = [v for v in examples.flat() if isinstance(v, torch.Tensor)]
    results = [*examples.carry, *examples.ys]
    return (
        bool(examples.carry)
        and all(t.device.type == "cpu" for t in tensors)
        and all(t.dtype in DTYPES for t in results)
    )


class RowsKernel(LoopKernelNode):
    def __init__(
        self,
        operands: Sequence[Any],
        signature: Signature,
        rows: RowBody,
        reverse: bool,
        examples: StepExamples,
        into: Sequence[Any],
    ) -> None:
        super().__init__(operands, signature, reverse, examples, into)
        self.rows = rows

    def call_kernel(self, wrapper: Any) -> None:
        names = [store.name for store in self.stores]
        emit_rows_kernel(wrapper, self, self.rows, self.operands.carry, names, self.trip_count)
