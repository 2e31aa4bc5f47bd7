"""Tell a watcher which kernel each scan became, while Inductor lowers a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch_scan_hop._torch.replaced import ambient, replaced

#: ``(call, kernel, refusals)``: the node of the kernel, None where the scan is a counted loop, and
#: why it is no other kernel, and no CUDA graph
Watcher = Callable[[Any, Any, dict[Any, str]], None]


_state = ambient(watcher=None)


def watching(watcher: Watcher) -> AbstractContextManager[None]:
    """Have ``watcher`` told of every scan that is lowered in this thread."""
    return replaced(_state, watcher=watcher)


def tell(call: Any, kernel: Any, refusals: dict[Any, str]) -> None:
    if _state.watcher is not None:
        _state.watcher(call, kernel, refusals)
