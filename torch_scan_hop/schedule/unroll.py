"""``unroll=k``: a scan over blocks of k steps, then a scan over the steps that are left.

::

    before: xs [T, ...]
    after:  blocks [T // k, k, ...]    one step of the block scan runs k steps
            rest   [T %  k, ...]       a scan of single steps

Fewer, longer iterations: a compiler sees k steps at once, for k times the code. There is code for
those of the two that are not empty: Inductor fails at derivatives of stacks of no steps.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.schedule.stretches import in_segments, in_two
from torch_scan_hop.step import CombineFn, Run, device_of, order_of_steps, step


def unrolled(run: Run, template: Any, unroll: int, reverse: bool) -> Run:
    """Return ``run`` with blocks of ``unroll`` steps, whose carries match ``template``."""

    def run_unrolled(combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any) -> tuple[Any, Any]:
        n_blocks, n_rest = trip_count // unroll, trip_count % unroll
        if n_blocks == 0:
            return run(combine_fn, init, xs, trip_count)
        block = _block_of(combine_fn, template, unroll, reverse)
        run_blocks = lambda carry, xs: in_segments(run, block, carry, xs, unroll, n_blocks)  # noqa: E731
        run_rest = lambda carry, xs: run(combine_fn, carry, xs, n_rest)  # noqa: E731
        cut = trip_count - n_rest
        return in_two(run_blocks, run_rest, init, xs, cut, trip_count, reverse)

    return run_unrolled


def _block_of(combine_fn: CombineFn, template: Any, unroll: int, reverse: bool) -> CombineFn:
    """Return ``unroll`` steps as one, whose x and y have a leading dimension of that size."""
    order = order_of_steps(unroll, reverse)

    def block(carry: Any, xs: Any) -> tuple[Any, Any]:
        device = device_of(carry, xs)
        steps: list[Any] = [None] * unroll
        y: Any = None
        for t in order:
            x = tree.slice_at(xs, t)
            leaves, y = step(combine_fn, carry, x, template, device)
            # copies, as between the steps of a scan: the next step may work in place
            steps[t] = [leaf.clone() for leaf in tree.tensors(y)]
            carry = tree.unflatten(carry, [leaf.clone() for leaf in leaves])
        return carry, tree.unflatten(y, [torch.stack(leaf) for leaf in zip(*steps, strict=True)])

    return block
