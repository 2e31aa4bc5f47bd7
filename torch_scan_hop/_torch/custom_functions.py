"""Custom ``autograd.Function``\\ s as Dynamo writes them down (torch 2.9.1, 2.13.0, 2.15.0).

A node of ``autograd_function_apply`` holds the user's forward and backward as graphs. Torch runs
them with gradients off, and hands what the forward saved to the backward as plain values: a second
derivative through it loses every path. :func:`connected` gives a function that saves as the user's
own does: inputs and outputs are connected to what they were computed from, other values are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# torch 2.9 hands its graphs an empty context first
_TAKES_CONTEXT = not hasattr(
    torch._functorch.autograd_function, "DynamoAutogradFunctionTraceHelper"
)


def is_custom_function(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "autograd_function_apply"


@dataclass(frozen=True)
class _Saved:
    """The place of a saved value: among the inputs, among the outputs, or only in itself."""

    is_input: bool
    is_output: bool
    index: int

    def is_connected(self, value: Any) -> bool:
        # a size that varies is an input, too
        return (self.is_input or self.is_output) and isinstance(value, torch.Tensor)


def _saved_of(forward: fx.GraphModule) -> list[_Saved]:
    (output,) = forward.graph.find_nodes(op="output")
    results, saved = output.args[0]
    outputs = list(results) if isinstance(results, (tuple, list)) else [results]
    inputs = _placeholders(forward)
    found = []
    for node in saved:
        is_input, is_output = node in inputs, node in outputs
        index = inputs.index(node) if is_input else outputs.index(node) if is_output else -1
        found.append(_Saved(is_input, is_output and not is_input, index))
    return found


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="placeholder")[1 if _TAKES_CONTEXT else 0 :]


def _switches(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that turn gradients off before the user's code, and on again after it."""
    return [n for n in graph.nodes if getattr(n.target, "__name__", "") == "_set_grad_enabled"]


def _each_its_own(
    forward: fx.GraphModule, backward: fx.GraphModule
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return both graphs, with all that the backward computes of saved values in the backward.

    Until torch 2.13, Dynamo puts attributes of them (``z.T``) behind the forward, and saves those.
    """
    nodes, switches = list(forward.graph.nodes), _switches(forward.graph)
    _, saved = nodes[-1].args[0]
    moved = nodes[nodes.index(switches[-1]) + 1 : -1] if switches else []
    if not set(moved) & set(saved):
        return forward, backward
    read = [*saved, *(n for node in moved for n in node.all_input_nodes)]
    kept = [n for n in dict.fromkeys(read) if n not in moved]

    env: dict[fx.Node, Any] = {}
    first = fx.Graph()
    copied = first.graph_copy(forward.graph, env)
    first.output((copied[0], [env[n] for n in kept]))  # type: ignore[index]
    for node in reversed(moved):
        first.erase_node(env[node])

    second, env = fx.Graph(), {}
    given = backward.graph.find_nodes(op="placeholder")
    cotangents, received = given[: -len(saved)], given[-len(saved) :]
    env |= {node: second.node_copy(node) for node in cotangents}
    known = {node: second.placeholder(node.name) for node in kept}
    for node in moved:
        known[node] = second.node_copy(node, lambda n: known[n])
    env |= {node: known[of] for node, of in zip(received, saved, strict=True)}
    second.output(second.graph_copy(backward.graph, env))
    return fx.GraphModule(forward, first), fx.GraphModule(backward, second)


def _with_gradients(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph without the switches that turn gradients off around it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in _switches(graph):
        graph.erase_node(node)
    return fx.GraphModule(module, graph)


def _context() -> tuple[Any, ...]:
    return (None,) if _TAKES_CONTEXT else ()


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, *args: Any) -> Any:  # type: ignore[override]
        forward, _, saved, non_differentiable = parts
        results, values = forward(*_context(), *args)
        outputs = results if isinstance(results, (tuple, list)) else (results,)
        ctx.mark_non_differentiable(*(outputs[k] for k in non_differentiable))
        pool = {True: args, False: outputs}
        pairs = zip(saved, values, strict=True)
        connected = [s for s, value in pairs if s.is_connected(value)]
        ctx.save_for_backward(*(pool[s.is_input][s.index] for s in connected))
        ctx.parts, ctx.values, ctx.n_args = parts, values, len(args)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        _, backward, saved, _ = ctx.parts
        connected = iter(ctx.saved_tensors)
        values = [
            next(connected) if s.is_connected(value) else value
            for s, value in zip(saved, ctx.values, strict=True)
        ]
        found = backward(*_context(), *cotangents, *values)
        found = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        return (None, *found, *(None,) * (ctx.n_args - len(found)))


def connected(
    forward: fx.GraphModule, backward: fx.GraphModule, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return the user's function of the node's tensors, differentiable any number of times."""
    forward, backward = _each_its_own(forward, backward)
    parts = (
        forward,
        _with_gradients(backward),
        _saved_of(forward),
        list(options.get("non_differentiable_idx", ())),
    )
    return lambda *args: _Connected.apply(parts, *args)


def with_connected_functions(body: fx.GraphModule) -> fx.GraphModule:
    """Return ``body`` with such functions for its ``autograd_function_apply`` nodes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_custom_function(node):
            continue
        forward, backward = (getattr(body, str(a.target)) for a in node.args[:2])  # type: ignore[union-attr]
        node.target = connected(forward, backward, dict(node.kwargs))
        node.args, node.kwargs = node.args[2:], {}
    # nothing is eliminated: a write in place has no users, and is not dead
    return fx.GraphModule(body, graph)
