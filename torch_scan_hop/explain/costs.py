"""Count what operators cost: FLOPs, as torch's own counter counts them, and bytes.

Products, convolutions and attention have FLOPs; pointwise work is counted by its bytes, which is
what it costs. Bytes are those of every operator's inputs and results, as in eager mode; a kernel
that does a whole step touches less, at least the inputs and the results of the scan.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.utils.flop_counter import flop_registry

from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.node_kinds import is_view
from torch_scan_hop.explain.facts import DROPPED, LOOP, ONCE, Operator, Work
from torch_scan_hop.explain.sites import Site, nbytes_of, recorded
from torch_scan_hop.op import ScanOperator

Limits = tuple[float, float]


@dataclass(frozen=True)
class Cost:
    flops: int
    nbytes: int
    #: those of the bytes that belong to values of which there is one for all steps
    nbytes_single: int = 0


def cost_of(node: fx.Node, single: Iterable[fx.Node] = ()) -> Cost:
    """Return the cost of ``node`` in a step; there is one of ``single`` values for all steps."""
    if isinstance(node.target, ScanOperator):
        return _cost_of_scan(node)
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return Cost(0, 0)
    sizes = {n: _size(n) for n in [*node.all_input_nodes, node]}
    of_single = sum(sizes[n] for n in sizes.keys() & set(single))
    return Cost(flops_of(node), sum(sizes.values()), of_single)


def flops_of(node: fx.Node) -> int:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), recorded)
    # symbolic sizes as they were when they were traced
    args, kwargs, out = pytree.tree_map(_sized, (args, kwargs, recorded(node)))
    return int(count(*args, **kwargs, out_val=out))


def _sized(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty([likely_value(n) for n in value.shape], dtype=value.dtype, device="meta")
    return likely_value(value) if isinstance(value, torch.SymInt) else value


def _size(node: fx.Node) -> int:
    return sum(map(nbytes_of, pytree.tree_leaves(recorded(node))))


def _cost_of_scan(node: fx.Node) -> Cost:
    module = node.graph.owning_module
    assert module is not None
    body = operator.attrgetter(str(node.args[0].target))(module)  # type: ignore[union-attr]
    steps = likely_value(recorded(node.args[2][0]).shape[0])  # type: ignore[index]
    costs = [cost_of(n) for n in body.graph.nodes]
    return Cost(steps * sum(c.flops for c in costs), steps * sum(c.nbytes for c in costs))


def times_run(place: str, n_steps: int) -> tuple[int, int]:
    """Return how often an operator runs, and how often it reads or writes single values."""
    if place == DROPPED:
        return 0, 0
    if place == ONCE:
        return 1, 1
    return n_steps, n_steps if place == LOOP else 1


def work_of(pairs: Sequence[tuple[Operator, Cost]], site: Site, returned: int, limits: Any) -> Work:
    """Return the work of all steps of a loop that returns so many bytes."""
    n, seconds, flops, nbytes = site.n_steps, 0.0, 0, 0
    for op, cost in pairs:
        times, single_times = times_run(op.place, n)
        of_op = cost.flops * times
        moved = (cost.nbytes - cost.nbytes_single) * times
        moved += cost.nbytes_single * single_times
        flops, nbytes = flops + of_op, nbytes + moved
        if limits is not None:
            seconds += max(of_op / limits[0], moved / limits[1])
    least = sum(map(nbytes_of, site.operands.flat())) + returned
    every_step = [c for op, c in pairs if op.place not in (ONCE, DROPPED)]
    work = Work(
        flops_per_step=sum(c.flops for c in every_step),
        nbytes_per_step=sum(c.nbytes for c in every_step),
        flops=flops,
        nbytes=nbytes,
        least_nbytes=least,
    )
    if limits is None:
        return work
    # the limit is the time of all FLOPs, or of the least bytes, whichever is longer
    by_flops, by_bytes = flops / limits[0], least / limits[1]
    least_seconds = max(by_flops, by_bytes)
    return replace(
        work,
        seconds=seconds,
        least_seconds=least_seconds,
        limit="arithmetic" if by_flops > by_bytes else "memory",
        fraction_of_limit=least_seconds / seconds if seconds else None,
    )
