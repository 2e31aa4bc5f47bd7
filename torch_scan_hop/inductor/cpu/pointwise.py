"""The kernel of a pointwise body: each lane, an element of the carry, runs by itself.

A body qualifies if all of it is pointwise on the CPU, its carries and ys have one shape, and a
step reads the carry only where it writes it.

Lanes are independent of one another, so they are the outer loop, which is split among threads and
vectorised. A tile of lanes takes all steps before the next tile. So its carries stay in the nearest
cache, and xs are read and ys written once, in long enough pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_scan_hop._torch.inductor_cpp import (
    DTYPE_TO_CPP,
    KernelFunction,
    Max,
    Min,
    address_of,
    after_stores,
    is_removed,
    keep_stores_to,
    vector_lanes,
    written_pointer,
)
from torch_scan_hop._torch.inductor_values import (
    handler_at_hand,
    likely_size,
    no_interpreter,
    ops,
)
from torch_scan_hop._torch.inductor_vectors import store_side_by_side
from torch_scan_hop.inductor.cpu.fits import are_tails_worth_masks, check_tensors
from torch_scan_hop.inductor.cpu.places import buffer_like
from torch_scan_hop.inductor.cpu.sharing import share_span, threads_for
from torch_scan_hop.inductor.cpu.vector_ops import FusedCarries, VectorOps
from torch_scan_hop.inductor.lane_body import PointwiseBody, independent_lanes, merged_dimensions
from torch_scan_hop.inductor.node import PARTS_PREFIX, ScanCall
from torch_scan_hop.inductor.qualify import check_pointwise
from torch_scan_hop.inductor.spans import KernelInSpans, Span
from torch_scan_hop.inductor.step import STEP, TILE


@dataclass(frozen=True)
class TimeLoop:
    """The code for a lane, scalar or vector; between steps the buffers ``carry`` hold carries."""

    body: PointwiseBody
    init: Any
    carry: Any
    ys: Any
    operators: type[VectorOps] = VectorOps

    def seed(self, lane: Sequence[Any]) -> None:
        for value, buffer in zip(self.init, self.carry, strict=True):
            keep_stores_to(buffer.name)
            _store(buffer, lane, value.make_loader()(lane))

    def step(self, lane: Sequence[Any]) -> None:
        dtypes = [buffer.layout.dtype for buffer in (*self.carry, *self.ys)]
        for buffer in self.carry:
            written_pointer(buffer.name)
            keep_stores_to(buffer.name)
        handler = handler_at_hand()
        carry = [handler.load(b.name, b.layout.make_indexer()(lane)) for b in self.carry]
        values = self.body.step(lane, carry, dtypes, self.operators)
        n, next_index = len(carry), self.body.index.subs(STEP, STEP + 1)
        self._store_ys([self.body.index, *lane], values[n:])
        for buffer in _one_of_each_name(self.ys):
            _prefetch_to_write(buffer, [next_index, *lane])
        for buffer, value in zip(self.carry, values[:n], strict=True):
            _store(buffer, lane, value)

    def _store_ys(self, index: Sequence[Any], values: Sequence[Any]) -> None:
        pairs = iter(zip(self.ys, values, strict=True))
        for buffer, value in pairs:
            if buffer.name.startswith(PARTS_PREFIX):
                keep_stores_to(buffer.name)
                _, imaginary = next(pairs)
                store_side_by_side(
                    buffer.name, buffer.layout.make_indexer()(index), value, imaginary
                )
            else:
                _store(buffer, index, value)


def _one_of_each_name(buffers: Sequence[Any]) -> list[Any]:
    """Return one buffer of each name: the parts of a complex stack share one, and cache lines."""
    first: dict[str, Any] = {}
    for buffer in buffers:
        first.setdefault(buffer.name, buffer)
    return list(first.values())


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
    """Prefetch where the next step writes: hardware does not foresee that it is another page."""
    if not is_removed(buffer.name):
        address = address_of(buffer.name, buffer.layout.make_indexer()(index))
        after_stores(f"SCAN_PREFETCH_TO_WRITE({address});")


# The part of the nearest cache that the carries of a tile may take. It should be large: the longer
# the pieces of xs and ys that a tile touches, the more of them the prefetcher has ready.
TILE_BYTES = 2**14
VECTOR_LANES = 32  # a tile is a whole number of vectors


def tile_lanes(sizes: Sequence[Any], bytes_per_lane: int, threads: int) -> int:
    """Return the lanes of a tile: fewer if some thread would get none otherwise."""
    *outer, lanes = (likely_size(size, fallback=TILE_BYTES) for size in sizes)
    share = lanes * max(1, math.prod(outer)) // threads
    tile = min(TILE_BYTES // bytes_per_lane, lanes, share)
    return max(1, -(-tile // VECTOR_LANES)) * VECTOR_LANES


def _is_one_tile(sizes: Sequence[Any], tile: int) -> bool:
    *outer, lanes = sizes
    return all(size == 1 for size in outer) and lanes.is_Integer and int(lanes) <= tile


def _parts(function: KernelFunction, node: Any, position: int) -> Any:
    """Declare a variable of the function for a complex result as reals in a row."""
    name, layout = f"{PARTS_PREFIX}{position}", node.destinations[position].layout
    stack = function.written_pointer(node.outputs[position].get_name())
    kind = DTYPE_TO_CPP[layout.dtype]
    function.code.writeline(f"auto {name} = reinterpret_cast<{kind}*>({stack});")
    return buffer_like(name, layout)


def _emit_tiles(
    function: KernelFunction, loop: TimeLoop, index_of: Any, sizes: Sequence[Any], span: Span
) -> None:
    """Emit the loop over tiles; between steps the buffers of the final carries hold the carries."""
    bytes_per_lane = sum(2 * store.layout.dtype.itemsize for store in loop.carry)
    threads = threads_for(span)
    tile = tile_lanes(sizes, bytes_per_lane, threads)
    seed = function.nest(lambda lane: loop.seed(index_of(lane)), sizes)
    step = function.nest(lambda lane: loop.step(index_of(lane)), sizes)
    # even with one thread at hand, what OpenMP runs keeps its carry in memory between two steps
    if threads > 1 and not _is_one_tile(sizes, tile):
        share_span(function, span)
        for nest in (seed, step):
            nest.for_threads()
    # init is copied by the call that runs the first step
    seed.repeat(STEP, (0, Max(0, 1 - span.first)), TILE, tile, likely=1)
    likely = likely_size(span.trip_count, fallback=tile)
    step.repeat(STEP, (span.first, span.end), TILE, tile, likely)
    for nest in (seed, step):
        function.add(nest)


HELD = "scan_buf_held_"


def are_few(sizes: Sequence[Any]) -> bool:
    """Return True if the lanes do not fill a vector; then a step is written out for each lane."""
    few = vector_lanes() or VECTOR_LANES
    return _is_one_tile(sizes, few - 1) and sizes[-1] != 0


def _emit_few_lanes(
    function: KernelFunction, loop: TimeLoop, index_of: Any, sizes: Sequence[Any], span: Span
) -> None:
    """Write out all lanes of a step; carries are variables of the function.

    ::

        float held[2];
        held = init, or where the span before has left it
        for each step of the span:
            lane 0 of it; lane 1 of it
        the carry = held

    A carry in a buffer is stored and loaded again between two steps, which takes longer than the
    arithmetic of a small step does.
    """
    held = [buffer_like(f"{HELD}{k}", b.layout) for k, b in enumerate(loop.carry)]
    of_scalars = dataclasses.replace(loop, carry=held, operators=FusedCarries)

    def add(emit: Callable[[Sequence[Any]], None], steps: tuple[Any, Any]) -> None:
        nest = function.nest(lambda lane: emit(index_of(lane)), sizes, in_vectors=False)
        nest.repeat_unrolled(STEP, steps)
        function.add(nest)

    with function.local_buffers(held):
        for buffer in held:
            function.declare_array(buffer)
        add(of_scalars.seed, (0, Max(0, 1 - span.first)))
        add(functools.partial(_copy, loop.carry, held), (0, Min(1, span.first)))
        add(of_scalars.step, (span.first, span.end))
        add(functools.partial(_copy, held, loop.carry), (0, 1))


def _copy(sources: Sequence[Any], destinations: Sequence[Any], lane: Sequence[Any]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        written_pointer(source.name)  # the kernel writes it, too
        keep_stores_to(destination.name)
        value = ops.load(source.name, source.layout.make_indexer()(lane))
        _store(destination, lane, value)


class PointwiseKernel(KernelInSpans):
    kind = "one kernel, lane by lane"
    joins_parts = True
    check = staticmethod(check_pointwise)

    @classmethod
    def lower(cls, call: ScanCall) -> PointwiseKernel:
        check_tensors(call.examples)
        return cls(call, independent_lanes(call))

    def call_span(self, wrapper: Any) -> None:
        n = len(self.operands.carry)
        loop = TimeLoop(
            self.step, self.operands.carry, self.destinations[:n], self.destinations[n:]
        )
        layouts = [destination.layout for destination in self.destinations]
        sizes, index_of = merged_dimensions(self.step, layouts[0].size, layouts)
        function = KernelFunction(self, are_tails_worth_masks(self.body))
        stacks = [_parts(function, self, k) for k in self.joined]
        with no_interpreter(), function.local_buffers(stacks):
            few = are_few(sizes) and not function.masks_tail_of(sizes[-1])
            emit = _emit_few_lanes if few else _emit_tiles
            emit(function, loop, index_of, sizes, self.span)
        function.declare(PREFETCH_SOURCE)
        function.define_and_call(wrapper)
