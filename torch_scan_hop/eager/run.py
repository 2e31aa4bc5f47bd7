"""The scan on real tensors, below autograd: planned, in blocks, or step by step.

A body that is a graph is optimised first (``rewrites``): work that does not depend on the
carry is done for all steps at once, and the loop runs what is left. The loop hands carries
from step to step and writes each y into its place of a stack that is allocated once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop._torch.operators import past_module_hooks, preserving_node_meta, storages_of
from torch_scan_hop._torch.symbols import Number, Symbols
from torch_scan_hop._torch.tracing import run_fake, trace
from torch_scan_hop.body.any_size import derived
from torch_scan_hop.body.carries_in import CarriesIn, with_joined, with_stacks
from torch_scan_hop.body.cleanup import clean_up
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.part_writes import add_at_indices, add_to_slices
from torch_scan_hop.body.step_examples import step_examples
from torch_scan_hop.body.stop_gradient import drop_stops
from torch_scan_hop.eager.known_operands import combine_known_operands
from torch_scan_hop.eager.loop import EagerLoop, StackLike
from torch_scan_hop.eager.nested import with_short_scans_written_out
from torch_scan_hop.errors import ScanTypeError, describe
from torch_scan_hop.huge_pages import empty_stack
from torch_scan_hop.op import FORWARD, Body, ScanOptions
from torch_scan_hop.progress_bar import steps as progressing
from torch_scan_hop.rewrites import Planner, ScanPlan, current_options
from torch_scan_hop.rewrites.blocks import block_length, run_in_blocks
from torch_scan_hop.rewrites.sizes import lift_integers
from torch_scan_hop.signature import Inputs, Signature
from torch_scan_hop.step import check_device, order_of_steps

log = logging.getLogger(__name__)

# below this, tracing and batching cost more than they save
MIN_TRIP_COUNT = 3


def unaliased(carry: Sequence[torch.Tensor], others: Sequence[Any]) -> list[torch.Tensor]:
    """Return contiguous carries that share storage neither with ``others`` nor with one another."""
    results = [leaf.contiguous() for leaf in carry]
    storages = storages_of([*others, *results])
    n_others = len(storages) - len(results)
    taken = set(storages[:n_others])
    for k, storage in enumerate(storages[n_others:]):
        if storage in taken or results[k].untyped_storage().nbytes() > results[k].nbytes:
            results[k] = results[k].clone(memory_format=torch.contiguous_format)
        taken.add(storage)
    return results


def empty_results(body: Body, inputs: Inputs[Any]) -> tuple[Any, ...]:
    """Return the results for a trip count of zero: copies of init, and empty stacks."""
    mode, examples = step_examples(inputs)
    with torch.no_grad():
        out = run_fake(body, examples.flat(), mode)
    ys = [None if y is None else empty_stack(y, 0) for y in out[len(inputs.carry) :]]
    return (*(c.clone(memory_format=torch.contiguous_format) for c in inputs.carry), *ys)


def _check_carry(carry: Sequence[torch.Tensor], results: Any) -> None:
    """Check the results of a body that a person has given to the operator directly."""
    name = "torch.ops.higher_order.scan"
    if not isinstance(results, (tuple, list)) or len(results) < len(carry):
        got = len(results) if isinstance(results, (tuple, list)) else describe(results)
        raise ScanTypeError(
            f"{name}: combine_fn must return {len(carry)} carries and then its ys, in a flat "
            f"tuple, but returned {got}."
        )
    for k, (before, after) in enumerate(zip(carry, results, strict=False)):
        if describe(before) != describe(after):
            raise ScanTypeError(
                f"{name}: carry[{k}] must keep its shape and dtype from step to step: expected "
                f"{describe(before)} (from init), but combine_fn returned {describe(after)}."
            )
        check_device(f"carry[{k}]", before, after)


def loop(body: Body, inputs: Inputs[Any], options: ScanOptions = FORWARD) -> tuple[Any, ...]:
    """Run the scan step by step, which a user's TorchDispatchMode sees."""
    n_carry, trip_count = len(inputs.carry), inputs.trip_count
    slices = list(zip(*(x.unbind(0) for x in inputs.xs), strict=True))
    order = order_of_steps(trip_count, options.reverse)
    # bodies are traced for contiguous carries
    carry: Sequence[torch.Tensor] = [c.contiguous() for c in inputs.carry]
    stacks: list[torch.Tensor] = []
    ys: Sequence[Any] = ()
    places: list[Sequence[torch.Tensor]] = []
    # a graph that is called as a module prints its code when it fails
    run = past_module_hooks(body)
    for t in progressing(order):
        out = run(*carry, *slices[t], *inputs.additional)
        if t == order[0]:
            _check_carry(carry, out)
        carry, ys = [c.contiguous() for c in out[:n_carry]], out[n_carry:]
        tensors = [y for y in ys if y is not None]
        if not stacks:
            stacks = [empty_stack(y, trip_count) for y in tensors]
            places = [stack.unbind(0) for stack in stacks]
        for place, y in zip(places, tensors, strict=True):
            place[t].copy_(y)
    made = iter(stacks)
    results = [None if y is None else next(made) for y in ys]
    return (*unaliased(carry, [*inputs.flat(), *stacks]), *results)


