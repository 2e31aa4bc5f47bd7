"""The loop of a body that writes to the xs by another name: x is what has become of them.

::

    def cell(h, x):
        self.buffer[self.t + 1] += h  # the xs are self.buffer
        ...

Elsewhere a loop hands the body copies of the xs, which it may write to. A copy is of before the
step, so that here x is a view, as in a loop that is written by hand.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.capture.shared_memory import OF_XS
from torch_scan_hop.eager.plain_loop import run_loop
from torch_scan_hop.step import CombineFn, device_of


def run_loop_because(
    reason: str, combine_fn: CombineFn, init: Any, xs: Any, trip_count: int, reverse: bool
) -> tuple[Any, Any]:
    """Run the loop of a body that was not captured for this ``reason``."""
    if trip_count == 0 or not reason.startswith(OF_XS):
        return run_loop(combine_fn, init, xs, trip_count, reverse)

    def step(carry: Any, position: torch.Tensor) -> tuple[Any, Any]:
        t = int(position)
        return combine_fn(carry, tree.map_leaves(lambda leaf: leaf[t], xs))

    positions = torch.arange(trip_count, device=device_of(init, xs))
    return run_loop(step, init, positions, trip_count, reverse)
