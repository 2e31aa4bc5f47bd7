"""Things derived from a body graph, kept for as long as that graph lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_derived: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def metadata(value: Any, drop_leading: bool = False) -> Any:
    """What a trace depends on: of an xs, not its trip count."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = tuple(value.shape)[1 if drop_leading else 0 :]
    return (shape, value.dtype, value.device)


def inputs_metadata(init: Any, xs: Any, additional: Any) -> tuple[Any, ...]:
    return (
        tuple(map(metadata, init)),
        tuple(metadata(x, drop_leading=True) for x in xs),
        tuple(map(metadata, additional)),
    )


def autocast_state() -> tuple[Any, ...]:
    return tuple(
        (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda", "xla")
    )


def _is_static(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_static, key))
    return not isinstance(key, (torch.SymInt, torch.SymFloat, torch.SymBool))


def remember(body: Any, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
    """``make()``, or what it gave for this body and key before.

    A body that is not a module, or a key that holds symbols (they belong to one trace), is
    not remembered.
    """
    if not isinstance(body, torch.nn.Module) or not _is_static(key):
        return make()
    known = _derived.setdefault(body, {})
    if key not in known:
        known[key] = make()
    return known[key]
