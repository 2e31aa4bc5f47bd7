"""A hook of a body's tensor, as an operator of its graph: a rule for the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop.capture.user_code import users_line
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


def refuse_hooks_of_used_carries(graph: fx.Graph, n_carry: int, wants_grad: Sequence[bool]) -> None:
    """Refuse a hook on a carry that is used besides being the carry of this step.

    A step's carry is what the step before returned, which gets one gradient from the next step and
    one from its other use, in a y, say; the hook would see only the first of them. Of init, if it
    ``wants_grad``, nobody knows what else the program does with it.
    """
    from torch_scan_hop._torch.dynamo.errors import Unsupported

    placeholders = graph.find_nodes(op="placeholder")[:n_carry]
    results: Any = output_node(graph).args[0]
    for k, (given, returned) in enumerate(zip(placeholders, results, strict=False)):
        hook = next((user for user in given.users if user.target is hooked), None)
        if hook is None:
            continue
        where = users_line(hook.stack_trace or "")
        if len(returned.users) > 1 or list(results).count(returned) > 1:
            raise Unsupported(
                "the body registers a hook on its carry, which the step before has used besides "
                f"returning it, in y or elsewhere{where}. Return carry.clone() as the carry"
            )
        if wants_grad[k]:
            raise Unsupported(
                "the body registers a hook on its carry, which is init at first, and init may be "
                f"used elsewhere{where}. Register it on carry.clone()"
            )
