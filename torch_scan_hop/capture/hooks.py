"""A hook of a body's tensor, as an operator of its graph: a rule for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop.signature import output_node


def hooked(
    tensor: torch.Tensor, hook: Callable[..., torch.Tensor], *captured: torch.Tensor
) -> torch.Tensor:
    """Return ``tensor``, whose gradient goes through ``hook(gradient, *captured)``.

    Where a step is differentiated this registers the hook, which autograd then calls. Elsewhere it
    does nothing.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        tensor.register_hook(lambda gradient: hook(gradient, *captured))
    return tensor


def has_hook(body: Any) -> bool:
    """Return True if ``body``, or a graph within it, is a graph with a hook."""
    if not isinstance(body, fx.GraphModule):
        return False
    graphs = [m.graph for m in body.modules() if isinstance(m, fx.GraphModule)]
    return any(node.target is hooked for graph in graphs for node in graph.nodes)


def refuse_hooks_of_used_carries(graph: fx.Graph, n_carry: int) -> None:
    """Refuse a hook on a carry that the step before has also used in another way, in a y, say.

    The carry that a step is given is what the step before returned. There it gets one gradient from
    the next step and one from the other use, but a hook in the next step would see only the first
    of them.
    """
    placeholders = graph.find_nodes(op="placeholder")[:n_carry]
    results: Any = output_node(graph).args[0]
    for given, returned in zip(placeholders, results, strict=False):
        is_hooked = any(user.target is hooked for user in given.users)
        if is_hooked and (len(returned.users) > 1 or list(results).count(returned) > 1):
            raise Unsupported(
                "the body registers a hook on its carry, which the step before has used besides "
                "returning it, in y or elsewhere. Return carry.clone() as the carry"
            )
