"""``ScanLoop``: the IR node of a scan, and its code: a counted loop.

The carry lives in two buffers of its own, read and written in turn (*ping-pong*); init is
copied into the first one before the loop, so that it is never written, and so that a trip
count of zero needs no case of its own. Nothing is allocated per step for carries, xs or ys.
The loop has no host synchronisation. Copies are calls of ``copy_``: a kernel for them would take
longer to compile than it could ever save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop import progress_bar
from torch_scan_hop._torch.inductor import (
    AllocateLine,
    DeclaredOutput,
    codegen_subgraph_inline,
    current_node,
    declare_loop_index,
    fake_mode,
    fresh_loop_index,
    import_into,
    is_tensor_ir,
    lower_subgraph,
    size_expression,
    trip_count_code,
    uses_cpp_wrapper,
    with_exact_strides,
)
from torch_scan_hop._torch.inductor_passes import decompose_mutating_operators
from torch_scan_hop._torch.inductor_values import is_unrealized, shifted_by_one
from torch_scan_hop.body.carries_in import is_in_graph
from torch_scan_hop.inductor import watch
from torch_scan_hop.inductor.body import StepExamples, destination_passing
from torch_scan_hop.inductor.kernels import kernel_of
from torch_scan_hop.inductor.node import ScanCall, ScanNode
from torch_scan_hop.signature import Inputs


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument


def _at_offset_zero(value: Any, contiguous: bool = False) -> Any:
    """A fake like ``value`` that starts its storage: the view handed over has the offset."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode():
        if contiguous:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def _realized(value: Any, like: Any) -> Any:
    return with_exact_strides(value, like.stride()) if isinstance(like, torch.Tensor) else value


def lower_carries_in(stack: Any, init: Any, _after: Any, reverse: bool) -> Any:
    """The lowering of ``carries_in``: kernels of whole loops read the stack in place."""
    return shifted_by_one(stack, init, reverse)


def lower_to_loop_or_kernel(
    combine_fn: Any,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional_inputs: Sequence[Any],
    reverse: bool = False,
    checkpoint: Any = None,
    into: Sequence[Any] = (),
) -> list[Any]:
    """The lowering of ``scan``: one node, and its outputs.

    ``into``, within the step of another scan, is where results are to be written.
    """
    given: Inputs[Any] = Inputs(*current_node().args[1:4])  # type: ignore[arg-type]
    results = current_node().meta["val"]
    examples = _examples(given.map(_value), results[len(init) :])
    likes = examples.inputs.flat()
    values = [*init, *xs, *additional_inputs]
    # the carries into steps of another scan: a kernel computes them where it reads them
    operands = [
        value if is_in_graph(argument) and is_unrealized(value) else _realized(value, like)
        for argument, value, like in zip(given.flat(), values, likes, strict=True)
    ]
    split = given.signature.split_inputs
    into = into or [None] * len(results)
    call = ScanCall(combine_fn.graph_module, split(operands), examples, reverse, into)
    node = kernel_of(call)
    watch.tell(call, None if node is None else type(node))
    if node is not None:
        return node.results()
    operands = [
        _realized(value, like) if is_unrealized(value) else value
        for value, like in zip(operands, likes, strict=True)
    ]
    step_module = destination_passing(call.body, examples, fake_mode())
    decompose_mutating_operators(step_module)
    step = lower_subgraph(f"{combine_fn.name}_step", step_module, examples.flat())
    return ScanLoop(dataclasses.replace(call, operands=split(operands)), step).results()


def _examples(values: Inputs[Any], ys: Sequence[Any]) -> StepExamples:
    index = fresh_loop_index()
    inputs = Inputs(
        [_at_offset_zero(c, contiguous=True) for c in values.carry],
        [_at_offset_zero(x) for x in values.xs],
        [_at_offset_zero(a) for a in values.additional],
    )
    return StepExamples(index, inputs, [_at_offset_zero(y, contiguous=True) for y in ys])


class ScanLoop(ScanNode):
    def __init__(self, call: ScanCall, step: Any) -> None:
        super().__init__(call)
        self.step = step
        self.loop_index = size_expression(call.examples.index)

    def get_subgraphs(self) -> list[Any]:
        return [self.step]

    def codegen(self, wrapper: Any) -> None:
        emitter = CppLoop if uses_cpp_wrapper() else PythonLoop
        emitter(self, wrapper).emit()


