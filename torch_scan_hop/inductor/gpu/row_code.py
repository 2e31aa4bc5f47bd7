"""The code of a kernel with products: a program takes a block of rows through all steps.

The weights are read once, before the loop. Triton keeps them in shared memory, in the layout that
the tensor cores read them in, and the carries in registers: a step waits for nothing but its xs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_triton import TritonLines, storage_type
from torch_scan_hop._torch.inductor_values import NotPointwise, handled_by, handler_at_hand
from torch_scan_hop.inductor.gpu.code import LANE, MASK, STEPS_AHEAD, StepCode
from torch_scan_hop.inductor.gpu.launch import Launch
from torch_scan_hop.inductor.gpu.row_body import PRODUCT, Product, RowBody
from torch_scan_hop.inductor.step import CARRY, StepOps, variable

ROWS = 16  # of a program: the least that a tensor core multiplies

# Bytes of weights up to which a program has so many warps. Not measured on a GPU.
WARPS_FOR_BYTES = ((4, 2**15), (8, 2**17))

# From here on weights leave little shared memory for xs: of 163 KiB on compute capability 8.0.
MANY_BYTES = 2**16


def emit_rows(
    body: RowBody, init: Sequence[Any], layouts: Sequence[Any], trip_count: Any
) -> Launch:
    """Emit the kernel of ``body``; ``layouts``: of its results."""
    code = _RowCode(body, init, layouts, trip_count)
    source = code.source(body.rows)
    for warps, most in WARPS_FOR_BYTES:
        if code.weight_bytes <= most:
            return Launch(source, ROWS, warps, code.weight_bytes)
    raise NotPointwise(f"{code.weight_bytes} bytes of weights: not in shared memory")


class _RowCode(StepCode):
    def __init__(
        self, body: RowBody, init: Sequence[Any], layouts: Sequence[Any], trip_count: Any
    ) -> None:
        super().__init__(init, layouts, trip_count)
        self.body, self.index = body, body.index
        self.width = max(16, 1 << (body.width - 1).bit_length())  # powers of two
        self.shape = ("BLOCK", str(self.width))
        self.lanes = self.lane = [variable("x0"), variable("x1")]
        sizes = dict(zip(self.lanes, (body.rows, sympy.Integer(body.width)), strict=True))
        self.is_wide = self.needs_64_bits([], sizes)
        self.weight_bytes = 0
        self.blocks: dict[tuple[int, int], Any] = {}

    def head(self) -> list[str]:
        columns = f"tl.arange(0, {self.width})"
        both = ", ".join(self.shape)
        return [
            f"{LANE} = {self.program} * BLOCK + tl.arange(0, BLOCK)",
            f"x0 = tl.broadcast_to({LANE}[:, None], [{both}])",
            f"x1 = tl.broadcast_to({columns}[None, :], [{both}])",
            f"{MASK} = (x0 < {self.text(self.body.rows)}) & (x1 < {self.body.width})",
            f"row, column = {columns}[:, None], {columns}[None, :]",
            f"in_weight = (row < {self.body.width}) & (column < {self.body.width})",
        ]

    def step(self, lines: TritonLines) -> list[str]:
        handler = _RowOps(self, lines, self.carries(lines))
        stores, carry = [], []
        with handled_by(handler), self.body.lowering.fresh_values():
            for k, blocks in enumerate(self.body.results):
                for number, (block, column) in enumerate(blocks):
                    row, own = self.lane
                    value = block.make_loader()([row, own + column])
                    if k < len(self.carry):
                        carry.append(value)
                    else:
                        shift = number * self.body.width
                        stores.append(self.store(k, value, self.own(k, shift)))
        return stores + self.next_carries(carry)

    def multiplied(self, lines: TritonLines, position: int, column: int) -> Any:
        """Return as many columns of a product as the carry has, from ``column`` on."""
        key = position, column
        if key not in self.blocks:
            self.blocks[key] = self._product(lines, self.body.products[position], column)
        return self.blocks[key]

    def _product(self, lines: TritonLines, product: Product, column: int) -> Any:
        dtype = product.weight.dtype
        kind, precision = storage_type(dtype), _precision(dtype)
        total: Any = None
        for k, piece in enumerate(product.left):
            value = piece.make_loader()(self.lane)
            # what is beyond the width is summed, too
            left = f"tl.where({MASK}, {value}, 0.0).to({kind})"
            weight = self._weight(lines, product, k * self.body.width, column)
            before = "" if total is None else f", {total}"
            dot = f"tl.dot({left}, {weight}{before}, input_precision='{precision}')"
            total = lines.line(dot, torch.float32)
        return total

    def _weight(self, lines: TritonLines, product: Product, row: int, column: int) -> Any:
        weight = product.weight
        down, right = weight.strides
        pointer = self.parameters.read(weight.buffer, weight.dtype)
        first = self.text(weight.offset + row * down + column * right)
        place = f"{pointer} + ({first}) + row * ({self.text(down)}) + column * ({self.text(right)})"
        self.weight_bytes += self.width**2 * weight.dtype.itemsize
        self.steps_ahead = 2 if self.weight_bytes > MANY_BYTES else STEPS_AHEAD
        return lines.line(f"tl.load({place}, in_weight, 0.0)", weight.dtype, before_steps=True)


def _precision(dtype: torch.dtype) -> str:
    """Return Triton's precision of products: tf32 for float32, if the user allowed torch's so."""
    exact = dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


class _RowOps(StepOps):
    """Operators of a row: a carry is a register, at its own element; a product is multiplied."""

    def __init__(self, code: _RowCode, lines: TritonLines, carry: Sequence[Any]) -> None:
        super().__init__(handler_at_hand(), code.body.lowering, self._carry)
        self.code, self.lines, self.carry = code, lines, carry

    def _carry(self, position: int, index: Any) -> Any:
        if self._columns_from(index, self.code.body.width) != 0:
            raise NotPointwise(f"{CARRY}{position} is read elsewhere than where it is written")
        return self.carry[position]

    def load(self, name: str, index: Any) -> Any:
        if not name.startswith(PRODUCT):
            return super().load(name, index)
        position = int(name.removeprefix(PRODUCT))
        columns = self.code.body.products[position].columns
        first = self._columns_from(index, columns)
        if first is None or not 0 <= first <= columns - self.code.body.width:
            raise NotPointwise(f"a product is read at {index}")
        return self.code.multiplied(self.lines, position, int(first))

    def _columns_from(self, index: Any, width: int) -> Any:
        """Return how far ``index`` is from a row's own element, in a matrix of that width."""
        row, own = self.code.lane
        distance = sympy.expand(index - row * width - own)
        return distance if isinstance(distance, (int, sympy.Integer)) else None
