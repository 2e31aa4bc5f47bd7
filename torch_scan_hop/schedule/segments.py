"""``checkpoint="sqrt"`` or a number: segments, each recomputed as a whole in the backward.

With ``k`` segments of ``m`` steps, ``k`` carries are kept, and ``m`` steps' residuals while a
segment is differentiated; the forward runs twice. ``k ~ m ~ sqrt(T)`` balances them (Chen, Xu,
Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016).
"""

from __future__ import annotations

from typing import Any

from torch_scan_hop.schedule.stretches import in_segments, joined_ys, stretch
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

    def region(
        combine_fn: CombineFn, carry: Any, xs: Any, steps: int, count: int
    ) -> tuple[Any, Any]:
        def segment(carry: Any, block: Any) -> tuple[Any, Any]:
            return run_steps(combine_fn, carry, block, steps)

        return in_segments(run_full, segment, carry, xs, steps, count)

    def run(combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any) -> tuple[Any, Any]:
        if trip_count == 0:
            return run_steps(combine_fn, init, xs, trip_count)
        length = segment_length(trip_count, segments)
        remaining = trip_count % length
        in_whole = trip_count - remaining
        whole = stretch(xs, 0, in_whole, trip_count, reverse)
        carry, ys = region(combine_fn, init, whole, length, trip_count // length)
        if not remaining:
            return carry, ys
        rest = stretch(xs, in_whole, trip_count, trip_count, reverse)
        carry, last = region(combine_fn, carry, rest, remaining, 1)
        return carry, joined_ys([ys, last], reverse)

    return run
