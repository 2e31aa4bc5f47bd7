"""What pays where a loop runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.rewrites.classify import Dependence, is_contraction, nbytes


@dataclass(frozen=True)
class Costs:
    """See :func:`~torch_scan_hop.rewrites.planner.make_plan` for the attributes."""

    pointwise_pays: bool
    guard_sizes: bool
    least_weight: int

    def nbytes(self, node: fx.Node) -> Any:
        """What pays does not decide what is right: it needs no guard."""
        return nbytes(node) if self.guard_sizes else likely_value(nbytes(node))

    def product_pays(self, node: fx.Node, dependence: Mapping[fx.Node, Dependence]) -> bool:
        """Whether it is a product, and better made for all steps at once."""
        if not is_contraction(node):
            return False
        inputs = (n for n in node.all_input_nodes if is_tensor_node(n))
        fixed = (n for n in inputs if dependence[n] is Dependence.INVARIANT)
        return not self.least_weight or bool(sum(map(self.nbytes, fixed)) >= self.least_weight)
