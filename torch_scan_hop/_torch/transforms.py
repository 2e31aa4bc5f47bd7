"""functorch levels and forward-mode AD (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
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
from torch._C._functorch import (
    _add_batch_dim as add_batch_dim,
)
from torch._C._functorch import (
    unwrap_if_dead as _unwrap_if_dead,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import restore_vmap, unwrap_batched, wrap_batched
from torch.autograd.forward_ad import _set_fwd_grad_enabled

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction

__all__ = [
    "SingleLevelFunction",
    "add_batch_dim",
    "dual_level",
    "enable_single_level_autograd_function",
    "get_unwrapped",
    "gradients_enabled",
    "has_tangents",
    "is_batchedtensor",
    "is_forward_mode",
    "is_functorch_wrapped_tensor",
    "is_gradtrackingtensor",
    "make_dual",
    "maybe_get_bdim",
    "maybe_get_level",
    "restore_vmap",
    "under_transform",
    "unpack_dual",
    "unwrap_batched",
    "unwrap_for_level",
    "unwrap_if_dead",
    "wrap_batched",
    "wrap_for_level",
]


def under_transform() -> bool:
    """Whether a functorch transform (grad, vmap, jvp, ...) is active."""
    return peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """Whether a functorch ``jvp`` is the innermost active transform."""
    interpreter = peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == TransformType.Jvp


def unwrap_for_level(value: Any, level: int) -> Any:
    return _unwrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value


def wrap_for_level(value: Any, level: int) -> Any:
    return _wrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value


def unpack_dual(value: Any) -> tuple[Any, Any]:
    """(primal, tangent or None) at torch's only forward-AD level.

    Not ``forward_ad.unpack_dual``: Dynamo's graphs enter that level without telling it.
    """
    if not isinstance(value, torch.Tensor):
        return value, None
    primal, tangent = torch._VF._unpack_dual(value, level=0)  # type: ignore[attr-defined]
    return primal, tangent


def make_dual(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    return torch._VF._make_dual(primal, tangent, level=0)  # type: ignore[attr-defined]


def _in_forward_mode() -> bool:
    """Whether torch's only forward-AD level is active: then it cannot be entered again.

    Asking each tensor instead makes a view of it, which costs 10 us on XLA.
    """
    try:
        torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=0)
    return False


def has_tangents(values: Iterable[Any]) -> bool:
    return _in_forward_mode() and any(unpack_dual(v)[1] is not None for v in values)


@contextlib.contextmanager
def dual_level() -> Iterator[None]:
    """A forward-AD level; torch has only one, so one that is active already is shared."""
    with gradients_enabled():
        try:
            torch._C._enter_dual_level()
        except RuntimeError:
            yield
            return
        try:
            yield
        finally:
            torch._C._exit_dual_level(level=0)


def unwrap_if_dead(value: Any) -> Any:
    """The value below a wrapper whose functorch level has ended."""
    return _unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def gradients_enabled() -> Iterator[None]:
    """Both gradient modes on: single-level functions turn them off for their forward."""
    with torch.enable_grad(), _set_fwd_grad_enabled(True):
        yield
