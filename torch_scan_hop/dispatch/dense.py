"""CompositeExplicitAutograd: the loop itself, on real tensors, below autograd.

Carries are handed from step to step; each y is written into its place of a stack that is
allocated once. Also the decomposition that a user's TorchDispatchMode sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop._torch.tracing import run_fake
from torch_scan_hop.examples import step_examples
from torch_scan_hop.op import Body, scan_op


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def unaliased(carry: Sequence[torch.Tensor], others: Sequence[Any]) -> list[torch.Tensor]:
    """Contiguous carries that share storage neither with ``others`` nor with one another."""
    taken = {storage_key(t) for t in others if isinstance(t, torch.Tensor)}
    results = []
    for leaf in carry:
        own = leaf.contiguous()
        if storage_key(own) in taken or own.untyped_storage().nbytes() > own.nbytes:
            own = own.clone(memory_format=torch.contiguous_format)
        taken.add(storage_key(own))
        results.append(own)
    return results


def empty_results(
    body: Body, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any]
) -> tuple[Any, ...]:
    """A trip count of zero: init, copied, and empty stacks of the right shape and dtype."""
    mode, examples = step_examples(init, xs, additional)
    with torch.no_grad():
        out = run_fake(body, examples.flat(), mode)
    ys = [
        torch.empty((0, *y.shape), dtype=y.dtype, device=y.device) for y in out[len(init) :]
    ]
    return (*(c.clone(memory_format=torch.contiguous_format) for c in init), *ys)


@scan_op.py_impl(DispatchKey.CompositeExplicitAutograd)
def dense(
    combine_fn: Body,
    init: list[torch.Tensor],
    xs: list[torch.Tensor],
    additional_inputs: tuple[Any, ...],
    *,
    reverse: bool = False,
    checkpoint: Any = None,
) -> tuple[torch.Tensor, ...]:
    trip_count = xs[0].shape[0]
    if trip_count == 0:
        return empty_results(combine_fn, init, xs, additional_inputs)
    n_carry = len(init)
    slices = list(zip(*(x.unbind(0) for x in xs), strict=True))
    order = range(trip_count - 1, -1, -1) if reverse else range(trip_count)
    carry: Sequence[torch.Tensor] = [c.contiguous() for c in init]
    stacks: list[torch.Tensor] = []
    places: list[Sequence[torch.Tensor]] = []
    for t in order:
        out = combine_fn(*carry, *slices[t], *additional_inputs)
        # bodies are traced for contiguous carries
        carry, ys = [c.contiguous() for c in out[:n_carry]], out[n_carry:]
        if not stacks:
            stacks = [torch.empty((trip_count, *y.shape), dtype=y.dtype, device=y.device) for y in ys]
            places = [stack.unbind(0) for stack in stacks]
        for place, y in zip(places, ys, strict=True):
            place[t].copy_(y)
    inputs = [*init, *xs, *additional_inputs, *stacks]
    return (*unaliased(carry, inputs), *stacks)
