"""The code of a pointwise body's kernel.

::

    lane = this program's lanes
    carry = init[lane]                         # in registers from here on
    for turn in range(steps):                  # loads of xs are issued some steps ahead
        step = turn, or steps - 1 - turn
        carry, y = body(carry, xs[step, lane], additional[lane])
        ys[step, lane] = y
    final[lane] = carry

What a step reads that is the same in all of them is read before the loop. An address is a pointer
that moves with the step, of 64 bits and the same for all lanes, and an offset of the lane, which
does not change: what a lane has to keep of it is 32 bits, where they are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_triton import (
    HEADER,
    TritonLines,
    compute_type,
    dtype_of,
    index_text,
    is_graph_symbol,
    simplified,
    storage_type,
)
from torch_scan_hop._torch.inductor_values import (
    NotPointwise,
    bounds_of,
    handled_by,
    handler_at_hand,
)
from torch_scan_hop.inductor.lane_body import PointwiseBody, merged_dimensions
from torch_scan_hop.inductor.step import STEP, StepOps

# How far loads run ahead of the loop, in steps: they wait in shared memory, or in registers
# where they are narrower than what the hardware copies there. Not measured on a GPU.
STEPS_AHEAD = 4

LANE, MASK = "lane", "inside"


@dataclass(frozen=True)
class Result:
    """A buffer that the kernel writes, by its position among the results of the scan."""

    position: int


@dataclass(frozen=True)
class TritonSource:
    """A kernel, and what it is to be called with.

    Attributes:
        text: a module that defines the function ``scan_kernel``.
        arguments: of each parameter but the last, which is ``BLOCK``: the name of a buffer that
            it reads, a :class:`Result`, or a size.
        dtypes: of the buffers among them; None for a size, an integer.
        size: the number of lanes.
    """

    text: str
    arguments: tuple[Any, ...]
    dtypes: tuple[torch.dtype | None, ...]
    size: Any


class Parameters:
    """The parameters of a kernel, in the order in which its code first names them."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[str, torch.dtype | None]] = {}

    def _name(self, argument: Any, name: str, dtype: torch.dtype | None) -> str:
        n = sum(other.startswith(name) for other, _ in self._found.values())
        return self._found.setdefault(argument, (f"{name}{n}", dtype))[0]

    def read(self, buffer: str, dtype: torch.dtype) -> str:
        return self._name(buffer, "in", dtype)

    def written(self, position: int, dtype: torch.dtype) -> str:
        return self._name(Result(position), "out", dtype)

    def size(self, symbol: Any) -> str:
        if not is_graph_symbol(symbol):
            raise NotPointwise(f"{symbol} is no integer")
        return self._name(symbol, "size", None)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._found.values()]

    @property
    def sizes(self) -> list[str]:
        return [name for name, dtype in self._found.values() if dtype is None]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self._found)

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        return tuple(dtype for _, dtype in self._found.values())


def emit_lanes(
    body: PointwiseBody, init: Sequence[Any], layouts: Sequence[Any], trip_count: Any
) -> TritonSource:
    """The kernel of ``body``, from ``init``; ``layouts`` of its results: final carries, then ys."""
    return _LaneCode(body, init, layouts, trip_count).emit()


