"""A scan split into work before, in and after the loop, and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop.rewrites.accumulate import Accumulator
from torch_scan_hop.rewrites.parts import Part, extract
from torch_scan_hop.signature import Signature

RunScan = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Decisions:
    """What moves where; nodes are nodes of the original body."""

    loop_carry: list[int]  # carries the loop keeps
    constant_carry: list[int]  # carries that never change: loop-invariant
    accumulators: list[Accumulator]
    invariants: list[fx.Node]  # computed once
    batched: list[fx.Node]  # xs-only, computed for all steps before the loop
    stacked: list[fx.Node]  # returned by the loop, stacked
    sunk: list[fx.Node]  # computed for all steps after the loop
    used_outputs: list[bool]


def _contiguous_matrix(value: Any) -> Any:
    """A transposed weight, laid out once instead of being read across at every step."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.is_contiguous():
        return value
    if any(s == 0 for s in value.stride()):  # an expanded value stays small
        return value
    return value.clone(memory_format=torch.contiguous_format)


class ScanPlan:
    """A scan of ``original`` with less work in the loop."""

    def __init__(
        self, original: fx.GraphModule, signature: Signature, decisions: Decisions
    ) -> None:
        self.signature = signature
        self.decisions = decisions
        self.roles = signature.split_inputs(original.graph.find_nodes(op="placeholder"))
        (output,) = original.graph.find_nodes(op="output")
        self.outputs = signature.split_outputs(list(output.args[0]))
        d = decisions
        constants = [self.roles.carry[k] for k in d.constant_carry]
        self.fixed = [*self.roles.additional, *constants]
        known = [*self.fixed, *d.invariants]
        self.invariant_part = Part(original, self.fixed, d.invariants, "ScanInvariants")
        self.batched_part = Part(original, [*self.roles.xs, *known], d.batched, "ScanBatched")
        self.sunk_part = Part(
            original, [*d.stacked, *d.batched, *self.roles.xs, *known], d.sunk, "ScanSunk"
        )
        carry = [self.roles.carry[k] for k in d.loop_carry]
        results = [*(self.outputs.carry[k] for k in d.loop_carry), *d.stacked]
        step = Part(original, [*carry, *self.roles.xs, *d.batched, *known], results, "ScanStep")
        read = set(step.inputs)
        self.loop_xs = [n for n in [*self.roles.xs, *d.batched] if n in read]
        self.loop_additional = [n for n in known if n in read]
        self.counts_only = not self.loop_xs  # the loop reads no xs, but needs one to count
        loop_xs = self.loop_xs or [self.roles.xs[0]]
        #: the loop's body, ``(carry, loop xs, loop additional) -> (carry', stacked)``
        self.body = extract(
            original, [*carry, *loop_xs, *self.loop_additional], results, "ScanLoopBody"
        )

    def is_trivial(self) -> bool:
        """Nothing moved."""
        d = self.decisions
        moved = [*d.constant_carry, *d.accumulators, *d.invariants, *d.batched, *d.sunk]
        return not moved and len(d.loop_carry) == self.signature.n_carry

    @property
    def loop_signature(self) -> Signature:
        return Signature(
            len(self.decisions.loop_carry), len(self.loop_xs) or 1, len(self.loop_additional)
        )

    def run(
        self,
        run_scan: RunScan,
        init: Sequence[Any],
        xs: Sequence[Any],
        additional: Sequence[Any],
        **options: Any,
    ) -> list[Any]:
        """All results of the scan; ``run_scan(body, init, xs, additional)`` runs the loop."""
        values = self.invariants(init, additional)
        carry: Sequence[Any] = [init[k] for k in self.decisions.loop_carry]
        carry, stacks = self.run_steps(run_scan, carry, xs, values, **options)
        final = dict(zip(self.decisions.loop_carry, carry, strict=True))
        for a in self.decisions.accumulators:
            final[a.index] = init[a.index] + a.total([stacks[leaf] for leaf in a.leaves], values)
        ys = self.gather(stacks, values, xs[0].shape[0])
        return [*self.final_carry(final, init), *ys]

    def invariants(self, init: Sequence[Any], additional: Sequence[Any]) -> dict[fx.Node, Any]:
        """All values that are the same at every step."""
        constants = (init[k] for k in self.decisions.constant_carry)
        values = dict(zip(self.fixed, [*additional, *constants], strict=True))
        return values | {n: _contiguous_matrix(v) for n, v in self.invariant_part(values).items()}

    def run_steps(
        self,
        run_scan: RunScan,
        carry: Sequence[Any],
        xs: Sequence[Any],
        values: dict[fx.Node, Any],
        **options: Any,
    ) -> tuple[Sequence[Any], dict[fx.Node, Any]]:
        """The loop's carry after these steps, and all stacks of them."""
        stacks = dict(zip(self.roles.xs, xs, strict=True))
        stacks |= self.batched_part.over_steps(stacks, values)
        results: Sequence[Any] = []
        if carry or self.decisions.stacked:
            loop_xs = [xs[0]] if self.counts_only else [stacks[n] for n in self.loop_xs]
            fixed = tuple(values[n] for n in self.loop_additional)
            results = run_scan(self.body, carry, loop_xs, fixed, **options)
        stacks |= dict(zip(self.decisions.stacked, results[len(carry) :], strict=True))
        stacks |= self.sunk_part.over_steps(stacks, values)
        return results[: len(carry)], stacks

    def final_carry(self, final: dict[int, Any], init: Sequence[Any]) -> list[Any]:
        """All carries, of those that were computed; a dropped one is None."""
        for k in self.decisions.constant_carry:
            final[k] = init[k].clone(memory_format=torch.contiguous_format)
        return [final.get(k) for k in range(self.signature.n_carry)]

    def gather(
        self, stacks: dict[fx.Node, Any], values: dict[fx.Node, Any], trip_count: Any
    ) -> list[Any]:
        """All ys, contiguous, each a tensor of its own; None where nothing reads it."""
        returned = set(self.roles.xs)  # results alias neither inputs nor one another
        ys: list[Any] = []
        for k, node in enumerate(self.outputs.ys):
            if not self.decisions.used_outputs[self.signature.n_carry + k]:
                ys.append(None)
                continue
            ys.append(_own_stack(node, stacks, values, trip_count, copy=node in returned))
            returned.add(node)
        return ys


def _own_stack(
    node: fx.Node,
    stacks: dict[fx.Node, Any],
    values: dict[fx.Node, Any],
    trip_count: Any,
    copy: bool,
) -> torch.Tensor:
    if node not in stacks:  # the same at every step
        value = values[node]
        stack = value.unsqueeze(0).expand(trip_count, *value.shape)
        return stack.clone(memory_format=torch.contiguous_format)
    if copy:
        return stacks[node].clone(memory_format=torch.contiguous_format)
    return stacks[node].contiguous()
