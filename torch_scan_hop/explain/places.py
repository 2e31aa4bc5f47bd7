"""Say where the plan of a scan puts each operator of its body, and why, in the planner's words."""

from __future__ import annotations

from torch import fx

from torch_scan_hop._torch.impure import is_random
from torch_scan_hop.explain import facts
from torch_scan_hop.op import ScanOperator
from torch_scan_hop.rewrites import ScanPlan
from torch_scan_hop.rewrites.accumulate import Accumulator
from torch_scan_hop.rewrites.classify import Dependence, ancestors, is_pinned, no_rule_for

DEPENDENCE = {
    Dependence.INVARIANT: facts.INVARIANT,
    Dependence.XS: facts.XS,
    Dependence.LOOP: facts.CARRY,
}
_WHY_THERE = {
    facts.ONCE: "the same at every step",
    facts.ALL_STEPS: "needs xs only",
    facts.AFTER: "the next step does not need it",
    facts.DROPPED: "nothing reads it",
}
# how many names a reason lists
_MAX_NAMES = 3


class Places:
    """``names``: what the inputs of the step are called."""

    def __init__(self, plan: ScanPlan, names: dict[fx.Node, str]) -> None:
        self.plan = plan
        self.names = names
        self.graph = plan.original.graph
        self.dependence = plan.decisions.dependence
        parts = {
            facts.LOOP: plan.step.nodes(),
            facts.ONCE: plan.invariant_part.nodes(),
            facts.ALL_STEPS: plan.batched_part.nodes(),
            facts.AFTER: plan.sunk_part.nodes(),
            facts.CONTRACTED: set().union(*map(self._work_of_sum, plan.decisions.accumulators)),
        }
        #: the first part that computes a node is where it costs most
        self.place = {n: place for place in reversed(parts) for n in parts[place]}
        self.of_next_carry = ancestors([plan.outputs.carry[k] for k in plan.decisions.loop_carry])

    def _work_of_sum(self, accumulator: Accumulator) -> set[fx.Node]:
        leaves = set(accumulator.leaves)
        found = ancestors([self.plan.outputs.carry[accumulator.index]], stop=leaves) - leaves
        return {n for n in found if n.op == "call_function"}

    def _sums_of(self, node: fx.Node) -> list[str]:
        sums = [a for a in self.plan.decisions.accumulators if node in self._work_of_sum(a)]
        return [self.names[self.plan.roles.carry[a.index]] for a in sums]

    def single(self) -> set[fx.Node]:
        """Return the values that there is one of for all steps: invariants, sums over steps."""
        found = {n for n, d in self.dependence.items() if d is Dependence.INVARIANT}
        sums = [self.plan.roles.carry[a.index] for a in self.plan.decisions.accumulators]
        return {*found, *sums, *(n for n, place in self.place.items() if place == facts.CONTRACTED)}

    def place_of(self, node: fx.Node) -> str:
        return self.place.get(node, facts.DROPPED)

    def depends_on(self, node: fx.Node) -> str:
        return DEPENDENCE[self.dependence[node]]

    def why(self, node: fx.Node) -> str:
        place = self.place_of(node)
        if place == facts.CONTRACTED:
            return f"added up in {_listed(self._sums_of(node))}"
        if place != facts.LOOP:
            return _WHY_THERE[place]
        if is_pinned(node):
            return _why_pinned(node)
        if node not in self.of_next_carry or self.dependence[node] is not Dependence.LOOP:
            stays = self._decision_about(node)
            if stays is not None:
                return stays
        return self._cause(node)

    def _decision_about(self, node: fx.Node) -> str | None:
        """Return the planner's decision about ``node``, or the first value after it that has one:
        it decides only about values that are read across the border of the loop."""
        pending, seen = [node], {node}
        while pending:
            current = pending.pop(0)
            if current in self.plan.decisions.stays:
                return self.plan.decisions.stays[current]
            users = [u for u in current.users if self.place_of(u) == facts.LOOP and u not in seen]
            seen.update(users)
            pending += users
        return None

    def _cause(self, node: fx.Node) -> str:
        """Return why ``node`` is known step by step only."""
        loop = {n for n in ancestors([node]) if self.dependence.get(n) is Dependence.LOOP}
        roots = [n for n in loop if not any(a in loop for a in n.all_input_nodes)]
        carries = [c for c in self.plan.roles.carry if c in roots]
        if carries:
            return f"depends on {_listed([self.names[c] for c in carries])}"
        if not roots:
            return "the loop returns it at every step"
        for root in sorted(roots, key=list(self.graph.nodes).index):
            if is_pinned(root):
                return f"reads {root.name}: {_why_pinned(root)}"
        if node in roots:
            return no_rule_for(node)
        return f"reads {roots[0].name}: {no_rule_for(roots[0])}"


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= _MAX_NAMES else [*names[: _MAX_NAMES - 1], "other carries"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _why_pinned(node: fx.Node) -> str:
    if isinstance(node.target, ScanOperator):
        return "a scan of its own"
    if is_random(node):
        return "random: drawn step by step"
    return "has an effect or a body of its own"
