"""Put a traced function in the place of a call in a graph, and see what is read of a call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from torch_scan_hop.body.meta_values import replace_by_source, value_of
from torch_scan_hop.signature import results_of


def used_outputs(call: fx.Node) -> list[bool]:
    """Return for each result of ``call`` whether anything reads it."""
    used = [False] * len(value_of(call))
    for user in call.users:
        if user.target is not operator.getitem:
            return [True] * len(used)
        used[user.args[1]] = used[user.args[1]] or bool(user.users)  # type: ignore[index]
    return used


def inline(
    gm: fx.GraphModule, call: fx.Node, traced: fx.GraphModule, operands: Sequence[Any]
) -> None:
    """Copy ``traced`` in front of ``call``, and let its results replace those of that."""
    graph = call.graph
    env: dict[fx.Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True)
    )
    with graph.inserting_before(call):
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                env[node] = _attribute(gm, call, traced, node)
            elif node.op == "call_function":
                env[node] = graph.node_copy(node, lambda n: env[n])
    results: Any = fx.map_arg(results_of(traced.graph), lambda n: env[n])
    if isinstance(results, fx.Node):
        replace_by_source(call, results)
        return
    for user in list(call.users):
        replacement = results[user.args[1]]
        if replacement is None:
            graph.erase_node(user)
        else:
            replace_by_source(user, replacement)
    graph.erase_node(call)


def _attribute(gm: fx.GraphModule, call: fx.Node, traced: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Put the attribute under a name of its own in the outer module, and return its node."""
    base = f"{call.name}_{str(node.target).replace('.', '_')}"
    name, k = base, 0
    while hasattr(gm, name):
        k += 1
        name = f"{base}_{k}"
    setattr(gm, name, getattr(traced, str(node.target)))
    copy = gm.graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy
