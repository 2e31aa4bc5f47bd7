"""A joint graph cut into a forward and a backward body, and what is handed across.

The forward body is the step with *residuals* as further ys. A value that the backward needs
is, in this order of preference

- an input of the step (a carry, an x, an additional input), handed over as it is;
- recomputed, where that is free or owed: views, values that depend on loop-invariant inputs
  only, values the forward itself does not need (unless the checkpoint policy says MUST_SAVE),
  and values whose checkpoint policy says so;
- a stack the forward already returns (``return h, h`` saves nothing twice);
- a new residual.

So nothing loop-invariant is ever stacked T times. Random values are always residuals: masks
are never redrawn. The backward scans in the other direction::

    carry:      cotangents of the differentiated carries, then one accumulator for each
                differentiated additional input
    xs:         cotangents of the differentiated ys, then the handed-over values
    additional: the additional inputs it reads, then sizes
    ys:         gradients of the differentiated xs
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.tracing import as_traced
from torch_scan_hop.autodiff.joint import JointGraph
from torch_scan_hop.autodiff.policy import Policy, must_save, wants_recompute
from torch_scan_hop.examples import contiguous_like
from torch_scan_hop.graph_cleanup import is_random, is_view, same_value, trim_scans

aten = torch.ops.aten


class Source(Enum):
    """Where the backward finds a value of a forward step."""

    CARRY_IN = "carry into the step"
    X = "x"
    ADDITIONAL = "additional input"
    Y = "stack returned by the forward"
    SIZE = "size"


@dataclass(frozen=True)
class Handover:
    """A per-step value (or, for additional inputs and sizes, one value) given to backward."""

    source: Source
    index: int = -1
    size: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Partition:
    """``forward``: (carry, x, additional) -> (carry', ys, residuals); ``backward`` as above."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    n_residuals: int
    per_step: tuple[Handover, ...]
    invariant: tuple[Handover, ...]
    # for a carry-in: the index among ys of the carry *out* of the step, or of the carry-in
    carry_stack: dict[int, tuple[int, bool]]
    accumulated: tuple[int, ...]
    x_gradients: tuple[int, ...]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_size(node: fx.Node) -> bool:
    return isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    )


