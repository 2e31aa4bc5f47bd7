"""A body's derivative, computed once for each way it is called and kept with the body."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop._torch.impure import is_random
from torch_scan_hop._torch.selective_checkpoints import is_in_region, users_policy_in_force
from torch_scan_hop._torch.symbols import Number, Symbols
from torch_scan_hop._torch.tracing import run_fake
from torch_scan_hop.autodiff.custom import has_own_backward
from torch_scan_hop.autodiff.derivative import Derivative, is_backward
from torch_scan_hop.autodiff.differentiability import GradientFlow, gradient_flow
from torch_scan_hop.autodiff.function import DifferentiatedCall
from torch_scan_hop.autodiff.handover import Handover, Partition, Source
from torch_scan_hop.autodiff.joint import trace_joint
from torch_scan_hop.autodiff.partition import partition_of
from torch_scan_hop.autodiff.policy import RECOMPUTED_WHOLE, policy_of
from torch_scan_hop.body.any_size import derived
from torch_scan_hop.body.step_examples import contiguous_like
from torch_scan_hop.eager.nested import keep_scans
from torch_scan_hop.op import FORWARD, REVERSE, Body, RunScan, ScanOptions
from torch_scan_hop.signature import Inputs

# what torch says of an operator without a derivative
_NOT_IMPLEMENTED = re.compile("derivative for .* is not implemented")


def differentiated_call(
    body: Body,
    inputs: Inputs[Any],
    wanted: tuple[bool, ...],
    options: ScanOptions,
    run_forward: RunScan,
    tangents_of: RunScan | None = None,
    traced: bool = False,
) -> DifferentiatedCall:
    """Return the call that an autograd function of the tensors among ``inputs`` is applied to."""
    derivative, sizes = derivative_of(body, inputs, wanted, options.checkpoint, traced)
    numbers = tuple([None if isinstance(a, torch.Tensor) else a for a in inputs.additional])
    options = REVERSE if options.reverse else FORWARD
    return DifferentiatedCall(derivative, numbers, options, run_forward, sizes, tangents_of)


def derivative_of(
    body: Body, inputs: Inputs[Any], wanted: tuple[bool, ...], checkpoint: Any, traced: bool
) -> tuple[Derivative, dict[Handover, Any]]:
    """Return the derivative by the ``wanted`` inputs, and the sizes that it hands over, if any."""
    checkpoint = policy_of(body, checkpoint)
    if traced and checkpoint is None and is_in_region():
        checkpoint = users_policy_in_force() or RECOMPUTED_WHOLE

    def make(mode: FakeTensorMode, examples: Inputs[Any], symbols: Symbols | None) -> _ForAnySize:
        roles = examples.signature.split_inputs(wanted)
        derivative = _derive(body, mode, examples, roles, checkpoint, traced)
        if checkpoint is not None:
            for made in derivative.bodies():
                keep_scans(made)
        if symbols is None:
            return _ForAnySize(derivative)
        sizes = derivative.sizes()
        return _ForAnySize(derivative, sizes, symbols.function([s.size for s in sizes]))

    return derived(body, ("derivative", wanted, checkpoint, traced), inputs, make)


@dataclass(frozen=True)
class _ForAnySize:
    """A derivative, and the sizes that it hands over as a function of the numbers of a call."""

    derivative: Derivative
    sizes: tuple[Handover, ...] = ()
    evaluate: Callable[..., tuple[Any, ...]] = tuple

    def at(self, numbers: tuple[Number, ...]) -> tuple[Derivative, dict[Handover, Any]]:
        return self.derivative, dict(zip(self.sizes, self.evaluate(*numbers), strict=True))


def _derive(
    body: Body,
    mode: FakeTensorMode,
    examples: Inputs[Any],
    wanted: Inputs[bool],
    checkpoint: Any,
    traced: bool,
) -> Derivative:
    signature = examples.signature
    flow = gradient_flow(body, examples, wanted, mode)
    try:
        first = partition_at(body, examples, flow, mode, checkpoint)
    except RuntimeError as error:
        if not is_backward(body) or not _NOT_IMPLEMENTED.search(str(error)):
            raise
        assert isinstance(body, fx.GraphModule)
        only_forward = Partition(body, body, 0, (), (), {}, (), ())
        return Derivative(signature, flow, only_forward, error=str(error))
    if traced:
        # a second derivative of a traced backward is that trace's: it does not come back here
        return Derivative(signature, flow, first, has_own_backward=has_own_backward(body))
    if has_own_backward(body):
        return Derivative(signature, flow, first, looped=body, has_own_backward=True)
    return _closed_under_differentiation(first, examples, wanted, flow, mode)


def partition_at(
    body: Body,
    examples: Inputs[Any],
    flow: GradientFlow,
    mode: FakeTensorMode,
    checkpoint: Any,
    saved: frozenset[int] | None = None,
) -> Partition:
    """Differentiate a step on these examples, and cut it in a forward and a backward."""
    with torch.no_grad():
        outputs = run_fake(body, examples.flat(), mode)
    like = [contiguous_like(mode, o) for o in outputs]
    joint = trace_joint(body, examples, like, flow, mode)
    if checkpoint == RECOMPUTED_WHOLE:
        # what it draws is not drawn again: such a scan is saved, but for what can be recomputed
        checkpoint = "full" if any(map(is_random, joint.module.graph.nodes)) else None
    return partition_of(joint, checkpoint, saved)


def _stacks_read(partition: Partition) -> frozenset[int]:
    """Return the positions of those of the forward's ys that the backward reads."""
    slots = (slot for h in partition.per_step for slot in partition.slots(h))
    return frozenset(slot.index for slot in slots if slot.source is Source.Y)


def _closed_under_differentiation(
    first: Partition,
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
        second = partition_at(forward, examples, second_flow, mode, None, saved)
        forward, saved = second.forward, saved | _stacks_read(second)
        if second.n_residuals == 0:
            break
    else:
        raise RuntimeError("torch_scan_hop: the residuals of a scan body did not settle")
    closed = dataclasses.replace(first, forward=forward)
    return Derivative(examples.signature, flow, closed, second, second_flow)
