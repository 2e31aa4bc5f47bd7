"""Inductor's C++ kernels, with a loop over time inside (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
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
from torch._inductor.codegen.cpp import (
    BracesBuffer,
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    CppVecKernel,
    KernelGroup,
    LoopNest,
)
from torch._inductor.ops_handler import WrapperHandler
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering, SubgraphLoweringException
from torch._inductor.virtualized import V, ops

__all__ = [
    "CARRY",
    "NotPointwise",
    "PointwiseBody",
    "TimeLoop",
    "emit_kernel",
    "lane_symbols",
    "merged_dimensions",
]

NotPointwise = SubgraphLoweringException

# "x": symbols of that prefix are printed as they are; others would become kernel arguments
STEP = sympy.Symbol("x999", integer=True, nonnegative=True)
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


class _CarriesInRegisters(WrapperHandler):
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


def _slice_at_step(xs: Any) -> Any:
    data = xs.data if isinstance(xs, ir.TensorBox) else xs
    layout = xs.get_layout()
    first, *rest = layout.stride
    sliced = ir.FixedLayout(
        layout.device, layout.dtype, layout.size[1:], rest, layout.offset + STEP * first
    )
    base = data.data if isinstance(data, ir.ReinterpretView) else data
    return ir.TensorBox(ir.ReinterpretView(data=base, layout=sliced))


class PointwiseBody:
    """A step as functions of an index, without buffers; raises NotPointwise if it needs one."""

    def __init__(self, gm: fx.GraphModule, carry: Any, xs: Any, additional: Any) -> None:
        never = 10**9
        self._lowering = _Lowering(gm)
        inputs = [
            *(_carry_input(k, c) for k, c in enumerate(carry)),
            *map(_slice_at_step, xs),
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
    """What a kernel does with one lane; called once for each kind of kernel (scalar, vector)."""

    def __init__(self, body: PointwiseBody, trip_count: Any, reverse: bool) -> None:
        self.body = body
        self.trip_count = trip_count
        self.reverse = reverse

    def emit(self, index: Sequence[Any], init: Sequence[Any], carry: Any, ys: Any) -> None:
        """``init``, ``carry``, ``ys``: where carries start and end, and where each y goes."""
        kernel = V.kernel
        dtypes = [buffer.layout.dtype for buffer in (*carry, *ys)]
        registers = [
            self._declare(value.make_loader()(index), dtype)
            for value, dtype in zip(init, dtypes, strict=False)
        ]
        for name, at in self.body.reads(index):
            if not name.startswith(CARRY) and STEP not in at.free_symbols:
                ops.load(name, at)  # known from here on: not loaded again in each step
        last = f"{kernel.index_to_str(self.trip_count)}"
        if self.reverse:
            head = f"for (int64_t {STEP} = {last} - 1; {STEP} >= 0; --{STEP})"
        else:
            head = f"for (int64_t {STEP} = 0; {STEP} < {last}; ++{STEP})"
        kernel.compute.writeline(head)
        lines = BracesBuffer()
        with kernel.swap_buffers(lines, lines, lines), lines.indent():
            with V.set_ops_handler(_CarriesInRegisters(V.ops, registers)):
                values = self.body.values(index, dtypes)
            n = len(registers)
            for buffer, value in zip(ys, values[n:], strict=True):
                ops.store(buffer.get_name(), buffer.layout.make_indexer()([STEP, *index]), value)
            following = [
                self._declare(value, dtype)
                for value, dtype in zip(values[:n], dtypes, strict=False)
            ]
            for register, value in zip(registers, following, strict=True):
                lines.writeline(f"{register} = {value};")
        kernel.compute.splice(lines)
        for buffer, register in zip(carry, registers, strict=True):
            ops.store(buffer.get_name(), buffer.layout.make_indexer()(index), register)

    def _declare(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` in a variable of its own, a vector in a vector kernel."""
        kernel = V.kernel
        value = getattr(value, "value", value)
        if isinstance(kernel, CppVecKernel) and not value.is_vec:
            value = kernel.broadcast(value)
        variable = kernel.cse.newvar(dtype=dtype)
        variable.is_vec = value.is_vec
        variable.dependent_itervars = set(value.dependent_itervars)
        kernel.compute.writeline(f"auto {variable} = {value};")
        return variable


class _Kernel(CppKernelProxy):
    """Lanes are the outer, parallel and vectorised loop."""

    work_per_lane: Any = 1

    def size_hint(self) -> Any:  # decides the number of threads
        return super().size_hint() * self.work_per_lane

    def codegen_lanes(self, emit: Callable[[list[Any]], None], sizes: Any, vectors: int) -> None:
        group = self.kernel_group
        self.set_ranges(sizes, ())

        def generate(kind: type[CppKernel], *args: Any) -> CppKernel:
            with group.new_kernel(kind, *args) as kernel:
                index, _ = kernel.set_ranges(sizes, ())
                emit(list(index))
                return kernel

        scalar = generate(self.kernel_cls)
        self.loop_nest = LoopNest.build(scalar)
        if not self.picked_vec_isa or vectors == 0:
            self.kernels = [scalar]
        else:
            with config.patch(inplace_buffers=False):
                depth = len(sizes) - 1
                width = self.picked_vec_isa.nelements(dtype=torch.float32) * vectors
                loop = self.loop_nest.tile(depth, factor=width)
                vector = generate(self.vec_kernel_cls, width, depth)
                vector.active_ranges = {loop.var: (0, loop.tiled_size)}
                scalar.inner_itervars = [loop.var]
                scalar.active_ranges = {loop.var: (loop.tiled_size, loop.size)}
                self.kernels = [vector, scalar]
        with contextlib.suppress(TypeError):  # without arguments on some versions
            self.aggregate_reduction_buffers(False, None)
        self.loop_nest.set_kernel(self)


@contextlib.contextmanager
def _no_interpreter() -> Iterator[None]:
    """torch 2.9 asks the interpreter that lowers nodes about the node at hand."""
    node = types.SimpleNamespace(target=None, meta={}, args=(), kwargs={})
    with V.set_interpreter_handler(types.SimpleNamespace(current_node=node)):
        yield


def emit_kernel(
    wrapper: Any,
    node: Any,
    emit: Callable[[list[Any]], None],
    sizes: Sequence[Any],
    work_per_lane: Any,
    vectors: int,
) -> None:
    """Define a kernel that runs ``emit`` for each lane of ``sizes``, and call it here."""
    group = KernelGroup()
    kernel = _Kernel(group)
    kernel.work_per_lane = work_per_lane
    with _no_interpreter():
        kernel.codegen_lanes(emit, tuple(sizes), vectors)
    kernel.codegen_loops(group.loops_code, group.ws)
    group.scheduled_nodes = [node]  # not empty, or there would be no code
    source = group.codegen_group()
    scheduling: Any = CppScheduling.__new__(CppScheduling)
    scheduling.kernel_group = group
    with config.patch({"cpp.descriptive_names": False}):
        name = CppScheduling.define_kernel(scheduling, source, [], group.args)
    group.call_kernel(wrapper, name)
