"""Interleaved timing: contestants take turns, so that a busy machine slows all of them."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Call = Callable[[], object]

SAMPLE_SECONDS = 0.02  # short calls are repeated to fill a sample
BUDGET_SECONDS = 4.0  # of one contestant; it takes fewer rounds past that
PAUSE_SECONDS = 0.005  # lets the spinning threads of the last contestant go to sleep


@dataclass(frozen=True)
class Timing:
    """Milliseconds."""

    median: float
    low: float  # quartiles
    high: float
    samples: int


def once(call: Call, repeat: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Else Python's collector runs in whichever call makes the next list of tensors."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, Timing]:
    """Every call has been warmed up by its caller."""
    estimate = {name: min(once(call), once(call)) for name, call in calls.items()}
    repeat = {name: max(1, min(50, int(SAMPLE_SECONDS / e))) for name, e in estimate.items()}
    turns = {
        name: max(3, min(rounds, int(BUDGET_SECONDS / (e * repeat[name]))))
        for name, e in estimate.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with _no_collector():
        for k in range(rounds):
            gc.collect()
            for name, call in calls.items():
                # spread over all rounds, also those that take few turns
                if len(samples[name]) * rounds > k * turns[name]:
                    continue
                time.sleep(PAUSE_SECONDS)
                if estimate[name] < 0.05:
                    call()  # warm caches, waking threads
                samples[name].append(once(call, repeat[name]) * 1e3)
    return {
        name: Timing(middle, low, high, len(rows))
        for name, rows in samples.items()
        for low, middle, high in [quartiles(rows)]
    }


def ratio(base: Call, other: Call, rounds: int, repeat: int) -> tuple[float, float, float, float]:
    """For differences of a percent: milliseconds of ``base``, and the quartiles of how many times
    as long ``other`` takes, in turns of base, other, other, base.
    """
    base(), other()
    times, ratios = [], []
    with _no_collector():
        for _ in range(rounds):
            gc.collect()
            turns = [once(call, repeat) for call in (base, other, other, base)]
            times += [turns[0], turns[3]]
            ratios.append((turns[1] + turns[2]) / (turns[0] + turns[3]))
    return statistics.median(times) * 1e3, *quartiles(ratios)
