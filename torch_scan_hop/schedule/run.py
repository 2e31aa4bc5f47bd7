"""The type of a run: a strategy takes one, and returns another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_scan_hop.step import CombineFn

#: ``run(combine_fn, init, xs, trip_count) -> (carry, ys)``: one scan, or several that come to it
Run = Callable[[CombineFn, Any, Any, Any], tuple[Any, Any]]
