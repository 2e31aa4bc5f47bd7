"""Operators that draw random numbers, in graphs (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import torch
from torch import fx

from torch_scan_hop._torch.operators import HigherOrderOperator


def erase_unread(graph: fx.Graph) -> None:
    """Erase nodes that nothing reads, but for draws: each changes those after it.

    FX itself keeps operators that draw, and no bodies that do, as those of nested scans.
    """
    for node in reversed(graph.nodes):
        if not (node.users or node.is_impure() or is_random(node)):
            graph.erase_node(node)
        elif node.op == "get_attr" and isinstance(inner := _attribute(node), fx.GraphModule):
            erase_unread(inner.graph)


def is_random(node: fx.Node) -> bool:
    """Return True if the node draws random numbers, itself or in a body that it is given."""
    if node.op == "get_attr":
        value = _attribute(node)
        return isinstance(value, fx.GraphModule) and any(map(is_random, value.graph.nodes))
    if isinstance(node.target, HigherOrderOperator):
        return any(is_random(n) for n in node.all_input_nodes if n.op == "get_attr")
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    """Return True for attention without dropout, which is tagged as random for what it may drop."""
    packet = getattr(node.target, "overloadpacket", None)
    if not str(packet).startswith("aten._scaled_dot_product"):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given.get("dropout_p", 0.0) == 0.0


def _attribute(node: fx.Node) -> object:
    value: object = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value
