"""A step with matrix products, as nests of loops and products.

A value that a product reads or makes lives in scratch memory of the kernel; everything else is
computed where it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_scan_hop._torch.inductor_values import (
    handled_by,
    handler_at_hand,
    is_tensor,
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
    Store,
    buffer_like,
    float_buffer,
)
from torch_scan_hop.inductor.cpu.row_lowering import RowLowering
from torch_scan_hop.inductor.cpu.row_order import assign_stages, nests_of_stages, overwritten_carry
from torch_scan_hop.inductor.cpu.tanh import VectorOps
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.step import CARRY, step_inputs


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
        if not all(map(is_tensor, results)):
            raise Refusal("a result that is no tensor")
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
        assign_stages(self.stores, self.operands)
        self.delayed: list[int] = []
        while (carry := overwritten_carry(self.carry, self.nests(), self.delayed)) is not None:
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

    def nests(self) -> list[list[list[Store]]]:
        """Return the nests of each stage, in order: the last one comes after all products."""
        return nests_of_stages(self.stores, len(self.products) + 2)

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
