"""Gradients of what a step makes of a weight: through that once, after the scan.

A step that multiplies by ``softmax(w)`` has ``g_t``, a gradient of that, at each step, and adds
``softmax_backward(g_t, softmax(w))`` up. That is linear in ``g_t``, and else reads what all steps
share. So the steps add ``g_t`` up, and what is linear is done once, on the sum::

    sum_t f(g_t)  =  f(sum_t g_t)

Where ``g_t`` is a product, all steps' are one product (``rewrites/accumulate``), which ``f`` was in
the way of.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.impure import is_impure
from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop.autodiff.cut import reached_from
from torch_scan_hop.autodiff.joint import JointGraph
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_number_node, is_tensor_node
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.rewrites.accumulate import WIDE
from torch_scan_hop.rewrites.classify import ancestors, nbytes
from torch_scan_hop.rewrites.parts import Part, unique

aten = torch.ops.aten

_PLAIN = operators("linear") | {aten.neg.default}
_PRODUCTS = operators("product")
_SCALINGS = operators("scaling")
_SUMS = operators("sum")
_REARRANGING = operators("rearranging")
#: the position of the argument in which they are linear
_LINEAR_IN_ONE: dict[Any, int] = {
    **dict.fromkeys(operators("linear_in_first"), 0),
    aten.linalg_lu_solve.default: 2,
    aten.linalg_solve_triangular.default: 1,
}
_DONE_THERE = _PLAIN | _SCALINGS | {aten.add.Tensor, aten.sub.Tensor}

# A sum kept in the loop may be that much larger than the gradients that are made of it.
_MOST_GROWTH = 4


@dataclass(frozen=True)
class LinearSums:
    """Gradients that are computed after the scan of a backward, from sums that it makes.

    Attributes:
        terms: what the steps add up, in the joint graph.
        gradients: the additional inputs whose gradients ``after`` computes.
        reads: the additional inputs that it reads.
        after: ``(values that it reads, sums) -> gradients``.
    """

    terms: tuple[fx.Node, ...]
    gradients: tuple[int, ...]
    reads: tuple[int, ...]
    after: fx.GraphModule

    @functools.cached_property
    def like(self) -> list[tuple[Any, ...]]:
        """Return ``(shape, dtype, device)`` of each sum."""
        values = map(value_of, self.terms)
        return [(v.shape, v.dtype, v.device) for v in values]


def find_linear_sums(joint: JointGraph) -> LinearSums | None:
    roles = joint.signature.split_inputs(joint.primals())
    varying = reached_from(joint, [*roles.carry, *roles.xs, *joint.cotangents()], random=True)
    gradients = joint.signature.split_inputs(joint.gradients()).additional
    nodes = {k: node for k, node in enumerate(gradients) if isinstance(node, fx.Node)}
    walks = [_Walk(varying.__contains__).terms_of(node) for node in nodes.values()]
    terms = unique([term for found in walks for term in found])
    if not terms:
        return None
    # a gradient that is itself such a term is its sum
    found = {k: n for (k, n), own in zip(nodes.items(), walks, strict=True) if own or n in terms}
    part = Part(joint.module, [*roles.additional, *terms], [*found.values()], "AfterSums")
    reads = [k for k, node in enumerate(roles.additional) if node in part.inputs]
    return LinearSums(tuple(terms), tuple(found), tuple(reads), part.module)


class _Walk:
    """The way from a gradient down to the terms in which it is linear."""

    def __init__(self, is_varying: Callable[[fx.Node], bool]) -> None:
        self.is_varying = is_varying
        self.passed: set[fx.Node] = set()

    def terms_of(self, gradient: fx.Node) -> list[fx.Node]:
        """Return the terms; none if the gradient is better added up as it is."""
        terms = unique(self._terms(gradient))
        if not any(map(_is_work, self.passed)) or not self._are_at_hand(terms):
            return []
        kept = sum(nbytes(t) for t in terms if t.target not in _PRODUCTS)
        return terms if kept <= _MOST_GROWTH * nbytes(gradient) else []

    def _terms(self, node: fx.Node) -> list[fx.Node]:
        if node in self.passed:
            return []
        bases = self._bases(node)
        if node.target in _SUMS and bases:
            # what it sums is larger: it pays where that is never made
            below = [t for base in bases for t in _Walk(self.is_varying)._terms(base)]
            bases = bases if all(t.target in _PRODUCTS for t in below) else []
        if not bases:
            return [node]
        self.passed.add(node)
        return [term for base in bases for term in self._terms(base)]

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments in which ``node`` is linear, if it is, all others being known."""
        varying = [a for a in node.all_input_nodes if self.is_varying(a)]
        values = [value_of(n) for n in (node, *varying)]
        if not all(isinstance(v, torch.Tensor) for v in values):
            return []
        if {v.dtype for v in values} - {values[0].dtype} or values[0].dtype not in WIDE:
            return []
        return varying if _is_linear_in(node, varying) else []

    def _are_at_hand(self, terms: list[fx.Node]) -> bool:
        """Return True if what is linear reads nothing else than what additional inputs give."""
        for node in ancestors(self.passed, stop=set(terms)) - set(terms):
            if node.op == "placeholder":
                continue
            is_operator = isinstance(node.target, OpOverload) and not is_impure(node)
            if not (is_operator or node.target is operator.getitem) or is_number_node(node):
                return False
            if is_tensor_node(node) and not _is_static(node):
                return False
        return all(map(_is_static, terms))


def _is_linear_in(node: fx.Node, varying: list[fx.Node]) -> bool:
    target, tensors = node.target, node.all_input_nodes
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return varying == tensors and all(isinstance(a, fx.Node) for a in node.args)
    if target in _PLAIN or target in _SUMS or target in _REARRANGING:
        return varying == tensors
    if target in _SCALINGS or target in _PRODUCTS:
        if target in (aten.div.Tensor, aten.div.Scalar) and varying != [node.args[0]]:
            return False
        return len(varying) == 1 and node.args.count(varying[0]) == 1
    position = _LINEAR_IN_ONE.get(target)
    return position is not None and varying == [node.args[position]]


def _is_work(node: fx.Node) -> bool:
    """Return True for what ``rewrites/accumulate`` would not do after the loop."""
    return node.target not in _DONE_THERE and node.target not in _REARRANGING


def _is_static(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in value_of(node).shape)
