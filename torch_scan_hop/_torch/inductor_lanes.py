"""C++ kernels of pointwise bodies: each lane runs by itself (checked on torch 2.9.1, 2.13.0,
2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.cpp import KernelGroup
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V, ops

from torch_scan_hop._torch.inductor_cpp import (
    STEP,
    LoopKernel,
    Lowering,
    Reads,
    StepOps,
    define_kernel,
    lane_symbols,
    likely_size,
    no_interpreter,
    step_inputs,
)

__all__ = ["PointwiseBody", "TimeLoop", "emit_kernel", "merged_dimensions"]


class PointwiseBody:
    """Step ``step`` as functions of an index; NotPointwise if it needs a buffer."""

    def __init__(self, gm: fx.GraphModule, roles: Any, step: Any) -> None:
        self.step = step
        self.lowering = Lowering(gm)
        self.results = self.lowering.lower(step_inputs(roles, step))

    def values(self, index: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
        with self.lowering.fresh_values():
            return [
                result.make_loader()(index)
                if isinstance(result, ir.TensorBox)
                else ops.constant(result, dtype)
                for result, dtype in zip(self.results, dtypes, strict=True)
            ]

    def reads(self, index: Sequence[Any]) -> Reads:
        """What a step reads at ``index``."""
        reads = Reads()
        with V.set_ops_handler(reads):
            self.values(index, [torch.float32] * len(self.results))
        return reads


def merged_dimensions(
    body: PointwiseBody, sizes: Sequence[Any], layouts: Sequence[Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """``sizes`` with dimensions merged where every access allows it, and indices for them."""
    index = lane_symbols(len(sizes))
    accesses = body.reads(index).indices
    accesses += [
        layout.make_indexer()(index) for layout in layouts if len(layout.size) == len(index)
    ]
    merged, reindex, _ = V.graph.sizevars._simplify_loops(index, list(sizes), accesses)
    # a scalar carry is one lane
    return list(merged) or [sympy.Integer(1)], lambda lanes: reindex(lanes[: len(merged)])


class TimeLoop:
    """What a kernel does with one lane; called once for each kind of kernel (scalar, vector).

    Carries live in the buffers where they end, of which a tile stays in the cache.
    """

    def __init__(self, body: PointwiseBody, init: Any, carry: Any, ys: Any) -> None:
        self.body = body
        self.init = init
        self.carry = carry
        self.ys = ys

    def seed(self, index: Sequence[Any]) -> None:
        for value, buffer in zip(self.init, self.carry, strict=True):
            V.kernel.must_keep_buffers.add(buffer.name)
            _store(buffer, index, value.make_loader()(index))

    def step(self, index: Sequence[Any]) -> None:
        dtypes = [buffer.layout.dtype for buffer in (*self.carry, *self.ys)]
        for buffer in self.carry:
            V.kernel.args.output(buffer.name)  # written, so read through the same pointer
            V.kernel.must_keep_buffers.add(buffer.name)  # even if nothing reads it later
        # through the handler itself: "ops" wraps what it returns, which hides that it is a vector
        carry = [V.ops.load(b.name, b.layout.make_indexer()(index)) for b in self.carry]
        with V.set_ops_handler(StepOps(V.ops, self.body.lowering, lambda k, _: carry[k])):
            values = self.body.values(index, dtypes)
        n, next_step = len(carry), self.body.step.subs(STEP, STEP + 1)
        for buffer, value in zip(self.ys, values[n:], strict=True):
            _store(buffer, [self.body.step, *index], value)
            _prefetch_to_write(buffer, [next_step, *index])
        for buffer, value in zip(self.carry, values[:n], strict=True):
            _store(buffer, index, value)


def _store(buffer: Any, index: Sequence[Any], value: Any) -> None:
    ops.store(buffer.name, buffer.layout.make_indexer()(index), value)


PREFETCH_SOURCE = """
#if defined(__GNUC__)
#define SCAN_PREFETCH_TO_WRITE(address) __builtin_prefetch(address, 1)
#else
#define SCAN_PREFETCH_TO_WRITE(address)
#endif
"""


def _prefetch_to_write(buffer: Any, index: Sequence[Any]) -> None:
    """No prefetcher of hardware foresees the page that the next step writes to."""
    if buffer.name in V.graph.removed_buffers:  # nothing reads it, so it is not written
        return
    kernel: Any = V.kernel
    place = kernel.rename_indexing(buffer.layout.make_indexer()(index))
    address = f"{kernel.args.output(buffer.name)} + {cexpr_index(place)}"
    kernel.stores.writeline(f"SCAN_PREFETCH_TO_WRITE({address});")


# What the carries of a tile may take of the nearest cache: the longer the pieces of the rows
# of xs and ys that a tile touches, the more of them the prefetcher has ready.
TILE_BYTES = 2**14
VECTOR_LANES = 32  # a tile is a whole number of vectors


def tile_lanes(sizes: Sequence[Any], bytes_per_lane: int) -> int:
    """Lanes of a tile: fewer where a thread would not get one otherwise."""
    *outer, lanes = (likely_size(size, fallback=TILE_BYTES) for size in sizes)
    share = lanes * max(1, math.prod(outer)) // parallel_num_threads()
    tile = min(TILE_BYTES // bytes_per_lane, lanes, share)
    return max(1, -(-tile // VECTOR_LANES)) * VECTOR_LANES


def emit_kernel(
    wrapper: Any, node: Any, loop: TimeLoop, index_of: Any, sizes: Sequence[Any], trip_count: Any
) -> None:
    """Define a kernel that runs ``loop`` for each lane of ``sizes``, and call it here."""
    bytes_per_lane = sum(2 * store.layout.dtype.itemsize for store in loop.carry)
    tile = tile_lanes(sizes, bytes_per_lane)
    group = KernelGroup()
    group.scheduled_nodes = [node]  # not empty, or there would be no code
    seed, step = LoopKernel(group), LoopKernel(group)
    with no_interpreter():
        seed.codegen_lanes(lambda index: loop.seed(index_of(index)), tuple(sizes))
        step.codegen_lanes(lambda index: loop.step(index_of(index)), tuple(sizes))
    for kernel in (seed, step):
        kernel.for_threads()
    step.repeat(trip_count, tile)
    for kernel in (seed, step):
        kernel.codegen_loops(group.loops_code, group.ws)
    define_kernel(wrapper, group, PREFETCH_SOURCE)
