"""The kernel of long and thin scans whose steps compose: parallel in time.

A lane goes through its steps one after the other, and waits for each. With at most a warp of lanes
for each multiprocessor, most of a GPU is idle. If a step is affine in its carries, or takes a
maximum or minimum, a program takes a tile of steps at once (``tiles``). The choice depends on lanes
and steps alone, so that a program compiled for some sizes has one kernel for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.launch import WARP, GpuKernel, Launch
from torch_scan_hop.inductor.gpu.serving import check_tensors, multiprocessors_of
from torch_scan_hop.inductor.gpu.tiles import TileCode
from torch_scan_hop.inductor.lane_body import check_one_shape, independent_lanes
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import check_pointwise
from torch_scan_hop.rewrites import current_options

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
