"""``checkpoint=Binomial(snapshots)``: few carries are alive at a time, for more recomputation.

Griewank: Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation, 1992.
"""

from __future__ import annotations

import math
from typing import Any

from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.schedule.stretches import in_segments, in_two
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
            if snapshots == 0 or sweeps == 0 or steps <= length:
                return run_steps(combine_fn, carry, xs, steps)
            left = min(steps, math.comb(snapshots + sweeps - 1, snapshots) * length)

            def first(carry: Any, xs: Any) -> tuple[Any, Any]:
                return recomputed(carry, xs, left, snapshots, sweeps - 1)

            def rest(carry: Any, xs: Any) -> tuple[Any, Any]:
                return chain(carry, xs, steps - left, snapshots - 1, sweeps)

            return in_two(first, rest, carry, xs, left, steps, reverse)

        def recomputed(
            carry: Any, xs: Any, steps: int, snapshots: int, sweeps: int
        ) -> tuple[Any, Any]:
            def region(carry: Any, block: Any) -> tuple[Any, Any]:
                return chain(carry, block, steps, snapshots, sweeps)

            return in_segments(run_full, region, carry, xs, steps, 1)

        return chain(init, xs, trip_count, policy.snapshots, policy.sweeps)

    return run
