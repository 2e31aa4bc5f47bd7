"""Scans of DTensors: the body of shards, with the collectives that DTensor's rules ask for.

A carry's layout must be the same before and after a step. If a step returns a carry in another
layout, that layout is tried for the next step: ``h @ w`` with a column-sharded ``w`` gives a
sharded ``h``. Another try moves the carry back at the end of each step. A carry that starts as a
plain tensor is also tried as a sum over the ranks, because the gradient of weights that all ranks
have is such a sum, and adding it up on each rank needs no collective in any step.

Of the layouts that steps keep, those with the fewest collectives are taken. Every rank finds the
same ones, because they depend only on shapes and layouts of whole tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch.dtensors import (
    MeshLayout,
    Placements,
    cost_of_collectives,
    is_dtensor,
    layout_of,
    moved,
    others_are_replicated,
    replicated,
    shard_of,
    summed,
    without_repetitions,
)
from torch_scan_hop._torch.fakes import fake_mode_of, fake_tensor
from torch_scan_hop._torch.operators import disable_proxy_modes_tracing, past_module_hooks
from torch_scan_hop._torch.tracing import run_fake, trace
from torch_scan_hop.body.cache import remember_for
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Inputs

# so often a carry may change its layout before it is replicated
MAX_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class ShardedBody:
    """``body`` takes and returns shards; of carries and of a step's ys, laid out so."""

    body: fx.GraphModule
    carry: list[MeshLayout]
    ys: list[MeshLayout]


def sharded_body(
    body: Body, inputs: Inputs[Any], layouts: Inputs[Any], over_steps: int | None = None
) -> ShardedBody:
    """Return the body of shards, which is made once for each way ``body`` is called.

    ``layouts``: of the inputs, None for numbers. ``over_steps``: the dimension of the mesh along
    which ranks are at different steps; nothing is split along it in a step.
    """

    def make() -> ShardedBody:
        with disable_proxy_modes_tracing():
            return _Sharding(body, inputs, layouts, over_steps).best()

    about = (over_steps, tuple(layouts.flat()))
    return remember_for(body, "sharded", inputs.map(shard_of), about, make)


class _Sharding:
    def __init__(
        self, body: Body, inputs: Inputs[Any], layouts: Inputs[Any], over_steps: int | None
    ) -> None:
        self.body, self.inputs, self.layouts = body, inputs, layouts
        self.over_steps = over_steps
        self.mode = fake_mode_of([shard_of(value) for value in inputs.flat()])
        self.mesh = layouts.xs[0].mesh

    def best(self) -> ShardedBody:
        tried: list[list[Placements]] = []
        for start in self._starts():
            for keep in (False, True):
                carry = self._settled(start, keep)
                if carry not in tried:
                    tried.append(carry)
        return min(map(self._traced, tried), key=lambda made: cost_of_collectives(made.body))

    def _starts(self) -> list[list[Placements]]:
        """Return the layouts of carries to try first: as they are given; plain ones as sums over
        ranks; or plain ones laid out as an input of their shape."""
        given = [c.placements for c in self.layouts.carry]
        plain = [
            not is_dtensor(c) and (c.is_floating_point() or c.is_complex())
            for c in self.inputs.carry
        ]
        if not any(plain):
            return [given]
        of_shape = {a.shape: a.placements for a in self.layouts.additional if a is not None}
        alike = [of_shape.get(c.shape, c.placements) for c in self.layouts.carry]
        sums = [summed(self.mesh, self.over_steps)] * len(given)
        return [
            given,
            *(
                [other if flag else p for p, other, flag in zip(given, others, plain, strict=True)]
                for others in (sums, alike)
            ),
        ]

    def _settled(self, start: list[Placements], keep: bool) -> list[Placements]:
        """Return the layouts that steps keep from ``start`` on; or move DTensors back: ``keep``."""
        kept = [keep and is_dtensor(c) for c in self.inputs.carry]
        carry = start
        for _ in range(MAX_ROUNDS):
            before, after = carry, self._after(carry)
            carry = [p if k else q for p, q, k in zip(start, after, kept, strict=True)]
            if before == carry:
                return carry
        pairs = zip(before, carry, strict=True)
        return [p if p == q else replicated(self.mesh) for p, q in pairs]

    def _after(self, carry: list[Placements]) -> list[Placements]:
        """Return the layouts of the carries after a step that takes them laid out as ``carry``."""
        found: list[Placements] = []

        def run(*shards: Any) -> None:
            results = self._step(carry, shards)[: len(carry)]
            found.extend(layout_of(c, self.mesh).placements for c in results)

        with torch.no_grad():
            run_fake(run, self._examples(carry), self.mode)
        return found

    def _traced(self, carry: list[Placements]) -> ShardedBody:
        n_carry = len(carry)
        kept = self._slices(carry)[:n_carry]
        ys: list[MeshLayout] = []

        def run(*shards: Any) -> list[Any]:
            results = self._step(carry, shards)
            layouts = [layout_of(value, self.mesh) for value in results]
            ys[:] = layouts[n_carry:]
            moves = zip(results[:n_carry], layouts, kept, strict=False)
            carries = [moved(shard_of(c), before, after) for c, before, after in moves]
            return [*carries, *map(shard_of, results[n_carry:])]

        with torch.no_grad():
            graph = trace(run, self._examples(carry), self.mode)
        without_repetitions(graph)
        return ShardedBody(graph, kept, ys)

    def _slices(self, carry: Sequence[Placements]) -> list[Any]:
        """Return the layouts of a step's inputs."""
        pairs = zip(self.layouts.carry, carry, strict=True)
        return [
            *(layout.placed(placements) for layout, placements in pairs),
            *(x.of_slice() for x in self.layouts.xs),
            *self.layouts.additional,
        ]

    def _step(self, carry: Sequence[Placements], shards: Sequence[Any]) -> list[Any]:
        pairs = zip(self._slices(carry), shards, strict=True)
        whole = [shard if layout is None else layout.join(shard) for layout, shard in pairs]
        with others_are_replicated():
            return list(past_module_hooks(self.body)(*whole))

    def _examples(self, carry: Sequence[Placements]) -> list[Any]:
        """Return fakes of this rank's shards."""
        pairs = zip(self._slices(carry), self.inputs.flat(), strict=True)
        return [value if layout is None else self._example(layout) for layout, value in pairs]

    def _example(self, layout: MeshLayout) -> Tensor:
        device = shard_of(self.inputs.xs[0]).device
        whole = fake_tensor(self.mode, layout.shape, layout.stride, layout.dtype, device)
        before = layout.placed(replicated(self.mesh))
        shard = run_fake(lambda: moved(whole, before, layout), [], self.mode)
        return fake_tensor(self.mode, shard.shape, shard.stride(), shard.dtype, device)
