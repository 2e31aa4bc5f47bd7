"""Find the writes of a step that can be made in place, and the calls that make them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from torch_scan_hop.body.added_parts import is_large
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import viewed
from torch_scan_hop.body.partial_writes import PART_OF, WRITE_OF, is_fresh, writes_in_place
from torch_scan_hop.eager.calls import (
    aten,
    binding,
    is_at_one_place,
    is_written_at_one_place,
    write_part_at,
)
from torch_scan_hop.signature import Inputs, Outputs


def calls_in_place(
    graph: fx.Graph,
    roles: Inputs[fx.Node],
    outputs: Outputs[fx.Node],
    own: Collection[fx.Node],
    lent: Collection[fx.Node],
    copied: Collection[fx.Node],
) -> dict[fx.Node, Callable[..., Any]]:
    """Return for each such write the function to call with the arguments of its node.

    The memory of ``own`` inputs is the loop's; that of ``lent`` results is not; ``copied`` results
    are copied where they are made.
    """
    own = {*own, *_own_carries(roles, outputs, lent)}
    return {node: _call(node) for node in writes_in_place(graph, own, lent, _pays, copied)}


def parts_read_in_place(
    graph: fx.Graph, writes: Collection[fx.Node], copied: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the reads at one place whose part is read where it lies.

    Their readers make results of their own, before the step writes to anything in place.
    """
    writes_before: dict[fx.Node, int] = {}
    unfit: set[fx.Node] = set()
    n_writes = 0
    for node in graph.nodes:
        n_writes += node in writes
        for part in writes_before.keys() & node.all_input_nodes:
            is_in_time = is_fresh(node) and writes_before[part] == n_writes
            if not (part in copied if node.op == "output" else is_in_time):
                unfit.add(part)
        if node.target is aten.index.Tensor and is_at_one_place(node):
            writes_before[node] = n_writes
    return writes_before.keys() - unfit


def _call(write: fx.Node) -> Callable[..., Any]:
    if is_written_at_one_place(write):
        return write_part_at
    if write.target in WRITE_OF:
        return binding(WRITE_OF[write.target])
    part_of = binding(PART_OF[write.target])

    def write_part(value: Any, source: Any, *where: Any, **named: Any) -> Any:
        part_of(value, *where, **named).copy_(source)
        return value

    return write_part


def _own_carries(
    roles: Inputs[fx.Node], outputs: Outputs[fx.Node], lent: Collection[fx.Node]
) -> list[fx.Node]:
    """Return the carries whose memory is the loop's own, because each step makes them anew.

    They are no row of a stack of ys, and no other carry shares their memory.
    """
    memory = [viewed(after) for after in outputs.carry]
    pairs = zip(roles.carry, outputs.carry, strict=True)
    return [
        carry
        for carry, after in pairs
        if is_fresh(after) and after not in lent and memory.count(after) == 1
    ]


def _pays(write: fx.Node) -> bool:
    """Return True if copying the value takes longer than a call or two, or the operator longer than
    Python's ``value[i] = source``."""
    example = value_of(write)
    return example.device.type == "cpu" and (is_large(example) or is_written_at_one_place(write))
