"""Dataclasses, and dicts and lists of classes of the user's, as containers: as Dynamo can trace
them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

try:  # torch 2.9 does not trace if the class of an array is one of dataclasses
    from numpy import ndarray as _ndarray
except ImportError:
    _ndarray = type  # type: ignore[assignment, misc]

# Dynamo of torch 2.9 does not trace the question of the last two, which modes are given.
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType)
_NO_DATACLASSES = (type, torch.nn.Module, _ndarray, *_DESCRIPTORS)


def is_dataclass(value: Any) -> bool:
    return not isinstance(value, _NO_DATACLASSES) and dataclasses.is_dataclass(value)


def field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


def new_dataclass(kind: Any, names: Iterable[str], parts: Sequence[Any]) -> Any:
    """Return an object with these ``parts`` as its fields. Its ``__init__`` is not called, which
    may do more than to assign."""
    new = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(new, name, part)
    return new


_NOT_MADE = (
    "scan: what a {0} holds is more than its items, or it is not made as {0}(a dict). Register it "
    "with torch.utils._pytree.register_pytree_node, or use a dict or a dataclass"
)


def has_attributes(container: dict[Any, Any]) -> bool:
    """Return True if something is kept beside its items."""
    attributes = getattr(container, "__dict__", container)
    return attributes is not container and len(attributes) > 0


def names_in(container: Any) -> list[Any]:
    """Return what the parts of a container are found by, if torch's pytree does not know it."""
    if isinstance(container, Mapping):
        if isinstance(container, dict) and has_attributes(container):
            raise TypeError(_NOT_MADE.format(type(container).__name__))
        return list(container)
    if isinstance(container, (list, tuple)):
        return list(range(len(container)))
    assert is_dataclass(container), f"not a container: {type(container)}"
    return field_names(container)


def new_container(kind: Any, names: list[Any], parts: Sequence[Any]) -> Any:
    """Return a container of this ``kind``, which torch's pytree does not know. A dict of a class of
    the user's is made as ``kind(a dict)``, which must be one of the same items."""
    if issubclass(kind, Mapping):
        probe: Any = kind(dict.fromkeys(names))  # type: ignore[call-arg]
        if list(probe) != names or any(probe[name] is not None for name in names):
            raise TypeError(_NOT_MADE.format(kind.__name__))
        return kind(dict(zip(names, parts, strict=True)))  # type: ignore[call-arg]
    return kind(parts) if issubclass(kind, (list, tuple)) else new_dataclass(kind, names, parts)
