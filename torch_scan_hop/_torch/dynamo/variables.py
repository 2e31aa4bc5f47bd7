"""Dynamo's variables, and the graph that they are written to: what a tracker needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import higher_order_ops as _hops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.higher_order_ops import (
    TorchHigherOrderOperatorVariable,
    discard_graph_changes,
    make_attr,
)
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx._lazy_graph_module import _LazyGraphModule

from torch_scan_hop._torch.sizes import is_exporting

#: the method by which a variable reads an attribute has another name since torch 2.14
GETATTR = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"

# torch's, under our names
__all__ = [
    "ConstantVariable",
    "LazyVariableTracker",
    "TensorVariable",
    "TorchHigherOrderOperatorVariable",
    "TupleVariable",
    "VariableTracker",
    "discard_graph_changes",
    "make_attr",
]


def sequence_items(tx: Any, variable: VariableTracker) -> list[VariableTracker]:
    unpack = getattr(_hops, "unpack_iterable", None)
    if unpack is not None:
        return list(unpack(tx, variable))
    return list(variable.unpack_var_sequence(tx))


def call_inlined(tx: Any, fn: Callable[..., Any], *args: VariableTracker) -> VariableTracker:
    return UserFunctionVariable(fn).call_function(tx, [*args], {})


def example_value(value: Any) -> Any:
    """Return the example of a variable, a proxy or a node; anything else is its own."""
    if isinstance(value, VariableTracker):
        value = value.as_proxy()
    node = value.node if isinstance(value, fx.Proxy) else value
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def example_value_or_none(value: Any) -> Any:
    """Return :func:`example_value`, and None for a constant, of which torch 2.9 has none."""
    if isinstance(value, VariableTracker) and value.is_python_constant():
        return None
    return example_value(value)


def make_traceable(fn: VariableTracker) -> None:
    """Generate the code of a GraphModule, without which Dynamo cannot trace into it."""
    module = getattr(fn, "value", None)
    if isinstance(module, fx.GraphModule):
        _LazyGraphModule.force_recompile(module)


def create_node(
    tx: Any, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> VariableTracker:
    """Emit a node into the graph being captured and track its result."""
    return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy(kind, target, args, kwargs))


def write_back(tx: Any, destination: fx.Proxy, source: fx.Proxy, is_counted: bool = True) -> None:
    """Emit ``destination.copy_(source)``, under ``no_grad`` if a leaf that requires grad is written
    to.

    Autograd refuses all else: a program that changed it has done so under ``no_grad``, too.
    ``is_counted``: whether autograd counts that write, as it has counted those of the program.
    """
    if not is_counted and not is_exporting():  # an exported program counts none
        data = create_node(
            tx,
            "call_function",
            torch._C._autograd._get_data_attr,  # type: ignore[attr-defined]
            (destination,),
            {},
        )
        destination = data.as_proxy()
    value = example_value(destination)
    is_unseen = not is_counted or (value.is_leaf and value.requires_grad)
    is_unseen = is_unseen and torch.is_grad_enabled()
    if is_unseen:
        _set_grad_enabled(tx, False)
    written = create_node(tx, "call_method", "copy_", (destination, source), {})
    # torch drops nodes that nobody reads if their example may have been read as a float, which the
    # destination's may if it is a scalar in double
    written.as_proxy().node.meta["example_value"] = example_value(source)
    if is_unseen:
        _set_grad_enabled(tx, True)


def _set_grad_enabled(tx: Any, enabled: bool) -> None:
    """Switch gradients for what is traced next, and in the graph."""
    create_proxy(tx, "call_function", torch._C._set_grad_enabled, (enabled,))
    torch._C._set_grad_enabled(enabled)


def graph_being_traced(tx: Any) -> fx.Graph:
    """Return the graph at hand: the program's, or that of a body that is being captured."""
    return tx.output.current_tracer.graph


def proxies_outside(tx: Any) -> dict[fx.Node, fx.Proxy]:
    """Return by placeholder of the body at hand what it stands for, in the graph around it."""
    lifted = tx.output.current_tracer.lifted_freevars
    return {inner.node: outer for outer, inner in lifted.items() if isinstance(inner, fx.Proxy)}


def create_proxy(tx: Any, kind: str, target: Any, args: tuple[Any, ...]) -> fx.Proxy:
    """Add a node to the graph at hand, about whose result nothing is known yet."""
    return tx.output.create_proxy(kind, target, args, {})


def install_body(tx: Any, name: str, module: fx.GraphModule) -> str:
    """Put ``module`` among the modules of the graph at hand; return its name there."""
    return str(tx.output.install_subgraph(name, module))


def nodes_at_hand(tx: Any) -> Iterable[fx.Node]:
    """Return the nodes of the graph that is being written."""
    nodes: Iterable[fx.Node] = tx.output.current_tracer.graph.nodes
    return nodes


def known_modules(tx: Any) -> dict[str, Any]:
    """Return the modules that graphs of this capture may refer to by name."""
    return dict(tx.output.nn_modules)
