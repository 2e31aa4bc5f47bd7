"""The two scans of reverse mode, as an autograd.Function.

``forward``: the scan of the forward body. Residuals are outputs like ys, so that they are
saved with ``save_for_backward`` (version checks, offloading hooks) and so that a double
backward reaches them. ``backward``: a scan in the other direction, through the dispatcher,
so that double backward, transforms and traces of it come by composition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch.tracing import is_functionalized, is_tracing_a_body
from torch_scan_hop._torch.transforms import has_tangents, over_grads_batch
from torch_scan_hop.autodiff.custom import gradients_of_loop
from torch_scan_hop.autodiff.differentiability import GradientFlow
from torch_scan_hop.autodiff.partition import Handover, Partition, Source
from torch_scan_hop.carries_in import CarriesIn, in_graph, with_joined, with_stacks
from torch_scan_hop.eager.run import dense
from torch_scan_hop.op import FORWARD, REVERSE, Body, RunScan, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs, Signature


@dataclass(frozen=True)
class Derivative:
    """A differentiated body. ``second`` also takes cotangents of the residuals.

    With ``loop_body``, a derivative that is differentiated again goes through a loop of it.
    """

    signature: Signature
    flow: GradientFlow
    first: Partition
    second: Partition | None
    second_flow: GradientFlow | None
    loop_body: Body | None = None

    @functools.cached_property
    def saved(self) -> tuple[Handover, ...]:
        """What a backward reads, once each."""
        partitions = [p for p in (self.first, self.second) if p is not None]
        wanted = [slot for partition in partitions for slot in _saved_slots(partition)]
        if self.loop_body is not None:
            wanted += _all_inputs(self.signature)
        return tuple(dict.fromkeys(wanted))

    @functools.cached_property
    def saved_ys(self) -> frozenset[int]:
        """Positions of the ys that a backward reads."""
        return frozenset(h.index for h in self.saved if h.source is Source.Y)

    def sizes(self) -> tuple[Handover, ...]:
        """The sizes that its backward bodies read."""
        partitions = [p for p in (self.first, self.second) if p is not None]
        found = [h for p in partitions for h in p.invariant if h.source is Source.SIZE]
        return tuple(dict.fromkeys(found))


@dataclass
class ScanCall:
    """One call of the operator: what is not a tensor, and how to run a scan below autograd."""

    derivative: Derivative
    additional: tuple[Any, ...]  # with None where a tensor stands
    reverse: bool
    run_forward: RunScan
    #: what the sizes that are handed over are in this call, where the derivative is for any size
    sizes: Mapping[Handover, Any]
    #: a scan of (primal, tangent) pairs, where inputs have tangents
    tangents_of: RunScan | None = None
    trip_count: Any = None
    output_like: tuple[tuple[Any, ...], ...] = ()

    @property
    def options(self) -> ScanOptions:
        """Of the forward: what is saved is decided already."""
        return REVERSE if self.reverse else FORWARD

    def inputs(self, tensors: Sequence[Any], numbers: Sequence[Any] | None = None) -> Inputs[Any]:
        """All inputs, from the tensors among them; ``numbers`` stand for the others."""
        numbers = self.additional if numbers is None else numbers
        n = self.derivative.signature.n_carry + self.derivative.signature.n_xs
        rest = iter(tensors[n:])
        additional = [
            next(rest) if a is None else number
            for a, number in zip(self.additional, numbers, strict=True)
        ]
        return self.derivative.signature.split_inputs([*tensors[:n], *additional])


def run(call: ScanCall, tensors: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        call.run_forward(call.derivative.first.forward, call.inputs(tensors), call.options)
    )


def _differentiable_outputs(call: ScanCall, outputs: Sequence[Any]) -> list[bool]:
    derivative = call.derivative
    flags = list(derivative.flow.outputs())
    if derivative.second_flow is None:
        return flags + [False] * (len(outputs) - len(flags))
    # what autograd says of each residual: some are constants to it (a layer norm's mean)
    return flags + list(derivative.second_flow.ys[len(derivative.flow.ys) :])


def save(ctx: Any, call: ScanCall, tensors: Sequence[Any], outputs: Sequence[Any]) -> None:
    """What backward reads, and nothing else."""
    derivative = call.derivative
    inputs = call.inputs(tensors)
    ys = outputs[derivative.signature.n_carry :]
    call.trip_count = inputs.trip_count
    call.output_like = tuple((o.shape, o.dtype, o.device) for o in outputs)
    ctx.set_materialize_grads(False)
    flags = _differentiable_outputs(call, outputs)
    ctx.mark_non_differentiable(*(o for o, flag in zip(outputs, flags, strict=True) if not flag))
    values = {
        Source.CARRY_IN: inputs.carry,
        Source.X: inputs.xs,
        Source.ADDITIONAL: inputs.additional,
        Source.Y: ys,
    }
    slots: dict[Handover, int] = {}
    kept: list[torch.Tensor] = []
    for slot in derivative.saved:
        value = values[slot.source][slot.index]
        if isinstance(value, torch.Tensor):
            slots[slot] = len(kept)
            kept.append(value)
    # accumulators start as zeros like these: metadata is enough
    ctx.additional_like = [
        (a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else None
        for a in inputs.additional
    ]
    ctx.slots = slots
    ctx.save_for_backward(*kept)
    ctx.call = call


def _all_inputs(signature: Signature) -> list[Handover]:
    sizes = {
        Source.CARRY_IN: signature.n_carry,
        Source.X: signature.n_xs,
        Source.ADDITIONAL: signature.n_additional,
    }
    return [Handover(source, k) for source, size in sizes.items() for k in range(size)]


def _saved_slots(partition: Partition) -> list[Handover]:
    slots = []
    for handover in (*partition.per_step, *partition.invariant):
        if handover.source is Source.CARRY_IN:
            index, shifted = partition.carry_stack[handover.index]
            slots.append(Handover(Source.Y, index))
            if shifted:
                slots.append(handover)
        elif handover.source is not Source.SIZE:
            slots.append(handover)
    return slots


class _Zeros:
    """Zeros like something of which ``(shape, dtype, device)`` is known.

    On XLA they take no memory, but each takes the host some time: one of a kind is enough.
    """

    def __init__(self) -> None:
        self.on_xla: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, like: tuple[Any, ...], only_read: bool) -> torch.Tensor:
        """``only_read`` zeros take no memory anywhere."""
        shape, dtype, device = like
        if device.type == "xla":
            if like not in self.on_xla:
                self.on_xla[like] = torch.zeros(shape, dtype=dtype, device=device)
            return self.on_xla[like]
        if only_read:
            return torch.zeros((), dtype=dtype, device=device).expand(shape)
        return torch.zeros(shape, dtype=dtype, device=device)


class _BackwardPass:
    def __init__(self, ctx: Any, cotangents: Sequence[Any]) -> None:
        self.call: ScanCall = ctx.call
        self.derivative = self.call.derivative
        self.ctx = ctx
        n_outputs = len(self.derivative.flow.outputs())
        of_residuals = any(c is not None for c in cotangents[n_outputs:])
        self.partition = self.derivative.first
        self.flow = self.derivative.flow
        if of_residuals:
            assert self.derivative.second is not None and self.derivative.second_flow is not None
            self.partition, self.flow = self.derivative.second, self.derivative.second_flow
        self.cotangents = cotangents[: len(self.flow.outputs())]
        self.saved = ctx.saved_tensors
        self.zeros = _Zeros()

    def _value(self, source: Source, index: int) -> Any:
        return self.saved[self.ctx.slots[Handover(source, index)]]

    def _per_step(self, handover: Handover) -> torch.Tensor | CarriesIn:
        if handover.source is not Source.CARRY_IN:
            return self._value(handover.source, handover.index)
        index, shifted = self.partition.carry_stack[handover.index]
        stack = self._value(Source.Y, index)
        if not shifted:
            return stack
        init = self._value(Source.CARRY_IN, handover.index)
        return CarriesIn(stack, init, self.call.reverse)

    def _invariant(self, handover: Handover) -> Any:
        if handover.source is Source.SIZE:
            return self.call.sizes.get(handover, handover.size)
        number = self.call.additional[handover.index]
        if number is not None:
            return number
        return self._value(handover.source, handover.index)

    def _cotangent(self, k: int) -> torch.Tensor:
        given = self.cotangents[k]
        return given if given is not None else self.zeros(self.call.output_like[k], True)

    def run(self) -> list[Any]:
        sig, flow, partition = self.derivative.signature, self.flow, self.partition
        n_carry = sig.n_carry
        carry = [k for k, flag in enumerate(flow.carry) if flag]
        ys = [k for k, flag in enumerate(flow.ys) if flag]
        like = self.ctx.additional_like
        init = [
            *(self._cotangent(k) for k in carry),
            *(self.zeros(like[k], False) for k in partition.accumulated),
        ]
        xs: list[torch.Tensor | CarriesIn] = [
            *(self._cotangent(n_carry + k) for k in ys),
            *(self._per_step(h) for h in partition.per_step),
        ]
        if not xs:
            xs = [torch.empty((self.call.trip_count, 0))]
        additional = [self._invariant(h) for h in partition.invariant]
        results = self._scan(self._body(len(init)), Inputs(init, xs, additional))
        return self._gather(results, carry)

    def _scan(self, body: Body, inputs: Inputs[Any]) -> Sequence[Any]:
        """The backward's scan; where no derivative of it is taken, carries stay in place."""
        options = FORWARD if self.call.reverse else REVERSE
        flat = tuple(with_stacks(inputs).flat())
        join = CarriesIn.whole
        # compiled autograd has Dynamo trace this very function
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and not torch.is_grad_enabled() and not has_tangents(flat):
            if scan_op.goes_to_kernel(flat):
                return dense(body, inputs, options)
            # a body's derivative is differentiated again, where its scan is
            if is_functionalized(flat) and not is_tracing_a_body():
                cotangent = next(c for c in self.cotangents if c is not None)
                join = functools.partial(in_graph, after=cotangent)
        return call_scan(body, with_joined(inputs, join), options)

    def _body(self, n_carry: int) -> Body:
        partition = self.partition
        if partition.per_step or any(self.flow.ys):
            return partition.backward
        # nothing varies from step to step: the body takes no xs, the scan needs one to count
        backward = partition.backward

        def body(*flat: Any) -> Any:
            return backward(*flat[:n_carry], *flat[n_carry + 1 :])

        return body

    def _gather(self, results: Sequence[Any], carry: list[int]) -> list[Any]:
        """One gradient for each flat input, None where there is none."""
        sig, partition = self.derivative.signature, self.partition
        places = [
            *carry,
            *(sig.n_carry + sig.n_xs + k for k in partition.accumulated),
            *(sig.n_carry + k for k in partition.x_gradients),
        ]
        found = dict(zip(places, results, strict=True))
        return [found.get(k) for k in range(sig.n_inputs)]