class Partitioner:
    """Cuts ``joint``. With ``saved``, only those of the forward's ys are read; everything
    else that is not random is recomputed from them and from the inputs."""

    def __init__(
        self, joint: JointGraph, policy: Policy, saved: frozenset[int] | None = None
    ) -> None:
        self.joint = joint
        self.policy = policy
        self.outputs = joint.outputs()
        self.n_carry = joint.signature.n_carry
        self.source = self._sources()
        self.needs_cotangent = self._reached_from(set(joint.cotangents()))
        primals = joint.primals()
        per_step = set(primals[: self.n_carry + joint.signature.n_xs])
        self.varying = self._reached_from(per_step, random=True)
        self.forward_nodes = self._ancestors([o for o in self.outputs if isinstance(o, fx.Node)])
        self.residuals: list[fx.Node] = []
        self.saved: set[fx.Node] = set()
        ys = self.outputs[self.n_carry :]
        self.readable = None
        if saved is not None:
            held = [ys[k] for k in sorted(saved)]
            self.readable = {same_value(y) for y in held if isinstance(y, fx.Node)}

    def _sources(self) -> dict[fx.Node, Handover]:
        sig, primals = self.joint.signature, self.joint.primals()
        roles = sig.split_inputs(primals)
        found = {n: Handover(Source.CARRY_IN, k) for k, n in enumerate(roles.carry)}
        found |= {n: Handover(Source.X, k) for k, n in enumerate(roles.xs)}
        found |= {n: Handover(Source.ADDITIONAL, k) for k, n in enumerate(roles.additional)}
        return found

    def _reached_from(self, roots: set[fx.Node], random: bool = False) -> set[fx.Node]:
        reached = set(roots)
        for node in self.joint.module.graph.nodes:
            if any(a in reached for a in node.all_input_nodes) or (random and is_random(node)):
                reached.add(node)
        return reached

    @staticmethod
    def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
        seen: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending.extend(node.all_input_nodes)
        return seen

    # --- which forward values are saved ---

    def _is_at_hand(self, node: fx.Node) -> bool:
        """Available to the backward without a residual of its own."""
        return node in self.source or node not in self.varying or same_value(node) in self.saved

    def must_save(self, node: fx.Node) -> bool:
        if not _is_tensor(node) or node.op == "get_attr" or node not in self.varying:
            return False
        if node in self.source:
            return False
        producer = node.args[0] if node.target is operator.getitem else node
        if isinstance(producer, fx.Node) and is_random(producer):
            return True
        if self.readable is not None:
            return same_value(node) in self.readable
        # an element of a tuple (a nested scan's residual) costs nothing once the tuple is there
        if producer not in self.forward_nodes:
            return must_save(self.policy, producer)
        if wants_recompute(self.policy, node, producer):
            return False
        return not self._is_free_view(node)

    def _is_free_view(self, node: fx.Node) -> bool:
        if not is_view(node):
            return False
        base = node.args[0]
        assert isinstance(base, fx.Node)
        if node.target is operator.getitem:
            base = base.args[0]
            assert isinstance(base, fx.Node)
        if self._is_at_hand(base):
            return True
        return bool(base.meta["val"].numel() <= node.meta["val"].numel())

    # --- the two graphs ---

    def run(self) -> Partition:
        builder = _BackwardBuilder(self)
        backward = builder.build()
        carry_stack = self._carry_stacks(builder)
        partition = Partition(
            forward=self._forward_module(),
            backward=backward,
            n_residuals=len(self.residuals),
            per_step=tuple(builder.per_step),
            invariant=tuple(builder.invariant),
            carry_stack=carry_stack,
            accumulated=builder.accumulated,
            x_gradients=builder.x_gradients,
        )
        if legality.check_after_each is not None:
            legality.check_after_each.partition("partition", self.joint, partition)
        return partition

    def stack_index(self, node: fx.Node) -> int:
        """Where ``node`` stands among the forward's ys; it is appended if it does not yet."""
        value = same_value(node)
        for k, out in enumerate([*self.outputs[self.n_carry :], *self.residuals]):
            if isinstance(out, fx.Node) and same_value(out) is value:
                return k
        self.residuals.append(node)
        self.saved.add(value)
        return len(self.outputs) - self.n_carry + len(self.residuals) - 1

    def _carry_stacks(self, builder: _BackwardBuilder) -> dict[int, tuple[int, bool]]:
        """The stack that holds each handed-over carry: shifted by a step, or as it is."""
        stacks: dict[int, tuple[int, bool]] = {}
        for handover in builder.per_step:
            if handover.source is not Source.CARRY_IN:
                continue
            k = handover.index
            carry_out = self.outputs[k]
            stacked = [*self.outputs[self.n_carry :], *self.residuals]
            held = [same_value(o) for o in stacked if isinstance(o, fx.Node)]
            carry_in = self.joint.primals()[k]
            shifted = isinstance(carry_out, fx.Node) and same_value(carry_out) in held
            if carry_in in held or not shifted:
                stacks[k] = (self.stack_index(carry_in), False)
            else:
                stacks[k] = (self.stack_index(carry_out), True)
        return stacks

    def _forward_module(self) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        results = [*self.outputs, *self.residuals]
        wanted = self._ancestors([r for r in results if isinstance(r, fx.Node)])
        primals = set(self.joint.primals())
        for node in self.joint.module.graph.nodes:
            if node in primals or (node in wanted and node.op != "placeholder"):
                env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[r] if isinstance(r, fx.Node) else r for r in results))
        graph.lint()
        module = fx.GraphModule(self.joint.module, graph, "ScanForward")
        trim_scans(module)
        return as_traced(module)


