"""The code of a kernel that is parallel in time: a program takes a few lanes, many steps at once.

::

    while first < steps:
        step = first + row                     # a tile: TIME rows of steps, BLOCK lanes
        a, b = coefficients(xs[step])
        a, b = associative_scan((a, b), compose)
        after = a * carry + b                  # each step's carry; before: that of the row above
        next, ys[step] = body(before, xs[step])
        if after is next, but for roundings:   # then all carries are those of the loop
            carry, first = next of the last row, first + rows
        else:
            try half of the rows

A composition may overflow where the loop does not (0 is carried through products of 2: their
product is infinite), and the check finds that, in the numbers of the tile. One row is a step as
the loop has it, so that a tile ends as small as it has to be. After a tile of fewer rows the next
has twice as many. Loads do not run ahead of such a loop: many threads wait at once instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.inductor_triton import TritonLines, dtype_of
from torch_scan_hop.inductor.gpu.code import MASK
from torch_scan_hop.inductor.gpu.composition import Composition, forms_of_carries
from torch_scan_hop.inductor.gpu.pointwise import LaneCode
from torch_scan_hop.inductor.lane_body import PointwiseBody
from torch_scan_hop.inductor.node import ScanCall

_OF_LANES = ("1", "BLOCK")


class TileCode(LaneCode):
    """The kernel of ``body`` in tiles of ``rows`` steps; Refusal if steps do not compose."""

    arange = "tl.arange(0, BLOCK)[None, :]"
    in_lanes = "in_lanes"
    stored = f"{MASK} & (row < kept)"  # nothing is stored twice, by another thread

    def __init__(self, body: PointwiseBody, call: ScanCall, rows: int) -> None:
        super().__init__(body, call)
        self.rows = rows
        self.shape = (str(rows), "BLOCK")

    def head(self) -> list[str]:
        return [
            *super().head(),
            f"row = tl.arange(0, {self.rows})[:, None]",
            f"{MASK} = tl.broadcast_to({self.in_lanes}, [{', '.join(self.shape)}])",
        ]

    def functions(self) -> list[str]:
        return [*self.composition.function(), ""]

    def _loop_header(self) -> list[str]:
        steps = self.text(self.trip_count)
        return [
            "first = tl.full([], 0, tl.int64)",
            f"most = tl.full([], {self.rows}, tl.int64)",
            f"while first < {steps}:",
            f"    rows = tl.minimum(most, {steps} - first)",
            "    step = first + row",
            f"    {MASK} = {self.in_lanes} & (row < rows)",
        ]

    def _first(self, position: int) -> list[str]:
        """Emit the first carry, which is one row."""
        carry = f"carry{position}"
        return [*super()._first(position), f"{carry} = {_row(carry, '0')}"]

    def step(self, lines: TritonLines) -> list[str]:
        n, dtypes = len(self.carry), self.dtypes
        forms = forms_of_carries(self.body, self.lane, dtypes[:n])
        self.composition = Composition(forms)
        shape = ", ".join(self.shape)
        lines.write([*self.composition.of_rows(MASK, shape), *self.composition.scanned()])
        lines.write([f"above = tl.broadcast_to(tl.maximum(row - 1, 0), [{shape}])"])
        lines.write([self._before(k) for k in range(n)])
        before = [lines.variable(f"before{k}", dtype) for k, dtype in enumerate(dtypes[:n])]
        values = self.body.step(self.lane, before, dtypes)
        lines.write([f"next{k} = {self._block(values[k], dtypes[k])}" for k in range(n)])
        lines.write(self._kept())
        return [*self.stores_of_ys(values), *self._turn()]

    def _before(self, k: int) -> str:
        """Return the carry that comes into each row."""
        return f"before{k} = tl.where(row == 0, carry{k}, tl.gather(after{k}, above, 0))"

    def _kept(self) -> list[str]:
        """Emit how many rows are kept: all or none, but a single row always."""
        if not self.composition.checked:
            return ["kept = rows"]
        return [
            "agrees = row >= 0",
            *self.composition.agreement(),
            f"wrong = tl.sum(tl.where({MASK} & (agrees == 0), 1, 0))",
            "kept = tl.where((wrong == 0) | (rows == 1), rows, 0)",
        ]

    def _turn(self) -> list[str]:
        last = "(rows - 1).to(tl.int32)"
        carries = [
            f"carry{k} = tl.where(kept > 0, {_row(f'next{k}', last)}, carry{k})"
            for k in range(len(self.carry))
        ]
        return [
            *carries,
            "first += kept",
            f"most = tl.where(kept > 0, tl.minimum(2 * most, {self.rows}), (rows + 1) // 2)",
        ]

    # --- addresses ---

    def store(self, position: int, value: Any, index: Any) -> str:
        if position >= len(self.carry):
            return super().store(position, value, index)
        pointer = self.parameters.written(position, self.carry[position].dtype)
        address = super().address(pointer, index, _OF_LANES)
        return f"tl.store({address}, {value}, {self.in_lanes})"

    def load(self, name: str, index: Any, mask: str | None) -> tuple[str, torch.dtype]:
        if mask is not None or not self._is_invariant(index):
            return super().load(name, index, mask)
        # one row is read, for all
        dtype = dtype_of(name)
        address = super().address(self.parameters.read(name, dtype), index, _OF_LANES)
        loaded = f"tl.load({address}, {self.in_lanes})"
        return f"tl.broadcast_to({loaded}, [{', '.join(self.shape)}])", dtype

    def address(self, pointer: str, index: Any, shape: Sequence[str] = ()) -> str:
        address = super().address(pointer, index, shape)
        return f"tl.broadcast_to({address}, [{', '.join(shape or self.shape)}])"


def _row(block: str, number: str) -> str:
    """Return one row of a block, bit for bit."""
    return f"tl.gather({block}, tl.full([1, BLOCK], 0, tl.int32) + {number}, 0)"
