"""The code of a kernel with products: a program takes a block of rows through all steps.

The weights are read once, before the loop. Triton keeps them in shared memory, in the layout that
the tensor cores read them in, and the carries in registers: a step waits for nothing but its xs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_triton import TritonLines, computed_dtype, storage_type
from torch_scan_hop._torch.inductor_values import NotPointwise, handled_by, handler_at_hand
from torch_scan_hop.inductor.gpu.code import LANE, MASK, STEPS_AHEAD, StepCode, indices
from torch_scan_hop.inductor.gpu.launch import WARP, Launch
from torch_scan_hop.inductor.gpu.reductions import of_row
from torch_scan_hop.inductor.gpu.row_body import RowBody
from torch_scan_hop.inductor.gpu.row_lowering import PRODUCT, REDUCED, Product
from torch_scan_hop.inductor.step import CARRY, StepOps, variable

ROWS = 16  # of a program: the least that a tensor core multiplies

# Bytes of weights up to which a program has so many warps. Not measured on a GPU.
WARPS_FOR_BYTES = ((4, 2**15), (8, 2**17))

# From here on weights leave little shared memory for xs: of 163 KiB on compute capability 8.0.
MANY_BYTES = 2**16


# Elements of a thread, and the most that rows without products have. Not measured on a GPU.
ELEMENTS, MOST_ELEMENTS = 8, 32
MOST_WARPS = 8

# Shared memory for xs of steps ahead, where there are no weights in it.
AHEAD_BYTES = 2**16


def rows_of_a_program(width: int) -> tuple[int, int]:
    """Rows and warps of a program without products: a warp, or as many as one row needs.

    >>> rows_of_a_program(16), rows_of_a_program(256), rows_of_a_program(4096)
    ((16, 1), (1, 1), (1, 8))
    """
    one = WARP * ELEMENTS
    if width > MOST_WARPS * WARP * MOST_ELEMENTS:
        raise NotPointwise(f"a row of {width} elements: not in registers")
    return max(1, one // width), min(MOST_WARPS, max(1, width // one))


def emit_rows(
    body: RowBody, init: Sequence[Any], layouts: Sequence[Any], trip_count: Any
) -> Launch:
    """Emit the kernel of ``body``; ``layouts``: of its results."""
    code = _RowCode(body, init, layouts, trip_count)
    source = code.source(body.rows)
    if not body.products:
        return Launch(source, *rows_of_a_program(code.width))
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
        sizes = [*body.frame.lead, sympy.Integer(body.width)]
        self.lanes = [variable(f"x{k}") for k in range(len(sizes))]
        # Inductor leaves the index of a dimension of size 1 out
        known = dict(zip(self.lanes, sizes, strict=True))
        self.lane = [sympy.Integer(0) if n == 1 else x for x, n in known.items()]
        self.is_wide = self.needs_64_bits([], known)
        body.lowering.sizes = {self.lane[-1]: body.width}
        self.weight_bytes = self.xs_bytes = 0
        self.blocks: dict[Any, Any] = {}

    def load(self, name: str, index: Any, mask: str | None) -> tuple[str, torch.dtype]:
        loaded, dtype = super().load(name, index, mask)
        if not (self.body.products or self._is_invariant(index)):
            self.xs_bytes += rows_of_a_program(self.width)[0] * self.width * dtype.itemsize
            self.steps_ahead = max(1, min(STEPS_AHEAD, AHEAD_BYTES // self.xs_bytes))
        return loaded, dtype

    def head(self) -> list[str]:
        columns, own = f"tl.arange(0, {self.width})", self.lanes[-1]
        both, width = ", ".join(self.shape), self.body.width
        in_weight = [
            f"row, column = {columns}[:, None], {columns}[None, :]",
            f"in_weight = (row < {width}) & (column < {width})",
        ]
        return [
            f"{LANE} = {self.program} * BLOCK + tl.arange(0, BLOCK)",
            *indices(f"{LANE}[:, None]", self.body.frame.lead, self.text, f"[{both}]"),
            f"{own} = tl.broadcast_to({columns}[None, :], [{both}])",
            f"{MASK} = ({LANE}[:, None] < {self.text(self.body.rows)}) & ({own} < {width})",
            *(in_weight if self.body.products else []),
        ]

    def lane_of(self, position: int) -> Sequence[Any]:
        rank = self.body.numbers.get(position)
        return self.lane if rank is None else [*self.lane[:-1], sympy.Integer(0)][:rank]

    def stored_of(self, position: int) -> str:
        is_number = position in self.body.numbers
        return f"{MASK} & ({self.lanes[-1]} == 0)" if is_number else MASK

    def step(self, lines: TritonLines) -> list[str]:
        handler = _RowOps(self, lines, self.carries(lines))
        stores, carry = [], []
        with handled_by(handler), self.body.lowering.fresh_values():
            for k, blocks in enumerate(self.body.results):
                for number, (block, column) in enumerate(blocks):
                    value = block.make_loader()(self.lane_at(k, column))
                    if k < len(self.carry):
                        carry.append(value)
                    else:
                        shift = number * self.body.width
                        stores.append(self.store(k, value, self.own(k, shift)))
        return stores + self.next_carries(carry)

    def reduced(self, lines: TritonLines, position: int) -> Any:
        """Return what a reduction makes of each row, in all columns of it."""
        key = REDUCED, position
        if key not in self.blocks:
            reduction = self.body.reductions[position]
            *lead, own = self.lane
            with lines.unmasked():
                blocks = range(0, reduction.columns, self.body.width)
                elements = [reduction.element(lead, own + column) for column in blocks]
            texts = [str(getattr(element, "value", element)) for element in elements]
            code = of_row(reduction, texts, MASK, self.lanes[-1])
            code = f"tl.broadcast_to({code}[:, None], [{', '.join(self.shape)}])"
            self.blocks[key] = lines.line(code, computed_dtype(reduction.result))
        return self.blocks[key]

    def multiplied(self, lines: TritonLines, position: int, column: int) -> Any:
        """Return as many columns of a product as the carry has, from ``column`` on."""
        key = position, column
        if key not in self.blocks:
            with lines.unmasked():
                self.blocks[key] = self._product(lines, self.body.products[position], column)
        return self.blocks[key]

    def _product(self, lines: TritonLines, product: Product, column: int) -> Any:
        dtype = product.weight.dtype
        kind, precision = storage_type(dtype), _precision(dtype)
        total: Any = None
        *lead, own = self.lane
        for k, (block, first) in enumerate(product.left):
            value = block.make_loader()([*lead, own + first])
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
        is_number = position in self.code.body.numbers
        if self._columns_from(index, 1 if is_number else self.code.body.width, is_number) != 0:
            raise NotPointwise(f"{CARRY}{position} is read elsewhere than where it is written")
        return self.carry[position]

    def load(self, name: str, index: Any) -> Any:
        if name.startswith(REDUCED):
            if self._columns_from(index, 1, True) != 0:
                raise NotPointwise(f"what is known of a row is read at {index}")
            return self.code.reduced(self.lines, int(name.removeprefix(REDUCED)))
        if not name.startswith(PRODUCT):
            return super().load(name, index)
        position = int(name.removeprefix(PRODUCT))
        columns = self.code.body.products[position].columns
        first = self._columns_from(index, columns)
        if first is None or not 0 <= first <= columns - self.code.body.width:
            raise NotPointwise(f"a product is read at {index}")
        return self.code.multiplied(self.lines, position, int(first))

    def _columns_from(self, index: Any, width: int, is_number: bool = False) -> Any:
        """Return how far ``index`` is from a row's own element, in rows of that width."""
        *lead, own = self.code.lane
        row = sympy.Integer(0)
        for position, size in zip(lead, self.code.body.frame.lead, strict=True):
            row = row * size + position
        distance = sympy.expand(index - row * width - (0 if is_number else own))
        return distance if isinstance(distance, (int, sympy.Integer)) else None
