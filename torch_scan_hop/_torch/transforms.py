"""functorch levels and forward-mode AD (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._C._functorch import (
    TransformType,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_dynamic_layer_stack_depth,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._C._functorch import unwrap_if_dead as _unwrap_if_dead
from torch._functorch import eager_transforms
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import (
    lazy_load_decompositions,
    restore_vmap,
    unwrap_batched,
    wrap_batched,
)
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _is_fwd_grad_enabled, _set_fwd_grad_enabled
from torch.utils import checkpoint

from torch_scan_hop._torch.function_modes import function_modes
from torch_scan_hop._torch.functorch_levels import enter_dual_level, exit_dual_level

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction

#: what ``torch.utils.checkpoint`` raises, from a hook, when a recomputation has gone far enough
StopRecomputation: type[Exception] = checkpoint._StopRecomputationError

# torch's, under our names
__all__ = [
    "enable_single_level_autograd_function",
    "restore_vmap",
    "unwrap_batched",
    "wrap_batched",
]


_CLOSE: dict[TransformType, Any] = {
    TransformType.Grad: functorch._grad_decrement_nesting,
    TransformType.Jvp: functorch._jvp_decrement_nesting,
    TransformType.Vmap: functorch._vmap_decrement_nesting,
    TransformType.Functionalize: functorch._func_decrement_nesting,  # type: ignore[attr-defined]
}


def _close_level() -> None:
    """End the innermost functorch level, as leaving it would."""
    _CLOSE[peek_interpreter_stack().key()]()


def _layers(depth: int) -> list[Any]:
    """Return functorch's stack, outermost level first."""
    layers = [pop_dynamic_layer_stack() for _ in range(depth)][::-1]
    for layer in layers:
        push_dynamic_layer_stack(layer)
    return layers


class put_back_on_error:
    """Closes whatever a failed trace left open: functorch levels, forward mode, hooks.

    Each call of a scan enters it, so it is no generator, which would be nine calls.
    """

    def __enter__(self) -> None:
        self.depth = get_dynamic_layer_stack_depth()
        self.layers = _layers(self.depth) if self.depth else []
        self.was_forward_mode = in_forward_mode()
        self.grad, self.forward_grad = torch.is_grad_enabled(), _is_fwd_grad_enabled()
        hooks: Any = torch._C._autograd
        self.hooks_were_enabled = hooks._saved_tensors_hooks_is_enabled()
        self.nesting = eager_transforms.JVP_NESTING

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            return
        while get_dynamic_layer_stack_depth() > self.depth:
            _close_level()
        for layer in self.layers[get_dynamic_layer_stack_depth() :]:
            push_dynamic_layer_stack(layer)  # set aside by what failed
        if in_forward_mode() and not self.was_forward_mode:
            exit_dual_level(True)
            forward_ad._current_level = -1
        eager_transforms.JVP_NESTING = self.nesting
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)
        if self.hooks_were_enabled:
            hooks: Any = torch._C._autograd
            hooks._saved_tensors_hooks_enable()


def collect_failed_trace() -> None:
    """Free what a failed trace left, with the dispatcher's state kept.

    Dynamo of torch 2.13 leaves something behind under transforms that changes the keys which the
    dispatcher leaves out when it is freed, which would be whenever the collector runs.
    """
    if not under_transform():
        return
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        gc.collect()


def under_transform() -> bool:
    """Return True if a functorch transform (grad, vmap, jvp, ...) is active."""
    return peek_interpreter_stack() is not None


def under_nothing() -> bool:
    """Return True if no transform, mode or tracer is active, not even a default device."""
    return (
        peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
    )


def in_plain_eager() -> bool:
    """Return True if no transform, dual level, mode or tracer of torch's is active.

    A default device does not count. It is a mode to torch, but Inductor's programs know it.
    """
    return (
        peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and all(isinstance(mode, torch.device) for mode in function_modes())
        and not torch.jit.is_tracing()
        and not torch.compiler.is_exporting()
    )


def unwrap_for_level(value: Any, level: int) -> Any:
    return _unwrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value


def wrap_for_level(value: Any, level: int) -> Any:
    return _wrap_for_grad(value, level) if isinstance(value, torch.Tensor) else value


