"""A plan that serves any size, and the form of it for the sizes of one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_scan_hop._torch.symbols import Number, Symbols
from torch_scan_hop.eager.loop import StackLike
from torch_scan_hop.rewrites import ScanPlan


@dataclass(frozen=True)
class SizedPlan:
    """A plan, and the sizes that a call adds to its inputs if the plan is for any size."""

    plan: ScanPlan
    additional: tuple[int, ...] = ()  # sizes, which the plan takes as further additional inputs
    stacked_bytes: int | None = None
    ys: list[StackLike] | None = None
    loop_ys: list[StackLike] | None = None


class PlanForAnySize:
    """A plan that takes ``sizes`` (symbolic) as further additional inputs."""

    def __init__(
        self, plan: ScanPlan, sizes: list[Any], loop_ys: list[StackLike], symbols: Symbols
    ) -> None:
        self.plan = plan
        self.n_sizes = len(sizes)
        self.loop_ys = loop_ys
        self.ys = [StackLike.of(y.meta["val"]) for y in plan.outputs.ys]
        dimensions = [size for y in [*self.ys, *loop_ys] for size in y.shape]
        self.evaluate = symbols.function([*sizes, sum(plan.stacked_sizes()), *dimensions])

    def at(self, numbers: Sequence[Number]) -> SizedPlan:
        values = self.evaluate(*numbers)
        rest = iter(values[self.n_sizes :])
        return SizedPlan(
            self.plan,
            values[: self.n_sizes],
            next(rest),
            [_sized(y, rest) for y in self.ys],
            [_sized(y, rest) for y in self.loop_ys],
        )


def _sized(like: StackLike, sizes: Iterator[int]) -> StackLike:
    return dataclasses.replace(like, shape=tuple(next(sizes) for _ in like.shape))
