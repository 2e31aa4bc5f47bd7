"""Stands in for the package where torch lacks what the operator needs: every scan is a Python loop.

Neither this module nor its imports use a private name of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from torch_scan_hop._torch.capabilities import CapabilityMissing, require, why_off
from torch_scan_hop.arguments import checked_call, stacked_along
from torch_scan_hop.fallback import refuse_if_not_allowed
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.schedule.strategies import Schedule

__all__ = ["Explanation", "debug", "explain", "scan", "scan_layers"]


# asked once: Dynamo traces what follows
_REASON = f"the operator is switched off: {why_off('operator')}"


def scan(
    combine_fn: Any,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    unroll: int = 1,
    checkpoint: Any = None,
    compile: bool | None = None,
    progress: bool | str | None = None,
) -> tuple[Any, Any]:
    """Run :func:`torch_scan_hop.api.scan` as a loop; ``unroll`` and what follows do nothing."""
    call = checked_call(combine_fn, init, xs, length, dim, Schedule(reverse, unroll, checkpoint))
    refuse_if_not_allowed(combine_fn, _REASON)
    carry, ys = scan_loop(combine_fn, init, call.xs, call.trip_count, reverse)
    return carry, stacked_along(dim, call.xs, ys)


def scan_layers(
    layers: Iterable[nn.Module],
    input_data: Any,
    partition_fn: Any = None,
    is_layer_pure: bool = False,
    *,
    checkpoint: Any = None,
) -> Any:
    """Run :func:`torch_scan_hop.layers.scan_layers` as a loop: each layer runs itself."""
    for layer in layers:
        is_tuple = isinstance(input_data, tuple)
        input_data = layer(*input_data) if is_tuple else layer(input_data)
    return input_data


@contextlib.contextmanager
def debug(detect_nonfinite: bool = False) -> Iterator[None]:
    """Do nothing: every scan is a loop already. A watch for nan is refused."""
    if detect_nonfinite:
        require("operator")
    yield


class Explanation:
    """A stand-in for the class of what ``explain`` returns."""


def explain(*args: Any, **options: Any) -> Explanation:
    """Refuse: there is nothing to explain."""
    require("operator")
    raise CapabilityMissing("torch_scan_hop: every scan is a Python loop.")
