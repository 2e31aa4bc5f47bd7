"""The code of a counted loop, in the language of the wrapper.

:class:`ReplayedLoop` is one that a CUDA graph may be made of (``cuda_graphs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_scan_hop import progress_bar
from torch_scan_hop._torch.inductor import (
    AllocateLine,
    DeclaredOutput,
    codegen_subgraph_inline,
    declare_loop_index,
    define_in_header,
    import_into,
    indented,
    is_tensor_ir,
    size_expression,
    trip_count_code,
)

if TYPE_CHECKING:
    from torch_scan_hop.inductor.loop import ScanLoop

#: in place of the tensor that a carry starts from
ZEROS = size_expression(0)
GRAPHED_LOOP = "from torch_scan_hop.cuda_graphs.graphed import GraphedLoop"


class PythonLoop:
    """The wrapper lines of one loop. :class:`CppLoop` has those that differ in C++."""

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
        in_turn = [k for k in range(len(self.carry)) if k not in loop.in_place]
        # by position, for the carries with two buffers
        self.next_carry = dict(zip(in_turn, take(in_turn), strict=True))
        n = len(operands.carry)
        self.carry_outputs, self.y_outputs = loop.outputs[:n], loop.outputs[n:]
        self.ys = take(self.y_outputs)

    # --- what differs in C++ ---

    def bind(self, name: str, value: str) -> None:
        self.wrapper.writeline(f"{name} = {value}")

    def reference(self, operand: Any, name: str) -> str:
        return operand.codegen_reference()

    def copy(self, destination: str, source: str) -> None:
        self.wrapper.writeline(f"{destination}.copy_({source})")

    def set_to_zero(self, destination: str) -> None:
        self.wrapper.writeline(f"{destination}.zero_()")

    def span(self) -> str:
        """Return the range of the loop's index; in C++ the number of its steps."""
        count = trip_count_code(self.wrapper, self.loop.trip_count)
        return f"range({count} - 1, -1, -1)" if self.loop.reverse else f"range({count})"

    def open_loop(self, span: str) -> None:
        index = str(self.loop.loop_index)
        declare_loop_index(self.wrapper, index)
        steps = import_into(self.wrapper, progress_bar.steps)
        self.wrapper.writeline(f"for {index} in {steps}({span}):")

    def close_loop(self) -> None:
        wrapper = self.wrapper
        self.swap()
        self.hand_over(self.carry)
        done = [*self.carry, *self.next_carry.values(), *self.xs, *self.ys]
        done += [
            name
            for name, operand in zip(self.additional, self.loop.operands.additional, strict=True)
            if is_tensor_ir(operand)
        ]
        done += self.buffers()
        wrapper.writeline(f"del {', '.join(done)}")
        wrapper.writeline(f"{self.loop.get_name()} = None")

    # --- the loop ---

    def emit(self) -> None:
        self.loop.allocate(self.wrapper, self.y_outputs)
        self._allocate_carries()
        self._seed()
        self._bind_operands()
        self.open_loop(self.span())
        self.emit_step()
        self.close_loop()

    def emit_step(self) -> None:
        following = self.next_carry.values()
        names = [*self.carry, *self.xs, *self.additional, *following, *self.ys]
        codegen_subgraph_inline(self.wrapper, self.loop.step, names)

    def buffers(self) -> list[str]:
        """Return the buffers of all carries."""
        even = [self.buffer(output, "even") for output in self.carry_outputs]
        return even + [self.buffer(self.carry_outputs[k], "odd") for k in self.next_carry]

    def pairs(self) -> list[tuple[str, str]]:
        """Return the names that steps have for the two buffers of a carry, which the loop swaps."""
        return [(self.carry[k], following) for k, following in self.next_carry.items()]

    def buffer(self, output: DeclaredOutput, which: str) -> str:
        return f"{output.get_name()}_{which}"

    def _allocate_carries(self) -> None:
        for k, output in enumerate(self.carry_outputs):
            for which in ("even", "odd") if k in self.next_carry else ("even",):
                line = AllocateLine(self.wrapper, self.buffer(output, which), output.layout)
                self.wrapper.writeline(line)

    def _seed(self) -> None:
        for output, init in zip(self.carry_outputs, self.loop.operands.carry, strict=True):
            first = self.buffer(output, "even")
            if init is ZEROS:
                self.set_to_zero(first)
                continue
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
        for k, output in enumerate(self.carry_outputs):
            self._bind_carry(k, output)

    def _bind_carry(self, k: int, output: DeclaredOutput) -> None:
        self.bind(self.carry[k], self.buffer(output, "even"))
        if k in self.next_carry:
            self.bind(self.next_carry[k], self.buffer(output, "odd"))

    def swap(self) -> None:
        """Write the last statement of the loop's suite."""
        for current, following in self.pairs():
            self.wrapper.writeline(f"    {current}, {following} = {following}, {current}")

    def hand_over(self, final_carry: Sequence[str]) -> None:
        for final, output in zip(final_carry, self.carry_outputs, strict=True):
            if isinstance(output, DeclaredOutput):
                self.wrapper.writeline(f"{output.get_name()} = {final}")
            else:
                self.copy(output.codegen_reference(), final)


