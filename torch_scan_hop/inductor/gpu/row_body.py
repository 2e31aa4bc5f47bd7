"""A step with products and reductions as functions of an element of a row.

Products and reductions are recorded, and stand for buffers. A row is as wide as the carry. What a
product makes is read by columns: ``(h @ w)[:, a:b]`` is ``h @ w[:, a:b]``. So every value of a step
is a block of that width, or one number of each row, and each of them stays in registers. So does
a square of a row: its element ``(k, column)`` is made of elements ``k`` and ``column`` of the row,
and of a weight, as in a product with another addition (log-sum-exp, or the greatest).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_values import named_buffer, storage_of, tensor_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.decompositions import ROWS, in_parts
from torch_scan_hop.inductor.gpu.row_frame import Frame, frame_of
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.product_lowering import ProductLowering
from torch_scan_hop.inductor.step import are_static, step_inputs

PRODUCT = "scan_product_"
REDUCED = "scan_reduced_"

# products of float64 run on no tensor core, and weights of that size in no registers
DTYPES = {torch.float32, torch.bfloat16, torch.float16}

#: reductions of Inductor's that a kernel of rows has
REDUCTIONS = ("sum", "prod", "max", "min", "any", "argmax", "argmin")


@dataclass(frozen=True)
class Weight:
    """A loop-invariant matrix in a buffer."""

    buffer: str
    dtype: torch.dtype
    offset: Any
    strides: tuple[Any, Any]


@dataclass(frozen=True)
class Product:
    """``left @ weight``; ``left``: its blocks side by side, each a value and its first column."""

    left: tuple[tuple[Any, int], ...]
    weight: Weight
    columns: int


@dataclass(frozen=True)
class Reduction:
    """Reduces a row, or each column of a square; ``element`` gives the elements, of ``dtype``: of a
    row by row and column, of a square by row and column of the result, and what is reduced."""

    element: Callable[..., Any]
    columns: int
    is_of_square: bool
    kind: str
    dtype: torch.dtype
    result: torch.dtype


class RowLowering(ProductLowering):
    def __init__(self, gm: Any, frame: Frame) -> None:
        super().__init__(gm)
        self.frame = frame
        self.reductions: list[Reduction] = []

    def product(self, left: Any, weight: Any) -> Any:
        found = storage_of(weight)
        sizes = [*weight.get_size(), *left.get_size()[1:]]
        static = are_static(sizes)
        dtypes = {left.get_dtype(), weight.get_dtype()}
        if found is None or not static or len(dtypes) > 1 or not dtypes <= DTYPES:
            raise Refusal(f"a product of {left.get_size()} and {weight.get_size()}")
        name, layout = found
        place = Weight(name, layout.dtype, layout.offset, tuple(layout.stride))
        rows, columns = left.get_size()[0], int(weight.get_size()[1])
        made = f"{PRODUCT}{len(self.products)}"
        blocks = tuple(self.blocks(left))
        if len(left.get_size()) != len(self.frame.lead) + 1 or columns % self.frame.width:
            raise Refusal(f"a product of {columns} columns, {self._no_blocks()}")
        self.products.append(Product(blocks, place, columns))
        return _buffer(made, left.get_device(), left.get_dtype(), [rows, columns])

    def _no_blocks(self) -> str:
        return f"in no blocks of {[*self.frame.lead, self.frame.width]}, as the carry is"

    def blocks(self, value: Any) -> list[tuple[Any, int]]:
        """Return the blocks of rows, as wide as the frame: the values they are in, and where."""
        count = self.frame.blocks_of(value.get_size())
        if count != 1:
            _, dim, parts = self.parts.get(id(value), (None, -1, []))
            whole = all(self.frame.blocks_of(part.get_size()) for part in parts)
            if dim == len(self.frame.lead) and whole:
                return [block for part in parts for block in self.blocks(part)]
        if not count:
            raise Refusal(f"a value of {value.get_size()}, {self._no_blocks()}")
        return [(value, k * self.frame.width) for k in range(count)]

    def reduced(self, how: Mapping[str, Any]) -> Any:
        """Return what stands for a reduction; None for one that is not of rows."""
        ranges, kind = how["ranges"], how["reduction_type"]
        blocks = self.frame.blocks_of((*self.frame.lead, *how["reduction_ranges"]))
        known = kind in REDUCTIONS and (blocks == 1 or not kind.startswith("arg"))
        if not (blocks and known):
            return None
        if not self.frame.is_of_rows(ranges):
            return self._reduced_square(how) if blocks == 1 else None
        keeps = len(ranges) > len(self.frame.lead)

        def element(lead: Sequence[Any], column: Any) -> Any:
            return how["inner_fn"]([*lead, sympy.Integer(0)] if keeps else [*lead], [column])

        return self._record(how, element, blocks * self.frame.width)

    def _reduced_square(self, how: Mapping[str, Any]) -> Any:
        """Return what stands for a reduction of which each column of a square has a result."""
        ranges, inner_fn = how["ranges"], how["inner_fn"]
        if None in (self.frame.place(ranges, 0, None) or (None,)):
            return None

        def element(lead: Sequence[Any], own: Any, down: Any) -> Any:
            return inner_fn([*lead, *(self.frame.place(ranges, own, None) or ())], [down])

        return self._record(how, element, self.frame.width, is_of_square=True)

    def _record(
        self, how: Mapping[str, Any], element: Any, columns: int, is_of_square: bool = False
    ) -> Any:
        kind, result = how["reduction_type"], how["dst_dtype"]
        self.reductions.append(
            Reduction(element, columns, is_of_square, kind, how["src_dtype"], result)
        )
        name = f"{REDUCED}{len(self.reductions) - 1}"
        return _buffer(name, how["device"], result, how["ranges"])


def _buffer(name: str, device: Any, dtype: torch.dtype, sizes: Sequence[Any]) -> Any:
    strides = [sympy.sympify(math.prod(sizes[k + 1 :])) for k in range(len(sizes))]
    return tensor_of(named_buffer(name, device, dtype, sizes, strides))


class RowBody:
    """A step of a scan whose carries are rows; a Refusal if not.

    Attributes:
        results: final carries and ys, each as the blocks that it is put together from.
        numbers: the positions of those that have one number of each row, or one of all, and how
            many dimensions these have.
        squares: the positions of those that have a square of each row, or one row or column of it,
            with their sizes.
    """

    def __init__(self, call: ScanCall) -> None:
        self.index = call.index
        self.frame = frame = frame_of(call.operands.carry)
        self.rows, self.width = frame.rows, frame.width
        self.lowering = RowLowering(in_parts(call.body, ROWS), frame)
        results = self.lowering.lower(step_inputs(call.operands, call.index))
        self.products, self.reductions = self.lowering.products, self.lowering.reductions
        sizes = [value.get_size() for value in results]
        self.numbers = {k: len(s) for k, s in enumerate(sizes) if frame.is_number(s)}
        self.squares = {
            k: s
            for k, s in enumerate(sizes)
            if k >= len(call.operands.carry)
            and not (k in self.numbers or frame.blocks_of(s))
            and frame.place(s, 0, 0)
        }
        self.results = [
            [(value, 0)] if k in self.numbers or k in self.squares else self.lowering.blocks(value)
            for k, value in enumerate(results)
        ]
        self.has_squares = bool(self.squares) or any(r.is_of_square for r in self.reductions)
        if not all(len(blocks) == 1 for blocks in self.results[: len(call.operands.carry)]):
            raise Refusal("carries of several widths")
