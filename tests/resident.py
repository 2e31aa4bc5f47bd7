"""What this process holds, and whether some work adds to it each time."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path


def memory() -> int:
    """Resident bytes of this process; 0 where that cannot be known."""
    if sys.platform != "linux":
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def least_growth(work: Callable[[], object], enough: float, rounds: int = 4) -> int:
    """Bytes that ``work`` adds to the process, the least of some rounds.

    A leak grows in every round. An allocator that lays its pages out anew grows in one, by tens of
    MB in a process that has run hundreds of other tests. Growth below ``enough`` ends the rounds.
    """
    growth = []
    for _ in range(rounds):
        gc.collect()
        before = memory()
        work()
        gc.collect()
        growth.append(memory() - before)
        if growth[-1] < enough:
            break
    return min(growth)
