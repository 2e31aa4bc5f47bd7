"""A step with products and reductions as functions of an element of a row.

A row is as wide as the carry. What a product makes is read by columns: ``(h @ w)[:, a:b]`` is
``h @ w[:, a:b]``. So every value of a step is a block of that width, or one number of each row, and
each of them stays in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from torch_scan_hop._torch.inductor_values import is_tensor
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.row_lowering import Frame, RowLowering
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.step import step_inputs


class RowBody:
    """A step of a scan whose carries are rows; a Refusal if not.

    Attributes:
        results: final carries and ys, each as the blocks that it is put together from.
        numbers: the positions of those that have one number of each row, or one of all, and how
            many dimensions these have.
    """

    def __init__(self, call: ScanCall) -> None:
        self.index = call.index
        self.frame = frame = _frame_of(call.operands.carry)
        self.rows, self.width = frame.rows, frame.width
        self.lowering = RowLowering(call.body, frame)
        results = self.lowering.lower(step_inputs(call.operands, call.index))
        self.products, self.reductions = self.lowering.products, self.lowering.reductions
        if not all(map(is_tensor, results)):
            raise Refusal("a result that is no tensor")
        sizes = [value.get_size() for value in results]
        self.numbers = {k: len(s) for k, s in enumerate(sizes) if frame.is_number(s)}
        self.results = [
            [(value, 0)] if k in self.numbers else self.lowering.blocks(value)
            for k, value in enumerate(results)
        ]
        if not all(len(blocks) == 1 for blocks in self.results[: len(call.operands.carry)]):
            raise Refusal("carries of several widths")


def _frame_of(carry: Sequence[Any]) -> Frame:
    """Return the rows of the carries that have most dimensions."""
    sizes = max((c.get_size() for c in carry), key=len)
    if not sizes or not isinstance(sizes[-1], (int, sympy.Integer)):
        raise Refusal(f"a carry of {sizes}, not rows of a static width")
    widest = max((c.get_size() for c in carry if len(c.get_size()) == len(sizes)), key=_width)
    frame = Frame(tuple(widest[:-1]), int(widest[-1]))
    for c in carry:
        if frame.blocks_of(c.get_size()) != 1 and not frame.is_number(c.get_size()):
            raise Refusal(f"carries of {widest} and {c.get_size()}")
    return frame


def _width(sizes: Sequence[Any]) -> int:
    return int(sizes[-1]) if isinstance(sizes[-1], (int, sympy.Integer)) else 0