class _LaneCode:
    def __init__(
        self, body: PointwiseBody, init: Sequence[Any], layouts: Sequence[Any], trip_count: Any
    ) -> None:
        self.body = body
        self.init = init
        self.carry, self.ys = layouts[: len(init)], layouts[len(init) :]
        self.trip_count = trip_count
        self.parameters = Parameters()
        self.sizes, index_of = merged_dimensions(body, self.carry[0].size, layouts)
        #: the variables of the kernel that stand for the merged dimensions
        self.lanes = [_variable(f"x{k}") for k in range(len(self.sizes))]
        self.lane: list[Any] = list(index_of(self.lanes))
        self.is_wide = self._needs_64_bits()

    def emit(self) -> TritonSource:
        lines = TritonLines(["BLOCK"], self._load, self._renamed, self._is_invariant)
        with lines.at_work():
            init = [self._first(lines, k) for k in range(len(self.init))]
            lines.begin_step()
            stores = self._step(lines)
        last = [
            f"tl.store({self._address(self._written(k), self._own(k))}, carry{k}, {MASK})"
            for k in range(len(self.carry))
        ]
        # all code before the head: it is what names the parameters
        loop = [*lines.of_a_step(), *stores]
        before = [*self._lane_variables(), *lines.before_steps(), *init]
        header = self._loop_header()
        size = sympy.Mul(*self.sizes)
        inside = f"{MASK} = {LANE} < {self._text(size)}"
        names = self.parameters.names
        first = [f"{name} = tl.cast({name}, tl.int64)" for name in self.parameters.sizes]
        first.append(f"{LANE} = tl.program_id(0){self._wide} * BLOCK + tl.arange(0, BLOCK)")
        text = [
            HEADER,
            "",
            f"@triton.jit(do_not_specialize={self.parameters.sizes})",
            f"def scan_kernel({', '.join([*names, 'BLOCK: tl.constexpr'])}):",
            *_indented([*first, inside, *before, *header, *_indented(loop), *last]),
        ]
        return TritonSource(
            "\n".join(text) + "\n", self.parameters.arguments, self.parameters.dtypes, size
        )

    # --- parts ---

    @property
    def _wide(self) -> str:
        return ".to(tl.int64)" if self.is_wide else ""

    def _needs_64_bits(self) -> bool:
        """Whether a lane, or an offset of one, may be out of the range of 32 bits."""
        if not all(isinstance(n, (int, sympy.Integer)) for n in self.sizes):
            return True
        sizes = dict(zip(self.lanes, self.sizes, strict=True))
        indices = self.body.reads(self.lane).indices
        indices += [layout.make_indexer()(self.lane) for layout in self.carry]
        indices += [layout.make_indexer()([STEP, *self.lane]) for layout in self.ys]
        for index in [*indices, sympy.Mul(*self.sizes)]:
            _, offset = self._parts(index)
            if not offset.free_symbols <= sizes.keys() or bounds_of(offset, sizes)[1] >= 2**31:
                return True
        return False

    def _lane_variables(self) -> list[str]:
        """Each dimension's index, of the number of the lane."""
        lines, inner = [], sympy.Integer(1)
        for k in reversed(range(len(self.sizes))):
            text = LANE if inner == 1 else f"({LANE} // ({self._text(inner)}))"
            text = f"{text} % ({self._text(self.sizes[k])})" if k else text
            lines.append(f"x{k} = {text}")
            inner = inner * self.sizes[k]
        return lines

    def _loop_header(self) -> list[str]:
        steps = self._text(self.trip_count)
        return [
            f"for turn in tl.range(0, {steps}, num_stages={STEPS_AHEAD}):",
            "    step = tl.cast(turn, tl.int64)",
        ]

    def _first(self, lines: TritonLines, position: int) -> str:
        value = self.init[position].make_loader()(self.lane)
        kept = _kept(value, self.carry[position].dtype)
        return f"carry{position} = tl.broadcast_to({kept}, [BLOCK])"

    def _step(self, lines: TritonLines) -> list[str]:
        """Emit the values of a step; the lines that store them come back."""
        carry = [lines.variable(f"carry{k}", layout.dtype) for k, layout in enumerate(self.carry)]
        dtypes = [layout.dtype for layout in (*self.carry, *self.ys)]
        handler = StepOps(handler_at_hand(), self.body.lowering, lambda k, _: carry[k])
        with handled_by(handler):
            values = self.body.values(self.lane, dtypes)
        n = len(carry)
        stores = [
            f"tl.store({self._address(self._written(k), self._own(k))}, {values[k]}, {MASK})"
            for k in range(n, len(values))
        ]
        stores += [
            f"next{k} = tl.broadcast_to({_kept(values[k], dtypes[k])}, [BLOCK])" for k in range(n)
        ]
        return stores + [f"carry{k} = next{k}" for k in range(n)]

    # --- addresses ---

    def _written(self, position: int) -> str:
        return self.parameters.written(position, (*self.carry, *self.ys)[position].dtype)

    def _own(self, position: int) -> Any:
        """The index at which a lane writes a result."""
        n = len(self.carry)
        if position < n:
            return self.carry[position].make_indexer()(self.lane)
        return self.ys[position - n].make_indexer()([self.body.index, *self.lane])

    def _load(self, name: str, index: Any, mask: str | None) -> tuple[str, torch.dtype]:
        dtype = dtype_of(name)
        both = MASK if mask is None else f"{MASK} & {mask}"
        address = self._address(self.parameters.read(name, dtype), index)
        return f"tl.load({address}, {both})", dtype

    def _parts(self, index: Any) -> tuple[Any, Any]:
        """What of an index is the same for all lanes, and the rest."""
        same, rest = sympy.expand(simplified(index)).as_independent(*self.lanes, as_Add=True)
        return same, rest

    def _address(self, pointer: str, index: Any) -> str:
        same, offset = self._parts(index)
        moved = pointer if same == 0 else f"{pointer} + ({self._text(same)})"
        if offset == 0:
            return f"{moved} + tl.full([BLOCK], 0, tl.int32)"
        return f"{moved} + ({self._text(offset)})"

    def _is_invariant(self, index: Any) -> bool:
        return STEP not in index.free_symbols

    def _renamed(self, expression: Any) -> Any:
        expression = simplified(expression)
        own = {STEP: _variable("step"), **{lane: lane for lane in self.lanes}}
        names = {
            s: own[s] if s in own else _variable(self.parameters.size(s))
            for s in sorted(expression.free_symbols, key=str)
        }
        return expression.xreplace(names)

    def _text(self, expression: Any) -> str:
        return index_text(self._renamed(sympy.sympify(expression)))


def _variable(name: str) -> Any:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _kept(value: Any, dtype: torch.dtype) -> str:
    """``value`` as the next step reads it: as exact as the carry's type, not more."""
    stored, computed = storage_type(dtype), compute_type(dtype)
    return (
        f"{value}.to({computed})" if stored == computed else f"{value}.to({stored}).to({computed})"
    )


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
