"""Methods of torch that a user has replaced."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
# what a trace does without calling it
_OF_MODULES = ("__call__", "__getattr__", "__setattr__", "__delattr__", "_call_impl")


def _is_users(value: Any) -> bool:
    """Torch's tracers put something in the place of a method, too, while they trace."""
    return isinstance(value, types.FunctionType) and not value.__code__.co_filename.startswith(
        _TORCH
    )


_OF_TENSORS = {
    *dir(torch.Tensor.__base__),
    *(name for name, value in vars(torch.Tensor).items() if not _is_users(value)),
}


def replaced_module_methods() -> dict[str, Any]:
    """Return by name what a user has put in the place of methods that call all modules."""
    found = zip(_OF_MODULES, module_methods(), strict=True)
    return {name: value for name, value in found if _is_users(value)}


def module_methods() -> tuple[Any, ...]:
    return tuple(map(vars(torch.nn.Module).get, _OF_MODULES))


def replaced_tensor_methods() -> dict[str, Any]:
    """Return by name what a user has put in the place of methods of all tensors."""
    found = vars(torch.Tensor).items()
    return {name: value for name, value in found if name in _OF_TENSORS and _is_users(value)}
