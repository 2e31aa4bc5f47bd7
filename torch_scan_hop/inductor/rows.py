"""One kernel for a whole loop whose body is pointwise work around products with weights.

The rows of a product (the batch) are independent of one another, so each thread takes some of
them through all steps: no thread waits for another one within the loop, a step is a few calls
into code that is inlined, and the weights, packed once per loop, stay in a core's cache.

A body qualifies if it is pointwise on the CPU but for float32 products of a row with
loop-invariant matrices, which fit a core's cache, and if a row reads no other row of the carry.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.inductor import layout_like
from torch_scan_hop._torch.inductor_rows import RowBody, vector_lanes
from torch_scan_hop._torch.inductor_rows_kernel import emit_rows_kernel
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.kernel import DTYPES, LoopKernelNode, may_be_pointwise
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.rewrites import current_options

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default}

# What the weights may take of a core's cache: from there on a step waits for memory, and
# threads that share the columns of a product read less of it.
WEIGHT_BYTES = 2**20


def _has_small_products(body: torch.fx.GraphModule) -> bool:
    if not all(map(_is_plain, body.graph.nodes)):
        return False
    weights = [n.args[-1].meta["val"] for n in body.graph.nodes if n.target in _PRODUCTS]
    if not all(isinstance(n, int) for w in weights for n in w.shape):
        return False
    return 0 < sum(w.numel() * w.element_size() for w in weights) <= WEIGHT_BYTES


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


def _may_be_rows(body: torch.fx.GraphModule) -> bool:
    return _has_small_products(body) and may_be_pointwise(body, {*_PRODUCTS, aten.cat.default})


def may_be_one_kernel(body: torch.fx.GraphModule) -> bool:
    """As far as the operators of ``body`` can tell."""
    return current_options().one_kernel and (may_be_pointwise(body) or _may_be_rows(body))


class RowsKernel(LoopKernelNode):
    @staticmethod
    def lowered(call: ScanCall, at: Any) -> RowBody | None:
        if not (_is_on_cpu(call.examples) and _may_be_rows(call.body) and vector_lanes()):
            return None
        layouts = [
            layout_like(like) if place is None else place.data.layout
            for like, place in zip(call.results_like, call.into, strict=True)
        ]
        step = RowBody(call.body, call.roles, layouts, at)
        return step if step.are_independent() else None

    def call_kernel(self, wrapper: Any) -> None:
        names = [store.name for store in self.stores]
        emit_rows_kernel(wrapper, self, self.step, self.operands.carry, names, self.trip_count)
