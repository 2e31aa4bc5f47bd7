"""A body's derivative, computed once for each way it is called and kept with the body."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.tracing import FakeTensorMode, is_traced, run_fake
from torch_scan_hop.autodiff.custom import has_custom_function
from torch_scan_hop.autodiff.differentiability import GradientFlow, gradient_flow
from torch_scan_hop.autodiff.function import Derivative
from torch_scan_hop.autodiff.joint import trace_joint
from torch_scan_hop.autodiff.partition import Partition, Partitioner, Source
from torch_scan_hop.autodiff.policy import policy_of
from torch_scan_hop.examples import contiguous_like, step_examples
from torch_scan_hop.memo import autocast_state, inputs_metadata, remember
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Inputs, Signature


def derivative_of(
    body: Body,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
    wanted: Inputs[bool],
    checkpoint: Any,
) -> Derivative:
    checkpoint = policy_of(body, checkpoint)
    key = (
        "derivative",
        inputs_metadata(init, xs, additional),
        tuple(wanted.flat()),
        checkpoint,
        autocast_state(),
        is_traced([*init, *xs, *additional]),
    )
    return remember(body, key, lambda: _derive(body, init, xs, additional, wanted, checkpoint))


def _derive(
    body: Body,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
    wanted: Inputs[bool],
    checkpoint: Any,
) -> Derivative:
    mode, examples = step_examples(init, xs, additional)
    signature = Signature(len(init), len(xs), len(additional))
    flow = gradient_flow(body, examples, wanted, mode)
    first = _partition(body, signature, examples, flow, mode, checkpoint)
    if is_traced([*init, *xs, *additional]):
        # a traced backward is not differentiated again through this Function
        return Derivative(signature, flow, first, None, None)
    if has_custom_function(body):
        return Derivative(signature, flow, first, None, None, body)
    return _closed_under_differentiation(first, signature, examples, wanted, flow, mode)


def _partition(
    body: Body,
    signature: Signature,
    examples: Inputs[Any],
    flow: GradientFlow,
    mode: FakeTensorMode,
    checkpoint: Any,
    saved: frozenset[int] | None = None,
) -> Partition:
    with torch.no_grad():
        outputs = run_fake(body, examples.flat(), mode)
    like = [contiguous_like(mode, o) for o in outputs]
    joint = trace_joint(body, signature, examples, like, flow, mode)
    return Partitioner(joint, checkpoint, saved).run()


def _stacks_read(partition: Partition) -> frozenset[int]:
    """Which of the forward's ys the backward reads."""
    read = {h.index for h in partition.per_step if h.source is Source.Y}
    return frozenset(read | {index for index, _ in partition.carry_stack.values()})


def _closed_under_differentiation(
    first: Partition,
    signature: Signature,
    examples: Inputs[Any],
    wanted: Inputs[bool],
    flow: GradientFlow,
    mode: FakeTensorMode,
) -> Derivative:
    """Differentiate the forward body with its residuals: a double backward enters there.

    It reads what the first backward reads and recomputes the rest, so that being
    differentiable twice costs no memory.
    """
    forward, saved = first.forward, _stacks_read(first)
    for _ in range(3):
        second_flow = gradient_flow(forward, examples, wanted, mode)
        second = _partition(forward, signature, examples, second_flow, mode, None, saved)
        forward, saved = second.forward, saved | _stacks_read(second)
        if second.n_residuals == 0:
            break
    else:
        raise RuntimeError("torch_scan_hop: the residuals of a scan body did not settle")
    closed = dataclasses.replace(first, forward=forward)
    return Derivative(signature, flow, closed, second, second_flow)
