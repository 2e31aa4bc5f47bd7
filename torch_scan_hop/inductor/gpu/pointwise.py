"""The kernel of a pointwise body: a program takes a block of lanes through all steps.

A lane is an element of the carry, which is in a register.

The conditions are those on the CPU, but for devices and dtypes: all of the body is pointwise, its
carries and ys have one shape, and a step reads the carry only where it writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from torch_scan_hop._torch.inductor_triton import TritonLines
from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.inductor.gpu.code import LANE, MASK, StepCode, indices
from torch_scan_hop.inductor.gpu.launch import (
    COPIED_BYTES,
    FEW_LANES,
    GpuKernel,
    lanes_of_a_program,
    launch_of_lanes,
)
from torch_scan_hop.inductor.gpu.serving import check_tensors
from torch_scan_hop.inductor.lane_body import PointwiseBody, independent_lanes, merged_dimensions
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_pointwise
from torch_scan_hop.inductor.step import variable


class PointwiseKernel(GpuKernel):
    kind = "one Triton kernel, lane by lane"
    check = staticmethod(check_pointwise)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel:
        check_tensors(call.examples.flat())
        return cls(call, launch_of_lanes(LaneCode(independent_lanes(call), call).source()))


class LaneCode(StepCode):
    """The kernel of ``body``, the step of ``call``."""

    shape: tuple[str, ...] = ("BLOCK",)
    arange = "tl.arange(0, BLOCK)"  # of a program's lanes
    in_lanes = MASK  # whether there are such lanes

    def __init__(self, body: PointwiseBody, call: ScanCall) -> None:
        super().__init__(call)
        self.body, self.index = body, body.index
        self.dtypes = [layout.dtype for layout in (*self.carry, *self.ys)]
        self.sizes, index_of = merged_dimensions(body, self.carry[0].size, [*self.carry, *self.ys])
        self.size = sympy.Mul(*self.sizes)
        self.lanes = [variable(f"x{k}") for k in range(len(self.sizes))]
        self.lane = list(index_of(self.lanes))
        sizes = dict(zip(self.lanes, self.sizes, strict=True))
        self.is_wide = self.needs_64_bits(body.reads(self.lane).indices, sizes)

    def head(self) -> list[str]:
        """Compute the index in each dimension from the number of the lane."""
        first = f"{LANE} = {self.program} * BLOCK + {self.arange}"
        inside = f"{self.in_lanes} = {LANE} < {self.text(self.size)}"
        return [first, inside, *indices(LANE, self.sizes, self.text)]

    def elements(self) -> int:
        return lanes_of_a_program(likely_size(self.size, fallback=FEW_LANES), COPIED_BYTES)[0]

    def step(self, lines: TritonLines) -> list[str]:
        carry = self.carries(lines)
        values = self.body.step(self.lane, carry, self.dtypes)
        return [*self.stores_of_ys(values), *self.next_carries(values[: len(carry)])]

    def stores_of_ys(self, values: Sequence[Any]) -> list[str]:
        ys = range(len(self.carry), len(values))
        return [self.store(k, values[k], self.own(k)) for k in ys]
