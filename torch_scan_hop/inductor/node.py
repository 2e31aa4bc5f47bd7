"""What both IR nodes of a scan are to Inductor: operands in, final carries and ys out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_scan_hop._torch.inductor import (
    DeclaredOutput,
    ExternKernel,
    MultiOutputLayout,
    V,
    declared_output,
    is_tensor_ir,
    size_expression,
)
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.signature import Signature


class ScanNode(ExternKernel):
    def __init__(
        self, operands: Sequence[Any], signature: Signature, reverse: bool, examples: StepExamples
    ) -> None:
        self.operands = signature.split_inputs(operands)
        self.trip_count = size_expression(examples.xs[0].shape[0])
        self.reverse = reverse
        super().__init__(
            name=None,
            layout=MultiOutputLayout(device=examples.xs[0].device),
            inputs=[a for a in operands if is_tensor_ir(a)],
            constant_args=[self.trip_count, *(a for a in operands if not is_tensor_ir(a))],
        )
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)
        outputs: list[DeclaredOutput] = [
            declared_output(self, k, like) for k, like in enumerate([*examples.carry, *examples.ys])
        ]
        self.outputs = outputs
