"""The code of the kernel of a loop with matrix products.

::

    pack the weights
    for each tile of rows, shared by threads:
        copy init to the carries, if the first step is one of the span
        for each step of the span:
            nests of stage 0; product 0; nests of stage 1; ...
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy

from torch_scan_hop._torch.inductor import keep_buffers
from torch_scan_hop._torch.inductor_cpp import (
    DTYPE_TO_CPP,
    CeilDiv,
    KernelFunction,
    keep_stores_to,
    written_pointer,
)
from torch_scan_hop._torch.inductor_values import handler_at_hand, likely_size, no_interpreter, ops
from torch_scan_hop.inductor.cpu.fits import are_tails_worth_masks
from torch_scan_hop.inductor.cpu.places import (
    NEXT,
    OPERAND,
    PRODUCT,
    Place,
    Product,
    Store,
    buffer_like,
    float_buffer,
)
from torch_scan_hop.inductor.cpu.product import packed, register_block, source_of_product
from torch_scan_hop.inductor.cpu.row_body import RowBody
from torch_scan_hop.inductor.cpu.sharing import share_span, threads_for
from torch_scan_hop.inductor.spans import Span
from torch_scan_hop.inductor.step import CARRY, STEP, TILE, plain_symbol

WEIGHT = "scan_buf_weight_"
FIRST_ROW = plain_symbol(997)
END_ROW = plain_symbol(996)

# rows of a tile: a panel of a weight is read from the nearest cache once for so many rows
MAX_ROWS = 32

CACHE_LINE = 64  # bytes


class RowCode:
    """A kernel that runs a span of the steps of ``node``, which has the destinations."""

    def __init__(self, node: Any) -> None:
        self.body: RowBody = node.step
        self.init = node.operands.carry
        body = self.body
        places = zip([*body.carry, *body.ys], node.destinations, strict=True)
        written = {place.name: destination for place, destination in places}
        #: the buffers that results are written to
        self.names = {name: destination.name for name, destination in written.items()}
        #: offsets at which carries begin in their buffers; the index of a place has a stack's
        self.begins = {place.name: written[place.name].layout.offset for place in body.carry}
        self.span: Span = node.span
        self.function = KernelFunction(node, are_tails_worth_masks(node.body))
        self.code = self.function.code
        self.product = f"{self.function.name}_product"
        self.threads = threads_for(self.span)
        share = -(-likely_size(body.rows, fallback=MAX_ROWS) // self.threads)
        self.tile = max(1, min(MAX_ROWS, share))

    def emit(self, wrapper: Any) -> None:
        """Define the kernel, and call it at this place of the wrapper."""
        # A product reads the row of a y where it is stored, also if nothing does after the loop. (A
        # read of no elements is none to Inductor.)
        keep_buffers(self.names[m.name] for m in self.body.operands if m.name in self.names)
        if self.threads > 1:
            share_span(self.function, self.span)
        scratch = self._scratch()
        with no_interpreter(), self.function.local_buffers(scratch):
            for buffer in scratch:
                self._allocate(buffer)
            for j, product in enumerate(self.body.products):
                self._pack(j, product)
            if self.threads > 1:
                self.function.share_loop(self.threads)
            tiles = self.function.text(CeilDiv(self.body.rows, self.tile))
            self.code.writeline(f"for (int64_t {TILE} = 0; {TILE} < {tiles}; ++{TILE})")
            with self.code.indent():
                rows = self.function.text(self.body.rows)
                self.code.writeline(f"const int64_t {FIRST_ROW} = {TILE} * {self.tile};")
                end = f"std::min<int64_t>({rows}, {FIRST_ROW} + {self.tile})"
                self.code.writeline(f"const int64_t {END_ROW} = {end};")
                begin, end = map(self.function.text, (self.span.first, self.span.end))
                self.code.writeline(f"if ({begin} == 0)")
                with self.code.indent():
                    self._seed()
                self.code.writeline(f"for (int64_t {STEP} = {begin}; {STEP} < {end}; ++{STEP})")
                with self.code.indent():
                    self._step()
        self.function.declare(source_of_product(self.product))
        self.function.define_and_call(wrapper)

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
        """Allocate aligned memory, so that no vector straddles two cache lines."""
        name, kind = buffer.get_name(), DTYPE_TO_CPP[buffer.get_dtype()]
        line = CACHE_LINE
        rows, *_ = buffer.layout.size
        row, *_ = buffer.layout.stride
        size = self.function.text(rows * row)
        self.code.writeline(f"std::unique_ptr<{kind}[]> {name}_owner(new {kind}[{size} + {line}]);")
        at = f"reinterpret_cast<uintptr_t>({name}_owner.get())"
        aligned = f"({at} + {line - 1}) & ~uintptr_t({line - 1})"
        self.code.writeline(f"{kind}* {name} = reinterpret_cast<{kind}*>({aligned});")

    def _pack(self, position: int, product: Product) -> None:
        store, sizes = packed(product, self.tile, f"{WEIGHT}{position}")
        nest = self.function.nest(store, sizes)
        if self.threads > 1:
            nest.for_threads()
        self.function.add(nest)

    # --- loops ---

    def _nest(self, emit: Any, shape: Sequence[Any]) -> None:
        """Emit ``emit`` for each element of these rows; one element is a row of one."""
        sizes = tuple(shape) if len(shape) > 1 else (*shape, sympy.Integer(1))
        nest = self.function.nest(lambda index: emit(index[: len(shape)]), sizes)
        nest.between(FIRST_ROW, END_ROW)
        self.function.add(nest, in_one_thread=True)

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
        keep_stores_to(name)
        ops.store(name, place.index(lanes) + self.begins.get(place.name, 0), value)

    def _store_all(self, stores: list[Store], lanes: list[Any]) -> None:
        handler = handler_at_hand()

        def read(carry: int, index: Any) -> Any:
            held = f"{CARRY}{carry}"
            written_pointer(self.names[held])
            return handler.load(self.names[held], index + self.begins[held])

        values = self.body.values([store.value for store in stores], lanes, read)
        for store, value in zip(stores, values, strict=True):
            self._store(store.place, lanes, value)

    def _multiply(self, position: int, product: Product) -> None:
        matrix, (k, n) = self.body.operands[position], product.sizes
        written = self.names.get(matrix.name)
        function = self.function
        left = function.written_pointer(written) if written else function.read_pointer(matrix.name)
        first = matrix.offset + self.begins.get(matrix.name, 0) + FIRST_ROW * matrix.row_stride
        arguments = [
            f"{left} + {function.text(first)}",
            f"{WEIGHT}{position}",
            f"{PRODUCT}{position} + {FIRST_ROW} * {product.padded}",
            f"{END_ROW} - {FIRST_ROW}",
            k,
            product.padded,
            function.text(matrix.row_stride),
            product.padded,
        ]
        most, vectors = register_block(self.tile, n)
        call = f"{self.product}<{most}, {vectors}>({', '.join(map(str, arguments))});"
        self.code.writeline(call)
