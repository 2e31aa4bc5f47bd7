"""Draw the seeds of all steps before the loop.

Inductor makes a random number of a seed and of the place of an element, which is pointwise; what
asks the generator is the seed. With its seeds among the xs, a step that drops elements or adds
noise may be one kernel, and a scan draws its seeds as the compiled Python loop does, all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.node_kinds import operator_name
from torch_scan_hop.signature import Inputs, Signature


@dataclass(frozen=True)
class SeedsBefore:
    """A scan of ``body`` whose seeds are drawn before it, ``drawn`` by each of these nodes."""

    body: fx.GraphModule
    signature: Signature
    drawn: Sequence[fx.Node]

    def inputs(self, given: Inputs[Any], reverse: bool) -> Inputs[Any]:
        """Return the inputs of the scan of :meth:`step`: the seeds are its last xs."""
        calls: list[Any] = [node.args for node in self.drawn]
        seeds = [_draw(given.trip_count, *call) for call in calls]
        seeds = [s.flip(0) for s in seeds] if reverse else seeds
        return Inputs(given.carry, [*given.xs, *seeds], given.additional)

    def step(self, *flat: Any) -> Any:
        first = self.signature.n_carry + self.signature.n_xs
        own, seeds = [*flat], flat[first : first + len(self.drawn)]
        del own[first : first + len(self.drawn)]
        known: dict[fx.Node, Any] = {}
        for node, of_node in zip(self.drawn, seeds, strict=True):
            known |= {node: of_node, **{u: of_node.select(0, u.args[1]) for u in node.users}}
        return fx.Interpreter(self.body).run(*own, initial_env=known)


def find_seeds(body: fx.GraphModule, signature: Signature) -> SeedsBefore | None:
    """Return the scan whose seeds are drawn before it, or None if ``body`` draws no seeds."""
    drawn = [node for node in body.graph.nodes if operator_name(node) == "inductor_seeds"]
    reads = {operator_name(user) for node in drawn for user in node.users}
    return SeedsBefore(body, signature, drawn) if reads == {"inductor_lookup_seed"} else None


def _draw(trip_count: Any, count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` seeds of each step, in the order of steps."""
    bounds = torch.iinfo(torch.int64)
    size = [trip_count * count]
    drawn = torch.randint(bounds.min, bounds.max, size, dtype=torch.int64, device=device)
    return drawn.reshape(trip_count, count)
