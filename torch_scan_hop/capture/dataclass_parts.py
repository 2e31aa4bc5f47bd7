"""Dataclasses as containers of their fields, as Dynamo can trace them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

try:  # torch 2.9 does not trace if the class of an array is one of dataclasses
    from numpy import ndarray as _ndarray
except ImportError:
    _ndarray = type  # type: ignore[assignment, misc]


def is_dataclass(value: Any) -> bool:
    is_none = isinstance(value, (type, torch.nn.Module, _ndarray))
    return not is_none and dataclasses.is_dataclass(value)


def field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


def new_dataclass(kind: Any, names: Iterable[str], parts: Sequence[Any]) -> Any:
    """Return an object with these ``parts`` as its fields. Its ``__init__`` is not called, which
    may do more than to assign."""
    new = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(new, name, part)
    return new
