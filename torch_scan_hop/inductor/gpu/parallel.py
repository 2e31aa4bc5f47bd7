"""The kernel of long and thin scans whose steps compose: parallel in time.

A lane goes through its steps one after the other, and waits for each. With at most a warp of lanes
for each multiprocessor, most of a GPU is idle. If a step is affine in its carries, or takes a
maximum or minimum, a program takes a tile: a few lanes, and many steps at once. The choice depends
on lanes and steps alone, so that a program compiled for some sizes has one kernel for them::

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

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.inductor_triton import TritonLines, dtype_of
from torch_scan_hop._torch.inductor_values import handled_by, handler_at_hand
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.code import MASK
from torch_scan_hop.inductor.gpu.composition import Composition, forms_of_carries
from torch_scan_hop.inductor.gpu.launch import WARP, GpuKernel, Launch
from torch_scan_hop.inductor.gpu.pointwise import LaneCode
from torch_scan_hop.inductor.gpu.serving import check_tensors, multiprocessors_of
from torch_scan_hop.inductor.lane_body import PointwiseBody, check_one_shape, independent_lanes
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_pointwise
from torch_scan_hop.inductor.step import StepOps
from torch_scan_hop.rewrites import current_options

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
        dtypes = [layout.dtype for layout in (*self.carry, *self.ys)]
        n = len(self.carry)
        forms = forms_of_carries(self.body, self.lane, dtypes[:n])
        self.composition = Composition(forms)
        shape = ", ".join(self.shape)
        lines.write([*self.composition.of_rows(MASK, shape), *self.composition.scanned()])
        lines.write([f"above = tl.broadcast_to(tl.maximum(row - 1, 0), [{shape}])"])
        lines.write([self._before(k) for k in range(n)])
        before = [lines.variable(f"before{k}", dtype) for k, dtype in enumerate(dtypes[:n])]
        handler = StepOps(handler_at_hand(), self.body.lowering, lambda k, _: before[k])
        with handled_by(handler):
            values = self.body.values(self.lane, dtypes)
        lines.write([f"next{k} = {self._block(values[k], dtypes[k])}" for k in range(n)])
        lines.write(self._kept())
        stores = [self.store(k, values[k], self.own(k)) for k in range(n, len(values))]
        return stores + self._turn()

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


# None of these is measured on a GPU. Below so many steps, a launch takes about as long.
LEAST_STEPS = 256
ELEMENTS = 1024  # of a tile: 4 of each thread
MANY_BUFFERS = 10  # from here on a tile has half of them, since a thread has so many registers
MOST_LANES = 8  # of a program: as many floats as memory is read in at once, if they are neighbours
WARPS = 8


class ParallelKernel(GpuKernel):
    kind = "one Triton kernel, parallel in time"

    @staticmethod
    def check(body: fx.GraphModule) -> None:
        if not current_options().parallel_in_time:
            raise Refusal("parallel_in_time is switched off")
        check_pointwise(body)

    @classmethod
    def lower(cls, call: ScanCall) -> ParallelKernel:
        check_tensors(call.examples.flat())
        check_one_shape(call.examples)
        carry = call.examples.inputs.carry[0]
        check_long_and_thin(call.examples.inputs.trip_count, carry)
        body = independent_lanes(call)
        lanes = lanes_of_a_program(lanes_of(carry))
        source = TileCode(body, call, ELEMENTS // lanes).source()
        if len(source.arguments) > MANY_BUFFERS:
            source = TileCode(body, call, ELEMENTS // lanes // 2).source()
        return cls(call, Launch(source, lanes, WARPS))


def check_long_and_thin(trip_count: Any, carry: torch.Tensor) -> None:
    """Refuse a scan that is not long and thin: one that is leaves a GPU idle."""
    steps, lanes = likely_value(trip_count), lanes_of(carry)
    if steps < LEAST_STEPS:
        raise Refusal(f"{steps} steps are few: it is for {LEAST_STEPS} and more")
    most = WARP * multiprocessors_of(carry.device)
    if lanes > most:
        raise Refusal(f"{lanes} lanes are many: it is for up to {most}")


def is_long_and_thin(trip_count: Any, carry: torch.Tensor) -> bool:
    try:
        check_long_and_thin(trip_count, carry)
    except Refusal:
        return False
    return True


def lanes_of(carry: torch.Tensor) -> int:
    return math.prod(map(likely_value, carry.shape))


def lanes_of_a_program(lanes: int) -> int:
    """
    >>> lanes_of_a_program(1), lanes_of_a_program(3), lanes_of_a_program(1000)
    (1, 4, 8)
    """
    return min(MOST_LANES, 1 << max(0, lanes - 1).bit_length())
