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

from torch_scan_hop._torch.inductor import (
    current_node,
    fake_mode,
    fresh_loop_index,
    lower_subgraph,
    size_expression,
    uses_cpp_wrapper,
    with_exact_strides,
)
from torch_scan_hop._torch.inductor_passes import decompose_mutating_operators
from torch_scan_hop._torch.inductor_values import is_unrealized, shifted_by_one
from torch_scan_hop.body.carries_in import is_in_graph
from torch_scan_hop.inductor import watch
from torch_scan_hop.inductor.body import StepExamples, destination_passing
from torch_scan_hop.inductor.kernels import kernel_of
from torch_scan_hop.inductor.loop_code import CountedLoop, CppLoop, PythonLoop, ReplayedLoop
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.replayed import why_not_replayed, within_a_graph
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
    is_replayed = not why_not_replayed(call)
    with within_a_graph(is_replayed):
        step = lower_subgraph(f"{combine_fn.name}_step", step_module, examples.flat())
    call = dataclasses.replace(call, operands=split(operands))
    return ScanLoop(call, step, is_replayed).results()


def _examples(values: Inputs[Any], ys: Sequence[Any]) -> StepExamples:
    index = fresh_loop_index()
    inputs = Inputs(
        [_at_offset_zero(c, contiguous=True) for c in values.carry],
        [_at_offset_zero(x) for x in values.xs],
        [_at_offset_zero(a) for a in values.additional],
    )
    return StepExamples(index, inputs, [_at_offset_zero(y, contiguous=True) for y in ys])


class ScanLoop(CountedLoop):
    def __init__(self, call: ScanCall, step: Any, is_replayed: bool) -> None:
        super().__init__(call)
        self.step = step
        self.loop_index = size_expression(call.examples.index)
        self.is_replayed = is_replayed

    def get_subgraphs(self) -> list[Any]:
        return [self.step]

    def codegen(self, wrapper: Any) -> None:
        in_python = ReplayedLoop if self.is_replayed else PythonLoop
        emitter = CppLoop if uses_cpp_wrapper() else in_python
        emitter(self, wrapper).emit()
