"""Graphs on the CPU, for what runs CUDA graphs: a capture runs nothing, a replay what was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class CountedGraphs:
    """A capture keeps its work, with all that it closes over; a replay does it again."""

    def __init__(self, fails: bool = False) -> None:
        self.captures = self.replays = self.recoveries = 0
        self.fails = fails
        self.capturing = False
        self.current_stream = 0

    def stream(self, device: torch.device) -> int:
        return self.current_stream

    def is_capturing(self, device: torch.device) -> bool:
        return self.capturing

    def capture(self, device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        launch = self.launched_by(work)

        def replay() -> None:
            self.replays += 1
            launch()

        return replay

    def launched_by(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def recover(self, device: torch.device) -> None:
        self.recoveries += 1


class GraphsOfOperators(CountedGraphs):
    """Closer to CUDA's: a replay runs the operators that were captured, on the same memory.

    Python does not run again, so that a number that it handed over is what it was.
    """

    def launched_by(self, work: Callable[[], None]) -> Callable[[], None]:
        recorder = _Recorder()
        with recorder, torch.no_grad():
            work()
        return recorder.replay


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            again = func(*args, **kwargs)
            pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True)
            for place, value in pairs:
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)
