"""Cotangents while the backward is being written: they add up where a value is used twice."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .shapes import value


def is_projection(node: fx.Node) -> bool:
    """Return True if this node takes something out of a tuple, rather than indexes a tensor."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    return isinstance(node.args[0], fx.Node) and isinstance(value(node.args[0]), (tuple, list))


class Cotangents:
    """The cotangent of each value of the source graph, as far as it has been gathered.

    The first one is stored, further ones are added to it: no code for adding to zero. For a value
    that is a tuple there is one cotangent for each item.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[fx.Node, int | None], fx.Proxy] = {}
        self.names: dict[fx.Node, str] = {}

    def add(self, node: fx.Node, d: Any, index: Any = None) -> None:
        """Add `d` to the cotangent of `node`, or to that of its item (or slice) at `index`."""
        if isinstance(index, slice):
            for i, d_i in zip(range(len(value(node)))[index], d, strict=True):
                self.add(node, d_i, i)
        elif d is not None:
            key = node, index if index is None else index % len(value(node))
            self._sums[key] = self._sums[key] + d if key in self._sums else d

    def close(self, node: fx.Node) -> Any:
        """Return the complete cotangent of `node`: a proxy, a tuple of them, or None for zero."""
        if isinstance(value(node), (tuple, list)):
            items = tuple(self._sums.get((node, i)) for i in range(len(value(node))))
            return items if any(d is not None for d in items) else None
        d = self._sums.get((node, None))
        if d is not None and (node.op == "placeholder" or d.node not in self.names):
            self.names[d.node] = f"d_{node.name}"
        return d
