"""What Inductor's C++ kernels with a loop over time have in common (checked on torch 2.9.1, 2.13.0,
2.15.0).

``inductor_lanes`` has kernels of pointwise bodies, ``inductor_rows`` those with products. Import
them only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.codegen.common import OptimizationContext
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
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, Min

from torch_scan_hop._torch.inductor import is_unrealized

__all__ = [
    "CARRY",
    "STEP",
    "TILE",
    "LoopKernel",
    "Lowering",
    "NotPointwise",
    "Reads",
    "StepOps",
    "carry_position",
    "define_kernel",
    "lane_symbols",
    "likely_size",
    "masked",
    "no_interpreter",
    "step_inputs",
    "step_of",
]

NotPointwise = SubgraphLoweringException

# "x": symbols of that prefix are printed as they are; others would become kernel arguments
STEP = sympy.Symbol("x999", integer=True, nonnegative=True)  # in the order that steps run
TILE = sympy.Symbol("x998", integer=True, nonnegative=True)
CARRY = "scan_carry_"


def lane_symbols(rank: int) -> list[Any]:
    return [sympy.Symbol(f"x{k}", integer=True, nonnegative=True) for k in range(rank)]


def carry_position(name: str) -> int | None:
    """Of the carry that a buffer's name stands for, if it does."""
    return int(name.removeprefix(CARRY)) if name.startswith(CARRY) else None


def likely_size(size: Any, fallback: int) -> int:
    sizevars: Any = V.graph.sizevars
    # "size_hint" until torch 2.9
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(hint(size, fallback=fallback))


# --- the body as functions of an index ---