class _BackwardBuilder:
    def __init__(self, owner: Partitioner) -> None:
        self.owner = owner
        joint = owner.joint
        self.gradients = joint.signature.split_inputs(joint.gradients())
        flow = joint.flow
        self.carry = tuple(k for k, flag in enumerate(flow.carry) if flag)
        self.accumulated = tuple(
            k for k, g in enumerate(self.gradients.additional) if isinstance(g, fx.Node)
        )
        self.x_gradients = tuple(
            k for k, g in enumerate(self.gradients.xs) if isinstance(g, fx.Node)
        )
        self.per_step: list[Handover] = []
        self.invariant: list[Handover] = []
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.handed: dict[Handover | fx.Node, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        joint, graph = self.owner.joint, self.graph
        cotangents = joint.cotangents()
        n = len(self.carry)
        for node in cotangents[:n]:
            self.env[node] = graph.node_copy(node)
        accumulators = {k: self._accumulator(k) for k in self.accumulated}
        for node in cotangents[n:]:
            self.env[node] = graph.node_copy(node)
        self.end_of_cotangents = next(iter(reversed(graph.nodes)), None)
        needed = self._needed_nodes()
        for node in joint.module.graph.nodes:
            if node in needed and node not in self.env:
                self._emit(node)
        carry = [self._carry_result(k) for k in self.carry]
        sums = [self._add(accumulators[k], self.gradients.additional[k]) for k in self.accumulated]
        ys = [self.env[self.gradients.xs[k]] for k in self.x_gradients]
        graph.output((*carry, *sums, *ys))
        self._order_placeholders()
        graph.lint()
        module = fx.GraphModule(joint.module, graph, "ScanBackward")
        trim_scans(module)
        return as_traced(module)

    def _accumulator(self, k: int) -> fx.Node:
        node = self.graph.placeholder(f"accumulator_{k}")
        roles = self.owner.joint.signature.split_inputs(self.owner.joint.primals())
        value = roles.additional[k].meta["val"]
        # a carry is contiguous, whatever the strides of what it sums gradients of
        node.meta["val"] = contiguous_like(value.fake_mode, value)
        return node

    def _needed_nodes(self) -> set[fx.Node]:
        """Nodes that the backward computes or receives, found from the gradients down."""
        seen: set[fx.Node] = set()
        pending = [g for g in self.gradients.flat() if isinstance(g, fx.Node)]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.owner.needs_cotangent:
                pending.extend(node.all_input_nodes)
            elif not self._is_received(node):
                pending.extend(node.all_input_nodes)
        return seen

    def _is_received(self, node: fx.Node) -> bool:
        if node in self.owner.source or node.op == "get_attr":
            return True
        if _is_size(node):
            return True
        if self.owner.must_save(node):
            self.owner.saved.add(same_value(node))
            return True
        return False

    def _emit(self, node: fx.Node) -> None:
        owner = self.owner
        if node in owner.needs_cotangent or not self._is_received(node) or node.op == "get_attr":
            self.env[node] = self.graph.node_copy(node, lambda n: self.env[n])
            return
        if node in owner.source:
            handover = owner.source[node]
        elif _is_size(node):
            value = node.meta["val"]
            handover = Handover(Source.SIZE, id(node), value)
        else:
            handover = Handover(Source.Y, owner.stack_index(node))
        self.env[node] = self._receive(handover, node)

    def _receive(self, handover: Handover, node: fx.Node) -> fx.Node:
        if handover not in self.handed:
            placeholder = self.graph.placeholder(node.name)
            placeholder.meta = dict(node.meta)
            self.handed[handover] = placeholder
            loop_invariant = handover.source in (Source.ADDITIONAL, Source.SIZE)
            (self.invariant if loop_invariant else self.per_step).append(handover)
        return self.handed[handover]

    def _order_placeholders(self) -> None:
        """Cotangents first, then per-step values, then invariant ones, all before the code."""
        graph = self.graph
        received = [self.handed[h] for h in [*self.per_step, *self.invariant]]
        fixed = [n for n in graph.find_nodes(op="placeholder") if n not in set(received)]
        for node in reversed([*fixed, *received]):
            first = next(iter(graph.nodes))
            if first is not node:
                first.prepend(node)

    def _carry_result(self, k: int) -> fx.Node:
        gradient = self.gradients.carry[k]
        if isinstance(gradient, fx.Node):
            return self.env[gradient]
        position = self.carry.index(k)
        cotangent = self.env[self.owner.joint.cotangents()[position]]
        zeros = self.graph.call_function(aten.zeros_like.default, (cotangent,))
        zeros.meta["val"] = cotangent.meta["val"]
        return zeros

    def _add(self, accumulator: fx.Node, gradient: fx.Node) -> fx.Node:
        term = self.env[gradient]
        value = gradient.meta["val"]
        if value.is_complex() and not value.is_contiguous():
            # Inductor adds complex numbers as rows of reals, which a transposed matrix has not got
            term = self.graph.call_function(
                aten.clone.default, (term,), {"memory_format": torch.contiguous_format}
            )
            term.meta["val"] = accumulator.meta["val"]
        node = self.graph.call_function(aten.add.Tensor, (accumulator, term))
        node.meta["val"] = accumulator.meta["val"]
        return node
