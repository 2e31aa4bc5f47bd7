"""Stretches of consecutive steps: take their xs out of all xs, and put their ys together again."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.step import CombineFn, Run


def stretch(xs: Any, first: int, last: int, trip_count: int, reverse: bool) -> Any:
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


def joined_ys(parts: list[Any], reverse: bool) -> Any:
    """Join the ys of consecutive stretches, in the order of xs."""
    ordered = parts[::-1] if reverse else parts
    leaves = [tree.tensors(part) for part in ordered]
    joined = [torch.cat(list(group)) for group in zip(*leaves, strict=True)]
    return tree.unflatten(ordered[0], joined)
