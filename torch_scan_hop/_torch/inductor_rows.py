"""A step with matrix products, row by row (checked on torch 2.9.1, 2.13.0, 2.15.0).

A step is made of *nests*, loops over rows and the elements of a row, and of *products*. A value
that a product reads or makes lives in scratch memory of the kernel; everything else is computed
where it is stored. Nests are put in *stages*: those of stage ``j`` run before product ``j``.

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from torch_scan_hop._torch.inductor_cpp import (
    CARRY,
    STEP,
    Lowering,
    NotPointwise,
    Reads,
    StepOps,
    carry_position,
    lane_symbols,
    step_inputs,
)

__all__ = [
    "NEXT",
    "OPERAND",
    "PRODUCT",
    "Place",
    "Product",
    "RowBody",
    "Store",
    "buffer_like",
    "float_buffer",
    "vector_lanes",
]

aten = torch.ops.aten

# "buf": names that Inductor lets a kernel store to
PRODUCT = "scan_buf_product_"
OPERAND = "scan_buf_operand_"
NEXT = "scan_buf_next_"
STACK = "scan_stack_"


def vector_lanes() -> int:
    """float32 lanes of a vector; 0 where there are none."""
    isa = pick_vec_isa()
    return isa.nelements(dtype=torch.float32) if isa else 0


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
    ranges: dict[Any, Any] = field(default_factory=dict)  # of the symbols that reads are at

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.value.get_size())

    @property
    def lanes(self) -> list[Any]:
        return lane_symbols(len(self.shape))


@dataclass(frozen=True)
class Product:
    """``left @ weight`` into scratch memory of the same position; ``weight`` is loop-invariant."""

    left: Any
    weight: Any

    @property
    def sizes(self) -> tuple[int, int]:
        k, n = self.weight.get_size()
        return int(k), int(n)

    @property
    def padded(self) -> int:
        lanes = vector_lanes()
        return -(-self.sizes[1] // lanes) * lanes


def float_buffer(name: str, sizes: Sequence[Any], row: Any) -> Any:
    layout = ir.FixedLayout(torch.device("cpu"), torch.float32, list(sizes), [row, 1])
    return ir.InputBuffer(name=name, layout=layout)


def buffer_like(name: str, layout: Any) -> Any:
    own = ir.FixedLayout(layout.device, layout.dtype, layout.size, layout.stride)
    return ir.InputBuffer(name=name, layout=own)


def _tensor(buffer: Any) -> Any:
    return ir.TensorBox(ir.StorageBox(buffer))


class _RowLowering(Lowering):
    """Products are recorded; what they make are buffers."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.products: list[Product] = []
        self.parts: dict[int, tuple[Any, int, list[Any]]] = {}
        self.ranges: dict[Any, Any] | None = None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.mm.default:
            return self._product(*args)
        if target is aten.addmm.default:
            added, left, weight = args
            return super().call_function(aten.add.Tensor, (added, self._product(left, weight)), {})
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
        return _tensor(float_buffer(name, size, product.padded))

    def _joined(self, parts: Sequence[Any], dim: int = 0) -> Any:
        dim %= len(parts[0].get_size())
        sizes = [part.get_size()[dim] for part in parts]
        starts = [sympy.sympify(sum(sizes[:k])) for k in range(len(sizes))]
        loaders = [part.make_loader() for part in parts]

        def inner_fn(index: Sequence[Any]) -> Any:
            def part(k: int) -> Any:
                own = list(index)
                own[dim] = self._within(index[dim] - starts[k], sizes[k])
                return loaders[k](own)

            at = ops.index_expr(index[dim], torch.int64)
            value = part(0) if len(parts) == 1 else None
            for k in reversed(range(len(parts))):
                begins = ops.ge(at, ops.index_expr(starts[k], torch.int64))
                ends = ops.lt(at, ops.index_expr(starts[k] + sizes[k], torch.int64))
                here = ops.masked(ops.and_(begins, ends), functools.partial(part, k), 0.0)
                value = here if value is None else ops.where(ends, here, value)
            return value

        size = list(parts[0].get_size())
        size[dim] = sum(sizes)
        joined = ir.Pointwise.create(
            device=parts[0].get_device(),
            dtype=parts[0].get_dtype(),
            inner_fn=inner_fn,
            ranges=size,
        )
        self.compute_once(joined)
        self.parts[id(joined)] = joined, dim, list(parts)
        return joined

    def _within(self, index: Any, size: Any) -> Any:
        """``index``, which a mask keeps in range; for those who ask for ranges, a symbol of it."""
        if self.ranges is None:
            return index
        symbol = sympy.Symbol(f"x{800 + len(self.ranges)}", integer=True, nonnegative=True)
        self.ranges[symbol] = size
        return symbol

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

    def __init__(self, gm: fx.GraphModule, roles: Any, layouts: Sequence[Any], step: Any) -> None:
        self.step = step
        n = len(roles.carry)
        self.carry = [Place(f"{CARRY}{k}", layout) for k, layout in enumerate(layouts[:n])]
        self.ys = [Place(f"{STACK}{k}", layout, (step,)) for k, layout in enumerate(layouts[n:])]
        self._lowering = _RowLowering(gm)
        results = self._lowering.lower(step_inputs(roles, step))
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
        #: the matrices that products read their rows from
        self.operands = [
            self._operand(j, product.left, stored.get(id(product.left)))
            for j, product in enumerate(self.products)
        ]
        for store in self.stores:
            self._find_reads(store)
        self._assign_stages()
        self.delayed: list[int] = []
        while (carry := self._overwritten()) is not None:
            self._delay(carry)

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
        place = Place(name, float_buffer(name, [self.rows, k], k).layout)
        self.stores += self._lowering.stores(place, left)
        matrix = place.matrix()
        assert matrix is not None
        return matrix

    def _find_reads(self, store: Store) -> None:
        store.ranges = self._lowering.ranges = dict(zip(store.lanes, store.shape, strict=True))
        try:
            store.reads = self._reads(store.value)
        finally:
            self._lowering.ranges = None

    def _reads(self, value: Any) -> list[tuple[str, Any]]:
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
            made = [_product_position(n) for n, _ in store.reads]
            store.stage = max((j + 1 for j in made if j is not None), default=0)
            for name, _ in store.reads:
                last_read[name] = max(last_read.get(name, 0), store.stage)
        for j, operand in enumerate(self.operands):
            last_read[operand.name] = max(last_read.get(operand.name, 0), j + 1)
        for store in self.stores:
            if store.carry is not None:
                store.stage = max(store.stage, last_read.get(f"{CARRY}{store.carry}", 0))

    def nests(self) -> list[list[list[Store]]]:
        """The nests of each stage, in order: stores of one shape are a nest."""
        stages = []
        for stage in range(len(self.products) + 2):
            nests: dict[tuple[Any, ...], list[Store]] = {}
            for store in self.stores:
                if store.stage == stage:
                    nests.setdefault(store.shape, []).append(store)
            # what reads a carry's old value comes before what writes one
            stages.append(sorted(nests.values(), key=lambda nest: any(map(_is_carry, nest))))
        return stages

    def _overwritten(self) -> int | None:
        """A carry of which an old value is read after it was written."""
        order = [nest for stage in self.nests() for nest in stage]
        for k in range(len(self.carry)):
            if k in self.delayed:
                continue
            written = next(i for i, nest in enumerate(order) if any(s.carry == k for s in nest))
            for i, store in ((i, store) for i, nest in enumerate(order) for store in nest):
                for name, at in store.reads:
                    same_lane = i == written and at == self._own_lane(k, store)
                    if name == f"{CARRY}{k}" and i >= written and not same_lane:
                        return k
        return None

    def _own_lane(self, carry: int, store: Store) -> Any:
        if store.shape != tuple(self.carry[carry].layout.size):
            return None
        # Inductor leaves the index of a dimension of size 1 out
        lanes = [0 if n == 1 else i for i, n in zip(store.lanes, store.shape, strict=True)]
        return self.carry[carry].index(lanes)

    def _delay(self, carry: int) -> None:
        """Write a carry to scratch memory, and copy it at the end of the step."""
        layout = self.carry[carry].layout
        name = f"{NEXT}{carry}"
        self.delayed.append(carry)
        for store in self.stores:
            if store.carry == carry:
                store.carry = None
                store.place = Place(name, layout, shift=store.place.shift)
        copy = Store(self.carry[carry], _tensor(buffer_like(name, layout)), carry=carry)
        self._find_reads(copy)
        copy.stage = len(self.products) + 1
        self.stores.append(copy)

    # --- what makes rows independent ---

    def are_independent(self) -> bool:
        return (
            all(s.shape[:1] == (self.rows,) and _is_static(s.shape[1:]) for s in self.stores)
            and all(p.left.get_size()[0] == self.rows for p in self.products)
            and all(self._is_invariant(p.weight) for p in self.products)
            and all(map(self._multiplies_own_row, self.operands, self.products))
            and all(self._reads_own_row(store) for store in self.stores)
        )

    def _is_invariant(self, value: Any) -> bool:
        reads = self._reads(value)
        return all(self._row_stride(name) is None and not at.has(STEP) for name, at in reads)

    def _row_stride(self, name: str) -> Any:
        """Of a carry or a product, in elements; None for what a step does not change."""
        carry, product = carry_position(name), _product_position(name)
        if carry is not None:
            return self.carry[carry].layout.stride[0]
        return None if product is None else sympy.Integer(self.products[product].padded)

    def _multiplies_own_row(self, operand: Matrix, product: Product) -> bool:
        """A view of the carry may put its rows together in another way."""
        stride = self._row_stride(operand.name)
        if stride is None:
            return True
        if not _is_static([stride, operand.offset, operand.row_stride]):
            return False
        same_rows = self.rows == 1 or operand.row_stride == stride
        return bool(same_rows and operand.offset + product.sizes[0] <= stride)

    def _reads_own_row(self, store: Store) -> bool:
        row = store.lanes[0]
        ranges = {symbol: size for symbol, size in store.ranges.items() if symbol != row}
        if not _is_static(ranges.values()):
            return False
        bounds = {symbol: ValueRanges(0, size - 1) for symbol, size in ranges.items()}
        for name, at in store.reads:
            stride = self._row_stride(name)
            if stride is None:
                continue
            within = sympy.expand(at - (0 if self.rows == 1 else row * stride))
            if not (within.free_symbols <= set(bounds) and _is_static([stride])):
                return False
            reach = bound_sympy(within, bounds)
            if not (reach.lower >= 0 and reach.upper < stride):
                return False
        return True


def _is_carry(store: Store) -> bool:
    return store.carry is not None


def _product_position(name: str) -> int | None:
    return int(name.removeprefix(PRODUCT)) if name.startswith(PRODUCT) else None


def _is_static(sizes: Iterable[Any]) -> bool:
    return all(isinstance(n, (int, sympy.Integer)) for n in sizes)
