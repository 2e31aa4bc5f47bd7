"""``checkpoint="sqrt"`` or a number: segments, each recomputed as a whole in the backward.

With ``k`` segments of ``m`` steps, ``k`` carries are kept, and ``m`` steps' residuals while a
segment is differentiated; the forward runs twice. ``k ~ m ~ sqrt(T)`` balances them (Chen, Xu,
Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016).
"""

from __future__ import annotations

from typing import Any

from torch_scan_hop.schedule.stretches import RunSteps, in_segments, in_two
from torch_scan_hop.step import CombineFn, Run


def segment_length(trip_count: int, segments: int | str) -> int:
    """Return the steps in a segment: for ``"sqrt"``, the power of two next below the root.

    That takes comparisons alone, so that one trace serves all trip counts between two powers of
    four, where a root would be a trace for each.

    >>> segment_length(100, "sqrt"), segment_length(100, 3), segment_length(2, 5)
    (8, 34, 1)
    """
    if segments == "sqrt":
        length = 1
        while trip_count >= 4 * length * length:
            length *= 2
        return length
    assert isinstance(segments, int)
    return max(1, -(-trip_count // segments))


def segmented(run_full: Run, run_steps: Run, segments: int | str, reverse: bool) -> Run:
    """Return a scan over segments; ``run_full`` saves carries only, ``run_steps`` is plain."""

    def of_segments(combine_fn: CombineFn, steps: int, count: int) -> RunSteps:
        def segment(carry: Any, block: Any) -> tuple[Any, Any]:
            return run_steps(combine_fn, carry, block, steps)

        return lambda carry, xs: in_segments(run_full, segment, carry, xs, steps, count)

    def run(combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any) -> tuple[Any, Any]:
        if trip_count == 0:
            return run_steps(combine_fn, init, xs, trip_count)
        length = segment_length(trip_count, segments)
        remaining = trip_count % length
        whole = of_segments(combine_fn, length, trip_count // length)
        rest = of_segments(combine_fn, remaining, 1)
        return in_two(whole, rest, init, xs, trip_count - remaining, trip_count, reverse)

    return run
