"""A step with matrix products, as nests of loops and products.

A product is recorded, and what it makes is a buffer. A value that a product reads or makes lives in
scratch memory of the kernel; everything else is computed where it is stored, in *nests*, loops over
rows and the elements of a row. Nests are put in *stages*: those of stage ``j`` run before product
``j``. A carry is written once nothing reads its old value any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_values import (
    bounds_of,
    handled_by,
    handler_at_hand,
    storage_of,
    tensor_of,
)
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.places import (
    NEXT,
    OPERAND,
    PRODUCT,
    STACK,
    Matrix,
    Place,
    Product,
    Store,
    buffer_like,
    float_buffer,
    product_position,
)
from torch_scan_hop.inductor.cpu.vector_ops import VectorOps
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.product_lowering import ProductLowering
from torch_scan_hop.inductor.step import CARRY, STEP, are_static, carry_position, step_inputs


class RowLowering(ProductLowering):
    """A body with products as values: a product is recorded, and what it makes is a buffer."""

    def product(self, left: Any, weight: Any) -> Any:
        static = are_static(weight.get_size())
        if not static or {left.get_dtype(), weight.get_dtype()} != {torch.float32}:
            raise Refusal(f"a product of {left.get_size()} and {weight.get_size()}")
        product = Product(left, weight)
        name = f"{PRODUCT}{len(self.products)}"
        self.products.append(product)
        size = [left.get_size()[0], weight.get_size()[1]]
        return tensor_of(float_buffer(name, size, product.padded))

    def stores(self, place: Place, value: Any) -> Iterator[Store]:
        """Store the parts of a value that is put together one by one."""
        if id(value) not in self.parts:
            yield Store(place, value)
            return
        _, dim, parts = self.parts[id(value)]
        start = 0
        for part in parts:
            yield from self.stores(place.part(dim, start), part)
            start = start + part.get_size()[dim]


def _own_lane(carry: Place, store: Store) -> Any:
    if store.shape != tuple(carry.layout.size):
        return None
    # Inductor leaves the index of a dimension of size 1 out
    lanes = [0 if n == 1 else i for i, n in zip(store.lanes, store.shape, strict=True)]
    return carry.index(lanes)


class RowBody:
    """A step as nests and products; a Refusal if it is anything else."""

    def __init__(self, call: ScanCall) -> None:
        n, index, layouts = len(call.operands.carry), call.index, call.result_layouts()
        # steps read a carry by its own index, wherever in a buffer it begins
        self.carry = [
            Place(name, buffer_like(name, layout).layout)
            for name, layout in ((f"{CARRY}{k}", layout) for k, layout in enumerate(layouts[:n]))
        ]
        self.ys = [Place(f"{STACK}{k}", layout, (index,)) for k, layout in enumerate(layouts[n:])]
        self._lowering = RowLowering(call.body)
        results = self._lowering.lower(step_inputs(call.operands, index))
        self.products = self._lowering.products
        self.rows = results[0].get_size()[0]
        self.stores: list[Store] = []
        for k, (place, value) in enumerate(zip(self.carry, results[:n], strict=True)):
            self._store(place, value, carry=k)
        for place, value in zip(self.ys, results[n:], strict=True):
            self._store(place, value)
        stored = {id(value): place for place, value in zip(self.ys, results[n:], strict=True)}
        #: the matrices that products read their rows from
        self.operands = [
            self._operand(j, product.left, stored.get(id(product.left)))
            for j, product in enumerate(self.products)
        ]
        for store in self.stores:
            store.reads, store.ranges = self._reads_of(store)
        self._assign_stages()
        self.delayed: list[int] = []
        while (carry := self._overwritten_carry()) is not None:
            self._delay(carry)

    def _store(self, place: Place, value: Any, carry: int | None = None) -> None:
        for store in self._lowering.stores(place, value):
            store.carry = carry
            self.stores.append(store)

    def _operand(self, position: int, left: Any, stack: Place | None) -> Matrix:
        """Return the matrix that holds ``left`` already, or into which it is to be stored."""
        found = storage_of(left)
        if found is not None:
            name, layout = found
            if layout.stride[-1] == 1 and not name.startswith(PRODUCT):
                return Matrix(name, layout.offset, layout.stride[0])
        matrix = None if stack is None else stack.matrix()
        if matrix is not None:
            return matrix
        name, (k, _) = f"{OPERAND}{position}", self.products[position].sizes
        place = Place(name, float_buffer(name, [self.rows, k], k).layout)
        self._store(place, left)
        matrix = place.matrix()
        assert matrix is not None
        return matrix

    def _reads_of(self, store: Store) -> tuple[list[tuple[str, Any]], dict[Any, Any]]:
        """Return the reads of an element, and the range of each symbol in their indices."""
        lanes = dict(zip(store.lanes, store.shape, strict=True))
        with self._lowering.ranges_of_indices(lanes) as ranges:
            return self.reads(store.value), ranges

    def reads(self, value: Any) -> list[tuple[str, Any]]:
        """Return (buffer, index) of all that an element of ``value`` is computed from."""
        return self._lowering.reads_of(value).found

    def values(self, values: Sequence[Any], lanes: Sequence[Any], read_carry: Any) -> list[Any]:
        """Return the elements of ``values`` at ``lanes``, in terms of the ops handler at hand."""
        handler = VectorOps(handler_at_hand(), self._lowering, read_carry)
        with self._lowering.fresh_values(), handled_by(handler):
            return [value.make_loader()(lanes) for value in values]

    # --- stages ---

    def _assign_stages(self) -> None:
        """Put each store as early as its reads allow, a carry once nothing reads its old value."""
        last_read: dict[str, int] = {}
        for store in self.stores:
            made = [product_position(n) for n, _ in store.reads]
            store.stage = max((j + 1 for j in made if j is not None), default=0)
            for name, _ in store.reads:
                last_read[name] = max(last_read.get(name, 0), store.stage)
        for j, operand in enumerate(self.operands):
            last_read[operand.name] = max(last_read.get(operand.name, 0), j + 1)
        for store in self.stores:
            if store.carry is not None:
                store.stage = max(store.stage, last_read.get(f"{CARRY}{store.carry}", 0))

    def nests(self) -> list[list[list[Store]]]:
        """Return each stage's nests, of stores of one shape; the last comes after all products."""
        stages = []
        for stage in range(len(self.products) + 2):
            nests: dict[tuple[Any, ...], list[Store]] = {}
            for store in self.stores:
                if store.stage == stage:
                    nests.setdefault(store.shape, []).append(store)
            # what reads a carry's old value comes before what writes one
            writes = lambda nest: any(store.carry is not None for store in nest)  # noqa: E731
            stages.append(sorted(nests.values(), key=writes))
        return stages

    def _overwritten_carry(self) -> int | None:
        """Return a carry, not delayed, whose old value is read after it was written, or None."""
        order = [nest for stage in self.nests() for nest in stage]
        for k in (k for k in range(len(self.carry)) if k not in self.delayed):
            written = next(i for i, nest in enumerate(order) if any(s.carry == k for s in nest))
            for i, store in ((i, store) for i, nest in enumerate(order) for store in nest):
                for name, at in store.reads:
                    same_lane = i == written and at == _own_lane(self.carry[k], store)
                    if name == f"{CARRY}{k}" and i >= written and not same_lane:
                        return k
        return None

    def _delay(self, carry: int) -> None:
        """Write a carry to scratch memory, and copy it at the end of the step."""
        layout = self.carry[carry].layout
        name = f"{NEXT}{carry}"
        self.delayed.append(carry)
        for store in self.stores:
            if store.carry == carry:
                store.carry = None
                store.place = Place(name, layout, shift=store.place.shift)
        copy = Store(self.carry[carry], tensor_of(buffer_like(name, layout)), carry=carry)
        copy.reads, copy.ranges = self._reads_of(copy)
        copy.stage = len(self.products) + 1
        self.stores.append(copy)

    # --- independence ---

    def rows_are_independent(self) -> bool:
        operands = zip(self.operands, self.products, strict=True)
        return (
            all(s.shape[:1] == (self.rows,) and are_static(s.shape[1:]) for s in self.stores)
            and all(p.left.get_size()[0] == self.rows for p in self.products)
            and all(self._is_invariant(p.weight) for p in self.products)
            and all(self._multiplies_own_row(*pair) for pair in operands)
            and all(map(self._reads_own_row, self.stores))
        )

    def _is_invariant(self, value: Any) -> bool:
        reads = self.reads(value)
        return all(self._row_stride(name) is None and not at.has(STEP) for name, at in reads)

    def _row_stride(self, name: str) -> Any:
        """Return a row's stride in a carry or a product; None for a value that no step changes."""
        carry, product = carry_position(name), product_position(name)
        if carry is not None:
            return self.carry[carry].layout.stride[0]
        return None if product is None else sympy.Integer(self.products[product].padded)

    def _multiplies_own_row(self, operand: Matrix, product: Product) -> bool:
        """Return True if a product reads the carry's own rows: a view may put others together."""
        stride = self._row_stride(operand.name)
        if stride is None:
            return True
        if not are_static([stride, operand.offset, operand.row_stride]):
            return False
        same_rows = self.rows == 1 or operand.row_stride == stride
        return bool(same_rows and operand.offset + product.sizes[0] <= stride)

    def _reads_own_row(self, store: Store) -> bool:
        row = store.lanes[0]
        sizes = {symbol: size for symbol, size in store.ranges.items() if symbol != row}
        if not are_static(sizes.values()):
            return False
        for name, at in store.reads:
            stride = self._row_stride(name)
            if stride is None:
                continue
            within = sympy.expand(at - (0 if self.rows == 1 else row * stride))
            if not (within.free_symbols <= set(sizes) and are_static([stride])):
                return False
            least, greatest = bounds_of(within, sizes)
            if not (least >= 0 and greatest < stride):
                return False
        return True