def straight_line_loop(
    loop: EagerLoop,
    body: Body,
    inputs: Inputs[Any],
    options: ScanOptions,
    *,
    into: Sequence[torch.Tensor | None] | None = None,
    like: Sequence[StackLike] | None = None,
) -> tuple[Any, ...]:
    """Run the loop that a plan leaves; ``body`` is what it was written from."""
    carry, stacks = loop(inputs, options.reverse, into, like)
    return (*unaliased(carry, [*inputs.flat(), *stacks]), *stacks)


# --- plans ---


@dataclass(frozen=True)
class SizedPlan:
    """A plan, and the sizes that a call adds to its inputs if the plan is for any size."""

    plan: ScanPlan
    loop: EagerLoop  # of what the plan leaves
    additional: tuple[int, ...] = ()  # sizes, which the plan takes as further additional inputs
    stacked_bytes: int | None = None
    ys: list[StackLike] | None = None
    loop_ys: list[StackLike] | None = None

    def at(self, numbers: tuple[Number, ...]) -> SizedPlan:
        return self


class PlanForAnySize:
    """A plan that takes ``sizes`` (symbolic) as further additional inputs."""

    def __init__(self, symbolic: SizedPlan, sizes: list[Any], symbols: Symbols) -> None:
        self.symbolic = symbolic
        self.n_sizes = len(sizes)
        plan = symbolic.plan
        self.ys = [StackLike.of(value_of(y)) for y in plan.outputs.ys]
        dimensions = [size for y in [*self.ys, *symbolic.loop.ys] for size in y.shape]
        self.evaluate = symbols.function([*sizes, sum(plan.stacked_sizes()), *dimensions])

    def at(self, numbers: tuple[Number, ...]) -> SizedPlan:
        values = self.evaluate(*numbers)
        rest = iter(values[self.n_sizes :])
        return dataclasses.replace(
            self.symbolic,
            additional=values[: self.n_sizes],
            stacked_bytes=next(rest),
            ys=[_sized(y, rest) for y in self.ys],
            loop_ys=[_sized(y, rest) for y in self.symbolic.loop.ys],
        )


def _sized(like: StackLike, sizes: Iterator[int]) -> StackLike:
    return dataclasses.replace(like, shape=tuple(next(sizes) for _ in like.shape))


