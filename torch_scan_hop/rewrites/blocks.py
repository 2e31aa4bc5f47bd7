"""A plan run block by block: what its rewrites stack is as long as a block, not as the scan.

The work of a plan before and after the loop reads and writes stacks. Made for all steps at
once they may be larger than the results (four gates for each state of an LSTM), and each
travels to memory and back. A block of them stays in a core's cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.tracing import likely_value
from torch_scan_hop.carries_in import CarriesIn, within_block
from torch_scan_hop.graph_cleanup import is_view
from torch_scan_hop.rewrites.classify import is_tensor, nbytes
from torch_scan_hop.rewrites.options import current_options
from torch_scan_hop.rewrites.plan import RunScan, ScanPlan

# what a block's stacks may take: about a core's cache
BLOCK_BYTES = 2**21
# a short scan has shorter ones, small beside its results
MIN_BLOCKS = 8
# fewer steps do not pay for the calls that a block makes
MIN_BLOCK = 16


def block_length(plan: ScanPlan, trip_count: int, copied: int = 0) -> int:
    """Steps in a block; ``trip_count`` where blocks would save nothing.

    ``copied``: bytes per step that the caller would have to stack, too.
    """
    per_step = stacked_bytes(plan) + copied
    if per_step == 0 or not current_options().blocks:
        return trip_count
    length = max(MIN_BLOCK, min(BLOCK_BYTES // per_step, trip_count // MIN_BLOCKS))
    return trip_count if 2 * length > trip_count else length


def whole_block_length(plan: ScanPlan, trip_count: int, copied: int = 0) -> int:
    """The divisor of ``trip_count`` that is nearest to a block's length, within a factor of 2."""
    length = block_length(plan, trip_count, copied)
    if length == trip_count:
        return trip_count
    divisors = [d for d in range(-(-length // 2), 2 * length + 1) if trip_count % d == 0]
    return min(divisors, key=lambda d: max(d / length, length / d), default=trip_count)


def stacked_bytes(plan: ScanPlan) -> int:
    """Bytes per step that the plan stacks and that are no results; for symbolic sizes, likely."""
    results = set(plan.outputs.ys)
    made = [n for n in plan.decisions.stacked if n not in results]
    for part in (plan.batched_part, plan.sunk_part):
        made += [
            n
            for n in part.module.graph.nodes
            if n.op == "call_function" and is_tensor(n) and not is_view(n)
        ]
    return sum(likely_value(nbytes(n)) for n in made)


def spans(trip_count: int, length: int, reverse: bool) -> Iterator[slice]:
    """
    >>> list(spans(5, 2, reverse=True))
    [slice(3, 5, None), slice(1, 3, None), slice(0, 1, None)]
    """
    for done in range(0, trip_count, length):
        count = min(length, trip_count - done)
        start = trip_count - done - count if reverse else done
        yield slice(start, start + count)


def run_in_blocks(
    plan: ScanPlan,
    run_loop: RunScan,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
    reverse: bool,
    length: int,
) -> list[Any]:
    """As :meth:`ScanPlan.run`, on real tensors.

    ``run_loop(body, init, xs, additional, reverse=, into=)`` writes each stack to the place
    that ``into`` has for it, if any.
    """
    d, trip_count = plan.decisions, xs[0].shape[0]
    values = plan.invariants(init, additional)
    ys = [_empty_stack(node, trip_count) for node in plan.outputs.ys]
    slots = {node: y for node, y in zip(plan.outputs.ys, ys, strict=True) if node in d.stacked}
    carry: Sequence[Any] = [init[k] for k in d.loop_carry]
    totals: dict[int, torch.Tensor] = {}
    for span in spans(trip_count, length, reverse):
        into = [slots[n][span] if n in slots else None for n in d.stacked]
        carry, stacks = plan.run_steps(
            run_loop, carry, [x[span] for x in xs], values, reverse=reverse, into=into
        )
        for a in d.accumulators:
            total = a.total([stacks[leaf] for leaf in a.leaves], values)
            before = totals.get(a.index, init[a.index])
            totals[a.index] = torch.add(before, total)
        for node, y in zip(plan.outputs.ys, ys, strict=True):
            if slots.get(node) is not y:
                y[span].copy_(stacks[node] if node in stacks else values[node])
    final = dict(zip(d.loop_carry, carry, strict=True)) | totals
    return [*plan.final_carry(final, init), *ys]


def _empty_stack(node: fx.Node, trip_count: int) -> torch.Tensor:
    like = node.meta["val"]
    return torch.empty((trip_count, *like.shape), dtype=like.dtype, device=like.device)


def scan_of_blocks(
    plan: ScanPlan,
    run_scan: RunScan,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
    length: int,
    **options: Any,
) -> list[Any]:
    """As :meth:`ScanPlan.run`, as a scan over blocks whose body is the plan of a block.

    ``length`` divides the trip count. Accumulators are carries of the outer scan. Among xs there
    may be :class:`CarriesIn`, which are joined within a block.
    """
    d, trip_count = plan.decisions, xs[0].shape[0]
    values = plan.invariants(init, additional)
    known = list(values)
    made = [n for n in dict.fromkeys(plan.outputs.ys) if n in {*d.stacked, *d.batched, *d.sunk}]
    shifted = {k: x for k, x in enumerate(xs) if isinstance(x, CarriesIn)}
    sizes = (len(d.loop_carry), len(d.accumulators), len(xs), len(shifted), len(known))

    def block(*flat: Any) -> tuple[Any, ...]:
        loop_carry, sums, block_xs, edges, fixed = _groups(flat, sizes)
        for (k, x), edge in zip(shifted.items(), edges, strict=True):
            block_xs[k] = within_block(block_xs[k], edge, x.reverse)
        here = dict(zip(known, fixed, strict=True))
        after, stacks = plan.run_steps(run_scan, loop_carry, block_xs, here, **options)
        totals = [
            before + a.total([stacks[leaf] for leaf in a.leaves], here)
            for a, before in zip(d.accumulators, sums, strict=True)
        ]
        return (*after, *totals, *(stacks[n].contiguous() for n in made))

    carried = [*d.loop_carry, *(a.index for a in d.accumulators)]
    wholes = [x.stack if isinstance(x, CarriesIn) else x for x in xs]
    block_xs = [x.unflatten(0, (trip_count // length, length)) for x in wholes]
    edges = [x.edges(length) for x in shifted.values()]
    results = run_scan(
        block, [init[k] for k in carried], [*block_xs, *edges], tuple(values.values()), **options
    )
    final = dict(zip(carried, results, strict=False))
    stacks = dict(zip(plan.roles.xs, wholes, strict=True))
    of_blocks = results[len(carried) :]
    stacks |= {n: y.flatten(0, 1) for n, y in zip(made, of_blocks, strict=True)}
    return [*plan.final_carry(final, init), *plan.gather(stacks, values, trip_count)]


def _groups(flat: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """
    >>> _groups("abcde", (2, 0, 3))
    [['a', 'b'], [], ['c', 'd', 'e']]
    """
    rest = iter(flat)
    return [list(itertools.islice(rest, size)) for size in sizes]
