"""Decide which work leaves the loop. Each decision is about one node: it moves, or it stays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.impure import is_impure
from torch_scan_hop.body.node_kinds import is_tensor_node, is_view
from torch_scan_hop.rewrites.accumulate import (
    Accumulator,
    accumulator_of,
    added_terms,
    is_cheap_to_sum,
    read_stack_instead,
)
from torch_scan_hop.rewrites.batchable import is_batchable
from torch_scan_hop.rewrites.classify import (
    CHEAP,
    Dependence,
    ancestors,
    classify,
    is_pinned,
    is_reduction,
    no_rule_for,
    too_large,
)
from torch_scan_hop.rewrites.costs import Costs
from torch_scan_hop.rewrites.options import Options
from torch_scan_hop.rewrites.parts import computed_once, unique
from torch_scan_hop.rewrites.plan import Decisions, ScanPlan
from torch_scan_hop.signature import Inputs, Signature, results_of


class Planner:
    """Splits a functional ATen ``body`` whose nodes hold ``meta["val"]``.

    ``pointwise_pays``: whether moving pointwise work out of the loop is worth a stack of its
    result: where dispatch is the cost (eager), not where it is fused (Inductor, XLA).
    ``guard_sizes``: whether symbolic sizes may become guards where they decide what pays.
    ``any_trip_count``: whether work for all steps is traced, for any number of them.
    ``least_weight``: bytes of loop-invariant operands, as of weights, from which on a product is
    better made for all steps at once: one that calls no library costs the same in the loop.
    ``keeps_impure``: whether steps draw, check and act also where nothing reads it.
    ``used_outputs``: which of the scan's results anything reads; others come back as None.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        signature: Signature,
        options: Options,
        *,
        pointwise_pays: bool,
        used_outputs: Sequence[bool] | None = None,
        guard_sizes: bool = True,
        any_trip_count: bool = False,
        least_weight: int = 0,
        keeps_impure: bool = False,
    ) -> None:
        self.body = body
        self.signature = signature
        self.options = options
        self.costs = Costs(pointwise_pays, guard_sizes, least_weight)
        self.any_trip_count = any_trip_count
        if used_outputs is None:
            used_outputs = [True] * len(results_of(body.graph))
        self.impure = [n for n in body.graph.nodes if keeps_impure and is_impure(n)]
        self.used = [used or not options.drop_dead for used in used_outputs]
        self.roles = signature.inputs_of(body)
        self.outputs = signature.outputs_of(body)
        pairs = zip(self.roles.carry, self.outputs.carry, strict=True)
        same = [k for k, (before, after) in enumerate(pairs) if before is after]
        self.constant_carry = same if options.drop_dead else []
        constants = [self.roles.carry[k] for k in self.constant_carry]
        carry = [n for n in self.roles.carry if n not in constants]
        roles = Inputs(carry, self.roles.xs, [*self.roles.additional, *constants])
        self.dependence = classify(body.graph, roles, self._may_be_batched)
        self.ys = [y for k, y in enumerate(self.outputs.ys) if self.used[signature.n_carry + k]]
        step_values = {*self.roles.xs, *self.roles.carry, *self.outputs.ys}
        self.step_bytes = sum(self.costs.nbytes(n) for n in step_values)
        self.budget = options.memory_gate * self.step_bytes
        self.accumulators = self._accumulators() if options.contract_accumulators else []
        self.loop_carry = self._live_carry()
        self.stays: dict[fx.Node, str] = {}

    def _may_be_batched(self, node: fx.Node) -> bool:
        return self.costs.may_be_batched(node) and is_batchable(node, self.any_trip_count)

    def _product_pays(self, node: fx.Node) -> bool:
        return self.costs.product_pays(node, self.dependence)

    # --- carries ---

    def _accumulators(self) -> list[Accumulator]:
        candidates = [
            accumulator_of(k, term, self._is_known)
            for k, term in added_terms(self.roles.carry, self.outputs).items()
            if self.used[k]
        ]
        at_hand = {*self.roles.xs, *self.ys}
        at_hand |= {leaf for a in candidates if a.is_product for leaf in a.leaves}
        at_hand |= {
            a.operand for a in candidates if is_cheap_to_sum(a, self.costs.nbytes, self.step_bytes)
        }
        candidates = [read_stack_instead(a, at_hand) for a in candidates]
        return [a for a in candidates if self._accumulator_pays(a, at_hand)]

    def _is_known(self, node: fx.Node) -> bool:
        """Return True if ``node`` is an invariant input, or is computed before the loop."""
        if self.dependence[node] is not Dependence.INVARIANT:
            return False
        if node.op == "placeholder":
            return True
        is_value = node.op == "call_function" and is_tensor_node(node)
        return self.options.hoist_invariant and is_value and self._invariant_is_small(node)

    def _accumulator_pays(self, accumulator: Accumulator, at_hand: set[fx.Node]) -> bool:
        if any(self.dependence[leaf] is Dependence.INVARIANT for leaf in accumulator.leaves):
            return False
        if accumulator.is_product or accumulator.leaves[0] in at_hand:
            return True
        # A fused loop adds in registers, for nothing. Where each operator costs a dispatch, a stack
        # of small terms, summed at once, is cheaper than an addition per step.
        most = min(self.step_bytes, accumulator.most_bytes)
        small = self.costs.nbytes(accumulator.term) <= most
        return self.costs.pointwise_pays and bool(small)

    def _live_carry(self) -> list[int]:
        """Return the carries that the loop keeps: those on which something that is read depends."""
        gone = {*self.constant_carry, *(a.index for a in self.accumulators)}
        kept = [k for k in range(self.signature.n_carry) if k not in gone]
        wanted = [*self.ys, *self.impure, *(leaf for a in self.accumulators for leaf in a.leaves)]
        live = {k for k in kept if self.used[k]}
        while True:
            needed = ancestors([*wanted, *(self.outputs.carry[k] for k in live)])
            grown = live | {k for k in kept if self.roles.carry[k] in needed}
            if grown == live:
                return [k for k in kept if k in live]
            live = grown

    # --- the split ---

    def plan(self) -> ScanPlan:
        carry_out = [self.outputs.carry[k] for k in self.loop_carry]
        in_loop = self._loop_nodes([*carry_out, *filter(is_pinned, self.body.graph.nodes)])
        targets = unique([*self.ys, *(leaf for a in self.accumulators for leaf in a.leaves)])
        targets = [n for n in targets if not self._is_given(n)]
        sunk = [n for n in targets if self._sinks(n, in_loop)]
        for node in targets:
            if node not in in_loop and node not in sunk:
                why = self._why_not_sunk(node, in_loop)
                self.stays |= {node: why} if why else {}
        in_loop |= self._loop_nodes([n for n in targets if n not in sunk])
        # a value that the loop computes anyway, on the way to another result, is returned by it
        sunk = [n for n in sunk if n not in in_loop]
        emitted = [n for n in targets if n not in sunk]
        batched = self._batched([*carry_out, *emitted], in_loop)
        batched, sunk = computed_once(batched, sunk, self.dependence)
        invariants = self._invariants([*carry_out, *emitted, *sunk, *batched])
        # and a value that is computed before the loop is not
        emitted = [n for n in emitted if n not in batched and n not in invariants]
        stacked = unique([*emitted, *self._frontier(sunk, in_loop)])
        decisions = Decisions(
            loop_carry=self.loop_carry,
            constant_carry=self.constant_carry,
            accumulators=self.accumulators,
            invariants=invariants,
            batched=batched,
            stacked=stacked,
            sunk=sunk,
            used_outputs=self.used,
            impure=self.impure,
            dependence=self.dependence,
            stays=self.stays,
        )
        legality.check("decisions", "decisions", self.body, self.signature, decisions)
        plan = ScanPlan(self.body, self.signature, decisions)
        legality.check("plan", "plan", plan)
        return plan

    def _is_given(self, node: fx.Node) -> bool:
        """Return True for an input that is the same at every step, or that is a stack already."""
        return node in self.roles.xs or (
            node.op == "placeholder" and self.dependence[node] is Dependence.INVARIANT
        )

    def _loop_nodes(self, roots: Sequence[fx.Node]) -> set[fx.Node]:
        found = {n for n in ancestors(roots) if self.dependence[n] is Dependence.LOOP}
        found |= {self.roles.carry[k] for k in self.loop_carry}
        # elements of a tuple live where the tuple does
        found |= {u for n in found for u in n.users if u.target is operator.getitem}
        return found

    def _sinks(self, node: fx.Node, in_loop: set[fx.Node]) -> bool:
        """Return True if ``node`` can be computed after a loop that keeps only ``in_loop``."""
        if node in in_loop or self.dependence[node] is Dependence.INVARIANT:
            return False
        if self.dependence[node] is Dependence.XS and not self.options.batch_xs:
            return False
        return not self._why_not_sunk(node, in_loop)

    def _why_not_sunk(self, node: fx.Node, in_loop: set[fx.Node]) -> str:
        if not self.options.sink_outputs:
            return "sink_outputs is switched off"
        chain = ancestors([node], stop=in_loop) - in_loop
        varying = [n for n in chain if self.dependence[n] is not Dependence.INVARIANT]
        without = {n for n in varying if not self._may_be_batched(n)}
        if without:
            return no_rule_for(next(n for n in self.body.graph.nodes if n in without))
        added = [n for n in self._frontier([node], in_loop) if n not in self.ys]
        if not all(map(is_tensor_node, added)):
            return no_rule_for(node)  # a size is no stack
        if not self.costs.pointwise_pays and not any(map(self._product_pays, varying)):
            # A reduction in the body keeps the loop from being one kernel. After the loop it costs
            # one pass over stacks, which is worth it if those are returned anyway.
            pays = any(is_reduction(n) for n in varying) and not added
            return "" if pays else CHEAP
        fits = self.costs.fits(added, self.budget, varying, self.dependence)
        return "" if fits else too_large(node)

    def _frontier(self, sunk: Sequence[fx.Node], in_loop: set[fx.Node]) -> list[fx.Node]:
        """Return per-step values of the loop that work after it reads."""
        seen = ancestors(sunk, stop=in_loop)
        return [n for n in self.body.graph.nodes if n in seen and n in in_loop]

    # --- before the loop ---

    def _is_read(self, node: fx.Node, roots: Sequence[fx.Node], readers: set[fx.Node]) -> bool:
        return node in roots or any(user in readers for user in node.users)

    def _batched(self, roots: Sequence[fx.Node], in_loop: set[fx.Node]) -> list[fx.Node]:
        """Return the xs-only values that the loop reads or returns."""
        found, spent = [], 0
        for node in self.body.graph.nodes:
            if self.dependence.get(node) is not Dependence.XS or node.op != "call_function":
                continue
            if not is_tensor_node(node) or not self._is_read(node, roots, in_loop):
                continue
            why = self._why_not_batched(node, spent)
            if why:
                self.stays[node] = why
            else:
                spent += self.costs.nbytes(node)
                found.append(node)
        return found

    def _why_not_batched(self, node: fx.Node, spent: Any) -> str:
        if not self.options.batch_xs:
            return "batch_xs is switched off"
        sources = ancestors([node])
        if not self._batching_pays(sources):
            return CHEAP
        fits = self.costs.fits([node], self.budget - spent, sources, self.dependence)
        return "" if fits else too_large(node)

    def _batching_pays(self, sources: set[fx.Node]) -> bool:
        xs_only = (n for n in sources if self.dependence[n] is Dependence.XS)
        work = [n for n in xs_only if n.op == "call_function"]
        if any(map(self._product_pays, work)):
            return True
        return self.costs.pointwise_pays and not all(is_view(n) for n in work)

    def _invariants(self, roots: Sequence[fx.Node]) -> list[fx.Node]:
        varying = {n for n, d in self.dependence.items() if d is not Dependence.INVARIANT}
        found = []
        for node in self.body.graph.nodes:
            if self.dependence.get(node) is not Dependence.INVARIANT or node.op != "call_function":
                continue
            if not is_tensor_node(node) or not self._is_read(node, roots, varying):
                continue
            if self._is_known(node):
                found.append(node)
                continue
            off = "hoist_invariant is switched off"
            self.stays[node] = too_large(node) if self.options.hoist_invariant else off
        return found

    def _invariant_is_small(self, node: fx.Node) -> bool:
        sources = [n for n in ancestors([node]) if n.op == "placeholder" and is_tensor_node(n)]
        size: Any = sum(self.costs.nbytes(n) for n in sources)
        return bool(self.costs.nbytes(node) <= self.options.memory_gate * size + self.budget)
