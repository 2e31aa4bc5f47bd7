"""Places of the values of a step with products: buffers of the scan, or scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_scan_hop._torch.inductor_cpp import vector_lanes
from torch_scan_hop._torch.inductor_values import named_buffer
from torch_scan_hop.inductor.step import lane_symbols

# "buf": names that Inductor lets a kernel store to
PRODUCT = "scan_buf_product_"
OPERAND = "scan_buf_operand_"
NEXT = "scan_buf_next_"
STACK = "scan_stack_"

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Matrix:
    """Contiguous rows in a buffer: what a product reads."""

    name: str
    offset: Any
    row_stride: Any


@dataclass(frozen=True)
class Place:
    """A buffer, and the elements of it in which a value is stored."""

    name: str
    layout: Any
    prefix: tuple[Any, ...] = ()  # of the index: the step, for a stack
    shift: tuple[Any, ...] = ()  # of the other dimensions

    def index(self, lanes: Sequence[Any]) -> Any:
        shift = self.shift or (0,) * len(lanes)
        moved = [lane + by for lane, by in zip(lanes, shift, strict=True)]
        return self.layout.make_indexer()([*self.prefix, *moved])

    def part(self, dim: int, start: Any) -> Place:
        rank = len(self.layout.size) - len(self.prefix)
        shift = list(self.shift or (0,) * rank)
        shift[dim] += start
        return Place(self.name, self.layout, self.prefix, tuple(shift))

    def matrix(self) -> Matrix | None:
        """Return the place as an operand of a product, or None if its rows are not contiguous."""
        rank = len(self.layout.size) - len(self.prefix)
        if rank != 2 or self.layout.stride[-1] != 1:
            return None
        return Matrix(self.name, self.index([0, 0]), self.layout.stride[-2])


@dataclass
class Store:
    """A value that a nest of loops computes and stores; ``stage`` says when."""

    place: Place
    value: Any
    stage: int = 0
    carry: int | None = None
    reads: list[tuple[str, Any]] = field(default_factory=list)
    ranges: dict[Any, Any] = field(default_factory=dict)  # of the symbols that reads are at

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.value.get_size())

    @property
    def lanes(self) -> list[Any]:
        return lane_symbols(len(self.shape))


@dataclass(frozen=True)
class Product:
    """``left @ weight`` into scratch memory of the same position; ``weight`` is loop-invariant."""

    left: Any
    weight: Any

    @property
    def sizes(self) -> tuple[int, int]:
        k, n = self.weight.get_size()
        return int(k), int(n)

    @property
    def padded(self) -> int:
        lanes = vector_lanes()
        return -(-self.sizes[1] // lanes) * lanes


def product_position(name: str) -> int | None:
    """Return the position of the product that a buffer's name stands for, or None."""
    return int(name.removeprefix(PRODUCT)) if name.startswith(PRODUCT) else None


def float_buffer(name: str, sizes: Sequence[Any], row: Any) -> Any:
    """Return scratch memory for a matrix, ``row`` elements from one row to the next."""
    return named_buffer(name, CPU, torch.float32, sizes, [row, 1])


def buffer_like(name: str, layout: Any) -> Any:
    return named_buffer(name, CPU, layout.dtype, layout.size, layout.stride)