def plan_of(body: fx.GraphModule, inputs: Inputs[Any]) -> SizedPlan:
    """Return the optimised form of ``body`` for inputs like these, which is made once."""

    def make(
        mode: FakeTensorMode, examples: Inputs[Any], symbols: Symbols | None
    ) -> SizedPlan | PlanForAnySize:
        with torch.no_grad():
            # `torch.fx.traceback.preserve_node_meta` asks which of the user's lines a node is of
            step = preserving_node_meta(with_short_scans_written_out(body))
            graph = trace(step, examples.flat(), mode)
        clean_up(graph)
        drop_stops(graph)
        legality.run_passes(graph, [add_at_indices, add_to_slices])
        combine_known_operands(graph.graph, inputs.signature.inputs_of(graph).carry)
        legality.checked("combine_known_operands", graph)
        if symbols is None:
            plan = _plan(graph, inputs.signature)
            return SizedPlan(plan, EagerLoop(plan.body, plan.loop_signature, plan.own_xs))
        return _for_any_size(graph, inputs.signature, symbols)

    return derived(body, ("plan", current_options()), inputs, make)


def _plan(graph: fx.GraphModule, signature: Signature, guard_sizes: bool = True) -> ScanPlan:
    return Planner(
        graph,
        signature,
        current_options(),
        pointwise_pays=True,
        guard_sizes=guard_sizes,
        keeps_impure=True,
    ).plan()


def _for_any_size(graph: fx.GraphModule, signature: Signature, symbols: Symbols) -> PlanForAnySize:
    graph, signature, sizes = lift_integers(graph, signature)
    plan = _plan(graph, signature, guard_sizes=False)
    # The loop is made now, though it runs later: what looks at a size must do so while the look is
    # recorded as a guard, by which the plan is later found to fit a call or not.
    loop = EagerLoop(plan.body, plan.loop_signature, plan.own_xs)
    return PlanForAnySize(SizedPlan(plan, loop), sizes, symbols)


# --- the scan ---


def dense(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[torch.Tensor, ...]:
    """Run the scan; some xs may be :class:`CarriesIn`."""
    trip_count = inputs.trip_count
    if trip_count == 0:
        return empty_results(body, with_stacks(inputs))
    if not is_planned(body, trip_count):
        return loop(body, with_joined(inputs), options)
    try:
        assert isinstance(body, fx.GraphModule)
        return _planned(body, inputs, options)
    except Exception as error:
        # the body's own error, which the loop raises, too, or a rewrite's, which is dropped
        failed = error
    results = loop(body, with_joined(inputs), options)
    log.warning("rewrites of a scan failed, which runs step by step", exc_info=failed)
    return results


def is_planned(body: Body, trip_count: int) -> bool:
    """Return True if ``body`` is a graph and the loop is long enough for rewrites to pay."""
    return trip_count >= MIN_TRIP_COUNT and isinstance(body, fx.GraphModule)


def _planned(
    body: fx.GraphModule, inputs: Inputs[Any], options: ScanOptions
) -> tuple[torch.Tensor, ...]:
    sized = plan_of(body, with_stacks(inputs))
    plan, trip_count = sized.plan, inputs.trip_count
    if sized.additional:
        inputs = Inputs(inputs.carry, inputs.xs, [*inputs.additional, *sized.additional])
    shifted = sum([x.stack[0].nbytes for x in inputs.xs if isinstance(x, CarriesIn)])
    length = block_length(plan, trip_count, shifted, sized.stacked_bytes)
    run = functools.partial(straight_line_loop, sized.loop, like=sized.loop_ys)
    if length < trip_count:
        results = run_in_blocks(plan, run, inputs, options, length, ys_like=sized.ys)
    else:
        results = plan.run(run, with_joined(inputs), options, adds_in_place=True)
    if legality.check_after_each is not None:
        legality.check_after_each.results("run", with_stacks(inputs).flat(), results)
    return tuple(results)


def step_by_step(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    """Run every operator of every step, as a user's dispatch mode wants to see them."""
    if inputs.trip_count == 0:
        return empty_results(body, inputs)
    return loop(body, inputs, options)
