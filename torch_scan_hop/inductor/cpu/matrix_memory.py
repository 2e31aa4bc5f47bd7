"""A body of small matrices as values: which of them are stored, and where.

A value is stored once, where several others read it, or where a factorisation does. Between those
all is computed where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from torch_scan_hop._torch.inductor_values import (
    is_unrealized,
    named_buffer,
    storage_of,
)
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.matrix_steps import SCRATCH, Called, Made, Scratch
from torch_scan_hop.inductor.cpu.places import CPU
from torch_scan_hop.inductor.product_lowering import ProductLowering
from torch_scan_hop.rewrites.matrix_sums import MOST_ENTRIES

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
        if not all(isinstance(n, (int, sympy.Integer)) for n in own):
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
        """Return True if ``value`` is made of what all lanes have in common.

        A weight may have as many rows as there are lanes.
        """
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
