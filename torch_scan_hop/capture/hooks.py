"""A hook of a body's tensor, as an operator of its graph: a rule for the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

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


def hooks_of(body: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the hooks of ``body``, and of graphs within it."""
    graphs = [m for m in body.modules() if isinstance(m, fx.GraphModule)]
    calls = [(m, node) for m in graphs for node in m.graph.nodes if node.target is hooked]
    return [getattr(module, node.args[1].target) for module, node in calls]


_SCALES = {operator.mul, operator.truediv, operator.neg, torch.mul, torch.div, torch.neg}


def is_scaling(hook: fx.GraphModule) -> bool:
    """Return True if ``hook`` does the same to the parts of a gradient and to their sum.

    >>> is_scaling(fx.symbolic_trace(lambda g: g * 0.5))
    True
    >>> is_scaling(fx.symbolic_trace(lambda g: g.clamp(-1, 1)))
    False
    """
    calls = [node for node in hook.graph.nodes if node.op not in ("placeholder", "output")]
    return all(
        node.target in _SCALES
        and isinstance(node.args[0], fx.Node)
        and not any(isinstance(arg, fx.Node) for arg in node.args[1:])
        for node in calls
    )


def refuse_hooks_of_used_carries(graph: fx.Graph, n_carry: int) -> None:
    """Refuse a hook on a carry that the step before has also used in another way, in a y, say.

    The carry that a step is given is what the step before returned. There it gets one gradient from
    the next step and one from the other use, but a hook in the next step would see only the first
    of them.
    """
    from torch_scan_hop._torch.dynamo.errors import Unsupported

    placeholders = graph.find_nodes(op="placeholder")[:n_carry]
    results: Any = output_node(graph).args[0]
    for given, returned in zip(placeholders, results, strict=False):
        is_hooked = any(user.target is hooked for user in given.users)
        if is_hooked and (len(returned.users) > 1 or list(results).count(returned) > 1):
            raise Unsupported(
                "the body registers a hook on its carry, which the step before has used besides "
                "returning it, in y or elsewhere. Return carry.clone() as the carry"
            )
