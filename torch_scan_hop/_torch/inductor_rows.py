"""C++ kernels that run a loop with matrix products row by row (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.

A step is made of *nests*, loops over rows and the elements of a row, and of *products*. A value
that a product reads or makes lives in scratch memory of the kernel; everything else is computed
where it is stored. Nests are put in *stages*: those of stage ``j`` run before product ``j``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.cpp import CppKernel, KernelGroup, WorkSharing
from torch._inductor.codegen.cpp_utils import LocalBufferContext, cexpr_index
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.lowering import pointwise_cat
from torch._inductor.utils import Placeholder, parallel_num_threads
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import CeilDiv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from torch_scan_hop._torch.inductor_cpp import (
    CARRY,
    STEP,
    TILE,
    StepOps,
    LoopKernel,
    Lowering,
    NotPointwise,
    Reads,
    carry_input,
    define_kernel,
    lane_symbols,
    likely_size,
    no_interpreter,
    slice_at,
)

__all__ = ["RowBody", "emit_rows_kernel", "vector_lanes"]

aten = torch.ops.aten

# "buf": names that Inductor lets a kernel store to
PRODUCT = "scan_buf_product_"
OPERAND = "scan_buf_operand_"
WEIGHT = "scan_buf_weight_"
STACK = "scan_stack_"
FIRST_ROW = sympy.Symbol("x997", integer=True, nonnegative=True)
END_ROW = sympy.Symbol("x996", integer=True, nonnegative=True)

# of a tile: a panel of a weight is read from the nearest cache once for so many of them
MAX_ROWS = 32

# Rows by vectors of columns that one call multiplies, so that their sums stay in registers and
# there are enough of them for the pipeline of multiply-add units. Panels of ``vectors`` columns
# are contiguous. Inductor's micro-kernel takes 1.3 times as long: its sums spill with more than
# one vector of columns, and it waits for loads with one.
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
            for (int v = 0; v < vectors; ++v) sums[r][v] = at::vec::fmadd(value, columns[v], sums[r][v]);
        }
    }
    #pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
        #pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sums[r][v].store(out + r * out_row + v * lanes);
}

template <int most, int vectors, int rows = most - 1>
inline void NAME_rest(
    int64_t rest, const float* left, const float* panel, float* out, int64_t depth, int64_t row, int64_t out_row
) {
    if constexpr (rows > 0) {
        if (rest == rows) NAME_rows<rows, vectors>(left, panel, out, depth, row, out_row);
        else NAME_rest<most, vectors, rows - 1>(rest, left, panel, out, depth, row, out_row);
    }
}

template <int most, int vectors>
inline void NAME(
    const float* left, const float* panels, float* out,
    int64_t rows, int64_t depth, int64_t columns, int64_t row
) {
    constexpr int width = vectors * at::vec::Vectorized<float>::size();
    for (int64_t column = 0; column < columns; column += width) {
        const float* panel = panels + column * depth;
        int64_t r = 0;
        for (; r + most <= rows; r += most)
            NAME_rows<most, vectors>(left + r * row, panel, out + r * columns + column, depth, row, columns);
        NAME_rest<most, vectors>(
            rows - r, left + r * row, panel, out + r * columns + column, depth, row, columns);
    }
}
"""


def vector_lanes() -> int:
    """float32 lanes of a vector; 0 where there are none."""
    isa = pick_vec_isa()
    return isa.nelements(dtype=torch.float32) if isa else 0


