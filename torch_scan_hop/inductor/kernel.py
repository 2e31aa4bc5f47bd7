"""One kernel for a whole loop whose body is pointwise: the loop over time runs inside.

Each lane (an element of the carry) is independent of the others, so lanes are the outer loop:
split among threads, and vectorised. A tile of them takes all steps before the next one: its
carries stay in the nearest cache, and xs are read and ys written once, in long enough pieces.
The arithmetic is Inductor's own, so every pointwise operator is covered.

A body qualifies if all of it is pointwise on the CPU, its carries and ys have one shape, and a
step reads the carry only where it writes it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor import V, size_expression
from torch_scan_hop._torch.inductor_cpp import CARRY, NotPointwise, lane_symbols, step_of
from torch_scan_hop._torch.inductor_lanes import (
    PointwiseBody,
    TimeLoop,
    emit_kernel,
    merged_dimensions,
)
from torch_scan_hop._torch.tracing import are_all_known_equal
from torch_scan_hop.graph_cleanup import is_view
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.node import ScanCall, ScanNode
from torch_scan_hop.rewrites import current_options

_MAKE_OR_CONVERT = {
    "_to_copy", "clone", "constant_pad_nd", "convert_element_type", "copy", "empty", "fill", "full",
    "full_like", "iota", "ones_like", "scalar_tensor", "zeros_like",
}  # fmt: skip

DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32}


def may_be_pointwise(body: torch.fx.GraphModule, besides: Collection[Any] = ()) -> bool:
    """Before lowering it: lowering a product may tune one."""
    return all(
        node.op != "call_function"
        or node.target is operator.getitem
        or isinstance(node.meta.get("val"), (int, torch.SymInt))
        or node.target in besides
        or is_view(node)
        or torch.Tag.pointwise in getattr(node.target, "tags", ())
        or getattr(node.target, "_opname", "") in _MAKE_OR_CONVERT
        for node in body.graph.nodes
    )


def _has_one_shape(examples: StepExamples) -> bool:
    if not examples.carry:
        return False
    shape = examples.carry[0].shape
    inputs = [v for v in (*examples.xs, *examples.additional) if isinstance(v, torch.Tensor)]
    results = [*examples.carry, *examples.ys]
    return (
        # without a guard: two symbolic sizes may have met by chance
        all(are_all_known_equal(c.shape, shape) for c in examples.carry)
        and all(are_all_known_equal(y.shape[1:], shape) for y in examples.ys)
        and all(t.device.type == "cpu" for t in (*results, *inputs))
        and all(t.dtype in DTYPES for t in results)
    )


def _lanes_are_independent(step: PointwiseBody, examples: StepExamples) -> bool:
    like = examples.carry[0]
    index = lane_symbols(like.ndim)
    # Inductor leaves the index of a dimension of size 1 out
    strides = [
        0 if n == 1 else size_expression(s) for n, s in zip(like.shape, like.stride(), strict=True)
    ]
    own = sum((i * s for i, s in zip(index, strides, strict=True)), sympy.Integer(0))
    carry_reads = [at for name, at in step.reads(index).found if name.startswith(CARRY)]
    return all(sympy.expand(at - own) == 0 for at in carry_reads)


class LoopKernelNode(ScanNode):
    """A scan that is one call of a kernel; subclasses know for which bodies, and the kernel."""

    step: Any

    @classmethod
    def of(cls, call: ScanCall) -> LoopKernelNode | None:
        """The node, or None if the body does not qualify."""
        if not current_options().one_kernel:
            return None
        try:
            step = cls.lowered(call, step_of(call.trip_count, call.reverse))
        except NotPointwise:
            return None
        if step is None:
            return None
        node = cls(call)
        node.step = step
        return node

    @staticmethod
    def lowered(call: ScanCall, at: Any) -> Any:
        """The body at step ``at`` for the kernel; None, or NotPointwise, if it does not qualify."""
        raise NotImplementedError

    def codegen(self, wrapper: Any) -> None:
        self.allocate(wrapper, self.outputs)
        n = len(self.operands.carry)
        # a carry that nothing reads after the loop lives somewhere, too
        V.graph.removed_buffers.difference_update(store.name for store in self.stores[:n])
        self.call_kernel(wrapper)
        if not V.graph.cpp_wrapper:
            wrapper.writeline(f"{self.get_name()} = None")

    def call_kernel(self, wrapper: Any) -> None:
        raise NotImplementedError


class PointwiseKernel(LoopKernelNode):
    @staticmethod
    def lowered(call: ScanCall, at: Any) -> PointwiseBody | None:
        if not (_has_one_shape(call.examples) and may_be_pointwise(call.body)):
            return None
        step = PointwiseBody(call.body, call.roles, at)
        return step if _lanes_are_independent(step, call.examples) else None

    def call_kernel(self, wrapper: Any) -> None:
        n = len(self.operands.carry)
        loop = TimeLoop(self.step, self.operands.carry, self.stores[:n], self.stores[n:])
        layouts = [output.layout for output in self.outputs]
        sizes, index_of = merged_dimensions(self.step, layouts[0].size, layouts)
        emit_kernel(wrapper, self, loop, index_of, sizes, self.trip_count)
