"""Copies of graphs, which a rewrite may change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def copied(
    module: fx.GraphModule, results: Sequence[fx.Node] | None = None, name: str = "GraphModule"
) -> fx.GraphModule:
    """Return a copy that shares all but the graph, which returns ``results`` if given."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    own = graph.graph_copy(module.graph, env)
    graph.output(own if results is None else tuple(env[n] for n in results))
    return fx.GraphModule(module, graph, name)


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph and the graphs of its bodies."""
    copy = copied(module)
    for name, child in list(copy.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(copy, name, copy_of(child))
    return copy
