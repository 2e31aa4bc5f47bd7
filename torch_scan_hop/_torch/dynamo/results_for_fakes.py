"""What a function gives for the fakes of a trace, which nobody traces (checked on torch 2.9.1,
2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from torch_scan_hop._torch.replaced import replaced
from torch_scan_hop._torch.tracing import replaying


def result_dtype(
    target: Any, args: Any, kwargs: Any, value_of: Callable[[fx.Proxy], Any]
) -> torch.dtype | None:
    """Return the dtype of what a function or a method gives for fakes; None if it gives no tensor,
    or nothing."""
    result = _result(target, args, kwargs, value_of)
    return result.dtype if isinstance(result, torch.Tensor) else None


def takes(target: Any, args: Any, kwargs: Any, value_of: Callable[[fx.Proxy], Any]) -> bool:
    """Return True if a function or a method gives something for fakes, and reads none of them."""
    env: Any = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
    unread = dataclasses.replace(env.settings, allow_scalar_outputs=False)
    with replaced(env, settings=unread):
        return _result(target, args, kwargs, value_of) is not None


def _result(target: Any, args: Any, kwargs: Any, value_of: Callable[[fx.Proxy], Any]) -> Any:
    args, kwargs = pytree.tree_map_only(fx.Proxy, value_of, (args, kwargs))
    mode = TracingContext.get().fake_mode
    assert mode is not None  # Dynamo's own
    with replaying(mode), contextlib.suppress(Exception):
        function = getattr(torch.Tensor, target) if isinstance(target, str) else target
        return function(*args, **kwargs)
    return None  # what is wrong with it will be said where it is traced
