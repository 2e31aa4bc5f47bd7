"""Carries that a step takes apart and puts together again, as several carries::

    h, c = state.chunk(2, -1)  # or state.unbind(0), or state[0], state[1]
    ...
    state = torch.cat([h, c], -1)  # or torch.stack

A kernel has its own element of each carry in a register, and none of another place. With the parts
as carries of their own such a step is pointwise, or of rows that are as wide as a part. A part that
is one element of the dimension has not got that dimension.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_alike
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.parts_wanted import PartsWanted, Range, ends_of_reads, ends_of_writes
from torch_scan_hop.rewrites.classify import is_pinned
from torch_scan_hop.signature import Inputs, Signature, results_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _Zeros:
    """A part of zeros, into which the gradients of other parts are written."""

    tensor: Any


def cut(value: torch.Tensor, dim: int, at: Range) -> torch.Tensor:
    """Return a part. No tensor becomes a scalar, which decides no dtype."""
    if at[1] - at[0] == 1 and value.dim() > 1:
        return value.select(dim, at[0])
    return value.narrow(dim, at[0], at[1] - at[0])


def join(parts: Iterable[torch.Tensor], dim: int, like: fx.Node) -> torch.Tensor:
    found = [_with_dimension(part, dim, like) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def _with_dimension(part: torch.Tensor, dim: int, like: fx.Node) -> torch.Tensor:
    return part if part.dim() == value_of(like).dim() else part.unsqueeze(dim)


class SplitValues:
    """The values of a step; among its ``inputs`` the carry that is split is a list of parts."""

    def __init__(self, wanted: PartsWanted, inputs: Iterator[Any]) -> None:
        self.wanted, self.dim = wanted, wanted.dim
        self.whole: dict[fx.Node, Any] = {}
        self.parts: dict[fx.Node, list[Any]] = {}
        for node in wanted.body.graph.nodes:
            if node.op == "placeholder":
                (self.parts if node is wanted.carry else self.whole)[node] = next(inputs)
                continue
            if node in wanted.in_parts:
                self.parts[node] = [self._part(node, at) for at in wanted.ranges]
            if node in wanted.whole:
                self.whole[node] = self._whole(node)

    def parts_of(self, value: fx.Node) -> list[Any]:
        return [_unwrapped(self._at(value, at)) for at in self.wanted.ranges]

    def result(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        is_whole = value in self.whole
        return self.whole[value] if is_whole else join(self.parts_of(value), self.dim, value)

    def _at(self, value: fx.Node, at: Range) -> Any:
        """Return a part of a value, or the value if it is broadcast."""
        if value in self.parts:
            return self.parts[value][self.wanted.ranges.index(at)]
        given = self.whole[value]
        if not isinstance(given, torch.Tensor) or given.dim() < -self.dim:
            return given
        if not self.wanted.is_as_long(value):
            return cut(given, self.dim, (0, 1)) if at[1] - at[0] == 1 else given
        part = cut(given, self.dim, at)
        is_zero = value.target is aten.full.default and value.args[1] == 0
        return _Zeros(part) if is_zero else part

    def _whole(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.wanted.body)
        read = self.wanted.read(node)
        if read is None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.whole.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]
        base, (first, end), drops = read
        within = (at for at in self.wanted.ranges if first <= at[0] and at[1] <= end)
        parts = [_unwrapped(self._at(base, at)) for at in within]
        if drops and parts[0].dim() < value_of(base).dim():
            return parts[0]
        whole = join(parts, self.dim, base)
        return whole.squeeze(self.dim) if drops else whole

    def _part(self, node: fx.Node, at: Range) -> Any:
        pieces = self.wanted.pieces(node)
        if pieces:
            return self._part_of_pieces(node, pieces, at)
        written = self.wanted.written(node)
        if written:
            first, end = written
            value, source = node.args[:2]
            if not (first <= at[0] and at[1] <= end):
                return self._at(value, at)  # type: ignore[arg-type]
            return self._cut(self.whole[source], node, (at[0] - first, at[1] - first))  # type: ignore[index]
        own = {n: self._at(n, at) for n in node.all_input_nodes}
        if node.target is aten.add.Tensor and not node.kwargs:
            zeros = [a for a in node.args if isinstance(a, fx.Node) and isinstance(own[a], _Zeros)]
            others = [a for a in node.args if a not in zeros]
            if zeros and all(is_alike(other, node) for other in others):
                return own[(others or zeros)[0]]  # type: ignore[index]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _unwrapped(own[n]))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _part_of_pieces(self, node: fx.Node, pieces: list[tuple[fx.Node, int]], at: Range) -> Any:
        starts = [0, *itertools.accumulate(length for _, length in pieces)]
        pairs = zip(pieces, starts, strict=False)
        found = [self.whole[n] for (n, _), start in pairs if at[0] <= start < at[1]]
        if len(found) == 1:
            return self._cut(found[0], node, (0, at[1] - at[0]))
        return join(found, self.dim, node)

    def _cut(self, value: Any, like: fx.Node, at: Range) -> Any:
        """Return a part of what is put into ``like``: an element of it may lack the dimension."""
        rank = value_of(like).dim()
        is_part = value.dim() < rank and rank > 1
        return value if is_part else cut(_with_dimension(value, self.dim, like), self.dim, at)


def _unwrapped(value: Any) -> Any:
    return value.tensor if isinstance(value, _Zeros) else value


MOST_PARTS = 8  # layers of a stack, or parts of a state


@dataclass(frozen=True)
class SplitCarry:
    """A scan whose carry ``position`` is several."""

    position: int
    wanted: PartsWanted

    def inputs(self, given: Inputs[Any]) -> Inputs[Any]:
        k, carry = self.position, given.carry
        parts = [cut(carry[k], self.wanted.dim, at).contiguous() for at in self.wanted.ranges]
        return Inputs([*carry[:k], *parts, *carry[k + 1 :]], given.xs, given.additional)

    def step(self, *flat: Any) -> tuple[Any, ...]:
        """Run the body with the parts in place of the carry, and return them likewise."""
        k, n = self.position, len(self.wanted.ranges)
        values = SplitValues(self.wanted, iter([*flat[:k], [*flat[k : k + n]], *flat[k + n :]]))
        before, after, rest = self._around(results_of(self.wanted.body.graph), 1)
        parts = values.parts_of(after[0])
        return (*map(values.result, before), *parts, *map(values.result, rest))

    def joined(self, results: Sequence[Any]) -> list[Any]:
        before, parts, rest = self._around(results, len(self.wanted.ranges))
        return [*before, join(parts, self.wanted.dim, self.wanted.carry), *rest]

    def _around(self, values: Sequence[Any], count: int) -> tuple[Any, Any, Any]:
        k = self.position
        return values[:k], values[k : k + count], values[k + count :]


def find_split_carry(body: fx.GraphModule, signature: Signature) -> SplitCarry | None:
    """Return the first carry of ``body`` that can be split."""
    if any(map(is_pinned, body.graph.nodes)):
        return None
    pairs = zip(signature.inputs_of(body).carry, signature.outputs_of(body).carry, strict=True)
    for position, (carry, after) in enumerate(pairs):
        sizes = value_of(carry).shape
        for dim in (d for d, n in enumerate(sizes) if isinstance(n, int) and n > 1):
            ends = {*ends_of_reads(carry, dim), *ends_of_writes(after, dim)}
            bounds = sorted({0, sizes[dim], *ends})
            if not 2 < len(bounds) <= MOST_PARTS + 1:
                continue
            try:
                return SplitCarry(position, PartsWanted(body, carry, position, dim, bounds))
            except Refusal:
                continue
    return None
