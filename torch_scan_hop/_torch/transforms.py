"""functorch levels and forward-mode AD (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch._C._functorch import (
    _add_batch_dim as add_batch_dim,
)
from torch._C._functorch import (
    TransformType,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_bdim,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import restore_vmap, unwrap_batched, wrap_batched
from torch.autograd.forward_ad import _set_fwd_grad_enabled

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction

__all__ = [
    "SingleLevelFunction",
    
    "add_batch_dim",
    "enable_single_level_autograd_function",
    "get_unwrapped",
    "gradients_enabled",
    "has_tangent",
    "is_forward_mode",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "is_gradtrackingtensor",
    "maybe_get_bdim",
    "maybe_get_level",
    "restore_vmap",
    "unwrap_batched",
    "unwrap_for_level",
    "wrap_batched",
    "wrap_for_level",
]


def is_forward_mode() -> bool:
    """Whether a functorch ``jvp`` is the innermost active transform."""
    interpreter = peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == TransformType.Jvp


def unwrap_for_level(value: Any, level: int) -> Any:
    return _unwrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value


def wrap_for_level(value: Any, level: int) -> Any:
    return _wrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value


def has_tangent(value: Any) -> bool:
    """Whether ``value`` is a dual tensor at the current forward-AD level."""
    if not isinstance(value, torch.Tensor) or not fwAD._current_level >= 0:
        return False
    return fwAD.unpack_dual(value).tangent is not None


@contextlib.contextmanager
def gradients_enabled() -> Iterator[None]:
    """Both gradient modes on: single-level functions turn them off for their forward."""
    with torch.enable_grad(), _set_fwd_grad_enabled(True):
        yield
