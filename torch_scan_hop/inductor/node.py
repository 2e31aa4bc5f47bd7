"""The IR nodes of a scan for Inductor: operands in, final carries and ys out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_scan_hop._torch.inductor import (
    AllocateLine,
    DeclaredOutput,
    ExternKernel,
    FixedLayout,
    MultiOutputLayout,
    boxed,
    buffers_of,
    declared_output,
    is_tensor_ir,
    keep_buffers,
    layout_like,
    register_node,
    size_expression,
    uses_cpp_wrapper,
    written_output,
)
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.body import StepExamples
from torch_scan_hop.inductor.huge_stacks import advise_when_run
from torch_scan_hop.inductor.step import STEP
from torch_scan_hop.signature import Inputs


@dataclass(frozen=True)
class Destination:
    """A buffer that a kernel writes, and where in it."""

    name: str
    layout: Any


@dataclass(frozen=True)
class ScanCall:
    """A scan to be lowered.

    ``into``: for each result a place to write it to, or None where one is to be allocated.
    ``joined``: positions of ys that are real parts, each before its imaginary one, of which
    nothing but the complex tensor is wanted.
    """

    body: fx.GraphModule
    operands: Inputs[Any]
    examples: StepExamples
    reverse: bool
    into: Sequence[Any]
    joined: Sequence[int] = ()

    @property
    def trip_count(self) -> Any:
        return size_expression(self.examples.inputs.trip_count)

    @property
    def index(self) -> Any:
        """The index of the step that a kernel's loop is at."""
        return self.trip_count - 1 - STEP if self.reverse else STEP

    def result_layouts(self) -> list[Any]:
        """Return the layouts of final carries, then of ys, wherever they are written."""
        return [
            layout_like(like) if place is None else place.data.layout
            for like, place in zip(self.examples.results(), self.into, strict=True)
        ]


# Inductor lets a kernel store only to names that have "buf" in them
PARTS_PREFIX = "scan_buf_parts_"


class ScanNode(ExternKernel):
    #: whether it writes the parts of complex ys side by side, to buffers named PARTS_PREFIX...
    joins_parts = False

    def __init__(self, call: ScanCall) -> None:
        self.joined = call.joined if self.joins_parts else ()
        self.operands = call.operands
        self.trip_count = call.trip_count
        self.reverse = call.reverse
        operands = call.operands.flat()
        super().__init__(
            name=None,
            layout=MultiOutputLayout(device=call.examples.inputs.xs[0].device),
            inputs=[buffer for a in (*operands, *call.into) for buffer in buffers_of(a)],
            constant_args=[self.trip_count, *(a for a in operands if not is_tensor_ir(a))],
        )
        self.name = register_node(self)
        #: where each result ends: an output of this node, or a given place
        self.outputs: list[Any] = self._make_outputs(call)
        written = {k: written_output(self, p) for k, p in enumerate(call.into) if p is not None}
        self.mutation_outputs = list(written.values())
        #: as a kernel stores to them
        self.destinations = [
            Destination(written[k].get_name() if k in written else output.get_name(), output.layout)
            for k, output in enumerate(self.outputs)
        ]
        for k in self.joined:
            self.destinations[k : k + 2] = self._destinations_of_parts(k)

    def _make_outputs(self, call: ScanCall) -> list[Any]:
        outputs: list[Any] = []
        for k, (like, place) in enumerate(zip(call.examples.results(), call.into, strict=True)):
            if k - 1 in self.joined:
                outputs.append(outputs[-1])  # where the real part is, too
            elif place is not None:
                outputs.append(place.data)
            else:
                dtype = like.dtype.to_complex() if k in self.joined else like.dtype
                outputs.append(declared_output(self, k, like, dtype))
        return outputs

    def _destinations_of_parts(self, position: int) -> list[Destination]:
        """Return where a complex output's real and imaginary numbers go, which alternate."""
        stack = self.outputs[position].layout
        strides = [2 * stride for stride in stack.stride]
        layouts = (
            FixedLayout(stack.device, stack.dtype.to_real(), stack.size, strides, offset)
            for offset in (0, 1)
        )
        return [Destination(f"{PARTS_PREFIX}{position}", layout) for layout in layouts]

    def results(self) -> list[Any]:
        return [boxed(output) for output in self.outputs]

    def allocate(self, wrapper: Any, outputs: Sequence[Any]) -> None:
        for output in {id(output): output for output in outputs}.values():
            if isinstance(output, DeclaredOutput):
                wrapper.writeline(AllocateLine(wrapper, output.get_name(), output.layout))
                advise_when_run(wrapper, output)


class KernelNode(ScanNode):
    """A scan that is one call of a kernel; each subclass is a kind of kernel, for some bodies.

    Attributes:
        kind: says in an explanation what a loop becomes.
        step: what :meth:`call_kernel` generates code of.
        takes_small_matrices: with products and factorisations of a few rows in each lane.
    """

    kind: str
    takes_small_matrices = False

    def __init__(self, call: ScanCall, step: Any) -> None:
        super().__init__(call)
        self.step = step

    @staticmethod
    def check(body: fx.GraphModule) -> None:
        """Refuse a body that the kernel cannot take, by its operators before lowering."""
        raise NotImplementedError

    @classmethod
    def may_qualify(cls, body: fx.GraphModule) -> bool:
        try:
            cls.check(body)
        except Refusal:
            return False
        return True

    @classmethod
    def lower(cls, call: ScanCall) -> KernelNode:
        """Return the node for a body that passes the check; Refusal or NotPointwise if none is."""
        raise NotImplementedError

    def call_kernel(self, wrapper: Any) -> None:
        """Define the kernel and call it at this place of the wrapper."""
        raise NotImplementedError

    def codegen(self, wrapper: Any) -> None:
        self.allocate(wrapper, self.outputs)
        n = len(self.operands.carry)
        # a carry that nothing reads after the loop lives somewhere, too
        keep_buffers(destination.name for destination in self.destinations[:n])
        self.call_kernel(wrapper)
        if not uses_cpp_wrapper():
            wrapper.writeline(f"{self.get_name()} = None")
