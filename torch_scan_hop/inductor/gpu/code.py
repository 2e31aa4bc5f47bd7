"""The common code of all kernels: the loop, and the addresses in it.

::

    lane = this program's elements
    carry = init[lane]                         # in registers from here on
    for turn in range(steps):                  # loads of xs are issued some steps ahead
        step = turn, or steps - 1 - turn
        carry, y = body(carry, xs[step, lane], additional[lane])
        ys[step, lane] = y
    final[lane] = carry

Loop-invariant values are read before the loop. An address has two parts: a pointer of 64 bits,
which moves with the step and is the same for all lanes, and an offset of the lane, which does not
change. So a lane has to keep 32 bits of it, where they are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_triton import (
    HEADER,
    TritonLines,
    dtype_of,
    index_text,
    simplified,
)
from torch_scan_hop._torch.inductor_values import bounds_of
from torch_scan_hop.inductor.gpu.launch import Parameters, TritonSource, indented, kept
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.step import STEP, are_static, variable

# How far loads run ahead of the loop, in steps, at most: they wait in shared memory, or in
# registers where they are narrower than what the hardware copies there. An LRU of 16,384 lanes took
# 0.84 ms on an H200 with 4 steps ahead, 0.46 with 8, 0.34 with 16 (a copy of its xs: 0.14).
STEPS_AHEAD = 16

# Shared memory for them, of a program: a multiprocessor of 163 KiB and more has room for some.
AHEAD_BYTES = 2**15

LANE, MASK = "lane", "inside"


class StepCode:
    """The code of one kernel; subclasses know what a program's elements are.

    Attributes:
        lanes: the variables of the kernel that stand for the index of an element.
        lane: the index of an element of a carry, in terms of ``lanes``.
        size: how many elements there are, which programs share.
        shape: of a program's block of elements.
        index: of the step at hand.
        load_bytes: what an element of ``shape`` reads in each step.
        stored: the condition for a y of an element to be stored.
    """

    stored = MASK

    lanes: list[Any]
    lane: list[Any]
    size: Any
    shape: tuple[str, ...]
    index: Any
    is_wide: bool

    def __init__(self, call: ScanCall) -> None:
        self.init, layouts = call.operands.carry, call.result_layouts()
        self.carry, self.ys = layouts[: len(self.init)], layouts[len(self.init) :]
        self.trip_count = call.trip_count
        self.parameters = Parameters()
        self.load_bytes = 0

    def head(self) -> list[str]:
        """Return the lines that define ``lanes``, and MASK: which elements there are."""
        raise NotImplementedError

    def step(self, lines: TritonLines) -> list[str]:
        """Emit the values of a step; return the lines that store them."""
        raise NotImplementedError

    def functions(self) -> list[str]:
        """Return the functions that the kernel calls, once the kernel's own lines are there."""
        return []

    def source(self) -> TritonSource:
        lines = TritonLines(self.shape, self.load, self._renamed, self._is_invariant)
        with lines.at_work():
            init = [line for k in range(len(self.init)) for line in self._first(k)]
            lines.begin_step()
            stores = self.step(lines)
        last = [self.store(k, f"carry{k}", self.own(k)) for k in range(len(self.carry))]
        # all code before the first lines: it is what names the parameters
        loop = [*lines.of_a_step(), *stores]
        before = [*self.head(), *lines.before_steps(), *init, *self._loop_header()]
        sizes = self.parameters.sizes
        first = [f"{name} = tl.cast({name}, tl.int64)" for name in sizes]
        text = [
            HEADER,
            "",
            *self.functions(),
            f"@triton.jit(do_not_specialize={sizes})",
            f"def scan_kernel({', '.join([*self.parameters.names, 'BLOCK: tl.constexpr'])}):",
            *indented([*first, *before, *indented(loop), *last]),
        ]
        return TritonSource(
            "\n".join(text) + "\n", self.parameters.arguments, self.parameters.dtypes, self.size
        )

    # --- the loop ---

    def _loop_header(self) -> list[str]:
        steps = self.text(self.trip_count)
        return [
            f"for turn in tl.range(0, {steps}, num_stages={self.steps_ahead()}):",
            "    step = tl.cast(turn, tl.int64)",
        ]

    def steps_ahead(self) -> int:
        """Return how far loads run ahead of the loop."""
        a_step = max(1, self.load_bytes * self.elements())
        return max(1, min(STEPS_AHEAD, AHEAD_BYTES // a_step))

    def elements(self) -> int:
        """Return how many elements a program has."""
        raise NotImplementedError

    def _first(self, position: int) -> list[str]:
        value = self.init[position].make_loader()(self.lane_of(position))
        return [f"carry{position} = {self._block(value, self.carry[position].dtype)}"]

    def _block(self, value: Any, dtype: torch.dtype) -> str:
        return f"tl.broadcast_to({kept(value, dtype)}, [{', '.join(self.shape)}])"

    def carries(self, lines: TritonLines) -> list[Any]:
        return [lines.variable(f"carry{k}", layout.dtype) for k, layout in enumerate(self.carry)]

    def next_carries(self, values: Sequence[Any]) -> list[str]:
        """Assign the next carries, once all of them are known."""
        pairs = zip(values, self.carry, strict=True)
        blocks = [f"next{k} = {self._block(v, to.dtype)}" for k, (v, to) in enumerate(pairs)]
        return blocks + [f"carry{k} = next{k}" for k in range(len(values))]

    # --- addresses ---

    def store(self, position: int, value: Any, index: Any) -> str:
        """Return the line that stores ``value`` to a result."""
        dtype = (*self.carry, *self.ys)[position].dtype
        address = self.address(self.parameters.written(position, dtype), index)
        return f"tl.store({address}, {value}, {self.stored_of(position)})"

    def stored_of(self, position: int) -> str:
        return self.stored

    def lane_of(self, position: int) -> Sequence[Any]:
        """Return the index of an element of a result."""
        return self.lane

    def lane_at(self, position: int, shift: int) -> list[Any]:
        """Return that of the element which is ``shift`` columns further."""
        lane = list(self.lane_of(position))
        if shift:
            lane[-1] += shift
        return lane

    def own(self, position: int, shift: int = 0) -> Any:
        """Return the index at which a lane writes a result, ``shift`` columns further."""
        n, lane = len(self.carry), self.lane_at(position, shift)
        if position < n:
            return self.carry[position].make_indexer()(lane)
        return self.ys[position - n].make_indexer()([self.index, *lane])

    def load(self, name: str, index: Any, mask: str | None) -> tuple[str, torch.dtype]:
        dtype = dtype_of(name)
        both = MASK if mask is None else f"{MASK} & {mask}"
        address = self.address(self.parameters.read(name, dtype), index)
        if not self._is_invariant(index):
            self.load_bytes += dtype.itemsize
        return f"tl.load({address}, {both})", dtype

    def address(self, pointer: str, index: Any, shape: Sequence[str] = ()) -> str:
        """Return the address of a block's elements, of ``shape`` if it is not a program's."""
        same, offset = self._parts(index)
        moved = pointer if same == 0 else f"{pointer} + ({self.text(same)})"
        if offset == 0:
            return f"{moved} + tl.full([{', '.join(shape or self.shape)}], 0, tl.int32)"
        return f"{moved} + ({self.text(offset)})"

    def _parts(self, index: Any) -> tuple[Any, Any]:
        """Split an index in a part that is the same for all lanes, and the rest."""
        same, rest = sympy.expand(simplified(index)).as_independent(*self.lanes, as_Add=True)
        return same, rest

    def needs_64_bits(self, indices: Iterable[Any], sizes: dict[Any, Any]) -> bool:
        """Return True if an offset of a lane may be out of the range of 32 bits."""
        if not are_static(sizes.values()):
            return True
        own = [self.own(k) for k in range(len(self.carry) + len(self.ys))]
        for index in (*indices, *own, sympy.Mul(*sizes.values())):
            _, offset = self._parts(index)
            if not offset.free_symbols <= sizes.keys() or bounds_of(offset, sizes)[1] >= 2**31:
                return True
        return False

    @property
    def program(self) -> str:
        return "tl.program_id(0)" + (".to(tl.int64)" if self.is_wide else "")

    def _is_invariant(self, index: Any) -> bool:
        return STEP not in index.free_symbols

    def _renamed(self, expression: Any) -> Any:
        expression = simplified(expression)
        own = {STEP: variable("step"), **{lane: lane for lane in self.lanes}}
        names = {
            s: own[s] if s in own else variable(self.parameters.size(s))
            for s in sorted(expression.free_symbols, key=str)
        }
        return expression.xreplace(names)

    def text(self, expression: Any) -> str:
        return index_text(self._renamed(sympy.sympify(expression)))


def indices(
    number: str, sizes: Sequence[Any], text: Callable[[Any], str], shape: str = ""
) -> list[str]:
    """Compute the index in each dimension, ``x0`` and so on, from the number of an element."""
    lines, inner = [], sympy.Integer(1)
    for k in reversed(range(len(sizes))):
        at = number if inner == 1 else f"({number} // ({text(inner)}))"
        at = f"{at} % ({text(sizes[k])})" if k else at
        lines.append(f"x{k} = tl.broadcast_to({at}, {shape})" if shape else f"x{k} = {at}")
        inner = inner * sizes[k]
    return lines
