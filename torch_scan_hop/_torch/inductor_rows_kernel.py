"""The C++ kernel of a loop with matrix products (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor.codegen.cpp import CppKernel, KernelGroup, WorkSharing
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, LocalBufferContext, cexpr_index
from torch._inductor.utils import Placeholder, parallel_num_threads
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import CeilDiv

from torch_scan_hop._torch.inductor_cpp import (
    CARRY,
    STEP,
    TILE,
    LoopKernel,
    define_kernel,
    likely_size,
    masked,
    no_interpreter,
)
from torch_scan_hop._torch.inductor_rows import (
    NEXT,
    OPERAND,
    PRODUCT,
    Place,
    Product,
    RowBody,
    Store,
    buffer_like,
    float_buffer,
    vector_lanes,
)

__all__ = ["emit_rows_kernel"]

WEIGHT = "scan_buf_weight_"
FIRST_ROW = sympy.Symbol("x997", integer=True, nonnegative=True)
END_ROW = sympy.Symbol("x996", integer=True, nonnegative=True)

# of a tile: a panel of a weight is read from the nearest cache once for so many of them
MAX_ROWS = 32

# Rows by vectors of columns that one call multiplies, so that their sums stay in registers and
# there are enough of them for the pipeline of multiply-add units. Panels of ``vectors`` columns
# are contiguous. In Inductor's micro-kernel sums spill with more than one vector of columns, and
# with one it waits for loads.
PRODUCT_SOURCE = """
template <int rows, int vectors>
inline void NAME_rows(
    const float* left, const float* panel, float* out, int64_t depth, int64_t row, int64_t out_row
) {
    using Vec = at::vec::Vectorized<float>;
    constexpr int lanes = Vec::size();
    Vec sums[rows][vectors];
    #pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
        #pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sums[r][v] = Vec(0.0f);
    for (int64_t k = 0; k < depth; ++k, panel += vectors * lanes) {
        Vec columns[vectors];
        #pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) columns[v] = Vec::loadu(panel + v * lanes);
        #pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Vec value(left[r * row + k]);
            #pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v)
                sums[r][v] = at::vec::fmadd(value, columns[v], sums[r][v]);
        }
    }
    #pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
        #pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sums[r][v].store(out + r * out_row + v * lanes);
}

template <int vectors, int rows>
inline void NAME_rest(
    int64_t rest, const float* left, const float* panel, float* out, int64_t depth, int64_t row,
    int64_t out_row
) {
    if constexpr (rows > 0) {
        if (rest == rows) NAME_rows<rows, vectors>(left, panel, out, depth, row, out_row);
        else NAME_rest<vectors, rows - 1>(rest, left, panel, out, depth, row, out_row);
    }
}

