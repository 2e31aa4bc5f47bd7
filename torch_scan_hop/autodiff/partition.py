"""Split a joint graph in a forward and a backward body, along what crosses between them (``cut``).

The forward body is the step with *residuals* as further ys. The backward scans in the other
direction::

    carry:      cotangents of the differentiated carries, then one accumulator for each
                differentiated additional input, or for what several of their gradients are
                linear in (``linear_sums``)
    xs:         cotangents of the differentiated ys, then the handed-over values
    additional: the additional inputs it reads, then sizes
    ys:         gradients of the differentiated xs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.tracing import as_traced
from torch_scan_hop.autodiff.cut import Cut, decide
from torch_scan_hop.autodiff.derivative import as_backward
from torch_scan_hop.autodiff.handover import Handover, Partition
from torch_scan_hop.autodiff.joint import JointGraph
from torch_scan_hop.autodiff.linear_sums import LinearSums, find_linear_sums
from torch_scan_hop.autodiff.policy import Policy
from torch_scan_hop.body.cleanup import trim_scans
from torch_scan_hop.body.meta_values import call_recorded, placeholder, value_of
from torch_scan_hop.body.step_examples import contiguous_like
from torch_scan_hop.rewrites.parts import extract

aten = torch.ops.aten


def partition_of(
    joint: JointGraph, policy: Policy, saved: frozenset[int] | None = None
) -> Partition:
    """Cut ``joint``; with ``saved``, the backward reads only those of the forward's ys."""
    cut = decide(joint, policy, saved)
    results = [*joint.outputs(), *cut.residuals]
    forward = extract(joint.module, joint.primals(), results, "ScanForward", impure=cut.impure)
    trim_scans(forward)
    builder = _BackwardBuilder(joint, cut, find_linear_sums(joint))
    backward = builder.build()
    partition = Partition(
        forward=as_traced(forward),
        backward=backward,
        n_residuals=len(cut.residuals),
        per_step=tuple(cut.per_step),
        invariant=tuple(cut.invariant),
        carry_stack=cut.carry_stack,
        accumulated=builder.accumulated,
        x_gradients=builder.x_gradients,
        cut_off=builder.cut_off,
        linear=builder.linear,
    )
    legality.check("partition", "partition", joint, partition)
    return partition


class _BackwardBuilder:
    def __init__(self, joint: JointGraph, cut: Cut, linear: LinearSums | None) -> None:
        self.joint = joint
        self.cut = cut
        self.linear = linear
        self.gradients = joint.signature.split_inputs(joint.gradients())
        self.carry = tuple(k for k, flag in enumerate(joint.flow.carry) if flag)
        after = linear.gradients if linear else ()
        accumulated = _positions_of_nodes(self.gradients.additional)
        self.accumulated = tuple(k for k in accumulated if k not in after)
        self.x_gradients = _positions_of_nodes(self.gradients.xs)
        pairs = enumerate(zip(joint.flow.inputs(), joint.gradients(), strict=True))
        self.cut_off = frozenset(k for k, (flag, g) in pairs if flag and not isinstance(g, fx.Node))
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.handed: dict[Handover, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        joint, graph = self.joint, self.graph
        cotangents = joint.cotangents()
        n = len(self.carry)
        for node in cotangents[:n]:
            self.env[node] = graph.node_copy(node)
        terms = [self.gradients.additional[k] for k in self.accumulated]
        terms += self.linear.terms if self.linear else ()
        names = [f"accumulator_{k}" for k in self.accumulated]
        names += [f"sum_of_{term.name}" for term in terms[len(names) :]]
        accumulators = list(map(self._accumulator, names, terms))
        for node in cotangents[n:]:
            self.env[node] = graph.node_copy(node)
        for node in joint.module.graph.nodes:
            if node in self.cut.received:
                self.env[node] = self._receive(self.cut.received[node], node)
            elif node in self.cut.needed and node not in self.env:
                self.env[node] = graph.node_copy(node, lambda n: self.env[n])
        carry = [self._carry_result(k) for k in self.carry]
        sums = list(map(self._add, accumulators, terms))
        ys = [self.env[self.gradients.xs[k]] for k in self.x_gradients]
        graph.output((*carry, *sums, *ys))
        self._order_placeholders()
        if self.linear:
            erase_unread(graph)
        graph.lint()
        module = fx.GraphModule(joint.module, graph, "ScanBackward")
        trim_scans(module)
        return as_backward(as_traced(module))

    def _accumulator(self, name: str, term: fx.Node) -> fx.Node:
        value = value_of(term)
        # the accumulator is a carry of the backward, and carries are contiguous: the strides of
        # the tensor whose gradient it sums do not count
        like = contiguous_like(value.fake_mode, value)
        return placeholder(self.graph, name, like)

    def _receive(self, handover: Handover, node: fx.Node) -> fx.Node:
        if handover not in self.handed:
            placeholder = self.graph.placeholder(node.name)
            placeholder.meta = dict(node.meta)
            self.handed[handover] = placeholder
        return self.handed[handover]

    def _order_placeholders(self) -> None:
        """Put placeholders before the code: cotangents, per-step values, invariant ones."""
        graph = self.graph
        received = [self.handed[h] for h in [*self.cut.per_step, *self.cut.invariant]]
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
        cotangent = self.env[self.joint.cotangents()[position]]
        return call_recorded(aten.zeros_like.default, cotangent)

    def _add(self, accumulator: fx.Node, gradient: fx.Node) -> fx.Node:
        term = self.env[gradient]
        value = value_of(gradient)
        if value.is_complex() and not value.is_contiguous():
            # Inductor adds complex numbers as a view of reals whose last dimension has stride 1,
            # and a transposed matrix has no such view
            term = call_recorded(aten.clone.default, term, memory_format=torch.contiguous_format)
        node = self.graph.call_function(aten.add.Tensor, (accumulator, term))
        node.meta["val"] = value_of(accumulator)
        return node


def _positions_of_nodes(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(k for k, value in enumerate(values) if isinstance(value, fx.Node))
