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

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from torch_scan_hop._torch.inductor_triton import TritonLines, computed_dtype, storage_type
from torch_scan_hop._torch.inductor_values import handled_by, handler_at_hand, likely_size
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.code import LANE, MASK, StepCode, indices
from torch_scan_hop.inductor.gpu.launch import WARP, GpuKernel, Launch
from torch_scan_hop.inductor.gpu.reductions import of_row
from torch_scan_hop.inductor.gpu.row_body import PRODUCT, REDUCED, Product, RowBody
from torch_scan_hop.inductor.gpu.serving import capability_of, check_devices, check_tensors
from torch_scan_hop.inductor.lane_body import READS_ELSEWHERE, have_one_shape
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_rows, is_plain, is_pointwise
from torch_scan_hop.inductor.step import StepOps, variable

# Rows of a program with products. With few rows in all, a program has one, whose weights stay in
# registers: nothing is staged, and there are more programs. A tensor core multiplies 16 rows at
# least; exact products of float32 run on none, and have fewer rows, sooner done. On an H200, ms of
# an LSTM of 64 rows, 256 steps, forward, with 16 rows, 4 and one: 1.14, 0.63, 0.42 of width 64;
# 1.39, -, 0.79 of width 128 in bfloat16. Of 512 rows and width 64: 1.45, 0.98, 1.08.
ROWS, FEW_ROWS = 16, 4
MOST_FOR_ONE_ROW, MOST_FOR_FEW_ROWS = 256, 1024

# Bytes of weights of a program, and its warps: of one row, which are all registers that there are
# at most (an LSTM of width 128: 1.32 ms, 2.25 trained; as a counted loop 2.75 and 6.5); and of more
# rows, in shared memory. For a GPU older than that which it was measured on, the largest programs
# spill three times as much, and one of them crashes the ptxas of Triton 3.9.
WARPS_OF_ONE_ROW = ((8, 2**16), (16, 2**18))
OLDEST_FOR_MOST_WARPS = (9, 0)
WARPS, SHARED_BYTES = 8, 2**17

# Elements of a thread, and the most that rows without products have. Not measured on a GPU.
ELEMENTS, MOST_ELEMENTS = 8, 32
MOST_WARPS = 8


def rows_of_a_program(width: int) -> tuple[int, int]:
    """Rows and warps of a program without products: a warp, or as many as one row needs.

    >>> rows_of_a_program(16), rows_of_a_program(256), rows_of_a_program(4096)
    ((16, 1), (1, 1), (1, 8))
    """
    one = WARP * ELEMENTS
    if width > MOST_WARPS * WARP * MOST_ELEMENTS:
        raise Refusal(f"a row of {width} elements: not in registers")
    return max(1, one // width), min(MOST_WARPS, max(1, width // one))


def rows_with_products(body: RowBody, width: int, device: torch.device) -> tuple[int, int, int]:
    """Return the rows and warps of a program that multiplies, and its bytes of shared memory."""
    dtypes = {product.weight.dtype for product in body.products}
    blocks = sum(len(p.left) * p.columns // body.width for p in body.products)
    nbytes = blocks * width**2 * max(dtype.itemsize for dtype in dtypes)
    rows = likely_size(body.rows, fallback=MOST_FOR_FEW_ROWS + 1)
    is_new = capability_of(device) >= OLDEST_FOR_MOST_WARPS
    for warps, most in WARPS_OF_ONE_ROW if is_new else WARPS_OF_ONE_ROW[:1]:
        if rows <= MOST_FOR_ONE_ROW and nbytes <= most:
            return 1, warps, 0
    if nbytes > SHARED_BYTES:
        raise Refusal(f"{nbytes} bytes of weights: not in shared memory")
    is_exact = torch.float32 in dtypes and _precision(torch.float32) == "ieee"
    return FEW_ROWS if is_exact and rows <= MOST_FOR_FEW_ROWS else ROWS, WARPS, nbytes


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
        self.is_wide = self.needs_64_bits([], known)
        body.lowering.sizes = {self.lane[-1]: body.width}
        self.nbytes = 0
        if body.products:
            device = self.carry[0].device
            self.rows, self.warps, self.nbytes = rows_with_products(body, self.width, device)
        else:
            self.rows, self.warps = rows_of_a_program(self.width)
        self.blocks: dict[Any, Any] = {}

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
        rank = self.body.numbers.get(position)
        if rank is None:
            return MASK
        first = "" if rank else f" & ({LANE}[:, None] == 0)"  # the one of all rows
        return f"{MASK} & ({self.lanes[-1]} == 0){first}"

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


def _precision(dtype: torch.dtype) -> str:
    """Return Triton's precision of products: tf32 for float32, if the user allowed torch's so."""
    exact = dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


class _RowOps(StepOps):
    """Operators of a row: a carry is a register, at its own element; a product is multiplied."""

    def __init__(self, code: RowCode, lines: TritonLines, carry: Sequence[Any]) -> None:
        super().__init__(handler_at_hand(), code.body.lowering, self._carry)
        self.code, self.lines, self.carry = code, lines, carry

    def _carry(self, position: int, index: Any) -> Any:
        body = self.code.body
        rank = body.numbers.get(position)
        width = body.width if rank is None else 1
        if rank != 0 and self._columns_from(index, width, rank is not None) != 0:
            raise Refusal(READS_ELSEWHERE)
        return self.carry[position]

    def load(self, name: str, index: Any) -> Any:
        if name.startswith(REDUCED):
            if self._columns_from(index, 1, True) != 0:
                raise Refusal("what is known of a row is read in another row")
            return self.code.reduced(self.lines, int(name.removeprefix(REDUCED)))
        if not name.startswith(PRODUCT):
            return super().load(name, index)
        position = int(name.removeprefix(PRODUCT))
        columns = self.code.body.products[position].columns
        first = self._columns_from(index, columns)
        if first is None or not 0 <= first <= columns - self.code.body.width:
            raise Refusal("a product is read elsewhere than in blocks as wide as the carry")
        return self.code.multiplied(self.lines, position, int(first))

    def _columns_from(self, index: Any, width: int, is_number: bool = False) -> Any:
        """Return how far ``index`` is from a row's own element, in rows of that width."""
        *lead, own = self.code.lane
        row = sympy.Integer(0)
        for position, size in zip(lead, self.code.body.frame.lead, strict=True):
            row = row * size + position
        distance = sympy.expand(index - row * width - (0 if is_number else own))
        return distance if isinstance(distance, (int, sympy.Integer)) else None


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
