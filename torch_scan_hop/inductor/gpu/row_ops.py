"""The operators of a step of rows: what it reads of carries, products and reductions; and the code
of a reduction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch

from torch_scan_hop._torch.inductor_triton import TritonLines, compute_type
from torch_scan_hop._torch.inductor_values import handler_at_hand
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.row_body import PRODUCT, REDUCED, Reduction
from torch_scan_hop.inductor.lane_body import READS_ELSEWHERE
from torch_scan_hop.inductor.step import StepOps

if TYPE_CHECKING:
    from torch_scan_hop.inductor.gpu.row_code import RowCode


class RowOps(StepOps):
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
        return self._along(self.carry[position], index)

    def load(self, name: str, index: Any) -> Any:
        body = self.code.body
        if name.startswith(REDUCED):
            position = int(name.removeprefix(REDUCED))
            is_column = body.reductions[position].is_of_square
            if self._columns_from(index, body.width if is_column else 1, not is_column) != 0:
                raise Refusal("what is known of a row is read in another row")
            return self._along(self.code.reduced(self.lines, position), index)
        if not name.startswith(PRODUCT):
            return super().load(name, index)
        position = int(name.removeprefix(PRODUCT))
        columns = body.products[position].columns
        first = self._columns_from(index, columns)
        if first is None or not 0 <= first <= columns - body.width:
            raise Refusal("a product is read elsewhere than in blocks as wide as the carry")
        return self._along(self.code.multiplied(self.lines, position, int(first)), index)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        if self.code.body.has_squares:  # a mask of a row is not one of a square
            raise Refusal("parts of a row, beside squares")
        return super().masked(mask, body, other)

    def _along(self, value: Any, index: Any) -> Any:
        """Return ``value``, elements of a row, along the rows of a square if ``index`` is."""
        if self.code.down not in index.free_symbols:
            return value
        return self.lines.line(f"{value}[:, :, None]", value.dtype)

    def _columns_from(self, index: Any, width: int, is_number: bool = False) -> Any:
        """Return how far ``index`` is from a row's own element, in rows of that width."""
        *lead, own = self.code.lane
        if self.code.down in index.free_symbols:
            own = self.code.down
        row = sympy.Integer(0)
        for position, size in zip(lead, self.code.body.frame.lead, strict=True):
            row = row * size + position
        distance = sympy.expand(index - row * width - (0 if is_number else own))
        return distance if isinstance(distance, (int, sympy.Integer)) else None


# --- the code of a reduction: columns are in registers, and beside them padding ---

_CODE = {
    "sum": "tl.sum({}, 1)",
    "prod": "triton_helpers.prod({}, 1)",
    # a nan is the greatest and the least, as it is in torch
    "max": "triton_helpers.max2({}, 1)",
    "min": "triton_helpers.min2({}, 1)",
    "argmax": "triton_helpers.max_with_index({}, {}, 1)[1]",
    "argmin": "triton_helpers.min_with_index({}, {}, 1)[1]",
}


_OF_TWO = {
    "sum": "({} + {})",
    "prod": "({} * {})",
    "max": "triton_helpers.maximum({}, {})",
    "min": "triton_helpers.minimum({}, {})",
    "any": "({} | {})",
}


def of_row(reduction: Reduction, elements: Sequence[str], inside: str, column: Any) -> str:
    """Return the code that reduces the ``elements`` that are ``inside`` of a row; there are some
    for each block of it, as wide as the frame."""
    kind, dtype = reduction.kind, reduction.dtype
    element = functools.reduce(lambda a, b: _OF_TWO[kind].format(a, b), elements)
    if kind == "any":
        return f"(tl.max(tl.where({inside}, {element}, 0).to(tl.int32), 1) > 0)"
    values = f"tl.where({inside}, {element}, {_neutral(kind, dtype)}).to({compute_type(dtype)})"
    if kind.startswith("arg"):
        # padding is after all columns, and the first of equals is taken
        return _CODE[kind].format(values, f"{column}.to(tl.int64)")
    return _CODE[kind].format(values)


def _neutral(kind: str, dtype: torch.dtype) -> str:
    """Return the value that changes nothing."""
    if kind in ("sum", "prod"):
        return "0" if kind == "sum" else "1"
    is_greatest = kind.endswith("max")
    if dtype.is_floating_point:
        return f"float('{'-' if is_greatest else ''}inf')"
    if dtype is torch.bool:
        return "0" if is_greatest else "1"
    info = torch.iinfo(dtype)
    return str(info.min if is_greatest else info.max)
