"""A step of small matrices: where its inputs are, what it does, and where its results go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from torch_scan_hop._torch.inductor_values import bounds_of, handled_by, is_tensor, slice_at
from torch_scan_hop.inductor.cpu.matrix_lowering import MatrixLowering
from torch_scan_hop.inductor.cpu.matrix_memory import Made, Scratch
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.step import are_static, lane_symbols


@dataclass(frozen=True)
class Returned:
    """A y: where it is, and its stack; ``rows`` of each lane are among the rows of a matrix."""

    scratch: Scratch
    prefix: tuple[Any, ...]
    rows: Any = None

    def index(self, own: Sequence[Any]) -> list[Any]:
        """Return the index in the stack of what is at index ``own`` of the scratch memory."""
        if self.rows is None:
            return [*self.prefix, *own]
        lane, row, *rest = own
        return [*self.prefix, lane * self.rows + row, *rest]


class MatrixBody:
    """A step; inputs in ``shared`` (positions) are the same for all lanes, whatever their shape."""

    def __init__(
        self, call: ScanCall, lanes: Any, width: int, shared: Collection[int] = ()
    ) -> None:
        self.lanes = lanes
        self.width = width
        self.lowering = MatrixLowering(call.body, lanes, width)
        #: what is read from memory that other lanes are in, too
        self.at_step: list[Made] = []
        self.at_start: list[Made] = []
        #: positions of inputs by the name of the scratch memory that they are copied to
        self.inputs: dict[str, int] = {}
        self.carry = [
            self.lowering.scratch(c.get_size(), c.get_dtype(), self.lowering.varies(c.get_size()))
            for c in call.operands.carry
        ]
        n, given = len(self.carry), [scratch.tensor() for scratch in self.carry]
        for x in call.operands.xs:
            given.append(self._input(slice_at(call.index, x), self.at_step, len(given), shared))
        for value in call.operands.additional:
            given.append(self._input(value, self.at_start, len(given), shared))
        results = self.lowering.lower(given)
        names = {scratch.name: k for k, scratch in enumerate(self.carry)}
        #: the scratch memory of each next carry, which is not that of another carry
        self.next = []
        for k, value in enumerate(results[:n]):
            held = self.lowering.held(value)
            moves = held is not None and names.get(held.name, k) != k
            self.next.append(self.lowering.stored(value, always=moves))
        self.ys = [self._returned(value, call.index) for value in results[n:]]
        self.scratch = self.lowering.memory
        self.actions = self.lowering.actions

    def _returned(self, value: Any, index: Any) -> Returned:
        stack = self.lowering.stack_of(value)
        if stack is None:
            return Returned(self.lowering.stored(value), (index,))
        return Returned(self.lowering.stored(stack), (index,), stack.get_size()[1])

    def _input(self, value: Any, copies: list[Made], position: int, shared: Collection[int]) -> Any:
        if position in shared or not is_tensor(value):
            return value
        stack = value if self.lowering.varies(value.get_size()) else self.lowering.stack_of(value)
        if stack is None:
            return value
        scratch = self.lowering.scratch(stack.get_size(), stack.get_dtype(), True)
        copies.append(Made(scratch, stack))
        self.inputs[scratch.name] = position
        whole = scratch.tensor()
        return whole if stack is value else self.lowering.fold(whole, value.get_size())

    @property
    def nbytes(self) -> int:
        return sum(s.numbers * s.dtype.itemsize for s in self.scratch)

    def values(self, value: Any, index: Sequence[Any], handler: Any) -> Any:
        with self.lowering.fresh_values(), handled_by(handler):
            return value.make_loader()(index)

    # --- independence ---

    def read_across(self) -> set[str]:
        """Return the names of what a lane reads where another lane is; "" for what has no lanes."""
        made = [action for action in self.actions if isinstance(action, Made)]
        return {name for action in made for name in self._read_across(action)}

    def _read_across(self, made: Made) -> Iterator[str]:
        symbols = lane_symbols(len(made.to.size))
        sizes = dict(zip(symbols, made.to.size, strict=True))
        with self.lowering.ranges_of_indices(sizes) as ranges:
            reads = self.lowering.reads_of(made.value)
        lane = symbols[0] if made.to.varies else None
        found = [(name, sympy.sympify(at)) for name, at in reads.found]
        loads = {at for _, at in found}
        others = {*map(sympy.sympify, reads.indices)} - loads
        if lane is not None and any(at.has(lane) for at in others):
            yield ""  # its number, which is too large for those beyond the last lane
        memory = {s.name: s for s in self.scratch}
        within = {s: n for s, n in ranges.items() if s != lane}
        for name, at in found:
            held = memory.get(name)
            if held is None or not held.varies:
                if lane is not None and at.has(lane):
                    yield ""
            elif lane is None or not self._is_own(sympy.expand(at - lane), within, held):
                yield name

    def _is_own(self, entry: Any, within: dict[Any, Any], held: Scratch) -> bool:
        """Return True if ``entry``, an index less that of the lane, is at one of its entries."""
        known = are_static(within.values())
        if not known or not entry.free_symbols <= set(within):
            return False
        least, greatest = bounds_of(entry, within)
        terms = sympy.Add.make_args(entry)
        whole = all(term.as_coeff_Mul()[0] % self.width == 0 for term in terms)
        return bool(whole and least >= 0 and greatest < self.width * held.entries)
