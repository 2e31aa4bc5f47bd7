"""The kernel of a body with products with weights, or norms: each row of the batch runs by itself.

A program takes a block of rows through all steps. The weights are read once, before the loop.
Triton keeps them in shared memory, in the layout that the tensor cores read them in, and the
carries in registers: a step waits for nothing but its xs.

A body qualifies if it is pointwise but for products of rows with loop-invariant matrices, in
float32, bfloat16 or float16, and for reductions of rows: their sums, means, variances and extremes.
Its carries are rows of one static width, and all that it makes is as wide, made of parts that are,
or one number of each row. The weights fit a program: for an LSTM, up to a width of 128 with few
rows, and with many 64 in float32, 128 in bfloat16. Without weights, a row fits its registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from torch_scan_hop._torch.inductor_triton import (
    TritonLines,
    computed_dtype,
    dtype_of,
    storage_type,
)
from torch_scan_hop._torch.inductor_values import handled_by
from torch_scan_hop._torch.replaced import replaced
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.code import LANE, MASK, StepCode, indices
from torch_scan_hop.inductor.gpu.launch import GpuKernel, Launch
from torch_scan_hop.inductor.gpu.row_body import REDUCED, Product, RowBody
from torch_scan_hop.inductor.gpu.row_ops import RowOps, of_row
from torch_scan_hop.inductor.gpu.row_programs import (
    WARPS,
    precision_of,
    rows_of_a_program,
    rows_with_products,
    warps_of_squares,
)
from torch_scan_hop.inductor.gpu.serving import check_devices, check_tensors
from torch_scan_hop.inductor.lane_body import have_one_shape
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_rows, is_plain, is_pointwise
from torch_scan_hop.inductor.step import variable

# The rows of a square, which of them there are, and which elements of it.
DOWN, INSIDE_DOWN, IN_SQUARE = "down", "inside_down", "in_square"


class RowCode(StepCode):
    """The kernel of ``body``, the step of ``call``."""

    def __init__(self, body: RowBody, call: ScanCall) -> None:
        super().__init__(call)
        self.body, self.index, self.size = body, body.index, body.rows
        self.width = max(16, 1 << (body.width - 1).bit_length())  # powers of two
        self.shape = ("BLOCK", str(self.width))
        sizes = [*body.frame.lead, sympy.Integer(body.width)]
        self.lanes = [variable(f"x{k}") for k in range(len(sizes))]
        # Inductor leaves the index of a dimension of size 1 out
        known = dict(zip(self.lanes, sizes, strict=True))
        self.lane = [sympy.Integer(0) if n == 1 else x for x, n in known.items()]
        self.down, self.own_column = variable(DOWN), self.lanes[-1]
        body.lowering.sizes = {self.lane[-1]: body.width}
        if body.has_squares:
            self.shape = ("1", str(self.width))  # a row, which goes with all rows of a square
            self.lanes += [self.down, *self.leads_of_square()]
            known[self.down] = body.lowering.sizes[self.down] = body.width
        self.is_wide = self.needs_64_bits([], known)
        self.nbytes = 0
        if body.products:
            device = self.carry[0].device
            self.rows, self.warps, self.nbytes = rows_with_products(body, self.width, device)
        else:
            self.rows, self.warps = rows_of_a_program(self.width)
        if body.has_squares:
            if body.products and self.rows > 1:
                raise Refusal("squares of several rows")
            self.rows, self.warps = 1, max(self.warps, warps_of_squares(self.width))
        self.blocks: dict[Any, Any] = {}

    def shape_of(self, is_square: bool) -> tuple[str, ...]:
        return (*self.shape, self.shape[1]) if is_square else self.shape

    def launch(self) -> Launch:
        return Launch(self.source(), self.rows, self.warps, self.nbytes)

    def elements(self) -> int:
        return self.rows * self.width

    def steps_ahead(self) -> int:
        """Weights in shared memory leave little of it, and in all registers no room for addresses.

        (Of a GRU of width 128 and 64 rows, forward: 0.95 ms with loads ahead, 0.46 without.)
        """
        if self.warps > WARPS:
            return 1
        ahead = super().steps_ahead()
        return min(4, ahead) if self.body.products and self.rows > 1 else ahead

    def head(self) -> list[str]:
        columns, own = f"tl.arange(0, {self.width})", self.own_column
        both, width = ", ".join(self.shape), self.body.width
        in_weight = [
            f"row, column = {columns}[:, None], {columns}[None, :]",
            f"in_weight = (row < {width}) & (column < {width})",
        ]
        lane = f"{LANE}[:, None, None]"
        in_square = [
            f"{DOWN} = {columns}[None, :, None]",
            f"{INSIDE_DOWN} = ({lane} < {self.text(self.body.rows)}) & ({DOWN} < {width})",
            f"{IN_SQUARE} = {MASK}[:, None, :] & {INSIDE_DOWN}",
            *(f"square_{line}" for line in indices(lane, self.body.frame.lead, self.text)),
        ]
        return [
            f"{LANE} = {self.program} * BLOCK + tl.arange(0, BLOCK)",
            *indices(f"{LANE}[:, None]", self.body.frame.lead, self.text, f"[{both}]"),
            f"{own} = tl.broadcast_to({columns}[None, :], [{both}])",
            f"{MASK} = ({LANE}[:, None] < {self.text(self.body.rows)}) & ({own} < {width})",
            *(in_weight if self.body.products else []),
            *(in_square if self.body.has_squares else []),
        ]

    def leads_of_square(self) -> list[Any]:
        """Return the variables that number the rows, in a shape of three dimensions."""
        return [variable(f"square_x{k}") for k in range(len(self.body.frame.lead))]

    def lane_of(self, position: int) -> Sequence[Any]:
        *lead, own = self.lane
        if position in self.body.squares:
            sizes = self.body.squares[position]
            return [*lead, *(self.body.frame.place(sizes, own, self.down) or ())]
        rank = self.body.numbers.get(position)
        return self.lane if rank is None else [*self.lane[:-1], sympy.Integer(0)][:rank]

    def stored_of(self, position: int) -> str:
        rank = self.body.numbers.get(position)
        if self.down in self.lane_of(position):
            return IN_SQUARE
        if rank is None:
            return MASK
        first = "" if rank else f" & ({LANE}[:, None] == 0)"  # the one of all rows
        return f"{MASK} & ({self.own_column} == 0){first}"

    def step(self, lines: TritonLines) -> list[str]:
        handler = RowOps(self, lines, self.carries(lines))
        stores, carry = [], []
        with handled_by(handler), self.body.lowering.fresh_values():
            for k, blocks in enumerate(self.body.results):
                for number, (block, column) in enumerate(blocks):
                    lane = self.lane_at(k, column)
                    with self.whole(lines, is_square=self.down in lane):
                        value = block.make_loader()(lane)
                    if k < len(self.carry):
                        carry.append(value)
                    else:
                        shift = number * self.body.width
                        stores.append(self.store(k, value, self.own(k, shift)))
        return stores + self.next_carries(carry)

    @contextlib.contextmanager
    def whole(self, lines: TritonLines, is_square: bool) -> Iterator[None]:
        """Compute all elements of a row, or of a square of it: others read them, too, than those
        behind the mask at hand."""
        shape = self.shape_of(is_square)
        if lines.shape == shape and not lines.is_masked():
            yield
            return
        # values at hand are masked, or have another number of dimensions
        with lines.unmasked(), replaced(lines, shape=shape), self.body.lowering.fresh_values():
            yield

    def load(self, name: str, index: Any, mask: str | None) -> tuple[str, torch.dtype]:
        if self.down not in index.free_symbols:
            return super().load(name, index, mask)
        dtype = dtype_of(name)
        inside = IN_SQUARE if self.own_column in index.free_symbols else INSIDE_DOWN
        leads = dict(zip(self.lanes, self.leads_of_square(), strict=False))
        address = self.address(self.parameters.read(name, dtype), index.xreplace(leads))
        if not self._is_invariant(index):
            self.load_bytes += dtype.itemsize * self.width
        return f"tl.load({address}, {inside})", dtype

    def reduced(self, lines: TritonLines, position: int) -> Any:
        """Return what a reduction makes of each row, in all columns of it, or of each column of a
        square."""
        key = REDUCED, position
        if key not in self.blocks:
            reduction = self.body.reductions[position]
            *lead, own = self.lane
            with self.whole(lines, reduction.is_of_square):
                if reduction.is_of_square:
                    elements = [reduction.element(lead, own, self.down)]
                else:
                    blocks = range(0, reduction.columns, self.body.width)
                    elements = [reduction.element(lead, own + column) for column in blocks]
            texts = [str(getattr(element, "value", element)) for element in elements]
            if reduction.is_of_square:
                shape = f"[{', '.join(self.shape_of(is_square=True))}]"
                code = of_row(reduction, texts, IN_SQUARE, f"tl.broadcast_to({DOWN}, {shape})")
            else:
                code = of_row(reduction, texts, MASK, self.own_column)
                code = f"tl.broadcast_to({code}[:, None], [{', '.join(self.shape)}])"
            with self.whole(lines, is_square=False):
                self.blocks[key] = lines.line(code, computed_dtype(reduction.result))
        return self.blocks[key]

    def multiplied(self, lines: TritonLines, position: int, column: int) -> Any:
        """Return as many columns of a product as the carry has, from ``column`` on."""
        key = position, column
        if key not in self.blocks:
            with self.whole(lines, is_square=False):
                self.blocks[key] = self._product(lines, self.body.products[position], column)
        return self.blocks[key]

    def _product(self, lines: TritonLines, product: Product, column: int) -> Any:
        dtype = product.weight.dtype
        kind, precision = storage_type(dtype), precision_of(dtype)
        total: Any = None
        *lead, own = self.lane
        for k, (block, first) in enumerate(product.left):
            value = block.make_loader()([*lead, own + first])
            # what is beyond the width is summed, too
            left = f"tl.where({MASK}, {value}, 0.0).to({kind})"
            weight = self._weight(lines, product, k * self.body.width, column)
            code = self._multiply_and_add(left, weight, total, precision)
            total = lines.line(code, torch.float32)
        return total

    def _multiply_and_add(self, left: str, weight: Any, total: Any, precision: str) -> str:
        if self.rows > 1:
            before = "" if total is None else f", {total}"
            return f"tl.dot({left}, {weight}{before}, input_precision='{precision}')"
        terms = f"({left})[:, :, None].to(tl.float32) * {weight}[None, :, :].to(tl.float32)"
        return f"tl.sum({terms}, 1)" if total is None else f"{total} + tl.sum({terms}, 1)"

    def _weight(self, lines: TritonLines, product: Product, row: int, column: int) -> Any:
        weight = product.weight
        down, right = weight.strides
        pointer = self.parameters.read(weight.buffer, weight.dtype)
        first = self.text(weight.offset + row * down + column * right)
        place = f"{pointer} + ({first}) + row * ({self.text(down)}) + column * ({self.text(right)})"
        return lines.line(f"tl.load({place}, in_weight, 0.0)", weight.dtype, before_steps=True)


class RowsKernel(GpuKernel):
    kind = "one Triton kernel, row by row"
    unit = "rows"

    @staticmethod
    def check(body: fx.GraphModule) -> None:
        check_devices(value_of(n) for n in body.graph.find_nodes(op="placeholder"))
        check_rows(body)
        if not all(map(is_plain, body.graph.nodes)):
            raise Refusal("neither pointwise nor a product with a weight: a scaled addmm")

    @classmethod
    def lower(cls, call: ScanCall) -> RowsKernel:
        check_tensors(call.examples.flat())
        if not call.operands.carry:
            raise Refusal("it has no carry")
        if is_pointwise(call.body) and have_one_shape(call.examples):
            raise Refusal("neither a product nor a reduction of rows")
        return cls(call, RowCode(RowBody(call), call).launch())
