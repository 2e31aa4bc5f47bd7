"""Run a plan block by block, so that its stacks are as long as a block, and not as the scan.

The work of a plan before and after the loop reads and writes stacks. For all steps at once, stacks
may be larger than the results (four gates for each state of an LSTM), and each of them goes to
memory and back. The stacks of a block stay in a core's cache.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_scan_hop.body.carries_in import CarriesIn, in_graph, stacks_of
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.huge_pages import empty_stack
from torch_scan_hop.op import RunScan, ScanOptions
from torch_scan_hop.rewrites.options import current_options
from torch_scan_hop.rewrites.plan import ScanPlan
from torch_scan_hop.signature import Inputs

# bytes of a block's stacks: they are to stay in a core's cache until the loop has read them
BLOCK_BYTES = 2**21
# a scan is cut into so many blocks at least: then a block's stacks are small beside its results
MIN_BLOCKS = 8
# steps of a block: with fewer, the calls that each block makes cost more than it saves
MIN_BLOCK = 16
# But if the stacks of so many leave the cache, each call takes much longer than to make it.
# Products are another matter: they pack their weights once for each block.
MIN_LARGE_BLOCK = 2


def block_length(
    plan: ScanPlan, trip_count: int, copied: int = 0, stacked: int | None = None
) -> int:
    """Return the number of steps in a block; ``trip_count`` where blocks would save nothing.

    ``copied``: bytes per step that the caller would have to stack, too. ``stacked``: those of the
    plan, where the call's sizes say better than the plan's.
    """
    per_step = (plan.stacked_bytes if stacked is None else stacked) + copied
    if 2 * per_step * trip_count <= BLOCK_BYTES or not current_options().blocks:
        return trip_count
    # each block reads and writes what it adds to: no more than its stacks, or it costs as much
    worth_adding = plan.accumulated_bytes // per_step
    fitting = BLOCK_BYTES // per_step
    least = min(MIN_BLOCK, max(fitting, MIN_LARGE_BLOCK))
    if plan.multiplies_stacks:
        least = MIN_BLOCK
    length = max(least, min(fitting, trip_count // MIN_BLOCKS), worth_adding)
    return trip_count if 2 * length > trip_count else length


def whole_block_length(plan: ScanPlan, trip_count: int, copied: int = 0) -> int:
    """Return the divisor of ``trip_count`` nearest to a block's length, within a factor of 2."""
    length = block_length(plan, trip_count, copied)
    if length == trip_count:
        return trip_count
    divisors = [d for d in range(-(-length // 2), 2 * length + 1) if trip_count % d == 0]
    return min(divisors, key=lambda d: max(d / length, length / d), default=trip_count)


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
    run_loop: Callable[..., Sequence[Any]],
    inputs: Inputs[Any],
    options: ScanOptions,
    length: int,
    ys_like: Sequence[Any] | None = None,
) -> list[Any]:
    """Run the plan on real tensors as :meth:`ScanPlan.run` does; some xs may be :class:`CarriesIn`.

    ``run_loop(body, inputs, options, into=)`` writes each stack to the place that ``into`` has for
    it, if any. ``ys_like``: a y of each kind, where the plan is for any size.
    """
    d, trip_count = plan.decisions, inputs.trip_count
    values = plan.invariants(inputs)
    ys_like = [value_of(node) for node in plan.outputs.ys] if ys_like is None else ys_like
    ys = [empty_stack(y, trip_count) for y in ys_like]
    slots = {node: y for node, y in zip(plan.outputs.ys, ys, strict=True) if node in d.stacked}
    carry = plan.with_own_sums([inputs.carry[k] for k in plan.carried])
    for span in spans(trip_count, length, options.reverse):
        into = [slots[n][span] if n in slots else None for n in d.stacked]
        run_block = functools.partial(run_loop, into=into)
        block_xs = [x[span] for x in inputs.xs]
        carry, stacks = plan.run_steps(
            run_block, carry, block_xs, values, options, sums_are_own=True
        )
        for node, y in zip(plan.outputs.ys, ys, strict=True):
            if slots.get(node) is not y:
                y[span].copy_(stacks[node] if node in stacks else values[node])
        del stacks  # before the next block makes its own
    return [*plan.final_carry(carry, inputs.carry), *ys]


def scan_of_blocks(
    plan: ScanPlan, run_scan: RunScan, inputs: Inputs[Any], options: ScanOptions, length: int
) -> list[Any]:
    """Run the plan as :meth:`ScanPlan.run` does, by a scan over blocks, whose body is their plan.

    ``length`` divides the trip count. Accumulators are carries of the outer scan. Among xs there
    may be :class:`CarriesIn`, which are joined within a block.
    """
    d, trip_count, xs = plan.decisions, inputs.trip_count, inputs.xs
    values = plan.invariants(inputs)
    known = list(values)
    made = [n for n in dict.fromkeys(plan.outputs.ys) if n in {*d.stacked, *d.batched, *d.sunk}]
    shifted = {k: x for k, x in enumerate(xs) if isinstance(x, CarriesIn)}
    n = len(plan.carried)
    sizes = (n, len(xs), len(shifted), len(known))

    def block(*flat: Any) -> tuple[Any, ...]:
        carry, block_xs, edges, fixed = _groups(flat, sizes)
        for (k, x), edge in zip(shifted.items(), edges, strict=True):
            block_xs[k] = in_graph(CarriesIn(block_xs[k], edge, x.reverse))
        here = dict(zip(known, fixed, strict=True))
        carry, stacks = plan.run_steps(run_scan, carry, block_xs, here, options)
        return (*carry, *(stacks[node].contiguous() for node in made))

    wholes = stacks_of(xs)
    block_xs = [x.unflatten(0, (trip_count // length, length)) for x in wholes]
    edges = [x.edges(length) for x in shifted.values()]
    carry = [inputs.carry[k] for k in plan.carried]
    blocks = Inputs(carry, [*block_xs, *edges], list(values.values()))
    results = run_scan(block, blocks, options)
    stacks = dict(zip(plan.roles.xs, wholes, strict=True))
    stacks |= {node: y.flatten(0, 1) for node, y in zip(made, results[n:], strict=True)}
    final = plan.final_carry(results[:n], inputs.carry)
    return [*final, *plan.gather(stacks, values, trip_count)]


def _groups(flat: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """
    >>> _groups("abcde", (2, 0, 3))
    [['a', 'b'], [], ['c', 'd', 'e']]
    """
    rest = iter(flat)
    return [list(itertools.islice(rest, size)) for size in sizes]
