"""What torch's CPU allocator hands out; for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of_allocator(call: Callable[[], object]) -> int:
    """Largest growth of the bytes that torch's CPU allocator has handed out, during ``call``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most
