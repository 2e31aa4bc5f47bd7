"""``checkpoint=Binomial(snapshots)``: few carries are alive at a time, for more recomputation.

Griewank: Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation, 1992.
"""

from __future__ import annotations

import math
from typing import Any

from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.schedule.stretches import in_segments, joined_ys, stretch
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
            first_xs = stretch(xs, 0, left, steps, reverse)
            carry, first = recomputed(carry, first_xs, left, snapshots, sweeps - 1)
            if left == steps:
                return carry, first
            rest = stretch(xs, left, steps, steps, reverse)
            carry, second = chain(carry, rest, steps - left, snapshots - 1, sweeps)
            return carry, joined_ys([first, second], reverse)

        def recomputed(
            carry: Any, xs: Any, steps: int, snapshots: int, sweeps: int
        ) -> tuple[Any, Any]:
            def region(carry: Any, block: Any) -> tuple[Any, Any]:
                return chain(carry, block, steps, snapshots, sweeps)

            return in_segments(run_full, region, carry, xs, steps, 1)

        return chain(init, xs, trip_count, policy.snapshots, policy.sweeps)

    return run
