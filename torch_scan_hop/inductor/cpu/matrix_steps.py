"""The work of a step of small matrices: values in scratch memory, and what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch.inductor_values import tensor_of

# "buf": names that Inductor lets a kernel store to
SCRATCH = "scan_buf_entries_"


@dataclass(frozen=True)
class Scratch:
    """Memory for a value of a step.

    Attributes:
        entries: for each lane.
        width: how many lanes are next to each other; None where the value has no lanes.
    """

    name: str
    buffer: Any
    entries: int
    width: int | None

    @property
    def varies(self) -> bool:
        return self.width is not None

    @property
    def numbers(self) -> int:
        return self.entries * (self.width or 1)

    @property
    def size(self) -> list[Any]:
        return list(self.buffer.layout.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.get_dtype()  # type: ignore[no-any-return]

    def tensor(self) -> Any:
        return tensor_of(self.buffer)


@dataclass(frozen=True)
class Made:
    """A value, and the memory that it goes to."""

    to: Scratch
    value: Any


@dataclass(frozen=True)
class Matrix:
    """Scratch memory as a stack of matrices, or as one of their transposes."""

    scratch: Scratch
    turned: bool = False

    @property
    def strides(self) -> tuple[Any, Any]:
        row, column = self.scratch.buffer.layout.stride[-2:]
        return (column, row) if self.turned else (row, column)


@dataclass(frozen=True)
class Called:
    """A function of ``matrix_source`` that changes each of a stack of matrices in place.

    ``notes``: integers beside each matrix; ``sizes``: of a matrix, as the function has them.
    """

    function: str
    sizes: tuple[int, ...]
    matrices: Sequence[Matrix]
    notes: Sequence[Scratch] = ()
    flags: tuple[bool, ...] = ()

    @property
    def stack(self) -> int:
        first = self.matrices[0].scratch
        return first.entries // int(first.size[-1] * first.size[-2])
