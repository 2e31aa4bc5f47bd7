"""A plan that serves any size, and the form of it for the sizes of one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_scan_hop._torch.symbols import Number, Symbols
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.eager.loop import EagerLoop, StackLike
from torch_scan_hop.rewrites import ScanPlan


@dataclass(frozen=True)
class SizedPlan:
    """A plan, and the sizes that a call adds to its inputs if the plan is for any size."""

    plan: ScanPlan
    loop: EagerLoop  # of what the plan leaves
    additional: tuple[int, ...] = ()  # sizes, which the plan takes as further additional inputs
    stacked_bytes: int | None = None
    ys: list[StackLike] | None = None
    loop_ys: list[StackLike] | None = None

    def at(self, numbers: tuple[Number, ...]) -> SizedPlan:
        return self


class PlanForAnySize:
    """A plan that takes ``sizes`` (symbolic) as further additional inputs."""

    def __init__(self, symbolic: SizedPlan, sizes: list[Any], symbols: Symbols) -> None:
        self.symbolic = symbolic
        self.n_sizes = len(sizes)
        plan = symbolic.plan
        self.ys = [StackLike.of(value_of(y)) for y in plan.outputs.ys]
        dimensions = [size for y in [*self.ys, *symbolic.loop.ys] for size in y.shape]
        self.evaluate = symbols.function([*sizes, sum(plan.stacked_sizes()), *dimensions])

    def at(self, numbers: tuple[Number, ...]) -> SizedPlan:
        values = self.evaluate(*numbers)
        rest = iter(values[self.n_sizes :])
        return dataclasses.replace(
            self.symbolic,
            additional=values[: self.n_sizes],
            stacked_bytes=next(rest),
            ys=[_sized(y, rest) for y in self.ys],
            loop_ys=[_sized(y, rest) for y in self.symbolic.loop.ys],
        )


def _sized(like: StackLike, sizes: Iterator[int]) -> StackLike:
    return dataclasses.replace(like, shape=tuple(next(sizes) for _ in like.shape))
