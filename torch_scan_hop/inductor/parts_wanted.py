"""Which values of a step are asked for in parts, and which whole.

Values are asked for from the results back. Whoever reads a part of what depends on a carry asks for
that part alone; a carry that something asks for whole cannot be split.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.part_ranges import (
    WRITES,
    Range,
    base_of,
    pieces_along,
    range_of,
    range_read_by,
)
from torch_scan_hop.signature import results_of


class PartsWanted:
    """What is asked for if ``carry`` is split along ``dim``; Refusal if a step reads it whole.

    ``bounds``: where parts begin and end. ``after``: the position of the next carry.

    Attributes:
        dim: from the last one, so that it is the same for all that is broadcast with the carry.
        whole, in_parts: the nodes whose values are asked for. Some are in both.
    """

    def __init__(
        self, body: fx.GraphModule, carry: fx.Node, after: int, dim: int, bounds: list[int]
    ) -> None:
        self.body, self.carry = body, carry
        self.dim = dim - value_of(carry).dim()
        self.bounds, self.size = {*bounds}, bounds[-1]
        self.ranges: list[Range] = list(itertools.pairwise(bounds))
        self._alike, self._apart = {carry}, {carry}
        for node in body.graph.nodes:
            self._sort(node)
        self.whole: set[fx.Node] = set()
        self.in_parts: set[fx.Node] = set()
        self._ask(after)

    def _sort(self, node: fx.Node) -> None:
        """Note what is pointwise of the carry; and what is made part by part, as it is."""
        if self.is_pointwise(node):
            for found in (self._alike, self._apart):
                if not found.isdisjoint(node.all_input_nodes):
                    found.add(node)
        if self.written(node) or self.pieces(node):
            self._apart.add(node)

    def _ask(self, after: int) -> None:
        results = results_of(self.body.graph)
        if results[after] not in self._apart:
            raise Refusal("a step does not put it together")
        for k, result in enumerate(results):
            self._want(result, k == after or result in self._alike)
        for node in reversed(self.body.graph.nodes):
            if node in self.in_parts:
                self._ask_for_parts(node)
            if node in self.whole:
                self._ask_for_whole(node)

    def _want(self, value: Any, in_parts: bool) -> None:
        if isinstance(value, fx.Node):
            (self.in_parts if in_parts and value in self._apart else self.whole).add(value)

    def _ask_for_whole(self, node: fx.Node) -> None:
        if node is self.carry:
            raise Refusal("a step reads it whole")
        read = self.read(node)
        for argument in node.all_input_nodes if read is None else ():
            self._want(argument, False)
        if read is not None:
            self._want(read[0], True)

    def _ask_for_parts(self, node: fx.Node) -> None:
        pieces = self.pieces(node)
        if pieces:
            for piece, _ in pieces:
                self._want(piece, False)
        elif self.written(node):
            self._want(node.args[0], True)
            self._want(node.args[1], False)
        else:
            for argument in node.all_input_nodes:
                self._want(argument, self.is_as_long(argument))

    # --- what a node is ---

    def is_as_long(self, value: Any) -> bool:
        if not is_tensor_node(value):
            return False
        shape = value_of(value).shape
        return len(shape) >= -self.dim and shape[self.dim] == self.size

    def is_pointwise(self, node: Any) -> bool:
        """Return True if each part of ``node`` is the operator of its arguments' parts."""
        tags = getattr(getattr(node, "target", None), "tags", ())
        if torch.Tag.pointwise not in tags or not self.is_as_long(node):
            return False
        sizes = (value_of(n).shape for n in node.all_input_nodes if is_tensor_node(n))
        return all(len(s) < -self.dim or s[self.dim] in (1, self.size) for s in sizes)

    def pieces(self, node: fx.Node) -> list[tuple[fx.Node, int]]:
        """Return what ``node`` is put together from, if that is of whole parts, and the lengths."""
        found = pieces_along(node, self.dim) if self.is_as_long(node) else None
        ends = {0, *itertools.accumulate(n for _, n in found or ())}
        return found if found and ends >= self.bounds else []

    def read(self, node: fx.Node) -> tuple[fx.Node, Range, bool] | None:
        """Return what ``node`` reads whole parts of, which, and if it drops the dimension."""
        base = base_of(node)
        found = range_read_by(node) if base in self._apart else None
        if found is None or not self._are_parts(base, *found[:2]):
            return None
        return base, found[1], found[2]

    def written(self, node: fx.Node) -> Range | None:
        """Return the whole parts that ``node`` writes."""
        found = range_of(node, 2) if node.target in WRITES else None
        if found is None or not self._are_parts(node, *found[:2]):
            return None
        same = value_of(node.args[1]).dtype is value_of(node).dtype
        return found[1] if same else None

    def _are_parts(self, value: Any, dim: int, at: Range) -> bool:
        if not self.is_as_long(value) or not {*at} <= self.bounds:
            return False
        rank = value_of(value).dim()
        return dim % rank == rank + self.dim
