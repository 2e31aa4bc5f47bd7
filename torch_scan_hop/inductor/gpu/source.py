"""The text of a kernel, and what it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch.inductor_triton import compute_type, is_graph_symbol, storage_type
from torch_scan_hop.errors import Refusal


@dataclass(frozen=True)
class Result:
    """A buffer that the kernel writes, by its position among the results of the scan."""

    position: int


@dataclass(frozen=True)
class TritonSource:
    """A kernel, and what it is to be called with.

    Attributes:
        text: a module that defines the function ``scan_kernel``.
        arguments: of each parameter but the last, which is ``BLOCK``: the name of a buffer that
            it reads, a :class:`Result`, or a size.
        dtypes: of the buffers among them; None for a size, an integer.
        size: the number of lanes.
    """

    text: str
    arguments: tuple[Any, ...]
    dtypes: tuple[torch.dtype | None, ...]
    size: Any


class Parameters:
    """The parameters of a kernel, in the order in which its code first names them."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[str, torch.dtype | None]] = {}

    def _name(self, argument: Any, name: str, dtype: torch.dtype | None) -> str:
        n = sum(other.startswith(name) for other, _ in self._found.values())
        return self._found.setdefault(argument, (f"{name}{n}", dtype))[0]

    def read(self, buffer: str, dtype: torch.dtype) -> str:
        return self._name(buffer, "in", dtype)

    def written(self, position: int, dtype: torch.dtype) -> str:
        return self._name(Result(position), "out", dtype)

    def size(self, symbol: Any) -> str:
        if not is_graph_symbol(symbol):
            raise Refusal(f"{symbol} is no integer")
        return self._name(symbol, "size", None)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._found.values()]

    @property
    def sizes(self) -> list[str]:
        return [name for name, dtype in self._found.values() if dtype is None]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self._found)

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        return tuple(dtype for _, dtype in self._found.values())


def kept(value: Any, dtype: torch.dtype) -> str:
    """Return ``value`` as the next step reads it: rounded to the carry's dtype."""
    stored, computed = storage_type(dtype), compute_type(dtype)
    return (
        f"{value}.to({computed})" if stored == computed else f"{value}.to({stored}).to({computed})"
    )


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