def _gradients_of_loop(ctx: Any, body: Body, cotangents: Sequence[Any]) -> list[Any]:
    call: ScanCall = ctx.call
    saved = ctx.saved_tensors
    inputs = [
        saved[ctx.slots[slot]] if slot in ctx.slots else call.additional[slot.index]
        for slot in _all_inputs(call.derivative.signature)
    ]
    roles = call.derivative.signature.split_inputs(inputs)
    cotangents = cotangents[: len(call.derivative.flow.outputs())]
    return gradients_of_loop(body, roles, call.reverse, cotangents)


def gradients(ctx: Any, cotangents: Sequence[Any]) -> list[Any]:
    """One gradient for each tensor among the flat inputs."""
    batched = over_grads_batch(functools.partial(gradients, ctx), cotangents)
    if batched is not None:
        return batched
    call: ScanCall = ctx.call
    sig = call.derivative.signature
    if call.derivative.loop_body is not None and torch.is_grad_enabled():
        flat = _gradients_of_loop(ctx, call.derivative.loop_body, cotangents)
    else:
        flat = _BackwardPass(ctx, cotangents).run()
    n = sig.n_carry + sig.n_xs
    tensors = [g for g, a in zip(flat[n:], call.additional, strict=True) if a is None]
    return [*flat[:n], *tensors]


class ScanFunction(torch.autograd.Function):
    """Plain autograd; functorch's grad levels have their own in ``dispatch/grad.py``.

    Forward over reverse: on dual tensors that require grad, ``jvp`` gives the results tangents,
    and what is saved keeps its own, so that the backward is a scan of duals.
    """

    @staticmethod
    def forward(ctx: Any, call: ScanCall, *tensors: Any) -> Any:  # type: ignore[override]
        outputs = run(call, tensors)
        save(ctx, call, tensors, outputs)
        if call.tangents_of is not None:
            ctx.save_for_forward(*tensors)
        return outputs

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        call: ScanCall = ctx.call
        assert call.tangents_of is not None
        pairs = list(zip(ctx.saved_tensors, tangents, strict=True))
        inputs = call.inputs(pairs, [(a, None) for a in call.additional])
        results = call.tangents_of(call.derivative.first.forward, inputs, call.options)
        return tuple(tangent for _, tangent in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        return None, *gradients(ctx, cotangents)
