"""Decide what crosses from a forward step to its backward, before any graph is built.

A value that the backward needs is, in this order of preference

- an input of the step (a carry, an x, an additional input), handed over as it is;
- recomputed, where that is free or owed: views, values that depend on loop-invariant inputs
  only, values the forward itself does not need (unless the checkpoint policy says MUST_SAVE),
  and values whose checkpoint policy says so;
- a stack the forward already returns (``return h, h`` saves nothing twice);
- a new residual.

So nothing loop-invariant is ever stacked T times. Random values are always residuals: masks
are never redrawn.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import fx

from torch_scan_hop._torch.impure import is_impure, is_random
from torch_scan_hop.autodiff.handover import Handover, Source
from torch_scan_hop.autodiff.joint import JointGraph
from torch_scan_hop.autodiff.policy import Policy, must_save, wants_recompute
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import (
    is_number_node,
    is_tensor_node,
    is_view,
    same_value,
    source_of_view,
)
from torch_scan_hop.rewrites.classify import ancestors


@dataclass(frozen=True)
class Cut:
    """The values that the forward hands to the backward, and those that it saves for that.

    Attributes:
        needed: nodes that the backward computes or receives.
        received: those of them that it receives, in the order of the joint graph.
        residuals: what the forward returns besides its results.
        impure: what the forward runs also if nothing reads it, such as draws.
        carry_stack: as of a :class:`~torch_scan_hop.autodiff.handover.Partition`.
    """

    needed: AbstractSet[fx.Node]
    received: dict[fx.Node, Handover]
    residuals: list[fx.Node]
    impure: list[fx.Node]
    carry_stack: dict[int, tuple[int, bool]]

    @property
    def per_step(self) -> list[Handover]:
        return [h for h in dict.fromkeys(self.received.values()) if not h.is_invariant]

    @property
    def invariant(self) -> list[Handover]:
        return [h for h in dict.fromkeys(self.received.values()) if h.is_invariant]


def decide(joint: JointGraph, policy: Policy, saved: frozenset[int] | None = None) -> Cut:
    """Decide what the backward of ``joint`` gets from the forward. With ``saved``, it reads only
    those of the forward's ys, and recomputes everything else that is not random."""
    rules = _Rules(joint, policy, saved)
    needed, values = _needed(joint, rules)
    stacks = _Stacks(joint)
    received: dict[fx.Node, Handover] = {}
    for node in joint.module.graph.nodes:
        if node in needed and node not in rules.of_cotangents and node.op != "get_attr":
            handover = _handover(node, rules, values, stacks)
            if handover is not None:
                received[node] = handover
    carries = dict.fromkeys(h.index for h in received.values() if h.source is Source.CARRY_IN)
    carry_stack = {k: _stack_of_carry(joint, k, stacks) for k in carries}
    nodes = joint.module.graph.nodes
    impure = [n for n in nodes if is_impure(n) and n not in rules.of_cotangents]
    return Cut(needed, received, stacks.residuals, impure, carry_stack)


