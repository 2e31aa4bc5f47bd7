"""A body of small matrices as values: which of them are stored where, and what makes those.

A value is stored once, where several others read it, or where a factorisation does. Between those
all is computed where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from torch_scan_hop._torch.inductor_values import is_unrealized, named_buffer, storage_of, tensor_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.places import CPU
from torch_scan_hop.inductor.product_lowering import ProductLowering
from torch_scan_hop.inductor.step import are_static
from torch_scan_hop.rewrites.lane_sums import MOST_ENTRIES

# "buf": names that Inductor lets a kernel store to
SCRATCH = "scan_buf_entries_"


@dataclass(frozen=True)
class Scratch:
    """Memory for a value of a step.

    Attributes:
        entries: for each lane.
        width: how many lanes are next to each other; None where the value has no lanes.
    """

    name: str
    buffer: Any
    entries: int
    width: int | None

    @property
    def varies(self) -> bool:
        return self.width is not None

    @property
    def numbers(self) -> int:
        return self.entries * (self.width or 1)

    @property
    def size(self) -> list[Any]:
        return list(self.buffer.layout.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.get_dtype()  # type: ignore[no-any-return]

    def tensor(self) -> Any:
        return tensor_of(self.buffer)


@dataclass(frozen=True)
class Made:
    """A value, and the memory that it goes to."""

    to: Scratch
    value: Any


@dataclass(frozen=True)
class Matrix:
    """Scratch memory as a stack of matrices, or as one of their transposes."""

    scratch: Scratch
    turned: bool = False

    @property
    def strides(self) -> tuple[Any, Any]:
        row, column = self.scratch.buffer.layout.stride[-2:]
        return (column, row) if self.turned else (row, column)


@dataclass(frozen=True)
class Called:
    """A function of ``matrix_source`` that changes each of a stack of matrices in place; ``sizes``
    are those of a matrix, and ``notes`` integers beside each."""

    function: str
    sizes: tuple[int, ...]
    matrices: Sequence[Matrix]
    notes: Sequence[Scratch] = ()
    flags: tuple[bool, ...] = ()

    @property
    def stack(self) -> int:
        first = self.matrices[0].scratch
        return first.entries // int(first.size[-1] * first.size[-2])


aten = torch.ops.aten


class EntriesLowering(ProductLowering):
    """``lanes``: how many there are, or None; ``width``: of them that are next to each other."""

    def __init__(self, gm: fx.GraphModule, lanes: Any, width: int) -> None:
        super().__init__(gm)
        self.lanes = lanes
        self.width = width
        #: the memory and the work of a step, in order
        self.memory: list[Scratch] = []
        self.actions: list[Made | Called] = []
        #: by id: a matrix that has the rows of several others, and the stack of those
        self._unfolded: dict[int, tuple[Any, Any]] = {}

    # --- memory ---

    def varies(self, sizes: Sequence[Any]) -> bool:
        return self.lanes is not None and bool(sizes) and sizes[0] == self.lanes

    def scratch(self, sizes: Sequence[Any], dtype: torch.dtype, varies: bool) -> Scratch:
        own = list(sizes[1:]) if varies else list(sizes)
        if not are_static(own):
            raise Refusal(f"a value of {list(sizes)}, whose entries are not known")
        unit = self.width if varies else 1
        strides = [unit * int(sympy.prod(own[d + 1 :])) for d in range(len(own))]
        entries = int(sympy.prod(own))
        if entries > MOST_ENTRIES:
            raise Refusal(f"a value of {list(sizes)}, which is no small matrix")
        name = f"{SCRATCH}{len(self.memory)}"
        strides = [1, *strides] if varies else strides
        buffer = named_buffer(name, CPU, dtype, sizes, strides)
        found = Scratch(name, buffer, entries, self.width if varies else None)
        self.memory.append(found)
        return found

    def held(self, value: Any) -> Scratch | None:
        """Return the scratch memory that has ``value``, entry by entry."""
        found = storage_of(value)
        if found is None:
            return None
        name, layout = found
        for scratch in self.memory:
            like = scratch.buffer.layout
            if scratch.name == name:
                same = list(layout.size) == list(like.size)
                return scratch if same and list(layout.stride) == list(like.stride) else None
        return None

    def stored(self, value: Any, always: bool = False) -> Scratch:
        """Return scratch memory with ``value``; a copy of its own if ``always``."""
        found = None if always else self.held(value)
        if found is None:
            sizes = value.get_size()
            varies = self.varies(sizes) and not self._is_shared(value)
            found = self.scratch(sizes, value.get_dtype(), varies)
            self.actions.append(Made(found, value))
        return found

    def _is_shared(self, value: Any) -> bool:
        """Return True if lanes share ``value``: a weight may have as many rows as lanes."""
        varying = {s.name for s in self.memory if s.varies}
        names = {name for name, _ in self.reads_of(value).found}
        return bool(names) and not names & varying

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and len(n.users) > 1 and is_unrealized(value):
            if value.get_dtype() != torch.bool:
                return self._stored_in_its_shape(value)
        return value

    def _stored_in_its_shape(self, value: Any) -> Any:
        stack = self.stack_of(value)
        if stack is None:
            return self.stored(value).tensor()
        return self.fold(self.stored(stack).tensor(), value.get_size())

    # --- rows of several matrices in one ---

    def fold(self, stack: Any, sizes: Sequence[Any]) -> Any:
        folded = super().call_function(aten.view.default, (stack, list(sizes)), {})
        self._unfolded[id(folded)] = folded, stack
        return folded

    def stack_of(self, value: Any) -> Any:
        """Return ``[lanes, n, ...]`` of ``[lanes * n, ...]``; None for any other value."""
        if id(value) in self._unfolded:
            return self._unfolded[id(value)][1]
        sizes = value.get_size()
        if self.lanes is None or not sizes or sizes[0] == self.lanes:
            return None
        rows = sympy.simplify(sympy.sympify(sizes[0]) / self.lanes)
        if not rows.is_Integer:
            return None
        return super().call_function(aten.view.default, (value, [self.lanes, rows, *sizes[1:]]), {})

    def _view(self, value: Any, sizes: Sequence[Any]) -> Any:
        _, value = self._unfolded.get(id(value), (None, value))
        if list(value.get_size()) == list(sizes):
            return value
        view = super().call_function(aten.view.default, (value, list(sizes)), {})
        if self.varies(value.get_size()) and not self.varies(sizes):
            stack = self.stack_of(view)
            if stack is not None:
                own = list(value.get_size())
                if list(stack.get_size()) == own:
                    stack = value
                self._unfolded[id(view)] = view, stack
        return view
