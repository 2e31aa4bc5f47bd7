"""Nothing is written in place but what is declared.

A step may work in place on what it made, and is right. But what it made may be the same at every
step, and leave the loop, or become a stack; then the next step reads what this one wrote. So a
graph stays functional for as long as anything may move, and even where it need not (``declared``)
no input is written, and no view of one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import fx

from legality import IllegalRewrite
from torch_scan_hop._torch.operators import HigherOrderOperator, OpOverload
from torch_scan_hop.body.node_kinds import viewed


def check_writes(
    where: str,
    module: fx.GraphModule,
    declared: Collection[fx.Node] = (),
    functional: bool = True,
) -> None:
    """``declared``: inputs that are there to be written. Not ``functional``: values that the graph
    makes may be written, too."""
    for node in module.graph.nodes:
        for value in _written(node):
            _check_write(where, node, value, declared, functional)


def _check_write(
    where: str, node: fx.Node, value: fx.Node, declared: Collection[fx.Node], functional: bool
) -> None:
    owner = viewed(value)
    if owner in declared:
        return
    how = f"{node} ({node.target}) writes in place to {value}"
    through = "" if owner is value else f", a view of {owner}"
    if owner.op in ("placeholder", "get_attr"):
        raise IllegalRewrite(
            f"{where}: {how}{through}: expected no write to what is from outside the loop; every "
            "step would find what the step before wrote"
        )
    if functional:
        raise IllegalRewrite(
            f"{where}: {how}{through}: expected a functional graph, for {owner} may leave the loop"
        )


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that ``node`` writes to."""
    if node.op != "call_function":
        return
    if isinstance(node.target, HigherOrderOperator):
        yield from _written_by_higher_order(node)
        return
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return
    for k, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value: Any = node.kwargs.get(argument.name, node.args[k] if k < len(node.args) else None)
        yield from _nodes(value)


def _written_by_higher_order(node: fx.Node) -> Iterator[fx.Node]:
    yield from _nodes(node.kwargs.get("into"))  # a scan within a step
    if node.target._name == "triton_kernel_wrapper_mutation":  # type: ignore[union-attr]
        yield from _nodes(list(node.kwargs["kwargs"].values()))  # type: ignore[union-attr]


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)
