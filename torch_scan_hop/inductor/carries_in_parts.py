"""Carries that a step takes apart and puts together again, as several carries::

    h, c = state.chunk(2, -1)  # or state.unbind(0), or state[0], state[1]
    ...
    state = torch.cat([h, c], -1)  # or torch.stack

A kernel has its own element of each carry in a register, and none of another place. With the parts
as carries of their own such a step is pointwise, or of rows that are as wide as a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.part_ranges import ends_of_reads, ends_of_writes
from torch_scan_hop.inductor.part_values import SplitValues, cut, join
from torch_scan_hop.inductor.parts_wanted import PartsWanted
from torch_scan_hop.rewrites.classify import is_pinned
from torch_scan_hop.signature import Inputs, Signature, results_of

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
