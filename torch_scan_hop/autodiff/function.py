"""The two scans of reverse mode, as an autograd.Function.

``forward``: the scan of the forward body. Residuals are outputs like ys, so that they are
saved with ``save_for_backward`` (version checks, offloading hooks) and so that a double
backward reaches them. ``backward``: a scan in the other direction, through the dispatcher,
so that double backward, transforms and traces of it come by composition.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch.dtensors import is_dtensor
from torch_scan_hop._torch.sizes import is_known_positive
from torch_scan_hop._torch.symbols import tracked
from torch_scan_hop._torch.tracing import is_functionalized, is_tracing_a_body
from torch_scan_hop._torch.transforms import has_tangents, over_grads_batch
from torch_scan_hop.autodiff.custom import gradients_of_loop
from torch_scan_hop.autodiff.derivative import Derivative
from torch_scan_hop.autodiff.handover import Handover, Source
from torch_scan_hop.autodiff.linear_sums import LinearSums
from torch_scan_hop.body.carries_in import CarriesIn, in_graph, stacks_of, with_joined
from torch_scan_hop.eager.run import dense
from torch_scan_hop.op import FORWARD, REVERSE, Body, RunScan, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs


@dataclass(frozen=True)
class DifferentiatedCall:
    """One call of the operator: arguments that are no tensors, and how it runs below autograd."""

    derivative: Derivative
    additional: tuple[Any, ...]  # with None where a tensor stands
    #: without a policy: what is saved is decided already
    options: ScanOptions
    run_forward: RunScan
    #: the values in this call of the sizes handed over, if the derivative is for any size
    sizes: Mapping[Handover, Any]
    #: a scan of (primal, tangent) pairs, where inputs have tangents
    tangents_of: RunScan | None = None

    def inputs(self, tensors: Sequence[Any], numbers: Sequence[Any] | None = None) -> Inputs[Any]:
        """Return all inputs: ``tensors``, and ``numbers`` in the places of the others."""
        numbers = self.additional if numbers is None else numbers
        n = self.derivative.signature.n_carry + self.derivative.signature.n_xs
        rest = iter(tensors[n:])
        additional = [
            next(rest) if a is None else number
            for a, number in zip(self.additional, numbers, strict=True)
        ]
        return self.derivative.signature.split_inputs([*tensors[:n], *additional])


def run(call: DifferentiatedCall, inputs: Inputs[Any]) -> tuple[Any, ...]:
    return tuple(call.run_forward(call.derivative.first.forward, inputs, call.options))


@dataclass(frozen=True)
class _Record:
    """The data besides saved tensors that a backward needs to know of its forward."""

    call: DifferentiatedCall
    slots: dict[tuple[Source, int], int]  # positions among the saved tensors
    trip_count: Any
    outputs_like: list[Any]
    # accumulators start as zeros like these: metadata is enough
    additional_like: list[Any]  # None for numbers


def _metadata(values: Sequence[Any]) -> list[Any]:
    return [(v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else None for v in values]


def save(ctx: Any, call: DifferentiatedCall, inputs: Inputs[Any], outputs: Sequence[Any]) -> None:
    """Save for the backward the values that it reads, and nothing else."""
    derivative = call.derivative
    ctx.set_materialize_grads(False)
    trip_count = inputs.xs[0].shape[0]
    is_number = isinstance(trip_count, int)
    has_steps = trip_count > 0 if is_number else is_known_positive(trip_count)
    stopped = []
    for output, flag in itertools.zip_longest(outputs, derivative.differentiable[has_steps]):
        # autograd refuses a tangent of what it calls not differentiable, and what is made under
        # no_grad has one: the operator's kernel cuts such results off once they have theirs
        if not flag and (call.tangents_of is None or not _may_have_tangent(output)):
            stopped.append(output)
    ctx.mark_non_differentiable(*stopped)
    values = {
        Source.CARRY_IN: inputs.carry,
        Source.X: inputs.xs,
        Source.ADDITIONAL: inputs.additional,
        Source.Y: outputs[derivative.signature.n_carry :],
    }
    kept: list[torch.Tensor] = []
    slots: dict[tuple[Source, int], int] = {}
    for slot in derivative.saved:
        value = values[slot.source][slot.index]
        if isinstance(value, torch.Tensor):
            slots[slot.source, slot.index] = len(kept)
            kept.append(value)
    ctx.save_for_backward(*kept)
    like = _metadata([*outputs, *inputs.additional])
    ctx.record = _Record(call, slots, trip_count, like[: len(outputs)], like[len(outputs) :])


def _may_have_tangent(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


class _BackwardPass:
    def __init__(self, ctx: Any, cotangents: Sequence[Any]) -> None:
        self.record: _Record = ctx.record
        self.call = self.record.call
        n_outputs = self.call.derivative.n_outputs
        of_residuals = any([c is not None for c in cotangents[n_outputs:]])
        self.scan = self.call.derivative.backward_scan(of_residuals)
        self.cotangents = cotangents
        self.saved = ctx.saved_tensors
        self.zeros_on_xla: dict[tuple[Any, ...], torch.Tensor] = {}

    def _zeros(self, like: tuple[Any, ...], only_read: bool) -> torch.Tensor:
        """Return zeros of ``(shape, dtype, device)``, which take no memory if ``only_read``; on
        XLA, where making them takes time, kept ones."""
        shape, dtype, device = like
        if device.type == "xla":
            if like not in self.zeros_on_xla:
                self.zeros_on_xla[like] = torch.zeros(shape, dtype=dtype, device=device)
            return self.zeros_on_xla[like]
        if only_read:
            return torch.zeros((), dtype=dtype, device=device).expand(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    def _per_step(self, handover: Handover) -> torch.Tensor | CarriesIn:
        slots, saved = self.record.slots, self.saved
        if handover.source is not Source.CARRY_IN:
            return saved[slots[handover.source, handover.index]]
        index, shifted = self.scan.partition.carry_stack[handover.index]
        stack = saved[slots[Source.Y, index]]
        if not shifted:
            return stack
        init = saved[slots[Source.CARRY_IN, handover.index]]
        return CarriesIn(stack, init, self.call.options.reverse)

    def _invariant(self, handover: Handover) -> Any:
        if handover.source is Source.SIZE:
            return tracked(self.call.sizes.get(handover, handover.size))
        number = self.call.additional[handover.index]
        if number is not None:
            return number
        return self.saved[self.record.slots[handover.source, handover.index]]

    def _cotangents(self, positions: Sequence[int]) -> list[torch.Tensor]:
        given, like = self.cotangents, self.record.outputs_like
        return [self._zeros(like[k], True) if given[k] is None else given[k] for k in positions]

    def run(self) -> list[Any]:
        """Return one gradient for each flat input, None where there is none."""
        scan = self.scan
        partition = scan.partition
        xs: list[torch.Tensor | CarriesIn] = [
            *self._cotangents(scan.ys),
            *[self._per_step(h) for h in partition.per_step],
        ]
        carry = self._cotangents(scan.carry)
        if not xs:  # an empty tensor carries the trip count, where a kernel can be given it
            device = carry[0].device if carry else None
            xs = [torch.empty((self.record.trip_count, 0), device=device)]
        additional = [self._invariant(h) for h in partition.invariant]
        results = list(self._scan(Inputs(carry, xs, additional)))
        flat: list[Any] = [None] * scan.n_inputs
        if partition.linear is not None:
            end = len(carry) + partition.n_sums
            start = end - len(partition.linear.terms)
            self._make_of_sums(partition.linear, results[start:end], flat)
            del results[start:end]
        for place, gradient in zip(scan.gradients, results, strict=True):
            flat[place] = gradient
        return flat

    def _make_of_sums(self, linear: LinearSums, sums: list[Any], flat: list[Any]) -> None:
        read = [self._invariant(Handover(Source.ADDITIONAL, k)) for k in linear.reads]
        gradients = linear.after.forward(*read, *sums)
        signature = self.call.derivative.signature
        for k, gradient in zip(linear.gradients, gradients, strict=True):
            flat[signature.n_carry + signature.n_xs + k] = gradient

    def _with_sums(self, inputs: Inputs[Any], only_read: bool) -> Inputs[Any]:
        """Add the carries that accumulate gradients of inputs that are the same at every step."""
        like, partition = self.record.additional_like, self.scan.partition
        sums = [self._zeros(like[k], only_read) for k in partition.accumulated]
        if partition.linear is not None:
            sums += [self._zeros(one, only_read) for one in partition.linear.like]
        return Inputs([*inputs.carry, *sums], inputs.xs, inputs.additional)

    def _scan(self, inputs: Inputs[Any]) -> Sequence[Any]:
        """Run the backward's scan; carries stay in place where no derivative of it is taken."""
        body = self.scan.body
        options = FORWARD if self.call.options.reverse else REVERSE
        flat = (*inputs.carry, *stacks_of(inputs.xs), *inputs.additional)
        join: Callable[[CarriesIn], torch.Tensor] = CarriesIn.whole
        # for compiled autograd Dynamo traces this very function, and is to see the operator
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and not torch.is_grad_enabled() and not has_tangents(flat):
            if scan_op.goes_to_kernel(flat):
                return dense(body, self._with_sums(inputs, only_read=True), options)
            # where a body is traced, this backward may be differentiated again with it
            if is_functionalized(flat) and not is_tracing_a_body():
                cotangent = next(c for c in self.cotangents if c is not None)
                join = functools.partial(in_graph, after=cotangent)
            elif any(map(is_dtensor, flat)):
                join = in_graph  # of what is split over time, ranks exchange a row
        inputs = self._with_sums(inputs, only_read=False)
        return call_scan(body, with_joined(inputs, join), options)


