"""Derivatives of a body, of several kinds: they differ in how the backward is differentiated."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_scan_hop.autodiff.differentiability import GradientFlow
from torch_scan_hop.autodiff.handover import Handover, Partition, Source
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Signature


class BackwardScan:
    """The scan of a backward: its inputs and results, by their places in the call's flat lists.

    Attributes:
        carry: the carries whose cotangents are its carries; sums of gradients follow them.
        ys: the ys whose cotangents are its first xs.
        gradients: for each of its results, the flat input whose gradient that is.
        body: its body.
    """

    def __init__(self, signature: Signature, partition: Partition, flow: GradientFlow) -> None:
        n_carry, n_xs = signature.n_carry, signature.n_xs
        self.partition = partition
        self.n_inputs = signature.n_inputs
        self.carry = [k for k, flag in enumerate(flow.carry) if flag]
        self.ys = [n_carry + k for k, flag in enumerate(flow.ys) if flag]
        self.gradients = [
            *self.carry,
            *(n_carry + n_xs + k for k in partition.accumulated),
            *(n_carry + k for k in partition.x_gradients),
        ]
        self.body: Body = partition.backward
        if not partition.per_step and not self.ys:
            self.body = self._passing_over_x(len(self.carry) + len(partition.accumulated))

    def _passing_over_x(self, n_carry: int) -> Body:
        """Return a body whose scan has an x for the trip count, since nothing else varies."""
        backward = self.partition.backward

        def body(*flat: Any) -> Any:
            return backward(*flat[:n_carry], *flat[n_carry + 1 :])

        return body


@dataclass(frozen=True)
class Derivative:
    """A forward and a backward for a call that is being traced.

    If the backward is differentiated again, whoever traces it does that, so there is no second
    derivative here.
    """

    signature: Signature
    flow: GradientFlow
    first: Partition

    @functools.cached_property
    def saved(self) -> tuple[Handover, ...]:
        """The values that a backward reads, each of them once."""
        return tuple(dict.fromkeys(self._slots()))

    @functools.cached_property
    def saved_ys(self) -> frozenset[int]:
        """Positions of the ys that a backward reads."""
        return frozenset(h.index for h in self.saved if h.source is Source.Y)

    def sizes(self) -> tuple[Handover, ...]:
        """Return the sizes that its backward bodies read."""
        found = [h for p in self._partitions() for h in p.invariant if h.source is Source.SIZE]
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def n_outputs(self) -> int:
        """Results of the scan; residuals come after them."""
        return len(self.flow.outputs())

    @functools.cached_property
    def differentiable(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """For each output, if it is differentiable: of a scan of no steps, and of some."""
        return self.flow.outputs(), self.flow.outputs(has_steps=True)

    def backward_of(self, residuals_too: bool) -> tuple[Partition, GradientFlow]:
        """Return the partition whose backward computes the gradients, and how gradients flow in it.

        ``residuals_too``: the residuals have cotangents as well.
        """
        assert not residuals_too
        return self.first, self.flow

    @functools.cached_property
    def _first_backward(self) -> BackwardScan:
        return BackwardScan(self.signature, *self.backward_of(False))

    def backward_scan(self, residuals_too: bool) -> BackwardScan:
        """Return the scan of :meth:`backward_of`."""
        if not residuals_too:
            return self._first_backward
        return BackwardScan(self.signature, *self.backward_of(True))

    def _partitions(self) -> list[Partition]:
        return [self.first]

    def bodies(self) -> list[fx.GraphModule]:
        """Return the forward and the backward body of each partition."""
        return [body for p in self._partitions() for body in (p.forward, p.backward)]

    def _slots(self) -> list[Handover]:
        partitions = self._partitions()
        handed = ((p, h) for p in partitions for h in (*p.per_step, *p.invariant))
        return [slot for partition, handover in handed for slot in partition.slots(handover)]


@dataclass(frozen=True)
class ClosedDerivative(Derivative):
    """A derivative whose forward has a derivative, ``second``, with the same forward.

    The second one also takes cotangents of the residuals, which is where a double backward enters.
    """

    second: Partition
    second_flow: GradientFlow

    @functools.cached_property
    def differentiable(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        # what autograd says of each residual: some are constants to it (a layer norm's mean)
        residuals = self.second_flow.ys[len(self.flow.ys) :]
        none, some = super().differentiable
        return none + residuals, some + residuals

    def backward_of(self, residuals_too: bool) -> tuple[Partition, GradientFlow]:
        return (self.second, self.second_flow) if residuals_too else (self.first, self.flow)

    def _partitions(self) -> list[Partition]:
        return [self.first, self.second]


@dataclass(frozen=True)
class DerivativeThroughLoop(Derivative):
    """The derivative of a body with a custom function or a hook.

    Its second derivative goes through a loop of ``body``.
    """

    body: Body

    def _slots(self) -> list[Handover]:
        return [*super()._slots(), *all_inputs(self.signature)]


_BACKWARD = "torch_scan_hop.backward"


def as_backward(body: fx.GraphModule) -> fx.GraphModule:
    """Mark ``body`` as the backward of a derivative."""
    body.meta[_BACKWARD] = True
    return body


def is_backward(body: Body) -> bool:
    return isinstance(body, fx.GraphModule) and _BACKWARD in body.meta


@dataclass(frozen=True)
class NoDerivative(Derivative):
    """A derivative whose backward has an operator without a derivative, as attention's has.

    ``torch.func.grad`` and ``create_graph=True`` ask for the graph of every backward, and seldom
    for its gradients. As in a loop, only who asks for those gets the error.
    """

    reason: str

    def backward_of(self, residuals_too: bool) -> tuple[Partition, GradientFlow]:
        raise RuntimeError(self.reason)


def without_derivative(
    body: fx.GraphModule, signature: Signature, flow: GradientFlow, reason: str
) -> NoDerivative:
    only_forward = Partition(body, body, 0, (), (), {}, (), ())
    return NoDerivative(signature, flow, only_forward, reason)


def all_inputs(signature: Signature) -> list[Handover]:
    sizes = {
        Source.CARRY_IN: signature.n_carry,
        Source.X: signature.n_xs,
        Source.ADDITIONAL: signature.n_additional,
    }
    return [Handover(source, k) for source, size in sizes.items() for k in range(size)]
