"""A scan split into work before, in and after the loop, and how to run it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.node_kinds import is_tensor_node, is_view, viewed
from torch_scan_hop.op import FORWARD, RunScan, ScanOptions
from torch_scan_hop.rewrites.accumulate import Accumulator
from torch_scan_hop.rewrites.classify import Dependence, ancestors, is_contraction, nbytes
from torch_scan_hop.rewrites.parts import Part, extract
from torch_scan_hop.signature import Inputs, Signature


@dataclass(frozen=True)
class Decisions:
    """The place of each piece of work. Nodes are nodes of the original body."""

    loop_carry: list[int]  # carries the loop keeps
    constant_carry: list[int]  # carries that never change: loop-invariant
    accumulators: list[Accumulator]
    invariants: list[fx.Node]  # computed once
    batched: list[fx.Node]  # xs-only, computed for all steps before the loop
    stacked: list[fx.Node]  # returned by the loop, stacked
    sunk: list[fx.Node]  # computed for all steps after the loop
    used_outputs: list[bool]
    #: draws, checks and calls that run though nothing may read them
    impure: list[fx.Node]
    #: the dependence of every node of the body
    dependence: dict[fx.Node, Dependence] = field(default_factory=dict, repr=False)
    #: for nodes that might have left the loop: why they stay
    stays: dict[fx.Node, str] = field(default_factory=dict, repr=False)


def _contiguous_matrix(value: Any) -> Any:
    """Lay a transposed weight out once, so that steps do not read it across."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.is_contiguous():
        return value
    if 0 in value.stride():  # an expanded value stays small
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _lies_apart(value: Any) -> bool:
    """Return True if neither rows nor columns are contiguous, so that each product copies it."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.is_contiguous():
        return False
    rows, columns = value.stride()[-2:]
    return likely_value(rows) > 1 and likely_value(columns) > 1


class ScanPlan:
    """A scan of ``original`` with less work in the loop."""

    def __init__(
        self, original: fx.GraphModule, signature: Signature, decisions: Decisions
    ) -> None:
        self.original = original
        self.signature = signature
        self.decisions = decisions
        self.roles = signature.inputs_of(original)
        self.outputs = signature.outputs_of(original)
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
        self.step = Part(
            original, [*carry, *self.roles.xs, *d.batched, *known], results, "ScanStep", d.impure
        )
        read = set(self.step.inputs)
        self.loop_xs = [n for n in [*self.roles.xs, *d.batched] if n in read]
        self.loop_additional = [n for n in known if n in read]
        self.counts_only = not self.loop_xs  # the loop reads no xs, but needs one to count
        loop_xs = self.loop_xs or [self.roles.xs[0]]
        self.loop_signature = Signature(len(carry), len(loop_xs), len(self.loop_additional))
        #: the loop's body, ``(carry, loop xs, loop additional) -> (carry', stacked)``
        self.body = extract(
            original,
            [*carry, *loop_xs, *self.loop_additional],
            results,
            "ScanLoopBody",
            impure=d.impure,
        )

    def is_trivial(self) -> bool:
        """Return True if nothing moved."""
        d = self.decisions
        moved = [*d.constant_carry, *d.accumulators, *d.invariants, *d.batched, *d.sunk]
        return not moved and len(d.loop_carry) == self.signature.n_carry

    @functools.cached_property
    def carried(self) -> list[int]:
        """Positions of the carries that steps change: those of the loop, then accumulators."""
        return [*self.decisions.loop_carry, *(a.index for a in self.decisions.accumulators)]

    def is_read_outside(self, x: fx.Node) -> bool:
        """Return True if work before or after the loop reads ``x``, or ``x`` is itself a result."""
        parts = [*self.batched_part.inputs, *self.sunk_part.inputs]
        leaves = [leaf for a in self.decisions.accumulators for leaf in a.leaves]
        return x in {*parts, *leaves, *self.outputs.ys}

    @functools.cached_property
    def own_xs(self) -> list[int]:
        """Positions of the loop's xs that were made for it, so that it may write over them."""
        made = self.decisions.batched
        read_by_others = ancestors([a for n in made for a in n.all_input_nodes])
        return [
            k
            for k, n in enumerate(self.loop_xs)
            # of a product, or a sum, the result is sure to be new memory, no view of something else
            if n in made and (is_contraction(n) or n.target is torch.ops.aten.add.Tensor)
            if n not in read_by_others
            if not self.is_read_outside(n)
        ]

    @functools.cached_property
    def stacked_bytes(self) -> int:
        """Bytes per step of stacks that are no results; likely ones for symbolic sizes."""
        return sum(map(likely_value, self.stacked_sizes()))

    @functools.cached_property
    def accumulated_bytes(self) -> int:
        """Bytes of the carries that are summed after the loop; likely ones for symbolic sizes."""
        summed = (self.roles.carry[a.index] for a in self.decisions.accumulators)
        return sum(likely_value(nbytes(n)) for n in summed)

    @functools.cached_property
    def multiplies_stacks(self) -> bool:
        """True if products are made of the values of several steps at once."""
        apart = self.batched_part.nodes() | self.sunk_part.nodes()
        return bool(self.decisions.accumulators) or any(map(is_contraction, apart))

    def stacked_sizes(self) -> list[Any]:
        """Return the bytes of each value that is stacked and is no result."""
        results = set(self.outputs.ys)
        made = [n for n in self.decisions.stacked if n not in results]
        for part in (self.batched_part, self.sunk_part):
            made += [
                n
                for n in part.module.graph.nodes
                if n.op == "call_function" and is_tensor_node(n) and not is_view(n)
            ]
        return [nbytes(n) for n in made]

    def run(
        self,
        run_scan: RunScan,
        inputs: Inputs[Any],
        options: ScanOptions = FORWARD,
        *,
        adds_in_place: bool = False,
    ) -> list[Any]:
        """Return all results of the scan, whose loop ``run_scan`` runs. ``adds_in_place``: on real
        tensors, sums are written over."""
        values = self.invariants(inputs)
        carry = [inputs.carry[k] for k in self.carried]
        if adds_in_place and self.decisions.accumulators:
            carry = self.with_own_sums(carry)
        carry, stacks = self.run_steps(
            run_scan, carry, inputs.xs, values, options, sums_are_own=adds_in_place
        )
        ys = self.gather(stacks, values, inputs.trip_count)
        return [*self.final_carry(carry, inputs.carry), *ys]

    def invariants(self, inputs: Inputs[Any]) -> dict[fx.Node, Any]:
        """Return all values that are the same at every step."""
        constants = [inputs.carry[k] for k in self.decisions.constant_carry]
        values = dict(zip(self.fixed, [*inputs.additional, *constants], strict=True))
        if self.decisions.invariants:
            for node, value in self.invariant_part(values).items():
                # products of all steps at once read a matrix rarely enough to take it as it lies
                values[node] = _contiguous_matrix(value) if node in self.loop_additional else value
        for node in self._fixed_factors:
            if _lies_apart(values[node]):
                values[node] = _contiguous_matrix(values[node])
        return values

    @functools.cached_property
    def _fixed_factors(self) -> list[fx.Node]:
        """Return the loop-invariant inputs that are operands of products in the loop."""
        products = filter(is_contraction, self.step.nodes())
        read = {a for node in products for a in node.all_input_nodes}
        return [node for node in self.fixed if node in read]

    def with_own_sums(self, carry: Sequence[Any]) -> list[Any]:
        """Return ``carried`` with copies of the accumulators, so that nobody else holds them."""
        n = len(self.decisions.loop_carry)
        sums = [c.clone(memory_format=torch.contiguous_format) for c in carry[n:]]
        return [*carry[:n], *sums]

    def run_steps(
        self,
        run_scan: RunScan,
        carry: Sequence[Any],
        xs: Sequence[Any],
        values: dict[fx.Node, Any],
        options: ScanOptions,
        sums_are_own: bool = False,
    ) -> tuple[list[Any], dict[fx.Node, Any]]:
        """Return ``carried`` after these steps, and all stacks; own sums are written over."""
        d = self.decisions
        n = len(d.loop_carry)
        stacks = dict(zip(self.roles.xs, xs, strict=True))
        if d.batched:
            stacks |= self.batched_part.over_steps(stacks, values, options.reverse)
        results: Sequence[Any] = []
        if n or d.stacked:
            loop_xs = [xs[0]] if self.counts_only else [stacks[n] for n in self.loop_xs]
            fixed = [values[n] for n in self.loop_additional]
            operands = Inputs(list(carry[:n]), loop_xs, fixed)
            if legality.check_after_each is not None:
                legality.check_after_each.operands("loop", self.body, operands)
            results = run_scan(self.body, operands, options)
        stacks |= dict(zip(d.stacked, results[n:], strict=True))
        if d.sunk:
            stacks |= self.sunk_part.over_steps(stacks, values, options.reverse)
        sums = []
        for a, before in zip(d.accumulators, carry[n:], strict=True):
            leaves = [stacks[leaf] for leaf in a.leaves]
            if sums_are_own:
                sums.append(a.add_into(before, leaves, values))
            else:
                sums.append(before + a.total(leaves, values))
        carried = [*results[:n], *sums]
        if legality.check_after_each is not None:
            legality.check_after_each.stacks("stacks", stacks, xs[0].shape[0])
            roles = [self.roles.carry[k] for k in self.carried]
            legality.check_after_each.rows("carries", roles, carried)
        return carried, stacks

    def final_carry(self, carry: Sequence[Any], init: Sequence[Any]) -> list[Any]:
        """Return all carries, from ``carried``; a dropped one is None."""
        final = dict(zip(self.carried, carry, strict=True))
        for k in self.decisions.constant_carry:
            final[k] = init[k].clone(memory_format=torch.contiguous_format)
        return [final.get(k) for k in range(self.signature.n_carry)]

    def gather(
        self, stacks: dict[fx.Node, Any], values: dict[fx.Node, Any], trip_count: Any
    ) -> list[Any]:
        """Return all ys, contiguous, each a tensor of its own; None where nothing reads it."""
        return [
            None if copy is None else _own_stack(node, stacks, values, trip_count, copy=copy)
            for node, copy in self._gathered
        ]

    @functools.cached_property
    def _gathered(self) -> list[tuple[fx.Node, bool | None]]:
        """Return each y, and whether it must be copied: a view of an input or of another y. (The
        stack of a carry is the loop's own.) None where nothing reads it."""
        taken = {*self.roles.xs, *self.roles.additional}
        found: list[tuple[fx.Node, bool | None]] = []
        used = self.decisions.used_outputs[self.signature.n_carry :]
        for node, is_used in zip(self.outputs.ys, used, strict=True):
            owner = viewed(node)
            found.append((node, owner in taken if is_used else None))
            if is_used:
                taken.add(owner)
        return found


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