def register_block(rows: int, columns: int) -> tuple[int, int]:
    """Rows, and vectors of columns, of one call: 16 sums with 32 registers, 8 with 16."""
    lanes = vector_lanes()
    sums = 16 if lanes >= 16 else 8
    most = min(rows, sums // 2)
    vectors = -(-columns // lanes)
    wide = [n for n in (8, 4, 2, 1) if n * most <= sums and vectors % n == 0]
    return most, wide[0]


@dataclass(frozen=True)
class Place:
    """Where a value is stored: a buffer, and which elements of it."""

    name: str
    layout: Any
    prefix: tuple[Any, ...] = ()  # of the index: the step, for a stack
    shift: tuple[Any, ...] = ()  # of the other dimensions

    def index(self, lanes: Sequence[Any]) -> Any:
        shift = self.shift or (0,) * len(lanes)
        moved = [lane + by for lane, by in zip(lanes, shift, strict=True)]
        return self.layout.make_indexer()([*self.prefix, *moved])

    def part(self, dim: int, start: Any) -> Place:
        rank = len(self.layout.size) - len(self.prefix)
        shift = list(self.shift or (0,) * rank)
        shift[dim] += start
        return Place(self.name, self.layout, self.prefix, tuple(shift))

    def matrix(self) -> Matrix | None:
        """As an operand of a product, if its rows are contiguous."""
        rank = len(self.layout.size) - len(self.prefix)
        if rank != 2 or self.layout.stride[-1] != 1:
            return None
        return Matrix(self.name, self.index([0, 0]), self.layout.stride[-2])


@dataclass(frozen=True)
class Matrix:
    name: str
    offset: Any
    row_stride: Any


@dataclass
class Store:
    place: Place
    value: Any
    stage: int = 0
    carry: int | None = None
    reads: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.value.get_size())

    @property
    def lanes(self) -> list[Any]:
        return lane_symbols(len(self.shape))


@dataclass
class Product:
    """``left @ weight`` into scratch memory of the same position; ``weight`` is loop-invariant."""

    left: Any
    weight: Any
    matrix: Matrix | None = None  # that left is in

    @property
    def sizes(self) -> tuple[int, int]:
        k, n = self.weight.get_size()
        return int(k), int(n)

    @property
    def padded(self) -> int:
        lanes = vector_lanes()
        return -(-self.sizes[1] // lanes) * lanes


def _scratch(name: str, sizes: Sequence[Any], row: Any) -> Any:
    layout = ir.FixedLayout(torch.device("cpu"), torch.float32, list(sizes), [row, 1])
    return ir.InputBuffer(name=name, layout=layout)


class _RowLowering(Lowering):
    """Products are recorded; what they make are buffers."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.products: list[Product] = []
        self.parts: dict[int, tuple[Any, int, list[Any]]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.mm.default:
            return self._product(*args)
        if target is aten.cat.default and len({part.get_dtype() for part in args[0]}) == 1:
            return self._joined(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def _product(self, left: Any, weight: Any) -> Any:
        static = all(isinstance(n, (int, sympy.Integer)) for n in weight.get_size())
        if not static or {left.get_dtype(), weight.get_dtype()} != {torch.float32}:
            raise NotPointwise(f"a product of {left.get_size()} and {weight.get_size()}")
        product = Product(left, weight)
        name = f"{PRODUCT}{len(self.products)}"
        self.products.append(product)
        size = [left.get_size()[0], weight.get_size()[1]]
        return ir.TensorBox(ir.StorageBox(_scratch(name, size, product.padded)))

    def _joined(self, parts: Sequence[Any], dim: int = 0) -> Any:
        rank = len(parts[0].get_size())
        joined = pointwise_cat(list(parts), dim % rank)
        self.compute_once(joined)
        self.parts[id(joined)] = joined, dim % rank, list(parts)
        return joined

    def stores(self, place: Place, value: Any) -> Iterator[Store]:
        """Parts of a value that is put together are stored one by one."""
        if id(value) not in self.parts:
            yield Store(place, value)
            return
        _, dim, parts = self.parts[id(value)]
        start = 0
        for part in parts:
            yield from self.stores(place.part(dim, start), part)
            start = start + part.get_size()[dim]


class RowBody:
    """A step as nests and products; NotPointwise if it is anything else.

    ``layouts``: of the buffers that its results are written to.
    """

    def __init__(
        self, gm: fx.GraphModule, roles: Any, layouts: Sequence[Any], step: Any
    ) -> None:
        self.step = step
        n = len(roles.carry)
        self.carry = [Place(f"{CARRY}{k}", layout) for k, layout in enumerate(layouts[:n])]
        self.ys = [Place(f"{STACK}{k}", layout, (step,)) for k, layout in enumerate(layouts[n:])]
        self._lowering = _RowLowering(gm)
        inputs = [
            *(carry_input(k, c) for k, c in enumerate(roles.carry)),
            *(slice_at(step, x) for x in roles.xs),
            *roles.additional,
        ]
        results = self._lowering.lower(inputs)
        self.products = self._lowering.products
        if not all(isinstance(r, ir.TensorBox) for r in results):
            raise NotPointwise("a result that is no tensor")
        places = [*self.carry, *self.ys]
        self.rows = results[0].get_size()[0]
        self.stores: list[Store] = []
        stored = {}
        for k, (place, value) in enumerate(zip(places, results, strict=True)):
            for store in self._lowering.stores(place, value):
                store.carry = k if k < n else None
                self.stores.append(store)
            if k >= n:
                stored[id(value)] = place
        for j, product in enumerate(self.products):
            product.matrix = self._operand(j, product.left, stored.get(id(product.left)))
        for store in self.stores:
            store.reads = self.reads(store.value)
        self._assign_stages()

    def _operand(self, position: int, left: Any, stack: Place | None) -> Matrix:
        """The matrix that ``left`` is in already, or is to be stored to."""
        try:
            storage, layout = ir.as_storage_and_layout(left, freeze=False)
            name = storage.get_name()
        except NotImplementedError:
            pass
        else:
            if layout.stride[-1] == 1 and not name.startswith(PRODUCT):
                return Matrix(name, layout.offset, layout.stride[0])
        matrix = None if stack is None else stack.matrix()
        if matrix is not None:
            return matrix
        name, (k, _) = f"{OPERAND}{position}", self.products[position].sizes
        place = Place(name, _scratch(name, [self.rows, k], k).layout)
        self.stores += self._lowering.stores(place, left)
        matrix = place.matrix()
        assert matrix is not None
        return matrix

    def reads(self, value: Any) -> list[tuple[str, Any]]:
        """(buffer, index) of all that an element of ``value`` is computed from."""
        found = Reads()
        with V.set_ops_handler(found), self._lowering.fresh_values():
            value.make_loader()(lane_symbols(len(value.get_size())))
        return found.found

    def values(self, values: Sequence[Any], lanes: Sequence[Any], read_carry: Any) -> list[Any]:
        """The elements of ``values`` at ``lanes``, in terms of the ops handler at hand."""
        handler = StepOps(V.ops, self._lowering, read_carry)
        with self._lowering.fresh_values(), V.set_ops_handler(handler):
            return [value.make_loader()(lanes) for value in values]

    def _assign_stages(self) -> None:
        """As early as what they read is there; a carry once nothing reads its old value."""
        last_read: dict[str, int] = {}
        for store in self.stores:
            made = [int(n.removeprefix(PRODUCT)) + 1 for n, _ in store.reads if _is_product(n)]
            store.stage = max(made, default=0)
            for name, _ in store.reads:
                last_read[name] = max(last_read.get(name, 0), store.stage)
        for j, product in enumerate(self.products):
            assert product.matrix is not None
            name = product.matrix.name
            last_read[name] = max(last_read.get(name, 0), j + 1)
        for store in self.stores:
            if store.carry is not None:
                store.stage = max(store.stage, last_read.get(f"{CARRY}{store.carry}", 0))

    def nests(self) -> list[list[list[Store]]]:
        """The nests of each stage, in order: stores of one shape are a nest."""
        stages = []
        for stage in range(len(self.products) + 1):
            nests: dict[tuple[Any, ...], list[Store]] = {}
            for store in self.stores:
                if store.stage == stage:
                    nests.setdefault((store.shape, store.carry is not None), []).append(store)
            # what reads a carry at its old value comes before what writes one
            merged: list[list[Store]] = []
            for (shape, writes), stores in nests.items():
                if writes and (shape, False) in nests:
                    stores[:0] = nests[shape, False]
                elif not writes and (shape, True) in nests:
                    continue
                merged.append(stores)
            stages.append(sorted(merged, key=lambda stores: any(s.carry is not None for s in stores)))
        return stages

    # --- what makes rows independent ---

    def are_independent(self) -> bool:
        if any(s.shape[:1] != (self.rows,) or not _is_static(s.shape[1:]) for s in self.stores):
            return False
        if any(p.left.get_size()[0] != self.rows for p in self.products):
            return False
        if any(not self._is_invariant(p.weight) for p in self.products):
            return False
        if not all(self._reads_own_row(store) for store in self.stores):
            return False
        return self._carries_are_read_before_they_are_written()

    def _is_invariant(self, value: Any) -> bool:
        return not any(
            name.startswith(CARRY) or _is_product(name) or at.has(STEP)
            for name, at in self.reads(value)
        )

    def _reads_own_row(self, store: Store) -> bool:
        row, *lanes = store.lanes
        for name, at in store.reads:
            if name.startswith(CARRY):
                stride = self.carry[int(name.removeprefix(CARRY))].layout.stride[0]
            elif _is_product(name):
                stride = sympy.Integer(self.products[int(name.removeprefix(PRODUCT))].padded)
            else:
                continue
            # Inductor leaves the index of a dimension of size 1 out
            within = sympy.expand(at - (0 if self.rows == 1 else row * stride))
            if not within.free_symbols <= set(lanes) or not _is_static([stride]):
                return False
            sizes = zip(lanes, store.shape[1:], strict=True)
            bounds = bound_sympy(within, {lane: ValueRanges(0, n - 1) for lane, n in sizes})
            if not (bounds.lower >= 0 and bounds.upper < stride):
                return False
        return True

    def _carries_are_read_before_they_are_written(self) -> bool:
        order = [nest for stage in self.nests() for nest in stage]
        for k, place in enumerate(self.carry):
            name = f"{CARRY}{k}"
            written = next(i for i, nest in enumerate(order) if any(s.carry == k for s in nest))
            for i, nest in enumerate(order):
                found = [(s, at) for s in nest for read, at in s.reads if read == name]
                if i > written and found:
                    return False
                if i == written and any(
                    sympy.expand(at - _without_unit_dimensions(place, s)) != 0 for s, at in found
                ):
                    return False
            if len({id(nest) for nest in order if any(s.carry == k for s in nest)}) > 1:
                return False
        return True


def _without_unit_dimensions(place: Place, store: Store) -> Any:
    lanes = [0 if n == 1 else i for i, n in zip(store.lanes, store.shape, strict=True)]
    return place.layout.make_indexer()(lanes)


def _is_product(name: str) -> bool:
    return name.startswith(PRODUCT)


def _is_static(sizes: Sequence[Any]) -> bool:
    return all(isinstance(n, (int, sympy.Integer)) for n in sizes)


# --- the kernel ---


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
            tile = self.tile
            tiles = self._text(CeilDiv(self.body.rows, tile))
            self.code.writeline(f"for (int64_t {TILE} = 0; {TILE} < {tiles}; ++{TILE})")
            with self.code.indent():
                rows = self._text(self.body.rows)
                self.code.writeline(f"const int64_t {FIRST_ROW} = {TILE} * {tile};")
                self.code.writeline(
                    f"const int64_t {END_ROW} = std::min<int64_t>({rows}, {FIRST_ROW} + {tile});"
                )
                self._seed()
                steps = self._text(self.trip_count)
                self.code.writeline(f"for (int64_t {STEP} = 0; {STEP} < {steps}; ++{STEP})")
                with self.code.indent():
                    self._step()
        define_kernel(wrapper, self.group, self._declarations())

    def _text(self, size: Any) -> str:
        return cexpr_index(self.plain.rename_indexing(size))

    def _declarations(self) -> str:
        return PRODUCT_SOURCE.replace("NAME", self.product)

    # --- scratch memory ---

    def _scratch(self) -> list[Any]:
        buffers = []
        for j, product in enumerate(self.body.products):
            k, n = product.sizes
            assert product.matrix is not None
            if product.matrix.name == f"{OPERAND}{j}":
                buffers.append(_scratch(f"{OPERAND}{j}", [self.body.rows, k], k))
            buffers.append(_scratch(f"{PRODUCT}{j}", [self.body.rows, n], product.padded))
            buffers.append(_scratch(f"{WEIGHT}{j}", [product.padded, k], k))
        return buffers

    def _allocate(self, buffer: Any) -> None:
        name, line = buffer.get_name(), 64  # bytes: no vector straddles two cache lines
        (rows, _), (row, _) = buffer.layout.size, buffer.layout.stride
        size = self._text(rows * row)
        self.code.writeline(f"std::unique_ptr<float[]> {name}_owner(new float[{size} + {line}]);")
        self.code.writeline(
            f"float* {name} = reinterpret_cast<float*>("
            f"(reinterpret_cast<uintptr_t>({name}_owner.get()) + {line - 1}) & ~uintptr_t({line - 1}));"
        )

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
                value = ops.masked(inside, lambda: load([row, column]), 0.0)
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
                self._nest(lambda lanes, stores=stores: self._store_all(stores, lanes), stores[0].shape)
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
        matrix, (k, n) = product.matrix, product.sizes
        assert matrix is not None
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