template <int most, int vectors>
inline void NAME(
    const float* left, const float* panels, float* out,
    int64_t rows, int64_t depth, int64_t columns, int64_t row
) {
    constexpr int width = vectors * LANES;
    static_assert(LANES == at::vec::Vectorized<float>::size(), "panels are packed for LANES");
    for (int64_t column = 0; column < columns; column += width) {
        const float* panel = panels + column * depth;
        float* to = out + column;
        int64_t r = 0;
        for (; r + most <= rows; r += most)
            NAME_rows<most, vectors>(left + r * row, panel, to + r * columns, depth, row, columns);
        NAME_rest<vectors, most - 1>(
            rows - r, left + r * row, panel, to + r * columns, depth, row, columns);
    }
}
"""


def register_block(rows: int, columns: int) -> tuple[int, int]:
    """Rows, and vectors of columns, of one call: 16 sums with 32 registers, 8 with 16."""
    lanes = vector_lanes()
    sums = 16 if lanes >= 16 else 8
    most = min(rows, sums // 2)
    vectors = -(-columns // lanes)
    wide = [n for n in (8, 4, 2, 1) if n * most <= sums and vectors % n == 0]
    return most, wide[0]


class _RowsKernel:
    """The code of one kernel.

    ::

        pack the weights
        for each tile of rows, shared by threads:
            copy init to the carries
            for each step:
                nests of stage 0; product 0; nests of stage 1; ...
    """

    def __init__(
        self, body: RowBody, init: Sequence[Any], names: Sequence[str], trip_count: Any, node: Any
    ) -> None:
        self.body = body
        self.init = init
        places = [*body.carry, *body.ys]
        #: the buffers that results are written to
        self.names = {place.name: name for place, name in zip(places, names, strict=True)}
        self.trip_count = trip_count
        self.group = KernelGroup()
        self.group.scheduled_nodes = [node]  # not empty, or there would be no code
        self.code = self.group.loops_code
        self.alone = WorkSharing(self.code)  # within the loop that threads share
        self.plain = CppKernel(self.group.args, 1)
        self.product = f"{Placeholder.KERNEL_NAME}_product"
        self.threads = parallel_num_threads()
        share = -(-likely_size(body.rows, fallback=MAX_ROWS) // self.threads)
        self.tile = max(1, min(MAX_ROWS, share))

    def emit(self, wrapper: Any) -> None:
        with no_interpreter(), LocalBufferContext(self.group.args) as local:
            for buffer in self._scratch():
                local.add_local_buffer(buffer)
                self._allocate(buffer)
            for j, product in enumerate(self.body.products):
                self._pack(j, product)
            if self.threads > 1:
                self.group.ws.parallel(self.threads)
                self.code.writeline("#pragma omp for")
            tiles = self._text(CeilDiv(self.body.rows, self.tile))
            self.code.writeline(f"for (int64_t {TILE} = 0; {TILE} < {tiles}; ++{TILE})")
            with self.code.indent():
                rows = self._text(self.body.rows)
                self.code.writeline(f"const int64_t {FIRST_ROW} = {TILE} * {self.tile};")
                end = f"std::min<int64_t>({rows}, {FIRST_ROW} + {self.tile})"
                self.code.writeline(f"const int64_t {END_ROW} = {end};")
                self._seed()
                steps = self._text(self.trip_count)
                self.code.writeline(f"for (int64_t {STEP} = 0; {STEP} < {steps}; ++{STEP})")
                with self.code.indent():
                    self._step()
        define_kernel(wrapper, self.group, self._declarations())

    def _text(self, size: Any) -> str:
        return cexpr_index(self.plain.rename_indexing(size))

    def _declarations(self) -> str:
        return PRODUCT_SOURCE.replace("NAME", self.product).replace("LANES", str(vector_lanes()))

    # --- scratch memory ---

    def _scratch(self) -> list[Any]:
        buffers = []
        for j, product in enumerate(self.body.products):
            k, n = product.sizes
            if self.body.operands[j].name == f"{OPERAND}{j}":
                buffers.append(float_buffer(f"{OPERAND}{j}", [self.body.rows, k], k))
            buffers.append(float_buffer(f"{PRODUCT}{j}", [self.body.rows, n], product.padded))
            buffers.append(float_buffer(f"{WEIGHT}{j}", [product.padded, k], k))
        for k in self.body.delayed:
            buffers.append(buffer_like(f"{NEXT}{k}", self.body.carry[k].layout))
        return buffers

    def _allocate(self, buffer: Any) -> None:
        name, kind = buffer.get_name(), DTYPE_TO_CPP[buffer.get_dtype()]
        line = 64  # bytes: no vector straddles two cache lines
        rows, *_ = buffer.layout.size
        row, *_ = buffer.layout.stride
        size = self._text(rows * row)
        self.code.writeline(f"std::unique_ptr<{kind}[]> {name}_owner(new {kind}[{size} + {line}]);")
        at = f"reinterpret_cast<uintptr_t>({name}_owner.get())"
        aligned = f"({at} + {line - 1}) & ~uintptr_t({line - 1})"
        self.code.writeline(f"{kind}* {name} = reinterpret_cast<{kind}*>({aligned});")

    def _pack(self, position: int, product: Product) -> None:
        """Columns of a weight as the product reads them: a panel of them, row by row."""
        k, n = product.sizes
        width = vector_lanes() * register_block(self.tile, n)[1]
        load = product.weight.make_loader()

        def emit(index: list[Any]) -> None:
            block, row, lane = index
            column = block * width + lane
            if product.padded == n:
                value = load([row, column])
            else:
                inside = ops.lt(ops.index_expr(column, torch.int64), ops.constant(n, torch.int64))
                value = masked(ops, inside, lambda: load([row, column]), 0.0)
            ops.store(f"{WEIGHT}{position}", (block * k + row) * width + lane, value)

        sizes = [product.padded // width, k, width]
        kernel = LoopKernel(self.group)
        kernel.codegen_lanes(emit, tuple(map(sympy.Integer, sizes)))
        kernel.for_threads()
        kernel.codegen_loops(self.code, self.group.ws)

    # --- loops ---

    def _nest(self, emit: Any, shape: Sequence[Any]) -> None:
        """``emit`` for each element of these rows; one element is a row of one."""
        sizes = tuple(shape) if len(shape) > 1 else (*shape, sympy.Integer(1))
        kernel = LoopKernel(self.group)
        kernel.codegen_lanes(lambda index: emit(index[: len(shape)]), sizes)
        kernel.between(FIRST_ROW, END_ROW)
        kernel.codegen_loops(self.code, self.alone)

    def _seed(self) -> None:
        for value, place in zip(self.init, self.body.carry, strict=True):

            def emit(lanes: list[Any], value: Any = value, place: Place = place) -> None:
                self._store(place, lanes, value.make_loader()(lanes))

            self._nest(emit, value.get_size())

    def _step(self) -> None:
        for j, nests in enumerate(self.body.nests()):
            for stores in nests:
                self._nest(functools.partial(self._store_all, stores), stores[0].shape)
            if j < len(self.body.products):
                self._multiply(j, self.body.products[j])

    def _store(self, place: Place, lanes: Sequence[Any], value: Any) -> None:
        name = self.names.get(place.name, place.name)
        V.kernel.must_keep_buffers.add(name)  # even if nothing reads it later
        ops.store(name, place.index(lanes), value)

    def _store_all(self, stores: list[Store], lanes: list[Any]) -> None:
        inner = V.ops
        read = lambda k, index: inner.load(self._carry_name(k), index)  # noqa: E731
        values = self.body.values([store.value for store in stores], lanes, read)
        for store, value in zip(stores, values, strict=True):
            self._store(store.place, lanes, value)

    def _carry_name(self, position: int) -> str:
        name = self.names[f"{CARRY}{position}"]
        V.kernel.args.output(name)  # written, so read through the same pointer
        return name

    def _multiply(self, position: int, product: Product) -> None:
        matrix, (k, n) = self.body.operands[position], product.sizes
        args = self.group.args
        written = self.names.get(matrix.name)
        left = args.input(matrix.name) if written is None else args.output(written)
        arguments = [
            f"{left} + {self._text(matrix.offset + FIRST_ROW * matrix.row_stride)}",
            f"{WEIGHT}{position}",
            f"{PRODUCT}{position} + {FIRST_ROW} * {product.padded}",
            f"{END_ROW} - {FIRST_ROW}",
            k,
            product.padded,
            self._text(matrix.row_stride),
        ]
        most, vectors = register_block(self.tile, n)
        call = f"{self.product}<{most}, {vectors}>({', '.join(map(str, arguments))});"
        self.code.writeline(call)


def emit_rows_kernel(
    wrapper: Any,
    node: Any,
    body: RowBody,
    init: Sequence[Any],
    names: Sequence[str],
    trip_count: Any,
) -> None:
    """Define a kernel that runs all steps of ``body``, and call it here.

    ``names`` of the buffers that final carries and ys are written to.
    """
    _RowsKernel(body, init, names, trip_count, node).emit(wrapper)
