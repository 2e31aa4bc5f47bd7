"""The rows of a scan's carries, and which sizes go with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from torch_scan_hop.errors import Refusal


@dataclass(frozen=True)
class Frame:
    """Rows of one static width; ``lead``: the dimensions that number them."""

    lead: tuple[Any, ...]
    width: int

    @property
    def rows(self) -> Any:
        return sympy.sympify(math.prod(self.lead))

    def is_of_rows(self, sizes: Sequence[Any]) -> bool:
        """Return True for the sizes of values of which each row has one."""
        return tuple(sizes) in (self.lead, (*self.lead, 1))

    def is_number(self, sizes: Sequence[Any]) -> bool:
        """Return True for one number of each row, or one of all, such as the count of a step."""
        return not sizes or self.is_of_rows(sizes)

    def place(self, sizes: Sequence[Any], own: Any, down: Any) -> tuple[Any, ...] | None:
        """Return the index, after that of the row, of an element of a row, of a square, or of one
        row or column of it; None for other sizes."""
        lead, last = tuple(sizes[: len(self.lead)]), tuple(sizes[len(self.lead) :])
        zero, width = sympy.Integer(0), self.width
        places: dict[Any, tuple[Any, ...]] = {
            (width,): (own,),
            (width, width): (down, own),
            (width, 1): (own, zero),
            (1, width): (zero, own),
        }
        return places.get(last) if lead == self.lead else None

    def blocks_of(self, sizes: Sequence[Any]) -> int:
        """Return how many times a row is as wide as the frame; 0 for other sizes."""
        *lead, width = sizes if sizes else (0,)
        static = isinstance(width, (int, sympy.Integer))
        fits = tuple(lead) == self.lead and static and width % self.width == 0
        return int(width) // self.width if fits else 0


def frame_of(carry: Sequence[Any]) -> Frame:
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
