"""What a graph runs for more than its results: draws, checks, calls that return nothing.

Checked on torch 2.9.1, 2.13.0, 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from torch_scan_hop._torch.operators import HigherOrderOperator, OpOverload


def erase_unread(graph: fx.Graph) -> None:
    """Erase nodes that nothing reads, but for those that are impure, in inner bodies, too.

    FX itself keeps operators that draw, and no bodies that do, as those of nested scans.
    """
    for node in reversed(graph.nodes):
        if not (node.users or node.is_impure() or is_impure(node)):
            graph.erase_node(node)
        elif node.op == "get_attr" and isinstance(inner := _attribute(node), fx.GraphModule):
            erase_unread(inner.graph)


def is_impure(node: fx.Node) -> bool:
    """Return True if the node draws, checks values, or acts on what is outside of the graph."""
    return _is_in(node, lambda n: _draws(n) or _acts(n))


def is_random(node: fx.Node) -> bool:
    """Return True if the node draws random numbers, itself or in a body that it is given."""
    return _is_in(node, _draws)


def _is_in(node: fx.Node, asked: Callable[[fx.Node], bool]) -> bool:
    if node.op == "get_attr":
        value = _attribute(node)
        return isinstance(value, fx.GraphModule) and any(
            _is_in(n, asked) for n in value.graph.nodes
        )
    if isinstance(node.target, HigherOrderOperator):
        return any(_is_in(n, asked) for n in node.all_input_nodes if n.op == "get_attr")
    return asked(node)


def is_check(node: fx.Node) -> bool:
    """Return True if the node raises where a tensor that it is given is false."""
    return str(getattr(node.target, "overloadpacket", "")) == "aten._assert_async"


def _acts(node: fx.Node) -> bool:
    """Return True for checks, and for operators of users that return nothing and write nothing."""
    target = node.target
    if is_check(node) or not isinstance(target, OpOverload):
        return is_check(node)
    schema = target._schema
    of_torch = target.namespace in ("aten", "prims", "inductor", "profiler")
    return not (schema.returns or schema.is_mutable or of_torch)


def _draws(node: fx.Node) -> bool:
    """A draw changes those after it, also if nothing reads it."""
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
