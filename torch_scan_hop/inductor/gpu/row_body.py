"""A step with products and reductions as functions of an element of a row.

Products and reductions are recorded, and stand for buffers. A row is as wide as the carry. What a
product makes is read by columns: ``(h @ w)[:, a:b]`` is ``h @ w[:, a:b]``. So every value of a step
is a block of that width, or one number of each row, and each of them stays in registers. So does
a square of a row: its element ``(k, column)`` is made of elements ``k`` and ``column`` of the row,
and of a weight, as in a product with another addition (log-sum-exp, or the greatest).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_values import named_buffer, storage_of, tensor_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.row_frame import Frame, frame_of
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.product_lowering import ProductLowering
from torch_scan_hop.inductor.step import are_static, step_inputs

aten, prims = torch.ops.aten, torch.ops.prims

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

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (aten.var_mean.correction, aten.var.correction):
            pair = self._variance_and_mean(*args, **kwargs)
            return pair if target is aten.var_mean.correction else pair[0]
        if getattr(target, "_opname", "") == "prepare_softmax_online":
            return self._extreme_and_sum(*args)
        if target in (aten.max.dim, aten.min.dim):
            return self._extreme_and_place(target, *args, **kwargs)
        if target is aten.slice_scatter.default:
            return self._written(*args, **kwargs)
        return super().call_function(target, args, kwargs)

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

    def _variance_and_mean(
        self, value: Any, dims: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> tuple[Any, Any]:
        """Pass over the row twice: it is in registers. In float32 at least, as Inductor's."""
        kind, convert = value.get_dtype(), prims.convert_element_type.default
        if kind in (torch.bfloat16, torch.float16):
            value = self.apply(convert, value, torch.float32)
        mean = self.apply(aten.mean.dim, value, dims, True)
        distance = self.apply(aten.sub.Tensor, value, mean)
        squares = self.apply(aten.mul.Tensor, distance, distance)
        total = self.apply(aten.sum.dim_IntList, squares, dims, keepdim)
        count = value.get_size()[-1] - (1 if correction is None else correction)
        variance = self.apply(aten.div.Tensor, total, float(max(0, count)))
        mean = mean if keepdim else self.apply(aten.mean.dim, value, dims, False)
        return self.apply(convert, variance, kind), self.apply(convert, mean, kind)

    def _written(
        self, value: Any, part: Any, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
    ) -> Any:
        """Write columns as parts side by side: a block that is not written is not looked at."""
        size, written = value.get_size()[dim], part.get_size()[dim]
        known = are_static((size, written, start or 0))
        if step != 1 or not known or dim % len(value.get_size()) != len(self.frame.lead):
            scatter = aten.slice_scatter.default
            return super().call_function(scatter, (value, part, dim, start, end, step), {})
        first = slice(start, end).indices(int(size))[0]
        sides = [(0, first), (first + int(written), int(size))]
        cut = functools.partial(self.apply, aten.slice.Tensor, value, dim)
        before, after = ([cut(*side)] * (side[0] < side[1]) for side in sides)
        return self._joined([*before, part, *after], dim)

    def _extreme_and_place(
        self, target: Any, value: Any, dim: int, keepdim: bool = False
    ) -> tuple[Any, Any]:
        is_greatest = target is aten.max.dim
        extreme = aten.amax.default if is_greatest else aten.amin.default
        place = aten.argmax.default if is_greatest else aten.argmin.default
        found = self.apply(extreme, value, [dim], keepdim)
        return found, self.apply(place, value, dim, keepdim)

    def _extreme_and_sum(self, value: Any, dim: int) -> tuple[Any, Any]:
        """Return the greatest value of a row, and the sum of exponentials below it."""
        greatest = self.apply(aten.amax.default, value, [dim], True)
        below = self.apply(aten.exp.default, self.apply(aten.sub.Tensor, value, greatest))
        return greatest, self.apply(aten.sum.dim_IntList, below, [dim], True)


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
        self.lowering = RowLowering(call.body, frame)
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
