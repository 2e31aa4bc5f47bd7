"""A hook of a body's tensor, as an operator of its graph: a rule for the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx


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
        node.target is changed_if
        or (
            node.target in _SCALES
            and isinstance(node.args[0], fx.Node)
            and not any(isinstance(arg, fx.Node) for arg in node.args[1:])
        )
        for node in calls
    )


def changed_if(flag: torch.Tensor, changed: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.where(flag, changed, gradient)


def with_flag(hook: fx.GraphModule) -> fx.GraphModule:
    """Return ``hook`` as a function of ``(gradient, flag, *captured)``, which leaves the gradient
    alone where the flag is False.

    >>> halved = with_flag(fx.symbolic_trace(lambda g: g * 0.5))
    >>> [halved(torch.tensor(8.0), torch.tensor(flag)).item() for flag in (True, False)]
    [4.0, 8.0]
    """
    graph = fx.Graph()
    gradient, flag = graph.placeholder("gradient"), graph.placeholder("flag")
    given = hook.graph.find_nodes(op="placeholder")
    known = {given[0]: gradient, **{n: graph.placeholder(n.name) for n in given[1:]}}
    result = graph.graph_copy(hook.graph, known)
    graph.output(graph.call_function(changed_if, (flag, result, gradient)))
    return fx.GraphModule(hook, graph, "Hook")
