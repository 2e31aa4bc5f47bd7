"""Which values of a step are asked for in parts, and which whole.

Values are asked for from the results back. Whoever reads a part of what depends on a carry asks for
that part alone; a carry that something asks for whole cannot be split.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import argument, is_tensor_node
from torch_scan_hop.errors import Refusal
from torch_scan_hop.signature import results_of

aten = torch.ops.aten

# --- the range of another value that a node reads or writes ---

SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
WRITES = {aten.select_scatter.default, aten.slice_scatter.default}

Range = tuple[int, int]


def ends_of_reads(carry: fx.Node, dim: int) -> set[int]:
    """Return where reads of the carry, or of a pointwise value of it, begin and end."""
    shape, ends = value_of(carry).shape, set[int]()
    alike = [carry]
    for node in alike:  # grows
        for user in node.users:
            found = range_read_by(user)
            if user.target in SPLITS:
                ends |= {end for element in user.users for end in _ends_in(element, dim, shape)}
            elif found is not None:
                ends |= _ends_in(user, dim, shape)
            elif is_tensor_node(user) and value_of(user).shape == shape and user not in alike:
                alike.append(user)
    return ends


def _ends_in(node: fx.Node, dim: int, shape: Any) -> set[int]:
    found = range_read_by(node)
    return {*found[2]} if found is not None and found[1] % len(shape) == dim else set()


def range_read_by(node: Any) -> tuple[fx.Node, int, Range, bool] | None:
    """Return what ``node`` reads a range of, the dimension, the range, and if it drops it."""
    if node.target in (aten.select.int, aten.slice.Tensor):
        found = range_of(node, 1)
        return None if found is None else (node.args[0], *found)
    base = node.args[0] if node.target is operator.getitem else None
    if not isinstance(base, fx.Node) or base.target not in SPLITS:
        return None
    is_element = base.target is aten.unbind.int
    dim = argument(base, 1 if is_element else 2, "dim", 0)
    lengths = [1 if is_element else piece.shape[dim] for piece in value_of(base)]
    if not all(isinstance(n, int) for n in lengths):
        return None
    first = sum(lengths[: node.args[1]])
    return base.args[0], dim, (first, first + lengths[node.args[1]]), is_element  # type: ignore[return-value]


def range_of(node: Any, place: int) -> tuple[int, Range, bool] | None:
    """Return the range of a ``select``, a ``slice`` or a write to one; its dimension is at
    ``place``."""
    dim, first = argument(node, place, "dim", 0), argument(node, place + 1, "start", None)
    is_element = node.target in (aten.select.int, aten.select_scatter.default)
    size = value_of(node.args[0]).shape[dim]
    end = first if is_element else argument(node, place + 2, "end", None)
    step = 1 if is_element else argument(node, place + 3, "step", 1)
    if step != 1 or not all(isinstance(n, (int, type(None))) for n in (first, end, size)):
        return None
    if is_element:
        return dim, (first % size, first % size + 1), True
    start, stop, _ = slice(first, end).indices(size)
    return dim, (start, max(start, stop)), False


def ends_of_writes(value: Any, dim: int) -> set[int]:
    """Return where what ``value`` is put together from begins and ends."""
    if not is_tensor_node(value):
        return set()
    shape, ends, alike = value_of(value).shape, set[int](), [value]
    for node in alike:  # grows
        found = range_of(node, 2) if node.target in WRITES else None
        if found is not None and found[0] % len(shape) == dim:
            ends |= {*found[1]}
        pieces = pieces_along(node, dim - len(shape))
        ends |= {*itertools.accumulate(n for _, n in pieces or ())}
        if node.target is aten.add.Tensor or node.target in WRITES:
            same = (n for n in node.all_input_nodes if is_tensor_node(n) and n not in alike)
            alike += [n for n in same if value_of(n).shape == shape]
    return ends


def pieces_along(node: Any, dim: int) -> list[tuple[fx.Node, int]] | None:
    """Return what ``node`` is put together from along ``dim``, which is negative, and how long
    each is; Inductor writes a stack as ``cat([h, c]).view(2, ...)``."""
    joined: Any = node.args[0] if node.target in (aten.view.default, aten.reshape.default) else node
    if joined.target is not aten.cat.default:
        return None
    pieces: Any = joined.args[0]
    sizes = [value_of(n).shape for n in pieces]
    if joined is node:
        own = argument(node, 1, "dim", 0) % len(sizes[0]) - len(sizes[0])
        return (
            [(n, size[dim]) for n, size in zip(pieces, sizes, strict=True)] if own == dim else None
        )
    at = value_of(node).dim() + dim
    whole = (*sizes[0][:at], len(pieces), *sizes[0][at:])
    is_stack = argument(joined, 1, "dim", 0) % len(sizes[0]) == at
    are_alike = all(size == sizes[0] for size in sizes) and tuple(value_of(node).shape) == whole
    return [(n, 1) for n in pieces] if is_stack and are_alike else None


# --- what is asked for ---


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
        for value in node.all_input_nodes if read is None else ():
            self._want(value, False)
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
            for value in node.all_input_nodes:
                self._want(value, self.is_as_long(value))

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
        found = range_read_by(node)
        if found is None or found[0] not in self._apart or not self._are_parts(*found[:3]):
            return None
        base, _, at, drops = found
        return base, at, drops

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
