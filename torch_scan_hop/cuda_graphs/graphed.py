"""A loop that is captured when it runs for the second time, and replayed from then on.

The first call is plain. It compiles and tunes what it calls, which must not happen in a capture;
and a loop that runs once gains nothing by one. If anything is wrong with a capture, the loop runs
plainly, then and later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_scan_hop import progress_bar
from torch_scan_hop.cuda_graphs.devices import CudaGraphs, graphs_for
from torch_scan_hop.cuda_graphs.recording import (
    LEAST_STEPS,
    MOST_STEPS,
    Loop,
    Operands,
    Recording,
    steps_of_a_block,
)

log = logging.getLogger(__name__)

# recordings of one loop; calls of further shapes, or on further streams, get no graph
MOST_RECORDINGS = 4

PLAIN_CALLS = 1


class _Seen:
    """Calls of one key: how many there were, which additional inputs move, and their recording."""

    def __init__(self, operands: Operands) -> None:
        self.calls = 0
        self.addresses = operands.addresses()
        self.moving: set[int] = set()
        self.recording: Recording | None = None

    def note(self, operands: Operands) -> None:
        """Count a call, and note which operands are elsewhere than in the call before."""
        self.calls += 1
        before, self.addresses = self.addresses, operands.addresses()
        pairs = enumerate(zip(before, self.addresses, strict=True))
        self.moving |= {k for k, (one, other) in pairs if one != other}


class GraphedLoop:
    """Calls one loop, or replays what it was captured as. Its slots serve one call at a time, and a
    second thread runs the loop plainly meanwhile."""

    def __init__(self, is_off: bool = False) -> None:
        self._seen: dict[Any, _Seen] = {}
        self._lock = threading.Lock()
        self._is_off = is_off

    def __call__(
        self,
        loop: Loop,
        order: range,
        carry: Sequence[Tensor],
        xs: Sequence[Tensor],
        additional: Sequence[Any],
        ys: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Return the results of ``loop`` for the other arguments; write to ``ys``."""
        operands = Operands(carry, xs, additional, ys)
        graphs = self._graphs_for(order, operands)
        if graphs is not None and self._lock.acquire(blocking=False):
            try:
                recording = self._recording(graphs, loop, order, operands)
                if recording is not None:
                    return recording.run(loop, order, operands)
            finally:
                self._lock.release()
        return loop(order, carry, xs, additional, ys)

    def _graphs_for(self, order: range, operands: Operands) -> CudaGraphs | None:
        """Return what captures and replays the loop; None if it is to run plainly."""
        if self._is_off or len(order) < LEAST_STEPS:
            return None
        if progress_bar.steps(order) is not order:
            return None  # somebody wants to see each step
        graphs = graphs_for(operands.device)
        return None if graphs is None or graphs.is_capturing(operands.device) else graphs

    def _recording(
        self, graphs: CudaGraphs, loop: Loop, order: range, operands: Operands
    ) -> Recording | None:
        """Return a recording that can be replayed for these operands; capture one if need be."""
        key = _key(graphs, order, operands)
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= MOST_RECORDINGS:
                return None
            seen = self._seen[key] = _Seen(operands)
        seen.note(operands)
        if seen.calls <= PLAIN_CALLS:
            return None
        try:
            return _captured(graphs, seen, loop, order, operands)
        except Exception:
            self._is_off = True
            self._seen.clear()
            log.warning("a loop is no CUDA graph, and is launched step by step", exc_info=True)
            _recover(graphs, operands)
            return None


def _captured(
    graphs: CudaGraphs, seen: _Seen, loop: Loop, order: range, operands: Operands
) -> Recording | None:
    """Return a recording, of at least twice as many steps as the last one if there is room."""
    recording = seen.recording
    least = 1 if recording is None else 2 * recording.length
    if least <= min(len(order), MOST_STEPS):
        length = steps_of_a_block(len(order), operands)
        if length >= least:
            recording = Recording(graphs, length, operands, seen.moving)
    if recording is None or len(order) < recording.length:
        return None
    if not recording.is_ready():
        recording.capture(loop, order, operands)
    seen.recording = recording
    return recording


def _recover(graphs: CudaGraphs, operands: Operands) -> None:
    try:
        graphs.recover(operands.device)
    except Exception:
        log.warning("a failed capture may be felt by random operators", exc_info=True)


def _key(graphs: CudaGraphs, order: range, operands: Operands) -> Any:
    """Return a key of what a capture depends on; not values, addresses or the trip count."""
    stacks = [*operands.xs, *operands.ys]
    return (
        graphs.stream(operands.device),
        # what libraries choose their kernels by
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        order.step,
        *((c.dtype, c.shape) for c in operands.carry),
        *((s.dtype, s.shape[1:], s.stride()) for s in stacks),
        *(
            (a.dtype, a.shape, a.stride()) if isinstance(a, Tensor) else (type(a), a)
            for a in operands.additional
        ),
    )
