"""Dataclasses as containers of their fields, as Dynamo can trace them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Sequence
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