class ReplayedLoop(PythonLoop):
    """The loop as a function of all that it reads and writes, which may be captured.

    ::

        def scan_loop_0(order, carry, xs, additional, ys):
            ...                                        # as ever, from init = carry
            return [carry_0, carry_1]
        buf2, buf3, = graphed_loop_0(scan_loop_0, range(12), [...], [...], [...], [...])
    """

    def emit(self) -> None:
        loop, wrapper = self.loop, self.wrapper
        loop.allocate(wrapper, self.y_outputs)
        runner = define_in_header(wrapper, "graphed_loop", "GraphedLoop()", GRAPHED_LOOP)
        function = f"scan_loop_{loop.get_name()}"
        wrapper.writeline(f"def {function}(order, carry, xs, additional, ys):")
        with indented(wrapper):
            self._emit_function()
        groups = (loop.operands.carry, loop.operands.xs, loop.operands.additional, self.y_outputs)
        names = ([self.reference(operand, "") for operand in group] for group in groups)
        arguments = ", ".join(f"[{', '.join(group)}]" for group in names)
        lasts = [self.buffer(output, "last") for output in self.carry_outputs]
        results = "".join(f"{last}, " for last in lasts)
        call = f"{runner}({function}, {self.span()}, {arguments})"
        wrapper.writeline(f"{results}= {call}".removeprefix("= "))
        self.hand_over(lasts)
        if lasts:
            wrapper.writeline(f"del {', '.join(lasts)}")
        wrapper.writeline(f"{loop.get_name()} = None")

    def _emit_function(self) -> None:
        self._allocate_carries()
        parts = (self.xs, "xs"), (self.additional, "additional"), (self.ys, "ys")
        for names, argument in parts:
            if names:
                self.wrapper.writeline(f"{', '.join(names)}, = {argument}")
        for k, output in enumerate(self.carry_outputs):
            self.copy(self.buffer(output, "even"), f"carry[{k}]")
            self._bind_carry(k, output)
        self.open_loop("order")
        self.emit_step()
        self.swap()
        self.wrapper.writeline(f"return [{', '.join(self.carry)}]")


class CppLoop(PythonLoop):
    def bind(self, name: str, value: str) -> None:
        self.wrapper.writeline(f"ConstantHandle {name}({value});")

    def reference(self, operand: Any, name: str) -> str:
        reference = operand.codegen_reference()
        if reference.isidentifier():
            return reference
        # a temporary view: give it an owner that outlives the loop
        # in parentheses, C++ would read what makes a temporary as the declaration of a function
        self.wrapper.writeline(f"RAIIAtenTensorHandle {name}_owner{{{reference}}};")
        return f"{name}_owner"

    def copy(self, destination: str, source: str) -> None:
        self.wrapper.writeline(
            f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_({destination}, {source}, 0));"
        )

    def set_to_zero(self, destination: str) -> None:
        self.wrapper.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_({destination}));")

    def span(self) -> str:
        return trip_count_code(self.wrapper, self.loop.trip_count)

    def open_loop(self, span: str) -> None:
        index = str(self.loop.loop_index)
        declare_loop_index(self.wrapper, index)
        if self.loop.reverse:
            header = f"for (int64_t {index} = {span} - 1; {index} >= 0; --{index}) {{"
        else:
            header = f"for (int64_t {index} = 0; {index} < {span}; ++{index}) {{"
        self.wrapper.writeline(header)

    def close_loop(self) -> None:
        wrapper = self.wrapper
        for current, following in self.pairs():
            wrapper.writeline(f"    std::swap({current}, {following});")
        wrapper.writeline("}")
        trip_count = trip_count_code(wrapper, self.loop.trip_count)
        for k, (current, output) in enumerate(zip(self.carry, self.carry_outputs, strict=True)):
            if not isinstance(output, DeclaredOutput):
                place = self.reference(output, f"{current}_place")
                self.copy(place, current)
                continue
            last = f"std::move({self.buffer(output, 'even')})"
            if k in self.next_carry:
                odd = self.buffer(output, "odd")
                last = f"({trip_count}) % 2 ? std::move({odd}) : {last}"
            wrapper.writeline(f"RAIIAtenTensorHandle {output.get_name()} = {last};")
