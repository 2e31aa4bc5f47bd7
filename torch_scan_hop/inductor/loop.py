"""``ScanLoop``: the IR node of a scan, and its code: a counted loop.

The carry has two buffers of its own, which are read and written in turn (*ping-pong*). It has only
one if parts of it are written, or if it is only added to. Init is copied into the first buffer
before the loop, so that init is never written, and a trip count of zero needs no case of its own.
Nothing is allocated per step for carries, xs or ys. The loop has no host synchronisation. Copies
are calls of ``copy_``, since a kernel for them would take longer to compile than it could ever
save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.capabilities import own_failures_said
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
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.step_examples import contiguous_like, like
from torch_scan_hop.inductor import watch
from torch_scan_hop.inductor.body import StepExamples, added_to, destination_passing, partly_written
from torch_scan_hop.inductor.kernels import is_product, kernel_of
from torch_scan_hop.inductor.loop_code import ZEROS, CppLoop, PythonLoop, ReplayedLoop
from torch_scan_hop.inductor.node import ScanCall, ScanNode
from torch_scan_hop.inductor.pairs import positions_of_joined
from torch_scan_hop.inductor.replayed import CUDA_GRAPH, why_not_replayed, within_a_graph
from torch_scan_hop.signature import Inputs

aten = torch.ops.aten


def _is_zeros(argument: Any) -> bool:
    """Return True for zeros: a sum that starts with them needs no tensor to start from."""
    if not isinstance(argument, torch.fx.Node) or argument.target is not aten.full.default:
        return False
    # not -0.0, which a sum of no steps keeps
    return str(argument.args[1]) in ("0", "0.0", "False")


def _realized(value: Any, example: Any) -> Any:
    if not isinstance(example, torch.Tensor):
        return value
    return with_exact_strides(value, example.stride())


def lower_carries_in(stack: Any, init: Any, _after: Any, reverse: bool) -> Any:
    """Lower ``carries_in``: kernels of whole loops read the stack in place."""
    return shifted_by_one(stack, init, reverse)


@own_failures_said("the lowering of a scan", "counted_loop")
def lower_to_loop_or_kernel(
    combine_fn: Any,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional_inputs: Sequence[Any],
    reverse: bool = False,
    checkpoint: Any = None,
    into: Sequence[Any] = (),
) -> list[Any]:
    """Lower ``scan`` to one node; ``into``: where a step of another scan wants the results."""
    given: Inputs[Any] = Inputs(*current_node().args[1:4])  # type: ignore[arg-type]
    results = value_of(current_node())
    examples = _examples(given.map(value_of), results[len(init) :])
    values = [*init, *xs, *additional_inputs]
    # the carries into steps of another scan: a kernel computes them where it reads them
    operands = [
        value if is_in_graph(argument) and is_unrealized(value) else _realized(value, example)
        for argument, value, example in zip(
            given.flat(), values, examples.inputs.flat(), strict=True
        )
    ]
    into = into or [None] * len(results)
    split = given.signature.split_inputs(operands)
    joined = positions_of_joined(current_node())
    call = ScanCall(combine_fn.graph_module, split, examples, reverse, into, joined)
    node, refusals = kernel_of(call)
    if node is not None:
        watch.tell(call, node, refusals)
        return node.results()
    not_replayed = why_not_replayed(call)
    watch.tell(call, None, {**refusals, CUDA_GRAPH: not_replayed})
    name = f"{combine_fn.name}_step"
    return _counted_loop(call, name, given.carry, is_replayed=not not_replayed).results()


def _counted_loop(call: ScanCall, name: str, init: Sequence[Any], is_replayed: bool) -> ScanLoop:
    """Lower to a counted loop; ``init``: the graph's nodes of the carries' first values."""
    examples = call.examples
    pairs = zip(call.operands.flat(), examples.inputs.flat(), strict=True)
    operands = [_realized(value, own) if is_unrealized(value) else value for value, own in pairs]
    written = partly_written(call.body, examples)
    in_place = [*added_to(call.body, examples, is_product), *written]
    writes = [write for chain in written.values() for write in chain]
    step_module = destination_passing(call.body, examples, fake_mode(), in_place, writes)
    decompose_mutating_operators(step_module)
    with within_a_graph(is_replayed):
        step = lower_subgraph(name, step_module, examples.of_step(in_place))
    if not is_replayed:
        for k, node in enumerate(init):
            if _is_zeros(node):
                operands[k] = ZEROS
    split = examples.inputs.signature.split_inputs
    call = dataclasses.replace(call, operands=split(operands))
    return ScanLoop(call, step, in_place, is_replayed)


def _examples(values: Inputs[Any], ys: Sequence[Any]) -> StepExamples:
    """Return fakes of whole inputs and outputs; the views that are handed over have the offsets."""
    mode, index = fake_mode(), fresh_loop_index()
    inputs = Inputs(
        [contiguous_like(mode, c) for c in values.carry],
        [like(mode, x) for x in values.xs],
        [like(mode, a) for a in values.additional],
    )
    return StepExamples(index, inputs, [contiguous_like(mode, y) for y in ys])


class ScanLoop(ScanNode):
    """A loop over ``step``; carries at ``in_place`` have one buffer, and others have two."""

    def __init__(
        self, call: ScanCall, step: Any, in_place: Sequence[int], is_replayed: bool
    ) -> None:
        super().__init__(call)
        self.step = step
        self.in_place = in_place
        self.loop_index = size_expression(call.examples.index)
        self.is_replayed = is_replayed

    def get_subgraphs(self) -> list[Any]:
        return [self.step]

    @own_failures_said("the code of a scan", "counted_loop")
    def codegen(self, wrapper: Any) -> None:
        in_python = ReplayedLoop if self.is_replayed else PythonLoop
        emitter = CppLoop if uses_cpp_wrapper() else in_python
        emitter(self, wrapper).emit()
