"""The code of the kernel of small matrices.

::

    for each vector of lanes, shared by threads:
        copy what all steps read; the carries, from init or from where the span before has left them
        for each step of the span:
            copy xs; loops over entries, and factorisations; copy ys; the next carries
        copy the carries to where the next span, or the caller, finds them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from torch_scan_hop._torch.inductor_cpp import (
    DTYPE_TO_CPP,
    CeilDiv,
    KernelFunction,
    Min,
    keep_stores_to,
    written_pointer,
)
from torch_scan_hop._torch.inductor_values import handler_at_hand, no_interpreter, ops
from torch_scan_hop.inductor.cpu.matrix_body import MatrixBody, Returned
from torch_scan_hop.inductor.cpu.matrix_memory import SCRATCH, Called, Made, Scratch
from torch_scan_hop.inductor.cpu.matrix_source import SOURCE
from torch_scan_hop.inductor.cpu.sharing import share_span, threads_for
from torch_scan_hop.inductor.cpu.vector_ops import VectorOps
from torch_scan_hop.inductor.spans import Span
from torch_scan_hop.inductor.step import STEP, TILE, plain_symbol

FIRST_LANE = plain_symbol(997)
COUNT = plain_symbol(996)  # lanes of this vector that there are


class _EntryOps(VectorOps):
    """Reads scratch memory, whose first lane is the first of the vector."""

    def __init__(self, inner: Any, body: MatrixBody, varying: set[str]) -> None:
        super().__init__(inner, body.lowering, lambda k, _: None)
        self.varying = varying

    def load(self, name: str, index: Any) -> Any:
        if name.startswith(SCRATCH):
            written_pointer(name)
            if name in self.varying:
                index = index - FIRST_LANE
        return self._inner.load(name, sympy.expand(index))


def _read(buffer: Any, index: Sequence[Any]) -> Any:
    """Read a buffer that the kernel writes."""
    name = buffer.name
    written_pointer(name)
    return handler_at_hand().load(name, buffer.layout.make_indexer()(index))


class MatrixCode:
    """A kernel that runs a span of the steps of ``node``."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.body: MatrixBody = node.step
        body = self.body
        self.span: Span = node.span
        self.function = KernelFunction(node, False)
        self.code = self.function.code
        self.varying = {s.name for s in body.scratch if s.varies}
        # threads would write a carry that all lanes share at once
        alone = body.lanes is None or not all(s.varies for s in body.carry)
        self.threads = 1 if alone else threads_for(self.span)

    def emit(self, wrapper: Any) -> None:
        """Define the kernel, and call it at this place of the wrapper."""
        if self.threads > 1:
            share_span(self.function, self.span)
        lanes = sympy.Integer(1) if self.body.lanes is None else self.body.lanes
        width = self.body.width
        with no_interpreter(), self.function.local_buffers([s.buffer for s in self.body.scratch]):
            if self.threads > 1:
                self.function.share_loop(self.threads)
            tiles = self.function.text(CeilDiv(lanes, width))
            self.code.writeline(f"for (int64_t {TILE} = 0; {TILE} < {tiles}; ++{TILE})")
            with self.code.indent():
                self.code.writeline(f"const int64_t {FIRST_LANE} = {TILE} * {width};")
                left = f"{self.function.text(lanes)} - {FIRST_LANE}"
                self.code.writeline(f"const int64_t {COUNT} = std::min<int64_t>({left}, {width});")
                self._tile(tiles)
        self.function.declare("#include <cstring>", SOURCE)
        self.function.define_and_call(wrapper)

    def _tile(self, tiles: str) -> None:
        body, destinations = self.body, self.node.destinations
        n = len(body.carry)
        for scratch in body.scratch:
            kind = DTYPE_TO_CPP[scratch.dtype]
            self.code.writeline(f"alignas(64) {kind} {scratch.name}[{scratch.numbers}];")
        for copied in body.at_start:
            self._copy_value(copied)
        begin, end = map(self.function.text, (self.span.first, self.span.end))
        self.code.writeline(f"if ({begin} == 0)")
        with self.code.indent():
            for scratch, init in zip(body.carry, self.node.operands.carry, strict=True):
                self._copy_value(Made(scratch, init))
        self.code.writeline("else")
        with self.code.indent():
            for scratch, destination in zip(body.carry, destinations, strict=False):
                self._copy_in(scratch, functools.partial(_read, destination))
        self.code.writeline(f"for (int64_t {STEP} = {begin}; {STEP} < {end}; ++{STEP})")
        with self.code.indent():
            for copied in body.at_step:
                self._copy_value(copied)
            for action in body.actions:
                self._make(action) if isinstance(action, Made) else self._call(action)
            for returned, destination in zip(body.ys, destinations[n:], strict=True):
                self._copy_out(returned, destination)
            for scratch, later in zip(body.carry, body.next, strict=True):
                if scratch is not later:
                    size = f"sizeof({scratch.name})"
                    self.code.writeline(f"std::memcpy({scratch.name}, {later.name}, {size});")
                    self._written(scratch)
        for scratch, destination in zip(body.carry, destinations, strict=False):
            if not scratch.varies:
                self.code.writeline(f"if ({TILE} == {tiles} - 1)")
            with self.code.indent():
                self._copy_out(Returned(scratch, ()), destination)

    def _written(self, scratch: Scratch) -> None:
        """Have the compiler read ``scratch`` anew from here on.

        gcc 12 takes parts of a copy from before it was made, where it puts numbers of an array
        together to a vector (``-O3 -fno-tree-loop-vectorize``, as Inductor compiles).
        """
        self.code.writeline(f'asm volatile("" : : "r"({scratch.name}) : "memory");')

    # --- loops over entries ---

    def _nest(
        self, emit: Callable[[list[Any]], None], sizes: Sequence[Any], in_vectors: bool = False
    ) -> Any:
        """Return loops that ``emit`` for each index of ``sizes``, which may be none."""
        sizes = tuple(sizes)
        padded = sizes or (sympy.Integer(1),)
        return self.function.nest(lambda index: emit(index[: len(sizes)]), padded, in_vectors)

    def _load(self, value: Any, index: Sequence[Any]) -> Any:
        handler = _EntryOps(handler_at_hand(), self.body, self.varying)
        return self.body.values(value, index, handler)

    def _store(self, scratch: Scratch, index: Sequence[Any], value: Any) -> None:
        """Store a value; ``index`` begins with a lane of the vector, if the value varies."""
        keep_stores_to(scratch.name)
        ops.store(scratch.name, scratch.buffer.layout.make_indexer()(index), value)

    def _make(self, made: Made) -> None:
        scratch = made.to
        width = sympy.Integer(self.body.width)

        def emit(index: list[Any]) -> None:
            if not scratch.varies:
                self._store(scratch, index, self._load(made.value, index))
                return
            *own, lane = index
            value = self._load(made.value, [FIRST_LANE + lane, *own])
            self._store(scratch, [lane, *own], value)

        sizes = [*scratch.size[1:], width] if scratch.varies else scratch.size
        self.function.add(self._nest(emit, sizes, in_vectors=True), in_one_thread=True)
        self._written(scratch)

    def _copy_in(self, scratch: Scratch, load: Callable[[Sequence[Any]], Any]) -> None:
        def emit(index: list[Any]) -> None:
            there = list(index)
            if scratch.varies:  # those beyond the last lane are like it
                there[0] = FIRST_LANE + Min(index[0], COUNT - 1)
            self._store(scratch, index, load(there))

        sizes = list(scratch.size)
        if scratch.varies:
            sizes[0] = sympy.Integer(self.body.width)
        self.function.add(self._nest(emit, sizes), in_one_thread=True)
        self._written(scratch)

    def _copy_value(self, copied: Made) -> None:
        self._copy_in(copied.to, lambda index: self._load(copied.value, index))

    def _copy_out(self, returned: Returned, destination: Any) -> None:
        scratch = returned.scratch

        def emit(index: list[Any]) -> None:
            there = list(index)
            if scratch.varies:
                there[0] = FIRST_LANE + index[0]
            value = _read(scratch.buffer, index)
            keep_stores_to(destination.name)
            place = destination.layout.make_indexer()(returned.index(there))
            ops.store(destination.name, place, value)

        nest = self._nest(emit, scratch.size)
        if scratch.varies:
            nest.between(sympy.Integer(0), COUNT)
        self.function.add(nest, in_one_thread=True)

    # --- factorisations ---

    def _call(self, called: Called) -> None:
        first = called.matrices[0].scratch
        kind, width = DTYPE_TO_CPP[first.dtype], first.width or 1

        def of_one(scratch: Scratch) -> str:
            return f"{scratch.name} + at * {scratch.numbers // called.stack}"

        matrices = [
            f"ScanMatrix<{kind}, {width}>{{{of_one(m.scratch)}, {row}, {column}}}"
            for m in called.matrices
            for row, column in [m.strides]
        ]
        notes = [of_one(scratch) for scratch in called.notes]
        flags = ["true" if flag else "false" for flag in called.flags]
        sizes = ", ".join(map(str, (kind, width, *called.sizes)))
        arguments = ", ".join([*matrices, *notes, *flags])
        self.code.writeline(f"for (int64_t at = 0; at < {called.stack}; ++at)")
        with self.code.indent():
            self.code.writeline(f"{called.function}<{sizes}>({arguments});")
        for scratch in (*(m.scratch for m in called.matrices), *called.notes):
            self._written(scratch)