def unpack_dual(value: Any) -> tuple[Any, Any]:
    """Return (primal, tangent or None) at torch's only forward-AD level.

    ``forward_ad.unpack_dual`` does not do, because Dynamo's graphs enter that level without telling
    it.
    """
    if not isinstance(value, torch.Tensor):
        return value, None
    primal, tangent = torch._VF._unpack_dual(value, level=0)  # type: ignore[attr-defined]
    return primal, tangent


def make_dual(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    return torch._VF._make_dual(primal, tangent, level=0)  # type: ignore[attr-defined]


@functools.cache
def _load_batching_rules() -> None:
    lazy_load_decompositions()


def over_first_dimension(
    fn: Callable[..., Sequence[torch.Tensor]],
    args: Sequence[Any],
    batched: Sequence[bool],
    batch_size: Any,
) -> list[torch.Tensor]:
    """Return ``torch.vmap`` of a flat ``fn`` along the first dimension of ``batched`` arguments.

    torch's own flattens trees and makes a wrapper, which takes longer than a small operator.
    """
    _load_batching_rules()
    levels: Any = functorch
    level = levels._vmap_increment_nesting(batch_size, "error")
    try:
        pairs = zip(args, batched, strict=True)
        results = fn(*[levels._add_batch_dim(a, 0, level) if b else a for a, b in pairs])
        return [levels._remove_batch_dim(r, level, batch_size, 0) for r in results]
    finally:
        levels._vmap_decrement_nesting()


def in_forward_mode() -> bool:
    """Return True if torch's only forward-AD level is active, so that it cannot be entered again.

    Asking each tensor instead makes a view of it, which costs 10 us on XLA.
    """
    try:
        torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=0)
    return False


def has_tangents(values: Iterable[Any]) -> bool:
    return in_forward_mode() and any(unpack_dual(v)[1] is not None for v in values)


@contextlib.contextmanager
def dual_level() -> Iterator[None]:
    """Open a forward-AD level; torch has only one, so one that is active already is shared."""
    with gradients_enabled():
        entered = enter_dual_level()
        try:
            yield
        finally:
            exit_dual_level(entered)


def unwrap_if_dead(value: Any) -> Any:
    """Return the value below a wrapper whose functorch level has ended."""
    return _unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def gradients_enabled() -> Iterator[None]:
    """Switch both gradient modes on; single-level functions turn them off for their forward."""
    with torch.enable_grad(), _set_fwd_grad_enabled(True):
        yield


def over_grads_batch(
    fn: Callable[[Sequence[Any]], list[Any]], cotangents: Sequence[Any]
) -> list[Any] | None:
    """Return ``fn`` vmapped where ``is_grads_batched=True`` calls it; None if nothing is batched.

    ``autograd.grad`` batches by torch's first vmap, whose wrappers no operator in Python can take.
    Here they are unwrapped, and batched by functorch.
    """
    if torch.compiler.is_dynamo_compiling():
        return None  # compiled autograd traces this, and knows no such vmap
    batched = [isinstance(c, torch.Tensor) and is_legacy_batchedtensor(c) for c in cotangents]
    if not any(batched):
        return None
    state: Any = torch._C
    level = state._vmapmode_increment_nesting() - 1  # the one to come is one above the last
    state._vmapmode_decrement_nesting()
    values = [
        torch._remove_batch_dim(c, level, 1, 0) if flag else c
        for c, flag in zip(cotangents, batched, strict=True)
    ]
    missing: list[bool] = []

    def tensors_of(*given: Any) -> tuple[torch.Tensor, ...]:
        results = fn(given)
        missing[:] = [r is None for r in results]
        return tuple(r for r in results if r is not None)

    given = [0 if flag else None for flag in batched]
    with _outside_first_vmap(level):
        results = iter(torch.vmap(tensors_of, in_dims=tuple(given))(*values))
    return [None if m else torch._add_batch_dim(next(results), 0, level) for m in missing]


@contextlib.contextmanager
def _outside_first_vmap(level: int) -> Iterator[None]:
    """Set the dispatch key of the first vmap aside: no operator in Python has a kernel for it."""
    state: Any = torch._C
    for _ in range(level):
        state._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(level):
            state._vmapmode_increment_nesting()
