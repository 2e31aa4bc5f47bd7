"""The attributes of ``nn.Module`` itself, and tensors swapped (torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module

from torch_scan_hop._torch.isolation import isolated

#: what a module without parameters, hooks and submodules has; ``training`` is the user's to set
_KEPT = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}

#: an RNN makes these from its parameters, again whenever those are others
_OF_AN_RNN = frozenset({"_flat_weights", "_flat_weight_refs"})

_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what the user or the module's class has set: no parameters, buffers, submodules."""
    left_out = _KEPT
    if isinstance(module, nn.RNNBase):
        left_out = _KEPT | _OF_AN_RNN
    elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
        # what torch.compile gives is compared by what it has compiled
        left_out = _KEPT | {"forward", "dynamo_ctx", "_forward"}
    return {name: value for name, value in vars(module).items() if name not in left_out}


def hooks_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return ``("a forward hook", hook)`` for each hook of the module's forward or backward."""
    return [
        (text, hook) for name, text in _HOOKS.items() for hook in getattr(module, name).values()
    ]


def class_of(module: nn.Module) -> type:
    """Return the module's class; for a parametrized module, the class that it had before."""
    if parametrize.is_parametrized(module):
        return parametrize.type_before_parametrizations(module)
    return type(module)


def holding(
    module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Let ``module`` have ``tensors`` for its own of these names.

    ``torch.func.functional_call`` is this around one call; what a forward has assigned to its
    buffers can only be seen before it ends.
    """
    return _reparametrize_module(module, dict(tensors), tie_weights=True)


@contextlib.contextmanager
def values_at_hand() -> Iterator[None]:
    """Let real tensors be compared, also in the middle of a trace."""
    with isolated(), torch.no_grad():
        yield


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` has numbers to compare: no fake, and not wrapped by a trace."""
    return not (
        isinstance(tensor, FakeTensor)
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    )
