"""Classify each node of a body by what it depends on.

``INVARIANT``  additional inputs and constants only
``XS``         xs as well, but no carry: known before the loop
``LOOP``       a carry, something random, or xs through an operator that cannot be batched:
               known step by step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

from torch import fx

from torch_scan_hop._torch.impure import is_impure
from torch_scan_hop._torch.operators import HigherOrderOperator
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import operator_name
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.rewrites.batchable import is_batchable
from torch_scan_hop.signature import Inputs


class Dependence(IntEnum):
    INVARIANT = 0
    XS = 1
    LOOP = 2


# why work stays in the loop though the carry neither determines nor needs it
CHEAP = "too cheap to be worth a stack"


def no_rule_for(node: fx.Node) -> str:
    return f"no trusted batching rule for {operator_name(node)}"


def too_large(node: fx.Node) -> str:
    return f"memory gate: a stack of {node.name} is larger than memory_gate allows"


def is_contraction(node: fx.Node) -> bool:
    return node.target in operators("contraction")


def is_reduction(node: fx.Node) -> bool:
    return node.target in operators("reduction")


def is_pinned(node: fx.Node) -> bool:
    """Return True for work that stays in the loop, in order: draws, effects, inner bodies."""
    if node.op != "call_function":
        return False
    return is_impure(node) or isinstance(node.target, HigherOrderOperator) or is_write(node)


def is_write(node: fx.Node) -> bool:
    """Return True for an operator that writes in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def classify(
    graph: fx.Graph,
    roles: Inputs[fx.Node],
    may_be_batched: Callable[[fx.Node], bool] = is_batchable,
) -> dict[fx.Node, Dependence]:
    found: dict[fx.Node, Dependence] = {}
    found |= dict.fromkeys(roles.additional, Dependence.INVARIANT)
    found |= dict.fromkeys(roles.xs, Dependence.XS)
    found |= dict.fromkeys(roles.carry, Dependence.LOOP)
    for node in graph.nodes:
        if node in found:
            continue
        if is_pinned(node):
            found[node] = Dependence.LOOP
            continue
        depends = max((found[a] for a in node.all_input_nodes), default=Dependence.INVARIANT)
        if depends is Dependence.XS and not may_be_batched(node):
            depends = Dependence.LOOP
        found[node] = depends
    return found


def ancestors(values: Iterable[Any], stop: set[fx.Node] | None = None) -> set[fx.Node]:
    """Return ``values`` and all they are computed from, not looking through ``stop``."""
    seen: set[fx.Node] = set()
    pending = [v for v in values if isinstance(v, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            if stop is None or node not in stop:
                pending.extend(node.all_input_nodes)
    return seen


def nbytes(node: fx.Node) -> Any:
    value = value_of(node)
    return value.numel() * value.element_size()
