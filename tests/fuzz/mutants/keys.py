"""Mends of the keys of traces: what a trace depends on besides its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from .registry import mutant


@contextmanager
def _keys_with(state: Callable[[], Any]) -> Iterator[None]:
    from torch_scan_hop.autodiff import differentiability
    from torch_scan_hop.body import any_size, cache

    with ExitStack() as stack:
        for module in (any_size, differentiability, cache):
            stack.enter_context(mock.patch.object(module, "autocast_state", state))
        yield


@mutant("i", "eager+operator", "pointwise,contexts")
def default_dtype_is_no_key() -> Iterator[object]:
    """A trace made under one default dtype serves another one."""
    from torch_scan_hop.body.cache import autocast_state

    with _keys_with(lambda: autocast_state()[:-2]):
        yield None


@mutant("i", "eager+operator", "pointwise,contexts")
def autocast_of_some_devices_is_no_key() -> Iterator[object]:
    """A trace made with autocast of XPU, MPS, HPU or MTIA on serves calls with it off."""
    from torch_scan_hop.body.cache import autocast_state

    def state() -> Any:
        known = tuple(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            for device in ("cpu", "cuda", "xla")
        )
        return known + autocast_state()[-2:]

    with _keys_with(state):
        yield None
