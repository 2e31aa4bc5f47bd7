"""``checkpoint=Binomial(snapshots)``: few carries are alive at a time, for more recomputation.

Griewank: Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation, 1992.
"""

from __future__ import annotations

import math
from typing import Any

from torch_scan_hop import tree
from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.schedule.stretches import flat, in_segments, joined_ys
from torch_scan_hop.step import CombineFn, Run


def treeverse(run_full: Run, run_steps: Run, policy: Binomial, reverse: bool) -> Run:
    """Return the binomial schedule over segments: the left part is recomputed, the right kept.

    ::

        chain(snapshots, sweeps) = recomputed chain(snapshots, sweeps - 1),
                                   then chain(snapshots - 1, sweeps)
    """

    def run(combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any) -> tuple[Any, Any]:
        if trip_count == 0:
            return run_steps(combine_fn, init, xs, trip_count)
        length = -(-trip_count // policy.leaves())

        def chain(carry: Any, xs: Any, steps: int, snapshots: int, sweeps: int) -> tuple[Any, Any]:
            left = (
                min(steps, math.comb(snapshots + sweeps - 1, snapshots) * length) if sweeps else 0
            )
            if snapshots == 0 or sweeps == 0 or steps <= length:
                return run_steps(combine_fn, carry, xs, steps)
            first_xs = _part(xs, 0, left, steps, reverse)
            carry, first = recomputed(carry, first_xs, left, snapshots, sweeps - 1)
            if left == steps:
                return carry, first
            rest = _part(xs, left, steps, steps, reverse)
            carry, second = chain(carry, rest, steps - left, snapshots - 1, sweeps)
            return carry, joined_ys([first, second], reverse)

        def recomputed(
            carry: Any, xs: Any, steps: int, snapshots: int, sweeps: int
        ) -> tuple[Any, Any]:
            def region(carry: Any, block: Any) -> tuple[Any, Any]:
                return chain(carry, block, steps, snapshots, sweeps)

            carry, ys = run_full(region, carry, in_segments(xs, steps), 1)
            return carry, flat(ys)

        return chain(init, xs, trip_count, policy.snapshots, policy.sweeps)

    return run


def _part(xs: Any, first: int, last: int, steps: int, reverse: bool) -> Any:
    """Return the xs of steps ``first`` to ``last``, which run from the end if reversed."""
    if reverse:
        first, last = steps - last, steps - first
    return tree.map_leaves(lambda x: x[first:last], xs)
