"""Estimate whether moving work out of the loop pays on the backend where the loop runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node, is_view, operator_name
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.rewrites.batchable import is_factorisation
from torch_scan_hop.rewrites.classify import Dependence, is_contraction, nbytes

# bytes; a block of MIN_BLOCK stacked states that are larger leaves a core's cache. On a GPU a copy
# of that size takes as long as a launch or two, by its vendor's figures
LARGE_STATE, LARGE_STATE_ON_GPU = 2**17, 2**24
# bytes; two of a larger value leave that cache, and an operator takes as long as a hundred calls
LARGE_VALUE = 2**19

# of rows, which a kernel of a CPU has at hand: with norms of 64 columns after the loop, training
# took 1.5 times as long (benchmarks/results/never_slower.md). On a GPU they are in a kernel's way
_STATISTICS = {"var_mean", "prepare_softmax_online"}
_CALLED = operators("called")


@dataclass(frozen=True)
class Costs:
    """See :class:`~torch_scan_hop.rewrites.planner.Planner` for the attributes."""

    pointwise_pays: bool
    guard_sizes: bool
    least_weight: int

    def nbytes(self, node: fx.Node) -> Any:
        """Return a node's bytes, likely ones for symbolic sizes: an estimate needs no guard."""
        return nbytes(node) if self.guard_sizes else likely_value(nbytes(node))

    def may_be_batched(self, node: fx.Node) -> bool:
        """Return False for a factorisation, where a compiler's loop has small matrices in
        registers, entry by entry; on a CPU for the statistics of rows; and for large values, which
        a step has in a cache, where calls are what leaving the loop saves."""
        if operator_name(node) in _STATISTICS and value_of(node.args[0]).device.type == "cpu":
            return False
        if not self.pointwise_pays:
            return not is_factorisation(node)
        if not is_tensor_node(node) or is_view(node) or is_contraction(node):
            return True
        return likely_value(nbytes(node)) <= LARGE_VALUE

    def product_pays(self, node: fx.Node, dependence: Mapping[fx.Node, Dependence]) -> bool:
        """Return True for a product that is faster when made for all steps at once, or that costs
        more."""
        if node.target in _CALLED:
            return True
        if not is_contraction(node):
            return False
        return not self.least_weight or bool(self._weight(node, dependence) >= self.least_weight)

    def fits(
        self,
        stacked: Sequence[fx.Node],
        budget: Any,
        work: Iterable[fx.Node],
        dependence: Mapping[fx.Node, Dependence],
    ) -> bool:
        """Return True if it costs little to stack ``stacked``, to do ``work`` outside the loop.

        A large state, such as a cache of which a step writes a row, is copied into the stack at
        each step. That takes longer than a call in the loop, unless ``work`` has a product with
        weights as large as the stack, which are then read once and not at each step.
        """
        size: Any = sum(self.nbytes(n) for n in stacked)
        if size > budget:
            return False
        is_on_cpu = any(value_of(n).device.type == "cpu" for n in stacked)
        large = LARGE_STATE if is_on_cpu else LARGE_STATE_ON_GPU
        if not self.pointwise_pays or size <= large:
            return True
        return any(self._weight(n, dependence) >= size for n in filter(is_contraction, work))

    def _weight(self, node: fx.Node, dependence: Mapping[fx.Node, Dependence]) -> Any:
        """Return the bytes of ``node``'s operands that are the same at every step."""
        inputs = (n for n in node.all_input_nodes if is_tensor_node(n))
        return sum(self.nbytes(n) for n in inputs if dependence[n] is Dependence.INVARIANT)
