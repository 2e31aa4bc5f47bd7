"""One capture: the memory that it reads and writes, and a call that replays it.

A graph works on the addresses that it was captured with. So it has memory of its own, *slots*, and
what differs from block to block is copied into and out of these::

    carry slots <- init
    for each block of K steps:
        slots of xs <- xs[block]
        replay                       # K steps, from the carry slots into the carry slots
        ys[block] <- slots of ys
    plainly: the steps that are left, fewer than K

Additional inputs are read where they are, because parameters do not move. One that has moved since,
as what a backward reads of its forward does, has a slot from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_scan_hop.cuda_graphs.devices import CudaGraphs, Work

#: ``loop(order, carry, xs, additional, ys)`` runs the steps in ``order``, which may be a part of
#: all, and gives the final carries. It writes to ``ys``, and to nothing else that it is given but
#: xs that are its own.
Loop = Callable[
    [range, Sequence[Tensor], Sequence[Tensor], Sequence[Any], Sequence[Tensor]], Sequence[Tensor]
]

# Steps of a block. The host takes as long to launch a graph as some kernels. Not measured on a GPU.
MOST_STEPS = 32
LEAST_STEPS = 4

# bytes of all slots: loops with larger steps wait for memory, not for launches
MOST_BYTES = 2**26


@dataclass(frozen=True)
class Operands:
    """The arguments of a loop, but for the order of its steps."""

    carry: Sequence[Tensor]
    xs: Sequence[Tensor]
    additional: Sequence[Any]
    ys: Sequence[Tensor]

    @property
    def device(self) -> torch.device:
        return (*self.carry, *self.xs)[0].device

    def addresses(self) -> list[int | None]:
        return [a.data_ptr() if isinstance(a, Tensor) else None for a in self.additional]


def steps_of_a_block(trip_count: int, operands: Operands) -> int:
    """Return the steps that a graph holds: as many as leave few over; 0 for no graph."""
    stacks = [*operands.xs, *operands.ys]
    most = MOST_STEPS
    while most >= LEAST_STEPS and sum(_slot_bytes(s, most) for s in stacks) > MOST_BYTES:
        most //= 2
    most = min(most, trip_count)
    if most < LEAST_STEPS:
        return 0
    return min(range(most, max(LEAST_STEPS, most // 2) - 1, -1), key=lambda k: trip_count % k)


def _slot_bytes(stack: Tensor, steps: int) -> int:
    """Return the bytes from the first element to the last; strides are those of the whole stack."""
    sizes = (steps, *stack.shape[1:])
    if 0 in sizes:
        return 0
    extent = sum((n - 1) * stride for n, stride in zip(sizes, stack.stride(), strict=True))
    return (extent + 1) * stack.element_size()


def _slot(like: Tensor, steps: int | None = None) -> Tensor:
    shape = like.shape if steps is None else (steps, *like.shape[1:])
    return torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device)


def _copy(destination: Tensor, source: Tensor) -> None:
    """Copy between tensors of equal strides; entries along a stride of 0 are copied once."""
    for dim, (size, stride) in enumerate(zip(destination.shape, destination.stride(), strict=True)):
        if stride == 0 and size:
            destination, source = destination.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    destination.copy_(source)


class Recording:
    """A graph of ``length`` steps; ``moving``: the additional inputs that are known to move."""

    def __init__(self, graphs: CudaGraphs, length: int, like: Operands, moving: set[int]) -> None:
        self.graphs = graphs
        self.length = length
        self.moving = moving
        self.carry = [
            torch.empty_like(c, memory_format=torch.contiguous_format) for c in like.carry
        ]
        self.xs = [_slot(x, length) for x in like.xs]
        self.ys = [_slot(y, length) for y in like.ys]
        self.additional: dict[int, Tensor] = {}
        self.replay: Work | None = None

    def is_ready(self) -> bool:
        """Return True if the recording can be replayed: what moves has a slot."""
        return self.replay is not None and self.moving <= self.additional.keys()

    def capture(self, loop: Loop, order: range, operands: Operands) -> None:
        """Capture a block of ``order``; nothing runs."""
        self.replay = None  # and its memory, before there is more
        for k in self.moving - self.additional.keys():
            self.additional[k] = _slot(operands.additional[k])
        additional = [self.additional.get(k, a) for k, a in enumerate(operands.additional)]
        steps = range(self.length)[:: order.step]

        def work() -> None:
            results = loop(steps, self.carry, self.xs, additional, self.ys)
            for slot, value in zip(self.carry, self._apart(results), strict=True):
                slot.copy_(value)

        self.replay = self.graphs.capture(operands.device, work)

    def _apart(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Clone results that lie in slots of carries, which may have changed places."""
        own = {slot.data_ptr() for slot in self.carry}
        return [value.clone() if value.data_ptr() in own else value for value in results]

    def run(self, loop: Loop, order: range, operands: Operands) -> Sequence[Tensor]:
        """Run all steps in ``order``; return the final carries."""
        assert self.replay is not None
        for slot, init in zip(self.carry, operands.carry, strict=True):
            slot.copy_(init)
        for k, slot in self.additional.items():
            _copy(slot, operands.additional[k])
        n_blocks, length = len(order) // self.length, self.length
        for number in range(n_blocks):
            block = order[number * length : (number + 1) * length]
            first = min(block[0], block[-1])
            for slot, x in zip(self.xs, operands.xs, strict=True):
                _copy(slot, x[first : first + length])
            self.replay()
            for slot, y in zip(self.ys, operands.ys, strict=True):
                y[first : first + length].copy_(slot)
        final = [slot.clone() for slot in self.carry]
        rest = order[n_blocks * length :]
        if not rest:
            return final
        return loop(rest, final, operands.xs, operands.additional, operands.ys)
