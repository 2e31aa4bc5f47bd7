"""A loop as it runs: the function that ``writer`` wrote, and the tensors that it writes to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import progress_bar
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.cuda_graphs.capturable import why_not_captured
from torch_scan_hop.cuda_graphs.devices import SERVED
from torch_scan_hop.cuda_graphs.graphed import GraphedLoop
from torch_scan_hop.eager.fuse import fused
from torch_scan_hop.eager.writer import LoopWriter
from torch_scan_hop.huge_pages import empty_stack
from torch_scan_hop.rewrites import current_options
from torch_scan_hop.signature import Inputs, Signature


@dataclass(frozen=True)
class StackLike:
    """One y of a step: its shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: torch.Tensor) -> StackLike:
        return StackLike(tuple(value.shape), value.dtype, value.device)


class EagerLoop:
    """A compiled loop: ``loop(inputs, reverse, into)`` -> (carry..., ys...).

    ``into`` has a place for each of the ys, or None if one is to be made; ``like`` gives its shape,
    if the body is for any size. The loop writes over the xs at ``own_xs``.
    """

    def __init__(
        self, body: fx.GraphModule, signature: Signature, own_xs: Collection[int] = ()
    ) -> None:
        writer = LoopWriter(fused(body), signature, own_xs)
        self.source = writer.write()
        namespace = dict(writer.source.names)
        exec(compile(self.source, "<torch_scan_hop eager loop>", "exec"), namespace)
        self.run_loop = namespace["run_loop"]
        self.written_ahead = writer.written_ahead
        self.own_carry = writer.own_carry
        self.ys = [StackLike.of(value_of(y)) for y in writer.outputs.ys]
        self.body = body
        self.graphed: GraphedLoop | None = None

    def __call__(
        self,
        inputs: Inputs[Any],
        reverse: bool,
        into: Sequence[torch.Tensor | None] | None = None,
        like: Sequence[StackLike] | None = None,
    ) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
        trip_count = inputs.trip_count
        places = into or [None] * len(self.ys)
        stacks = [
            empty_stack(y, trip_count) if place is None else place
            for y, place in zip(like or self.ys, places, strict=True)
        ]
        order = range(trip_count)[::-1] if reverse else range(trip_count)
        carry = [
            c.clone(memory_format=torch.contiguous_format)
            if k in self.own_carry
            else c.contiguous()
            for k, c in enumerate(inputs.carry)
        ]
        operands = order, carry, inputs.xs, inputs.additional, stacks
        if inputs.xs[0].device.type in SERVED and current_options().cuda_graphs:
            return self._replayed(*operands), stacks
        return self._run(*operands), stacks

    def _replayed(self, *operands: Any) -> Sequence[torch.Tensor]:
        """Run the loop as a graph of the device, if the body may be captured as one."""
        if self.graphed is None:
            self.graphed = GraphedLoop(is_off=bool(why_not_captured(self.body)))
        return self.graphed(self._run, *operands)

    def _run(
        self,
        order: range,
        carry: Sequence[torch.Tensor],
        xs: Sequence[torch.Tensor],
        additional: Sequence[Any],
        stacks: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        rows: list[Sequence[torch.Tensor]] = [s.unbind(0) for s in stacks]
        for k, position in self.written_ahead.items():
            rows[k] = _rows_ahead(rows[k], carry[position], order)
        steps = progress_bar.steps(order)
        final: Sequence[torch.Tensor] = self.run_loop(
            steps, carry, [x.unbind(0) for x in xs], additional, rows
        )
        return final


def _rows_ahead(
    rows: Sequence[torch.Tensor], init: torch.Tensor, order: range
) -> list[torch.Tensor]:
    """Return each step's row of ys for its carry, the next step's; ``init`` goes to the first."""
    last = torch.empty_like(rows[0])
    rows[order[0]].copy_(init)
    return [last, *rows[:-1]] if order.step < 0 else [*rows[1:], last]
