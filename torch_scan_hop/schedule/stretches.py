"""Stretches of consecutive steps: take their xs out of all xs, and put their ys together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.step import CombineFn, Run

#: ``(carry, xs) -> (carry, ys)``: the run of the steps that have these xs
RunSteps = Callable[[Any, Any], tuple[Any, Any]]


def _stretch(xs: Any, first: int, last: int, trip_count: int, reverse: bool) -> Any:
    """Return the xs of steps ``first`` to ``last``, which run from the end if reversed."""
    if reverse:
        first, last = trip_count - last, trip_count - first
    return tree.map_leaves(lambda x: x[first:last], xs)


def in_segments(
    run: Run, segment: CombineFn, carry: Any, xs: Any, steps: int, count: int
) -> tuple[Any, Any]:
    """Run ``count`` segments of so many steps: ``segment`` takes the xs of a whole one."""
    blocks = tree.map_leaves(lambda x: x.reshape(count, steps, *x.shape[1:]), xs)
    carry, ys = run(segment, carry, blocks, count)
    return carry, tree.map_leaves(lambda y: y.flatten(0, 1), ys)


def in_two(
    first: RunSteps, rest: RunSteps, init: Any, xs: Any, cut: Any, trip_count: Any, reverse: bool
) -> tuple[Any, Any]:
    """Run the steps up to ``cut`` by ``first``, and those that are left, if any, by ``rest``."""
    carry, ys = first(init, _stretch(xs, 0, cut, trip_count, reverse))
    if cut == trip_count:
        return carry, ys
    carry, last = rest(carry, _stretch(xs, cut, trip_count, trip_count, reverse))
    # both are in the order of xs
    parts = [last, ys] if reverse else [ys, last]
    leaves = zip(*map(tree.tensors, parts), strict=True)
    return carry, tree.unflatten(ys, [torch.cat(list(pair)) for pair in leaves])