class Lowering(PointwiseSubgraphLowering):
    """Values as functions of an index, without buffers; NotPointwise if one is needed.

    Each is computed once per place, however many others read it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, root_graph_lowering=V.graph)
        self._computed: dict[Any, Any] = {}

    def lower(self, inputs: Sequence[Any]) -> list[Any]:
        never = 10**9
        inline = config.patch(
            realize_reads_threshold=never,
            realize_opcount_threshold=never,
            realize_acc_reads_threshold=never,
        )
        # a GraphLowering in all that lowerings ask of it
        handler: Any = self
        with inline, _values_read_often_stay_inline(), V.set_graph_handler(handler):
            self.run(*inputs)
        return list(self.graph_outputs or ())

    def run_node(self, n: fx.Node) -> Any:
        size = n.meta.get("val")
        if isinstance(size, torch.SymInt) and n.op != "placeholder":
            return size.node.expr
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        out = super().call_function(target, args, kwargs)
        for value in out if isinstance(out, (list, tuple)) else [out]:
            self.compute_once(value)
        return out

    def compute_once(self, value: Any) -> None:
        box = getattr(value, "data", None)
        data = getattr(box, "data", None)
        if isinstance(box, ir.StorageBox) and isinstance(data, ir.Pointwise):
            object.__setattr__(data, "inner_fn", self._once(data, data.inner_fn))

    def _once(self, data: Any, inner_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fn(index: Any) -> Any:
            key = (id(data), tuple(index))
            if key not in self._computed:
                self._computed[key] = inner_fn(index)
            return self._computed[key]

        return fn

    @contextlib.contextmanager
    def fresh_values(self) -> Iterator[None]:
        """What was computed outside is not there inside, nor the other way round."""
        outside, self._computed = self._computed, {}
        try:
            yield
        finally:
            self._computed = outside

    @contextlib.contextmanager
    def scope_of_values(self) -> Iterator[None]:
        """What was computed outside is there inside, but not the other way round."""
        outside = self._computed
        self._computed = dict(outside)
        try:
            yield
        finally:
            self._computed = outside


@contextlib.contextmanager
def _values_read_often_stay_inline() -> Iterator[None]:
    original = ir.StorageBox.should_realize_on_reuse
    ir.StorageBox.should_realize_on_reuse = lambda *_, **__: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        ir.StorageBox.should_realize_on_reuse = original  # type: ignore[method-assign]


def step_inputs(roles: Any, step: Any) -> list[Any]:
    """What a body is lowered with: carries by name, xs at ``step``, additional inputs."""
    return [
        *(_carry_input(k, c) for k, c in enumerate(roles.carry)),
        *(_slice_at(step, x) for x in roles.xs),
        *roles.additional,
    ]


def step_of(trip_count: Any, reverse: bool) -> Any:
    """The index of the step that the loop is at."""
    return trip_count - 1 - STEP if reverse else STEP


def _carry_input(position: int, like: Any) -> Any:
    size = like.get_size()
    layout = ir.FixedLayout(
        like.get_device(), like.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size)
    )
    return ir.TensorBox(ir.StorageBox(ir.InputBuffer(name=f"{CARRY}{position}", layout=layout)))


def _slice_at(step: Any, xs: Any) -> Any:
    if is_unrealized(xs):
        load = xs.make_loader()
        return ir.Pointwise.create(
            device=xs.get_device(),
            dtype=xs.get_dtype(),
            inner_fn=lambda index: load([step, *index]),
            ranges=list(xs.get_size()[1:]),
        )
    data = xs.data if isinstance(xs, ir.TensorBox) else xs
    layout = xs.get_layout()
    first, *rest = layout.stride
    sliced = ir.FixedLayout(
        layout.device, layout.dtype, layout.size[1:], rest, layout.offset + step * first
    )
    base = data.data if isinstance(data, ir.ReinterpretView) else data
    return ir.TensorBox(ir.ReinterpretView(data=base, layout=sliced))


# (tanh(x) / x - 1) / x^2 as a polynomial in x^2 for |x| < TANH_SMALL, lowest degree first: least
# squares weighted until all extremes of the relative error were equal, 4e-9 (Lawson's algorithm)
TANH_TERMS = [-0.3333328068, 0.1333144158, -0.05373971537, 0.0206390880, -0.005704986863]
TANH_SMALL = 0.625


def _tanh(inner: Any, x: Any) -> Any:
    """tanh of a float32, within 2 ulp; the vectorised one of Inductor is within 1, and slow."""
    constant = lambda value: inner.constant(value, torch.float32)  # noqa: E731
    square = inner.mul(x, x)
    *terms, series = map(constant, TANH_TERMS)
    for term in reversed(terms):
        series = inner.add(inner.mul(series, square), term)
    near_zero = inner.add(x, inner.mul(x, inner.mul(square, series)))
    size = inner.abs(x)
    growth = inner.exp(inner.add(size, size))
    far = inner.sub(constant(1.0), inner.truediv(constant(2.0), inner.add(growth, constant(1.0))))
    far = inner.where(inner.lt(x, constant(0.0)), inner.neg(far), far)
    return inner.where(inner.lt(size, constant(TANH_SMALL)), near_zero, far)


def masked(inner: Any, mask: Any, body: Callable[[], Any], other: Any) -> Any:
    """``ops.masked`` where no node of a graph says what type the result is of."""

    def typed() -> Any:
        result = body()
        result = getattr(result, "value", result)  # what "ops" wraps
        V.interpreter.current_node.meta[OptimizationContext.key].dtype = result.dtype
        return result

    return inner.masked(mask, typed, other)


class StepOps(WrapperHandler):
    """Reads of carry ``k`` at an index become ``read(k, index)``.

    What is computed behind a mask is local to it.
    """

    def __init__(self, inner: Any, lowering: Lowering, read: Callable[[int, Any], Any]) -> None:
        super().__init__(inner)
        self.lowering = lowering
        self.read = read

    def load(self, name: str, index: Any) -> Any:
        position = carry_position(name)
        if position is not None:
            return self.read(position, index)
        return self._inner.load(name, index)

    def tanh(self, x: Any) -> Any:
        if getattr(x, "dtype", None) is torch.float32:
            return _tanh(self._inner, x)
        return self._inner.tanh(x)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        def scoped() -> Any:
            with self.lowering.scope_of_values():
                return body()

        return masked(self._inner, mask, scoped, other)


class Reads(WrapperHandler):
    """(buffer, index) of everything that is read."""

    def __init__(self) -> None:
        super().__init__(V.MockHandler())
        self.found: list[tuple[str, Any]] = []
        #: every expression of an index: those of loads, and those that are values
        self.indices: list[Any] = []

    def load(self, name: str, index: Any) -> Any:
        self.found.append((name, index))
        self.indices.append(index)
        return self._inner.load(name, index)

    def index_expr(self, index: Any, dtype: torch.dtype) -> Any:
        self.indices.append(index)
        return self._inner.index_expr(index, dtype)


# --- kernels ---


class _LoopNest(LoopNest):
    """Steps run in order: only lanes are for threads."""

    n_parallel_loops = 0

    def max_parallel_depth(self) -> Any:  # type: ignore[override]
        return ParallelDepth(parallel_depth=self.n_parallel_loops, start_depth=0)


class LoopKernel(CppKernelProxy):
    """A nest of loops over lanes, of which the last is vectorised."""

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

    def for_threads(self) -> None:
        """Threads may share the lanes."""
        nest: Any = self.loop_nest
        nest.n_parallel_loops = len(nest.loops)

    def repeat(self, trip_count: Any, tile: int) -> None:
        """Let each ``tile`` of lanes run ``trip_count`` times before the next one."""
        self.work_per_lane = likely_size(trip_count, fallback=tile)
        nest: Any = self.loop_nest
        *outer, lanes = nest.loops
        tiles = LoopLevel(TILE, CeilDiv(lanes.size, tile))
        steps = self.kernels[-1].rename_indexing(trip_count)
        time = LoopLevel(STEP, steps, is_reduction=True)  # neither parallel nor vectorised
        lanes.offset, lanes.size = TILE * tile, Min(lanes.size, TILE * tile + tile)
        nest.loops = [*outer, tiles, time, lanes]

    def between(self, first: Any, end: Any) -> None:
        """Of the outermost loop, these turns only."""
        nest: Any = self.loop_nest
        nest.loops[0].offset, nest.loops[0].size = first, end


@contextlib.contextmanager
def no_interpreter() -> Iterator[None]:
    """Kernels ask the interpreter that lowers nodes about the node at hand: it is no node."""
    meta = {OptimizationContext.key: OptimizationContext()}
    node = types.SimpleNamespace(target=None, meta=meta, args=(), kwargs={})
    with V.set_interpreter_handler(types.SimpleNamespace(current_node=node)):
        yield


def define_kernel(wrapper: Any, group: KernelGroup, declarations: str) -> None:
    """Define the kernel that ``group`` has the code of, after ``declarations``; call it here."""
    function = 'extern "C"'
    source = group.codegen_group().replace(function, f"{declarations}{function}", 1)
    scheduling: Any = CppScheduling.__new__(CppScheduling)
    scheduling.kernel_group = group
    with config.patch({"cpp.descriptive_names": False}):
        name = CppScheduling.define_kernel(scheduling, source, [], group.args)
    group.call_kernel(wrapper, name)
