"""Inductor's C++ kernels, with a loop over time inside (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.codegen.cpp import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    KernelGroup,
    LoopLevel,
    LoopNest,
    ParallelDepth,
)
from torch._inductor.ops_handler import WrapperHandler
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering, SubgraphLoweringException
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import CeilDiv, Min

__all__ = [
    "CARRY",
    "STEP",
    "NotPointwise",
    "PointwiseBody",
    "TimeLoop",
    "emit_kernel",
    "lane_symbols",
    "merged_dimensions",
]

NotPointwise = SubgraphLoweringException

# "x": symbols of that prefix are printed as they are; others would become kernel arguments
STEP = sympy.Symbol("x999", integer=True, nonnegative=True)  # in the order that steps run
TILE = sympy.Symbol("x998", integer=True, nonnegative=True)
CARRY = "scan_carry_"


class _Lowering(PointwiseSubgraphLowering):
    """Each value is computed once per place, however many others read it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, root_graph_lowering=V.graph)
        self.computed: dict[Any, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        size = n.meta.get("val")
        if isinstance(size, torch.SymInt) and n.op != "placeholder":
            return size.node.expr
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        out = super().call_function(target, args, kwargs)
        for value in out if isinstance(out, (list, tuple)) else [out]:
            box = getattr(value, "data", None)
            data = getattr(box, "data", None)
            if isinstance(box, ir.StorageBox) and isinstance(data, ir.Pointwise):
                object.__setattr__(data, "inner_fn", self._once(data, data.inner_fn))
        return out

    def _once(self, data: Any, inner_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fn(index: Any) -> Any:
            key = (id(data), tuple(index))
            if key not in self.computed:
                self.computed[key] = inner_fn(index)
            return self.computed[key]

        return fn


class _CarriesInBuffers(WrapperHandler):
    """Reads of a carry become reads of the buffer it lives in, at this lane."""

    def __init__(self, inner: Any, carry: Sequence[Any]) -> None:
        super().__init__(inner)
        self.carry = carry

    def load(self, name: str, index: Any) -> Any:
        if name.startswith(CARRY):
            return self.carry[int(name.removeprefix(CARRY))]
        return self._inner.load(name, index)


class _Reads(WrapperHandler):
    def __init__(self) -> None:
        super().__init__(V.MockHandler())
        self.found: list[tuple[str, Any]] = []

    def load(self, name: str, index: Any) -> Any:
        self.found.append((name, index))
        return self._inner.load(name, index)


@contextlib.contextmanager
def _values_read_often_stay_inline() -> Iterator[None]:
    original = ir.StorageBox.should_realize_on_reuse
    ir.StorageBox.should_realize_on_reuse = lambda *_, **__: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        ir.StorageBox.should_realize_on_reuse = original  # type: ignore[method-assign]


def _carry_input(position: int, like: Any) -> Any:
    size = like.get_size()
    layout = ir.FixedLayout(
        like.get_device(), like.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size)
    )
    return ir.TensorBox(ir.StorageBox(ir.InputBuffer(name=f"{CARRY}{position}", layout=layout)))


def _slice_at(step: Any, xs: Any) -> Any:
    data = xs.data if isinstance(xs, ir.TensorBox) else xs
    layout = xs.get_layout()
    first, *rest = layout.stride
    sliced = ir.FixedLayout(
        layout.device, layout.dtype, layout.size[1:], rest, layout.offset + step * first
    )
    base = data.data if isinstance(data, ir.ReinterpretView) else data
    return ir.TensorBox(ir.ReinterpretView(data=base, layout=sliced))


class PointwiseBody:
    """Step ``step`` as functions of an index, without buffers; NotPointwise if it needs one."""

    def __init__(self, gm: fx.GraphModule, carry: Any, xs: Any, additional: Any, step: Any) -> None:
        never = 10**9
        self.step = step
        self._lowering = _Lowering(gm)
        inputs = [
            *(_carry_input(k, c) for k, c in enumerate(carry)),
            *(_slice_at(step, x) for x in xs),
            *additional,
        ]
        inline = config.patch(
            realize_reads_threshold=never,
            realize_opcount_threshold=never,
            realize_acc_reads_threshold=never,
        )
        # a GraphLowering in all that lowerings ask of it
        handler: Any = self._lowering
        with inline, _values_read_often_stay_inline(), V.set_graph_handler(handler):
            self._lowering.run(*inputs)
        self.results: list[Any] = list(self._lowering.graph_outputs or ())

    def values(self, index: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
        self._lowering.computed.clear()
        try:
            return [
                result.make_loader()(index)
                if isinstance(result, ir.TensorBox)
                else ops.constant(result, dtype)
                for result, dtype in zip(self.results, dtypes, strict=True)
            ]
        finally:
            self._lowering.computed.clear()

    def reads(self, index: Sequence[Any]) -> list[tuple[str, Any]]:
        """(buffer, index) of everything that a step reads at ``index``."""
        reads = _Reads()
        with V.set_ops_handler(reads):
            self.values(index, [torch.float32] * len(self.results))
        return reads.found


def lane_symbols(rank: int) -> list[Any]:
    return [sympy.Symbol(f"x{k}", integer=True, nonnegative=True) for k in range(rank)]


def merged_dimensions(
    body: PointwiseBody, sizes: Sequence[Any], layouts: Sequence[Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """``sizes`` with dimensions merged where every access allows it, and indices for them."""
    index = lane_symbols(len(sizes))
    accesses = [at for _, at in body.reads(index)]
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
        with V.set_ops_handler(_CarriesInBuffers(V.ops, carry)):
            values = self.body.values(index, dtypes)
        n = len(carry)
        for buffer, value in zip(self.ys, values[n:], strict=True):
            _store(buffer, [self.body.step, *index], value)
        for buffer, value in zip(self.carry, values[:n], strict=True):
            _store(buffer, index, value)


def _store(buffer: Any, index: Sequence[Any], value: Any) -> None:
    ops.store(buffer.name, buffer.layout.make_indexer()(index), value)


class _LoopNest(LoopNest):
    """Steps run in order: only the lanes are for threads."""

    n_lane_loops = 1

    def max_parallel_depth(self) -> Any:  # type: ignore[override]
        return ParallelDepth(parallel_depth=self.n_lane_loops, start_depth=0)


class _Kernel(CppKernelProxy):
    """Tiles of lanes are the outer, parallel loop; then come steps; then the lanes of a tile."""

    work_per_lane = 1

    def size_hint(self) -> Any:  # decides the number of threads
        return super().size_hint() * self.work_per_lane

    def codegen_lanes(self, emit: Callable[[list[Any]], None], sizes: Sequence[Any]) -> None:
        group = self.kernel_group
        self.set_ranges(sizes, ())

        def generate(kind: type[CppKernel], *args: Any) -> CppKernel:
            with group.new_kernel(kind, *args) as kernel:
                index, _ = kernel.set_ranges(sizes, ())
                emit(list(index))
                return kernel

        scalar = generate(self.kernel_cls)
        nest = self.loop_nest = _LoopNest(LoopNest.build(scalar).loops)
        nest.n_lane_loops = len(sizes)
        self.kernels = [scalar]
        if self.picked_vec_isa:
            with config.patch(inplace_buffers=False):
                depth = len(sizes) - 1
                width = self.picked_vec_isa.nelements(dtype=torch.float32)
                loop = nest.tile(depth, factor=width)
                vector = generate(self.vec_kernel_cls, width, depth)
                vector.active_ranges = {loop.var: (0, loop.tiled_size)}
                scalar.inner_itervars = [loop.var]
                scalar.active_ranges = {loop.var: (loop.tiled_size, loop.size)}
                self.kernels = [vector, scalar]
        with contextlib.suppress(TypeError):  # without arguments on some versions
            self.aggregate_reduction_buffers(False, None)
        nest.set_kernel(self)

    def repeat(self, trip_count: Any, tile: int) -> None:
        """Let each ``tile`` of lanes run ``trip_count`` times before the next one."""
        self.work_per_lane = _hint(trip_count)
        nest: Any = self.loop_nest
        *outer, lanes = nest.loops
        tiles = LoopLevel(TILE, CeilDiv(lanes.size, tile))
        steps = self.kernels[-1].rename_indexing(trip_count)
        time = LoopLevel(STEP, steps, is_reduction=True)  # neither parallel nor vectorised
        lanes.offset, lanes.size = TILE * tile, Min(lanes.size, TILE * tile + tile)
        nest.loops = [*outer, tiles, time, lanes]


@contextlib.contextmanager
def _no_interpreter() -> Iterator[None]:
    """torch 2.9 asks the interpreter that lowers nodes about the node at hand."""
    node = types.SimpleNamespace(target=None, meta={}, args=(), kwargs={})
    with V.set_interpreter_handler(types.SimpleNamespace(current_node=node)):
        yield


# What the carries of a tile may take of the nearest cache: the longer the pieces of the rows
# of xs and ys that a tile touches, the more of them the prefetcher has ready.
TILE_BYTES = 2**14
VECTOR_LANES = 32  # a tile is a whole number of vectors


def _hint(size: Any) -> int:
    sizevars: Any = V.graph.sizevars
    # "size_hint" until torch 2.9
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(hint(size, fallback=TILE_BYTES))


def tile_lanes(sizes: Sequence[Any], bytes_per_lane: int) -> int:
    """Lanes of a tile: fewer where a thread would not get one otherwise."""
    *outer, lanes = map(_hint, sizes)
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
    seed, step = _Kernel(group), _Kernel(group)
    with _no_interpreter():
        seed.codegen_lanes(lambda index: loop.seed(index_of(index)), tuple(sizes))
        step.codegen_lanes(lambda index: loop.step(index_of(index)), tuple(sizes))
    step.repeat(trip_count, tile)
    for kernel in (seed, step):
        kernel.codegen_loops(group.loops_code, group.ws)
    source = group.codegen_group()
    scheduling: Any = CppScheduling.__new__(CppScheduling)
    scheduling.kernel_group = group
    with config.patch({"cpp.descriptive_names": False}):
        name = CppScheduling.define_kernel(scheduling, source, [], group.args)
    group.call_kernel(wrapper, name)
