"""Ask what kind of node it is: a copy, a view."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop._torch.sizes import are_all_known_equal
from torch_scan_hop._torch.symbols import SYMBOLS
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.body.stop_gradient import is_stop

aten = torch.ops.aten

_IDENTITIES = operators("identity")


def all_nodes(module: torch.nn.Module) -> Iterator[fx.Node]:
    """Return the nodes of a graph, and of the graphs in it."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def operator_name(node: fx.Node) -> str:
    """
    >>> operator_name(fx.Graph().call_function(aten.add.Tensor))
    'add'
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def argument(node: Any, place: int, name: str, default: Any) -> Any:
    """Return an argument of ``node``, which is given by position or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def is_tensor_node(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def is_number_node(node: fx.Node) -> bool:
    """Return True for a size, or another number that the trace knows or has a symbol for."""
    return isinstance(node.meta.get("val"), (int, float, *SYMBOLS))


def is_alike(value: Any, like: fx.Node) -> bool:
    """Return True if ``value`` is known to be a tensor of the dtype and shape of ``like``."""
    if not is_tensor_node(value) or not is_tensor_node(like):
        return False
    own, other = value_of(value), value_of(like)
    return own.dtype is other.dtype and are_all_known_equal(own.shape, other.shape)


def addends(node: Any) -> list[fx.Node]:
    """Return what ``node`` is the plain sum of, if it is."""
    is_sum = node.target is aten.add.Tensor and not node.kwargs
    return list(node.args) if is_sum and all(is_alike(a, node) for a in node.args) else []


def is_identity(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in _IDENTITIES:
        argument = node.args[0]
        return not (isinstance(argument, fx.Node) and argument.op == "get_attr")
    if node.target is aten.clone.default:
        return node.kwargs.get("memory_format") in (None, torch.preserve_format)
    return False


def same_value(node: fx.Node) -> fx.Node:
    """Return the earliest node with this node's value, looking through copies of any layout."""
    while node.op == "call_function" and (
        node.target is aten.clone.default or node.target in _IDENTITIES
    ):
        argument = node.args[0]
        if not isinstance(argument, fx.Node) or argument.op == "get_attr":
            break
        node = argument
    return node


def is_view(node: fx.Node) -> bool:
    """Return True for what is free: a view, an element of one (``split``), a stopped gradient."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _returns_views(source)
    return _returns_views(node) or is_stop(node)


def source_of_view(view: Any) -> Any:
    """Return the value that ``view``, or an element of one (``split``), is a view of."""
    source = view.args[0]
    return source.args[0] if view.target is operator.getitem else source


def viewed(node: fx.Node) -> fx.Node:
    """Return the value whose memory ``node`` may share, looking through any number of views."""
    while is_view(node):
        node = source_of_view(node)
    return node


def _returns_views(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target is aten.reshape.default:
        return True
    returns = target._schema.returns
    if not returns:
        return False
    if target.is_view:
        return True
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write
