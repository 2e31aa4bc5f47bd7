"""Higher-order operators and dispatch keys (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch._decomp import get_decompositions
from torch._higher_order_ops.utils import _maybe_run_with_interpreter as preserving_node_meta
from torch._higher_order_ops.utils import reenter_make_fx, unique_graph_id
from torch._ops import HigherOrderOperator, OpOverload, key_extractor
from torch._subclasses.functional_tensor import CppFunctionalizeAPI
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

# torch's, under our names
__all__ = [
    "CppFunctionalizeAPI",
    "OpOverload",
    "ProxyTorchDispatchMode",
    "TorchDispatchMode",
    "TransformType",
    "current_dispatch_mode",
    "disable_proxy_modes_tracing",
    "preserving_node_meta",
    "reenter_make_fx",
    "track_tensor_tree",
    "unique_graph_id",
]


class FlatOperator(HigherOrderOperator):
    """An operator that knows the leaves of its arguments.

    torch's own ``__call__`` goes through pytree twice, for every dispatch key on the way.
    """

    def call_flat(self, flat: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Call the operator with ``args`` and ``kwargs``, whose leaves are ``flat``."""
        if torch.overrides.has_torch_function(flat):
            return torch.overrides.handle_torch_function(self, flat, *args, **kwargs)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        keys = key_extractor(tensors, self.non_fallthrough_keys)
        return self.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)

    def goes_to_kernel(self, flat: tuple[Any, ...]) -> bool:
        """Return True if a call with these leaves reaches the kernel on real tensors through
        autograd only.

        It does not if there is a mode, a transform, a subclass, or a device with a kernel of its
        own.
        """
        if torch.overrides.has_torch_function(flat):
            return False
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        with torch._C._AutoDispatchBelowAutograd():
            key = key_extractor(tensors, self.non_fallthrough_keys).highestPriorityTypeId()
        return key in _KERNELS


_KERNELS = (DispatchKey.CPU, DispatchKey.CUDA)


# modules of functions that are written in operators
_MODULES = {
    *("torch", "torch.functional", "torch.nn.functional", "torch._refs"),
    *(f"torch._C.{part}" for part in ("_nn", "_linalg", "_fft", "_special")),
    *("_operator", "builtins", "math"),
}


def is_function_of_torch(target: Any) -> bool:
    """Return True for an operator of torch's, or a function of it or of Python's operators.

    >>> is_function_of_torch(torch.tanh), is_function_of_torch(torch.autograd.Function.apply)
    (True, False)
    """
    return str(target).startswith("aten.") or getattr(target, "__module__", None) in _MODULES


def past_module_hooks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn``, or the ``forward`` of a graph.

    A graph is a module to torch, but hooks of all modules (``register_module_forward_hook``) are
    meant for the user's.
    """
    return fn.forward if isinstance(fn, fx.GraphModule) else fn


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fail with ``message`` where ``condition`` is false, without a wait for its value."""
    torch._assert_async(condition, message)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Dispatch below the Autograd keys, as a C++ autograd kernel does after its own work."""
    return torch._C._AutoDispatchBelowAutograd()


def storage_of(tensor: torch.Tensor) -> int:
    return storages_of([tensor])[0]


def storages_of(values: Iterable[Any]) -> list[int]:
    """Return the tensors' storages, equal where memory is shared, under functorch as well."""
    found = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        found.append(value.untyped_storage()._cdata)
    return found


def _owners_of_memory(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


#: the owners counted for memory of one tensor; the count itself adds some, depending on torch
_ONE_OWNER = _owners_of_memory(torch.empty(1))


def has_memory_alone(tensor: torch.Tensor) -> bool:
    """Return True if no other tensor (``.data``, what autograd saves) or array has the memory."""
    is_torchs = tensor.untyped_storage().resizable()  # not so where numpy, for one, allocated it
    return is_torchs and _owners_of_memory(tensor) == _ONE_OWNER


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor that shares the memory of ``tensor`` until one of them is written to.

    Torch cannot differentiate that for complex tensors; those are returned as they are.
    """
    return tensor if tensor.is_complex() else torch._lazy_clone(tensor)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return True for a tensor with memory of its own that no trace or transform wraps."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch._is_functional_tensor(tensor)
        or tensor.device.type in ("xla", "meta")
    )


def under_users_mode() -> bool:
    """Return True if a dispatch mode is active that is not torch's own (fakes, proxies, ...)."""
    return is_in_torch_dispatch_mode(include_infra_modes=False)


def under_tracer() -> bool:
    """Return True if make_fx, or what is built on it (export, AOTAutograd), records what runs."""
    return get_proxy_mode() is not None


def decompositions(ops: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of operators into others that have derivatives."""
    return dict(get_decompositions(list(ops)))


def dispatch_key(name: str) -> DispatchKey:
    return torch._C._dispatch_key_parse(name)


def from_functional(value: Any) -> Any:
    """Return the tensor that C++ functionalization wraps.

    (``unwrap_tensors`` goes through pytree, which takes 0.1 ms a call.)
    """
    if isinstance(value, torch.Tensor) and torch._is_functional_tensor(value):
        torch._functionalize_sync(value)
        return torch._from_functional_tensor(value)
    return value


def to_functional(value: Any) -> Any:
    return torch._to_functional_tensor(value) if isinstance(value, torch.Tensor) else value


def symbolic_tracer_of(flat: tuple[Any, ...]) -> Any:
    """Return the FX tracer whose proxies are among ``flat``; loading a pickled graph uses one."""
    for leaf in flat:
        if isinstance(leaf, fx.Proxy):
            return leaf.tracer
    return None


def trace_symbolically(
    tracer: Any, op: HigherOrderOperator, arguments: tuple[Any, ...], options: dict[str, Any]
) -> fx.Proxy:
    """Add a node of ``op`` to the graph of ``tracer``; the body is a submodule of its root."""
    body, *rest = arguments
    if isinstance(body, torch.nn.Module):
        body = tracer.create_proxy("get_attr", tracer.path_of_module(body), (), {})
    return tracer.create_proxy("call_function", op, (body, *rest), options)


def take_operator_name(op: HigherOrderOperator) -> None:
    """Make ``torch.ops.higher_order.<name>`` resolve to ``op``.

    ``HigherOrderOperator.__init__`` overwrites the registry entry. The namespace object also caches
    what it resolved once, so that cache is set, too. Calls that torch's own ``scan()`` makes by
    that name are handed back, see :mod:`torch_scan_hop._torch.own_scan`.
    """
    setattr(torch.ops.higher_order, op.__name__, op)
    resolved: Any = getattr(torch.ops.higher_order, op.__name__)
    assert resolved is op
