"""The derivative of a body: its forward, its backward, and how that is differentiated again."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import fx

from torch_scan_hop._torch.fakes import fake_mode_of, fake_tensor
from torch_scan_hop.autodiff.differentiability import GradientFlow
from torch_scan_hop.autodiff.handover import Handover, Partition, Source
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.meta_values import placeholder, value_of
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Signature


class BackwardScan:
    """The scan of a backward: its inputs and results, by their places in the call's flat lists.

    Attributes:
        carry: the carries whose cotangents are its carries; sums of gradients follow them.
        ys: the ys whose cotangents are its first xs.
        gradients: for each of its results, the flat input whose gradient that is, but for those of
            the sums that further gradients are made of, which lie before gradients of xs.
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
        self.body = partition.backward
        if not partition.per_step and not self.ys:
            self.body = _with_unread_x(self.body, len(self.carry) + partition.n_sums)


def _with_unread_x(backward: fx.GraphModule, n_carry: int) -> fx.GraphModule:
    """Return a body whose scan has an x for the trip count, since nothing else varies."""
    body = copied(backward)
    first, *_ = nodes = list(body.graph.nodes)
    like = value_of(first)
    unread = fake_tensor(fake_mode_of([like]), (0,), None, like.dtype, like.device)
    with body.graph.inserting_before(nodes[n_carry]):
        placeholder(body.graph, "step", unread)
    body.recompile()
    return body


@dataclass(frozen=True)
class Derivative:
    """A forward and a backward, which may be differentiated again.

    In a call that is being traced, whoever traces it does that, and there is no more here.

    Attributes:
        second: a derivative of the forward, with the same forward. It also takes cotangents of the
            residuals, which is where a double backward enters; ``second_flow`` says of which.
        looped: a body with a custom function or a hook: its second derivative goes through a loop.
        has_own_backward: the body has such a thing, whoever differentiates it again.
        error: of a backward that has an operator without a derivative, as attention's has.
            ``torch.func.grad`` and ``create_graph=True`` ask for the graph of every backward, and
            seldom for its gradients. As in a loop, only who asks for those gets the error.
    """

    signature: Signature
    flow: GradientFlow
    first: Partition
    second: Partition | None = None
    second_flow: GradientFlow | None = None
    looped: Body | None = None
    has_own_backward: bool = False
    error: str = ""

    @functools.cached_property
    def saved(self) -> tuple[Handover, ...]:
        """The values that a backward reads, each of them once."""
        handed = ((p, h) for p in self._partitions() for h in (*p.per_step, *p.invariant))
        slots = [slot for partition, handover in handed for slot in partition.slots(handover)]
        return tuple(dict.fromkeys(slots if self.looped is None else [*slots, *self.all_inputs()]))

    @functools.cached_property
    def saved_ys(self) -> frozenset[int]:
        """Positions of the ys that a backward reads."""
        return frozenset(h.index for h in self.saved if h.source is Source.Y)

    @functools.cached_property
    def cut_off(self) -> tuple[frozenset[int], frozenset[int]]:
        """The flat inputs that no gradient reaches: in a scan of no steps, which returns its
        carries, and in one of some."""
        cut = self.first.cut_off
        if self.has_own_backward:  # which may depend on what no result does
            cut -= self._read()
        return frozenset(k for k in cut if k >= self.signature.n_carry), cut

    def _read(self) -> set[int]:
        """Return the flat inputs that a forward or a backward reads."""
        position = {handover: k for k, handover in enumerate(self.all_inputs())}
        handed = [h for p in self._partitions() for h in (*p.per_step, *p.invariant)]
        placeholders = self.first.forward.graph.find_nodes(op="placeholder")
        used = {k for k, node in enumerate(placeholders) if node.users}
        return used | {position[h] for h in handed if h in position}

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
        """Flags of all outputs of the forward scan, of no steps and of some. Autograd decides about
        residuals: some are constants to it (a layer norm's mean)."""
        residuals = () if self.second_flow is None else self.second_flow.ys[len(self.flow.ys) :]
        return self.flow.outputs() + residuals, self.flow.outputs(has_steps=True) + residuals

    @functools.cached_property
    def _first_backward(self) -> BackwardScan:
        return BackwardScan(self.signature, self.first, self.flow)

    def backward_scan(self, residuals_too: bool) -> BackwardScan:
        """Return the scan of the gradients; ``residuals_too``: these have cotangents as well."""
        if self.error:
            raise RuntimeError(self.error)
        if not residuals_too:
            return self._first_backward
        assert self.second is not None and self.second_flow is not None
        return BackwardScan(self.signature, self.second, self.second_flow)

    def _partitions(self) -> list[Partition]:
        return [self.first] if self.second is None else [self.first, self.second]

    def bodies(self) -> list[fx.GraphModule]:
        """Return the forward and the backward body of each partition."""
        return [body for p in self._partitions() for body in (p.forward, p.backward)]

    def all_inputs(self) -> list[Handover]:
        sizes = {
            Source.CARRY_IN: self.signature.n_carry,
            Source.X: self.signature.n_xs,
            Source.ADDITIONAL: self.signature.n_additional,
        }
        return [Handover(source, k) for source, size in sizes.items() for k in range(size)]


_BACKWARD = "torch_scan_hop.backward"


def as_backward(body: fx.GraphModule) -> fx.GraphModule:
    """Mark ``body`` as the backward of a derivative."""
    body.meta[_BACKWARD] = True
    return body


def is_backward(body: Body) -> bool:
    return isinstance(body, fx.GraphModule) and _BACKWARD in body.meta
