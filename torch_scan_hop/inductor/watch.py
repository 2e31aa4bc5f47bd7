"""Tell a watcher which kernel each scan became, while Inductor lowers a graph."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

#: ``(call, kernel)``: the class of the kernel, None where the scan is a counted loop
Watcher = Callable[[Any, Any], None]

_watcher: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar(
    "torch_scan_hop_watcher", default=None
)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Have ``watcher`` told of every scan that is lowered in this context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def tell(call: Any, kernel: Any) -> None:
    watcher = _watcher.get()
    if watcher is not None:
        watcher(call, kernel)
