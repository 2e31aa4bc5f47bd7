"""Find the bodies that may be captured: those whose steps all tell the device the same.

While a graph is captured nothing runs, and a replay runs what was launched then. So an operator
must not ask the device for a value, nor launch according to one. Operators that nobody looked at
are refused: at worst they would be replayed with the numbers of the captured step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.impure import is_random
from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop.body.carries_in import carries_in_op
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import operator_name
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.cuda_graphs.devices import is_served
from torch_scan_hop.op import scan_op

# their bodies are what torch ships, and launch on the current stream
NAMESPACES = {"aten", "prims"}

UNKNOWN = "nobody knows what it launches"
_MASKS = (torch.bool, torch.uint8)

_UNFIT = {
    torch.Tag.data_dependent_output: "it reads a value on the host",
    torch.Tag.dynamic_output_shape: "the shape of its result depends on values",
}

_INDEXED = operators("by_index")

_OF_GIVEN_SEEDS = ("inductor_lookup_seed", "inductor_randint", "inductor_random")


def why_not_captured(body: fx.GraphModule) -> str:
    """Return which operator of ``body`` stands against a capture, and why; empty if none does."""
    for node in body.graph.nodes:
        reason = _why_not(body, node)
        if reason:
            return f"{operator_name(node)}: {reason}"
    return ""


def _why_not(body: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "get_attr":
        value: Any = operator.attrgetter(str(node.target))(body)
        if isinstance(value, fx.GraphModule):
            return why_not_captured(value)
        return "" if _is_served(value) else "it is not on the GPU"
    if node.op != "call_function":
        return ""
    # of several results, those that are used have nodes of their own
    return _why_not_operator(node) if _is_served(node.meta.get("val")) else "not on the GPU"


def _is_served(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or is_served(value.device)


def _why_not_operator(node: fx.Node) -> str:
    target: Any = node.target
    if target in (operator.getitem, scan_op, carries_in_op):
        return ""  # the body of a scan is an attribute
    if not isinstance(target, OpOverload):
        is_number = isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))
        return "" if is_number else UNKNOWN
    if target.namespace not in NAMESPACES:
        return UNKNOWN
    if target in _INDEXED:
        masks = [n for n in node.all_input_nodes[1:] if value_of(n).dtype in _MASKS]
        return "a mask among its indices is counted first" if masks else ""
    unfit = [reason for tag, reason in _UNFIT.items() if tag in target.tags]
    if unfit:
        return unfit[0]
    name = operator_name(node)
    draws = is_random(node) or (name.startswith("inductor_") and name not in _OF_GIVEN_SEEDS)
    return "it draws random numbers" if draws else ""