def _needed(joint: JointGraph, rules: _Rules) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes that the backward computes or receives, and which of them are saved."""
    needed: set[fx.Node] = set()
    values: set[fx.Node] = set()
    pending = [g for g in joint.gradients() if isinstance(g, fx.Node)]
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        if node not in rules.of_cotangents:
            # the backward has it without saving it
            if node in rules.source or node.op == "get_attr" or is_number_node(node):
                continue
            if rules.must_save(node, values):
                values.add(same_value(node))
                continue
        pending.extend(node.all_input_nodes)
    return needed, values


def _handover(
    node: fx.Node, rules: _Rules, values: AbstractSet[fx.Node], stacks: _Stacks
) -> Handover | None:
    """Return how the backward gets ``node``; None if it computes it."""
    if node in rules.source:
        return rules.source[node]
    if is_number_node(node):
        return Handover(Source.SIZE, id(node), value_of(node))
    if rules.must_save(node, values):
        return Handover(Source.Y, stacks.hold(node))
    return None


class _Rules:
    """The rules for which values of the forward are given to the backward, saved or recomputed."""

    def __init__(self, joint: JointGraph, policy: Policy, saved: frozenset[int] | None) -> None:
        self.policy = policy
        outputs = joint.signature.split_outputs(joint.outputs())
        roles = joint.signature.split_inputs(joint.primals())
        self.source = {n: Handover(Source.CARRY_IN, k) for k, n in enumerate(roles.carry)}
        self.source |= {n: Handover(Source.X, k) for k, n in enumerate(roles.xs)}
        self.source |= {n: Handover(Source.ADDITIONAL, k) for k, n in enumerate(roles.additional)}
        #: what depends on a cotangent: the backward's own work
        self.of_cotangents = reached_from(joint, joint.cotangents())
        self.varying = reached_from(joint, [*roles.carry, *roles.xs], random=True)
        self.of_forward = ancestors(outputs.flat())
        self.readable: set[fx.Node] | None = None
        if saved is not None:
            held = [outputs.ys[k] for k in sorted(saved)]
            self.readable = {same_value(y) for y in held if isinstance(y, fx.Node)}

    def must_save(self, node: fx.Node, values: AbstractSet[fx.Node]) -> bool:
        if not is_tensor_node(node) or node.op == "get_attr" or node not in self.varying:
            return False
        if node in self.source:
            return False
        producer = node.args[0] if node.target is operator.getitem else node
        if isinstance(producer, fx.Node) and is_random(producer):
            return True
        if self.readable is not None:
            return same_value(node) in self.readable
        # asked of an element of a tuple (a nested scan's residual), the policy decides about the
        # operator that returns the tuple: the element costs nothing once that has run
        if producer not in self.of_forward:
            return must_save(self.policy, producer)
        if wants_recompute(self.policy, node, producer):
            return False
        return not self._is_free_view(node, values)

    def _is_free_view(self, node: fx.Node, values: AbstractSet[fx.Node]) -> bool:
        """Return True for a view, or its copy, of what the backward has, or of what is no larger.

        A product of a transposed stack copies it first. That copy, and one for each other way to
        turn the same matrix, would be saved beside it.
        """
        node = same_value(node)
        if not is_view(node):
            return False
        base = source_of_view(node)
        if base in self.source or base not in self.varying or same_value(base) in values:
            return True
        return bool(value_of(base).numel() <= value_of(node).numel())


class _Stacks:
    """The stacks that the forward returns: its ys, then residuals."""

    def __init__(self, joint: JointGraph) -> None:
        self.ys = joint.signature.split_outputs(joint.outputs()).ys
        self.residuals: list[fx.Node] = []

    def hold(self, node: fx.Node) -> int:
        """Return the position of ``node`` among the stacks, adding a residual if it is in none."""
        value = same_value(node)
        for k, held in enumerate([*self.ys, *self.residuals]):
            if isinstance(held, fx.Node) and same_value(held) is value:
                return k
        self.residuals.append(node)
        return len(self.ys) + len(self.residuals) - 1


def _stack_of_carry(joint: JointGraph, k: int, stacks: _Stacks) -> tuple[int, bool]:
    """Return the stack that holds a carry for the backward, and if it is shifted by a step."""
    carry_in, carry_out = joint.primals()[k], joint.outputs()[k]
    held = [same_value(v) for v in (*stacks.ys, *stacks.residuals) if isinstance(v, fx.Node)]
    shifted = isinstance(carry_out, fx.Node) and same_value(carry_out) in held
    if carry_in in held or not shifted:
        return stacks.hold(carry_in), False
    return stacks.hold(carry_out), True


def reached_from(
    joint: JointGraph, roots: Collection[fx.Node], random: bool = False
) -> set[fx.Node]:
    """Return the nodes that depend on ``roots``; ``random``: and those that depend on a draw."""
    reached = set(roots)
    for node in joint.module.graph.nodes:
        if any(a in reached for a in node.all_input_nodes) or (random and is_random(node)):
            reached.add(node)
    return reached
