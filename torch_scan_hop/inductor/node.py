"""What both IR nodes of a scan are to Inductor: operands in, final carries and ys out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_scan_hop._torch.inductor import (
    AllocateLine,
    DeclaredOutput,
    ExternKernel,
    MultiOutputLayout,
    TensorBox,
    V,
    buffers_of,
    declared_output,
    is_tensor_ir,
    size_expression,
    written_output,
)
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.signature import Signature


@dataclass(frozen=True)
class Store:
    """A buffer that a kernel writes, and where in it."""

    name: str
    layout: Any


class ScanNode(ExternKernel):
    """``into``: for each result a place to write it to, or None where one is to be allocated."""

    def __init__(
        self,
        operands: Sequence[Any],
        signature: Signature,
        reverse: bool,
        examples: StepExamples,
        into: Sequence[Any],
    ) -> None:
        self.operands = signature.split_inputs(operands)
        self.trip_count = size_expression(examples.xs[0].shape[0])
        self.reverse = reverse
        super().__init__(
            name=None,
            layout=MultiOutputLayout(device=examples.xs[0].device),
            inputs=[buffer for a in (*operands, *into) for buffer in buffers_of(a)],
            constant_args=[self.trip_count, *(a for a in operands if not is_tensor_ir(a))],
        )
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)
        likes = [*examples.carry, *examples.ys]
        #: where each result ends: an output of this node, or a given place
        self.outputs: list[Any] = [
            declared_output(self, k, like) if place is None else place.data
            for k, (like, place) in enumerate(zip(likes, into, strict=True))
        ]
        written = {k: written_output(self, p) for k, p in enumerate(into) if p is not None}
        self.mutation_outputs = list(written.values())
        #: as a kernel stores to them
        self.stores = [
            Store(written[k].get_name() if k in written else output.get_name(), output.layout)
            for k, output in enumerate(self.outputs)
        ]

    def results(self) -> list[Any]:
        return [TensorBox.create(output) for output in self.outputs]

    def allocate(self, wrapper: Any, outputs: Sequence[Any]) -> None:
        for output in outputs:
            if isinstance(output, DeclaredOutput):
                wrapper.writeline(AllocateLine(wrapper, output.get_name(), output.layout))
