"""C++ kernels that Inductor defines and calls as its own (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen.cpp import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    KernelGroup,
    LoopLevel,
    LoopNest,
    ParallelDepth,
    WorkSharing,
)
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, LocalBufferContext, cexpr_index
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import Placeholder, parallel_num_threads
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, Max, Min

from torch_scan_hop._torch.inductor_values import PythonsIndices, handled_by, handler_at_hand
from torch_scan_hop._torch.inductor_vectors import VectorKernel, helpers_of

# torch's, under our names
__all__ = ["Max", "parallel_num_threads"]


def vector_lanes() -> int:
    """Return the float32 lanes of a vector; 0 if there are no vectors."""
    isa = pick_vec_isa()
    return isa.nelements(dtype=torch.float32) if isa else 0


# --- while the code of a nest is made ---


def keep_stores_to(name: str) -> None:
    """Keep stores to the buffer, even if nothing reads it later."""
    V.kernel.must_keep_buffers.add(name)


def written_pointer(name: str) -> str:
    """Return the pointer to a buffer that the kernel writes, and so reads through the same one."""
    return str(V.kernel.args.output(name))


def is_removed(name: str) -> bool:
    """Return True if nothing reads the buffer, so that it is not written."""
    return name in V.graph.removed_buffers


def address_of(name: str, index: Any) -> str:
    """Return the address of an element of a buffer that the kernel writes, as code."""
    kernel: Any = V.kernel
    place = kernel.rename_indexing(index)
    return f"{kernel.args.output(name)} + {cexpr_index(place)}"


def after_stores(line: str) -> None:
    """Put a line behind the stores of so far."""
    kernel: Any = V.kernel
    kernel.stores.writeline(line)


# --- loops, and the function around them ---


class _UnrolledLoop(LoopLevel):
    """A loop of a few turns that the compiler writes out."""

    @classmethod
    def of(cls, loop: LoopLevel) -> _UnrolledLoop:
        return cls(loop.var, loop.size, tiled_size=loop.tiled_size, steps=loop.steps)

    def lines(self) -> Any:
        return [f"#pragma GCC unroll {CeilDiv(self.size, self.steps)}", super().lines()[-1]]


class _OuterLoopsForThreads(LoopNest):
    """Lets threads share lanes only, because steps run in order."""

    n_parallel_loops = 0

    def max_parallel_depth(self) -> Any:  # type: ignore[override]
        return ParallelDepth(parallel_depth=self.n_parallel_loops, start_depth=0)


class LaneNest(CppKernelProxy):
    """A nest of loops over lanes, of which the last is vectorised."""

    vec_kernel_cls = VectorKernel
    work_per_lane = 1

    def size_hint(self) -> Any:  # decides the number of threads
        return super().size_hint() * self.work_per_lane

    def generate(
        self,
        emit: Callable[[list[Any]], None],
        sizes: Sequence[Any],
        in_vectors: bool,
        masks_tail: bool,
    ) -> None:
        """Call ``emit`` with the index, once for each kind of code (scalar, vector).

        Lanes that fill no vector are one vector with a mask, if ``masks_tail``, or done one by one.
        """
        group = self.kernel_group
        self.set_ranges(sizes, ())

        def generate(kind: type[CppKernel], *args: Any) -> CppKernel:
            with group.new_kernel(kind, *args) as kernel:
                index, _ = kernel.set_ranges(sizes, ())
                with handled_by(PythonsIndices(handler_at_hand())):
                    emit(list(index))
                return kernel

        scalar = generate(self.kernel_cls)
        nest = self.loop_nest = _OuterLoopsForThreads(LoopNest.build(scalar).loops)
        self.kernels = [scalar]
        if in_vectors and self.picked_vec_isa:
            with config.patch(inplace_buffers=False):
                depth = len(sizes) - 1
                width = self.picked_vec_isa.nelements(dtype=torch.float32)
                loop = nest.tile(depth, factor=width)
                vector = generate(self.vec_kernel_cls, width, depth)
                if masks_tail:
                    tail = generate(self.vec_kernel_cls, width, depth, loop.size - loop.tiled_size)
                else:
                    tail = scalar
                    scalar.inner_itervars = [loop.var]
                vector.active_ranges = {loop.var: (0, loop.tiled_size)}
                tail.active_ranges = {loop.var: (loop.tiled_size, loop.size)}
                self.kernels = [vector, tail]
        self.aggregate_reduction_buffers(False, None)
        nest.set_kernel(self)

    def for_threads(self) -> None:
        """Let threads share the lanes."""
        nest: Any = self.loop_nest
        nest.n_parallel_loops = len(nest.loops)

    def repeat(
        self, step: Any, steps: tuple[Any, Any], tile: Any, lanes_per_tile: int, likely: int
    ) -> None:
        """Let each tile of lanes run these steps before the next one; the symbols count them.

        ``likely``: how many steps there are, as far as that is known.
        """
        self.work_per_lane = likely
        nest: Any = self.loop_nest
        *outer, lanes = nest.loops
        tiles = LoopLevel(tile, CeilDiv(lanes.size, lanes_per_tile))
        time = self._loop_over(step, steps)
        first = tile * lanes_per_tile
        lanes.offset, lanes.size = first, Min(lanes.size, first + lanes_per_tile)
        nest.loops = [*outer, tiles, time, lanes]

    def repeat_unrolled(self, step: Any, steps: tuple[Any, Any]) -> None:
        """Let all lanes, of which there are a few, run these steps in one piece of code."""
        nest: Any = self.loop_nest
        *outer, lanes = nest.loops
        nest.loops = [self._loop_over(step, steps), *outer, _UnrolledLoop.of(lanes)]

    def _loop_over(self, step: Any, steps: tuple[Any, Any]) -> LoopLevel:
        """Loop over steps, neither in parallel nor vectorised."""
        begin, end = map(self.kernels[-1].rename_indexing, steps)
        return LoopLevel(step, end, offset=begin, is_reduction=True)

    def between(self, first: Any, end: Any) -> None:
        """Run only these turns of the outermost loop."""
        nest: Any = self.loop_nest
        nest.loops[0].offset, nest.loops[0].size = first, end


class _SharingIf(WorkSharing):
    """A parallel region whose threads are asked for if ``condition`` holds when it runs."""

    def __init__(self, code: Any, condition: str) -> None:
        super().__init__(code)
        self._condition = condition

    def parallel(self, threads: int) -> None:
        first = len(self.code._lines)
        super().parallel(threads)
        pragma = "#pragma omp parallel"
        for k, line in enumerate(self.code._lines[first:], first):
            if isinstance(line, str) and line.lstrip().startswith(pragma):
                self.code._lines[k] = f"{line} if({self._condition})"


# Fewer lanes that fill no vector take less time one by one than together, with a mask.
FEWEST_MASKED = 5


class KernelFunction:
    """One C++ function, which the IR's ``node`` calls."""

    #: its name, wherever its code says so
    name = str(Placeholder.KERNEL_NAME)

    def __init__(self, node: Any, masks_tails: bool) -> None:
        #: whether lanes that fill no vector may be one with a mask
        self._masks_tails = masks_tails
        self._declarations: list[str] = []
        self._group = KernelGroup()
        self._group.scheduled_nodes = [node]  # not empty, or there would be no code
        #: where lines are written to: ``writeline``, ``indent``
        self.code = self._group.loops_code
        self._alone = WorkSharing(self.code)
        self._sizes = CppKernel(self._group.args, 1)

    def share_if(self, condition: str) -> None:
        """Have threads only if this is true when the code runs."""
        self._group.ws = self._group.stack.enter_context(_SharingIf(self.code, condition))

    def text(self, size: Any) -> str:
        """Return a size or an index as code; what it depends on becomes an argument."""
        return cexpr_index(self._sizes.rename_indexing(size))

    def read_pointer(self, name: str) -> str:
        return str(self._group.args.input(name))

    def written_pointer(self, name: str) -> str:
        return str(self._group.args.output(name))

    @contextlib.contextmanager
    def local_buffers(self, buffers: Sequence[Any]) -> Iterator[None]:
        """Make these variables of the function, which allocates them itself."""
        with LocalBufferContext(self._group.args) as local:
            for buffer in buffers:
                local.add_local_buffer(buffer)
            yield

    def masks_tail_of(self, lanes: Any) -> bool:
        """Return True if those last lanes that fill no vector are one vector with a mask."""
        if not (self._masks_tails and vector_lanes()):
            return False
        tail = lanes % vector_lanes()
        return bool(tail >= FEWEST_MASKED) if tail.is_Integer else True

    def declare_array(self, buffer: Any) -> None:
        """Declare one of the local buffers, of a known size, as an array on the stack."""
        kind, layout = DTYPE_TO_CPP[buffer.get_dtype()], buffer.layout
        extents = zip(layout.size, layout.stride, strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in extents)
        self.code.writeline(f"{kind} {buffer.get_name()}[{elements}];")

    def nest(
        self, emit: Callable[[list[Any]], None], sizes: Sequence[Any], in_vectors: bool = True
    ) -> LaneNest:
        """Return loops over ``sizes``, which :meth:`add` puts into the function."""
        nest = LaneNest(self._group)
        nest.generate(emit, tuple(sizes), in_vectors, self.masks_tail_of(sizes[-1]))
        return nest

    def add(self, nest: LaneNest, in_one_thread: bool = False) -> None:
        nest.codegen_loops(self.code, self._alone if in_one_thread else self._group.ws)

    def share_loop(self, threads: int) -> None:
        """Let threads share the loop that is written next."""
        self._group.ws.parallel(threads)
        self.code.writeline("#pragma omp for")

    def declare(self, *lines: str) -> None:
        """Put these declarations before the function."""
        self._declarations += lines

    def define_and_call(self, wrapper: Any) -> None:
        """Define the function, and call it at this place of the wrapper."""
        function = 'extern "C"'
        source = self._group.codegen_group()
        before = "\n".join([*helpers_of(source), *self._declarations, function])
        source = source.replace(function, before, 1)
        scheduling: Any = CppScheduling.__new__(CppScheduling)
        scheduling.kernel_group = self._group
        with config.patch({"cpp.descriptive_names": False}):
            name = CppScheduling.define_kernel(scheduling, source, [], self._group.args)
        self._group.call_kernel(wrapper, name)
