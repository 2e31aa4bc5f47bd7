"""What a step of small matrices does: values in scratch memory, and what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_scan_hop._torch.inductor_values import tensor_of

# "buf": names that Inductor lets a kernel store to
SCRATCH = "scan_buf_entries_"


@dataclass(frozen=True)
class Scratch:
    """Memory for a value of a step; where ``varies``, lanes are next to each other."""

    name: str
    buffer: Any
    varies: bool
    entries: int  # for each lane

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
    """A value that loops over its entries compute."""

    to: Scratch
    value: Any


@dataclass(frozen=True)
class Called:
    """A function of ``matrix_source`` that changes matrices in scratch memory."""

    function: str
    sizes: tuple[int, ...]
    matrices: Sequence[tuple[Scratch, Any, Any, Any]]  # first number, strides of row and column
    notes: Sequence[Scratch] = ()
    flags: tuple[bool, ...] = ()


@dataclass
class Steps:
    """What a step does, in order."""

    scratch: list[Scratch] = field(default_factory=list)
    actions: list[Made | Called] = field(default_factory=list)