class LoopEmitter:
    """The wrapper lines of one loop; subclasses know the language."""

    def __init__(self, loop: ScanLoop, wrapper: Any) -> None:
        self.loop = loop
        self.wrapper = wrapper
        names = iter(loop.step.graph.graph_inputs)
        next(names)  # the loop index is a size, bound by the loop itself
        take = lambda items: [next(names) for _ in items]  # noqa: E731
        operands = loop.operands
        self.carry = take(operands.carry)
        self.xs = take(operands.xs)
        self.additional = take(operands.additional)
        self.next_carry = take(operands.carry)
        n = len(operands.carry)
        self.carry_outputs, self.y_outputs = loop.outputs[:n], loop.outputs[n:]
        self.ys = take(self.y_outputs)

    # language-specific pieces

    def bind(self, name: str, value: str) -> None:
        raise NotImplementedError

    def reference(self, operand: Any, name: str) -> str:
        raise NotImplementedError

    def copy(self, destination: str, source: str) -> None:
        raise NotImplementedError

    def open_loop(self) -> None:
        raise NotImplementedError

    def close_loop(self) -> None:
        raise NotImplementedError

    # the loop

    def emit(self) -> None:
        self._allocate()
        self._seed()
        self._bind_operands()
        self.open_loop()
        names = [*self.carry, *self.xs, *self.additional, *self.next_carry, *self.ys]
        codegen_subgraph_inline(self.wrapper, self.loop.step, names)
        self.close_loop()

    def buffer(self, output: DeclaredOutput, which: str) -> str:
        return f"{output.get_name()}_{which}"

    def _allocate(self) -> None:
        self.loop.allocate(self.wrapper, self.y_outputs)
        for output in self.carry_outputs:
            for which in ("even", "odd"):
                line = AllocateLine(self.wrapper, self.buffer(output, which), output.layout)
                self.wrapper.writeline(line)

    def _seed(self) -> None:
        for output, init in zip(self.carry_outputs, self.loop.operands.carry, strict=True):
            first = self.buffer(output, "even")
            self.copy(first, self.reference(init, f"{first}_init"))

    def _bind_operands(self) -> None:
        operands = self.loop.operands
        for name, operand in zip(
            [*self.xs, *self.additional], [*operands.xs, *operands.additional], strict=True
        ):
            if is_tensor_ir(operand):
                self.bind(name, self.reference(operand, name))
        for name, output in zip(self.ys, self.y_outputs, strict=True):
            self.bind(name, self.reference(output, name))
        for current, following, output in zip(
            self.carry, self.next_carry, self.carry_outputs, strict=True
        ):
            self.bind(current, self.buffer(output, "even"))
            self.bind(following, self.buffer(output, "odd"))


class PythonLoop(LoopEmitter):
    def bind(self, name: str, value: str) -> None:
        self.wrapper.writeline(f"{name} = {value}")

    def reference(self, operand: Any, name: str) -> str:
        return operand.codegen_reference()

    def copy(self, destination: str, source: str) -> None:
        self.wrapper.writeline(f"{destination}.copy_({source})")

    def open_loop(self) -> None:
        index = str(self.loop.loop_index)
        declare_loop_index(self.wrapper, index)
        trip_count = trip_count_code(self.wrapper, self.loop.trip_count)
        span = f"range({trip_count} - 1, -1, -1)" if self.loop.reverse else f"range({trip_count})"
        steps = import_into(self.wrapper, progress_bar.steps)
        self.wrapper.writeline(f"for {index} in {steps}({span}):")

    def close_loop(self) -> None:
        wrapper = self.wrapper
        # the last statement of the loop's suite
        for current, following in zip(self.carry, self.next_carry, strict=True):
            wrapper.writeline(f"    {current}, {following} = {following}, {current}")
        for current, output in zip(self.carry, self.carry_outputs, strict=True):
            if isinstance(output, DeclaredOutput):
                wrapper.writeline(f"{output.get_name()} = {current}")
            else:
                self.copy(output.codegen_reference(), current)
        done = [*self.carry, *self.next_carry, *self.xs, *self.ys]
        done += [
            name
            for name, operand in zip(self.additional, self.loop.operands.additional, strict=True)
            if is_tensor_ir(operand)
        ]
        done += [self.buffer(o, which) for o in self.carry_outputs for which in ("even", "odd")]
        wrapper.writeline(f"del {', '.join(done)}")
        wrapper.writeline(f"{self.loop.get_name()} = None")


class CppLoop(LoopEmitter):
    def bind(self, name: str, value: str) -> None:
        self.wrapper.writeline(f"ConstantHandle {name}({value});")

    def reference(self, operand: Any, name: str) -> str:
        reference = operand.codegen_reference()
        if reference.isidentifier():
            return reference
        # a temporary view: give it an owner that outlives the loop
        self.wrapper.writeline(f"RAIIAtenTensorHandle {name}_owner({reference});")
        return f"{name}_owner"

    def copy(self, destination: str, source: str) -> None:
        self.wrapper.writeline(
            f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_({destination}, {source}, 0));"
        )

    def open_loop(self) -> None:
        index = str(self.loop.loop_index)
        declare_loop_index(self.wrapper, index)
        trip_count = trip_count_code(self.wrapper, self.loop.trip_count)
        if self.loop.reverse:
            header = f"for (int64_t {index} = {trip_count} - 1; {index} >= 0; --{index}) {{"
        else:
            header = f"for (int64_t {index} = 0; {index} < {trip_count}; ++{index}) {{"
        self.wrapper.writeline(header)

    def close_loop(self) -> None:
        wrapper = self.wrapper
        for current, following in zip(self.carry, self.next_carry, strict=True):
            wrapper.writeline(f"    std::swap({current}, {following});")
        wrapper.writeline("}")
        trip_count = trip_count_code(wrapper, self.loop.trip_count)
        for current, output in zip(self.carry, self.carry_outputs, strict=True):
            if not isinstance(output, DeclaredOutput):
                place = self.reference(output, f"{current}_place")
                self.copy(place, current)
                continue
            even, odd = self.buffer(output, "even"), self.buffer(output, "odd")
            wrapper.writeline(
                f"RAIIAtenTensorHandle {output.get_name()} = "
                f"({trip_count}) % 2 ? std::move({odd}) : std::move({even});"
            )