def _gradients_of_loop(ctx: Any, body: Body, cotangents: Sequence[Any]) -> list[Any]:
    record: _Record = ctx.record
    call, derivative, saved = record.call, record.call.derivative, ctx.saved_tensors
    slots = [(slot.source, slot.index) for slot in derivative.all_inputs()]
    inputs = [
        saved[record.slots[slot]] if slot in record.slots else call.additional[slot[1]]
        for slot in slots
    ]
    roles = derivative.signature.split_inputs(inputs)
    return gradients_of_loop(body, roles, call.options.reverse, cotangents[: derivative.n_outputs])


def gradients(ctx: Any, cotangents: Sequence[Any]) -> list[Any]:
    """Return one gradient for each tensor among the flat inputs."""
    batched = over_grads_batch(functools.partial(gradients, ctx), cotangents)
    if batched is not None:
        return batched
    call: DifferentiatedCall = ctx.record.call
    derivative, sig = call.derivative, call.derivative.signature
    if derivative.looped is not None and torch.is_grad_enabled():
        flat = _gradients_of_loop(ctx, derivative.looped, cotangents)
    else:
        flat = _BackwardPass(ctx, cotangents).run()
    n = sig.n_carry + sig.n_xs
    tensors = [g for g, a in zip(flat[n:], call.additional, strict=True) if a is None]
    return [*flat[:n], *tensors]


class ScanFunction(torch.autograd.Function):
    """The autograd.Function of plain autograd; ``dispatch/grad`` has that of functorch's levels.

    Forward over reverse works, too. On dual tensors that require grad, ``jvp`` gives the results
    tangents, and what is saved keeps its own, so that the backward is a scan of duals.
    """

    @staticmethod
    def forward(ctx: Any, call: DifferentiatedCall, *tensors: Any) -> Any:  # type: ignore[override]
        inputs = call.inputs(tensors)
        outputs = run(call, inputs)
        save(ctx, call, inputs, outputs)
        if call.tangents_of is not None:
            ctx.save_for_forward(*tensors)
        return outputs

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        call: DifferentiatedCall = ctx.record.call
        assert call.tangents_of is not None
        pairs = list(zip(ctx.saved_tensors, tangents, strict=True))
        inputs = call.inputs(pairs, [(a, None) for a in call.additional])
        results = call.tangents_of(call.derivative.first.forward, inputs, call.options)
        return tuple(tangent for _, tangent in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        return None, *gradients(ctx, cotangents)
