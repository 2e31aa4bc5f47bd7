"""Accumulators: carries that are only ever added to.

A carry ``acc' = acc + g_t`` whose value no step reads is ``acc_0 + sum_t g_t``. Where ``g_t``
is a matrix product the sum over steps is one product with the steps in the contracted
dimension, so that no stack of weight-sized gradients is made::

    sum_t A_t @ B_t  =  [A_0 A_1 ...] @ [B_0; B_1; ...]

Transposes and reshapes around it are linear: they commute with the sum. So does a product with what
is the same at every step, as the derivative of what a body makes of a weight is::

    h' = sigmoid(w) * h:    sum_t sigmoid'(w) * g_t h_t  =  sigmoid'(w) * sum_t g_t h_t

So, but for rounding, does a cast to a wider type.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import addends, is_alike, is_tensor_node
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.signature import Outputs

aten = torch.ops.aten

# An addition costs eager mode one dispatch per step; summed after the loop, its terms are written
# to a stack and read again. Terms of more bytes than this make the stack the dearer of the two: on
# a CPU as measured, on a GPU by what a launch and a byte take, by its vendor's figures.
SMALL_TERM, SMALL_TERM_ON_GPU = 4096, 2**20

# `acc + g.sum(0)` may stack g and sum all of it after the loop. That is cheap where g is small
# beside what a step reads and writes anyway: at most a CHEAP_STACKS-th of those bytes.
CHEAP_STACKS = 4

SUMS = operators("sum")
_LINEAR, _PRODUCTS, _SCALINGS = operators("linear"), operators("product"), operators("scaling")

# Autocast's: the gradient of a weight in float32 is that of its copy in bfloat16. The terms of one
# product, or of one sum, are added in float32 whatever its type is, and rounded once, not in every
# step. (Of float16 the sum may overflow where each of its terms does not.)
_CASTS = operators("cast")

# A sum of narrower numbers may overflow where that of the scaled ones does not.
WIDE = {torch.float32, torch.float64, torch.complex64, torch.complex128}


@dataclass(frozen=True)
class Accumulator:
    """Carry ``index`` plus ``maps(sum_t term_t)``; ``leaves`` are stacked for it. ``maps`` are
    linear, the last one first; what else they read is the same at every step."""

    index: int
    term: fx.Node
    maps: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]

    @functools.cached_property
    def is_product(self) -> bool:
        return self.term.target in _PRODUCTS

    @functools.cached_property
    def _is_transposed(self) -> list[bool]:
        """Flags of a product's factors: is it the transpose of the leaf stacked for it?"""
        return [a is not leaf for a, leaf in zip(self.term.args, self.leaves, strict=True)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the term and the sum: torch sums small integers and bools as int64."""
        return value_of(self.term).dtype

    @property
    def most_bytes(self) -> int:
        """The most that a term has of which a stack is cheaper than additions."""
        return SMALL_TERM if value_of(self.term).device.type == "cpu" else SMALL_TERM_ON_GPU

    @property
    def operand(self) -> fx.Node:
        """The value that the term is a sum over dimensions of; the term itself if it is no sum."""
        if self.term.target in SUMS:
            return self.term.args[0]  # type: ignore[return-value]
        return self.term

    def _reduced(self, stack: torch.Tensor) -> torch.Tensor:
        """Return ``sum_t sum(v_t, dims)`` from the stack of ``v``."""
        rank = stack.dim() - 1
        named: Any = self.term.args[1] if len(self.term.args) > 1 else None
        named = [named] if isinstance(named, int) else named
        # to torch, no dimensions are all of them, and a scalar has one, too
        dims = [0, *(d % rank + 1 for d in (named if rank and named else range(rank)))]
        keepdim = len(self.term.args) > 2 and bool(self.term.args[2])
        total = torch.sum(stack, dims, keepdim, dtype=self.dtype)  # type: ignore[arg-type]
        return total.squeeze(0) if keepdim else total

    def total(self, stacks: Sequence[torch.Tensor], values: Mapping[fx.Node, Any]) -> torch.Tensor:
        """Return ``maps(sum_t term_t)`` from stacks of its leaves, and ``values`` that ``maps``
        read."""
        total, known, last = self._sum(stacks, values), dict(values), self.term
        for node in reversed(self.maps):
            known[last], last = total, node
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            total = node.target(*args, **kwargs)  # type: ignore[operator]
        return total

    def add_into(
        self, before: torch.Tensor, stacks: Sequence[torch.Tensor], values: Mapping[fx.Node, Any]
    ) -> torch.Tensor:
        """Add :meth:`total` to ``before`` in place; a product needs no memory for that."""
        if not self.is_product or not all(map(is_matrix_transpose, self.maps)):
            return before.add_(self.total(stacks, values))
        turned = before.t() if len(self.maps) % 2 else before
        add_product = turned.addmm_ if turned.dim() == 2 else turned.baddbmm_
        add_product(*self._factors(stacks))
        return before

    def _sum(self, stacks: Sequence[torch.Tensor], values: Mapping[fx.Node, Any]) -> torch.Tensor:
        """Return ``sum_t term_t``."""
        if self.is_product:
            left, right = self._factors(stacks)
            return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)
        if self.leaves[0] is not self.term:
            return self._reduced(stacks[0])
        return torch.sum(stacks[0], 0, dtype=self.dtype)

    def _factors(self, stacks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two factors whose one product is ``sum_t left_t @ right_t``.

        ``flatten``, since ``reshape`` cannot tell what -1 is where another size is zero.
        """
        left, right = [
            stack.transpose(1, 2) if flag else stack
            for stack, flag in zip(stacks, self._is_transposed, strict=True)
        ]
        if left.dim() == 3:  # [T, m, k] @ [T, k, n]
            return left.permute(1, 0, 2).flatten(1), right.flatten(0, 1)
        # [T, b, m, k] @ [T, b, k, n]
        return left.permute(1, 2, 0, 3).flatten(2), right.permute(1, 0, 2, 3).flatten(1, 2)


@dataclass(frozen=True)
class SumOfProducts(Accumulator):
    """Carry ``index`` plus the sums over steps of several products, as of a weight read twice."""

    parts: tuple[Accumulator, ...] = ()

    is_product = True  # type: ignore[assignment]

    def _sum(self, stacks: Sequence[torch.Tensor], values: Mapping[fx.Node, Any]) -> torch.Tensor:
        totals = (part.total(own, values) for part, own in self._of_parts(stacks))
        return functools.reduce(torch.add, totals)

    def add_into(
        self, before: torch.Tensor, stacks: Sequence[torch.Tensor], values: Mapping[fx.Node, Any]
    ) -> torch.Tensor:
        if not all(map(is_matrix_transpose, self.maps)):
            return before.add_(self.total(stacks, values))
        turned = before.t() if len(self.maps) % 2 else before
        for part, own in self._of_parts(stacks):
            part.add_into(turned, own, values)
        return before

    def _of_parts(
        self, stacks: Sequence[torch.Tensor]
    ) -> list[tuple[Accumulator, Sequence[torch.Tensor]]]:
        found: list[tuple[Accumulator, Sequence[torch.Tensor]]] = []
        rest = list(stacks)
        for part in self.parts:
            n = len(part.leaves)
            found.append((part, rest[:n]))
            rest = rest[n:]
        return found


def is_cheap_to_sum(
    accumulator: Accumulator, nbytes: Callable[[fx.Node], Any], step_bytes: Any
) -> bool:
    """Return True for a sum over dimensions of a value that is small beside a step's traffic."""
    operand = accumulator.operand
    return operand is not accumulator.term and bool(CHEAP_STACKS * nbytes(operand) <= step_bytes)


def read_stack_instead(accumulator: Accumulator, at_hand: set[fx.Node]) -> Accumulator:
    """Let it read the stack of what its term sums over dimensions, if there is one anyway."""
    if accumulator.operand is not accumulator.term and accumulator.operand in at_hand:
        return dataclasses.replace(accumulator, leaves=(accumulator.operand,))
    return accumulator


def is_matrix_transpose(node: Any) -> bool:
    target = getattr(node, "target", None)
    is_turned = target is aten.permute.default and tuple(node.args[1]) == (1, 0)
    return target is aten.t.default or is_turned


def _untransposed(node: Any) -> Any:
    """Return what to stack for a product's operand: its base, if it is a transposed matrix."""
    return node.args[0] if is_matrix_transpose(node) else node


def added_terms(before: Sequence[fx.Node], after: Outputs[Any]) -> dict[int, fx.Node]:
    """Return what a step adds to each carry that it does nothing else with."""
    results = after.flat()
    # a running sum that is returned as a y, too, must be known after every step
    pairs = zip(before, after.carry, strict=True)
    found = {k: _added_term(*pair) for k, pair in enumerate(pairs) if results.count(pair[1]) == 1}
    return {k: term for k, term in found.items() if term is not None}


def _added_term(carry_in: fx.Node, carry_out: Any) -> fx.Node | None:
    is_sum = isinstance(carry_out, fx.Node) and carry_out.target is aten.add.Tensor
    if not is_sum or carry_out.kwargs or [*carry_in.users] != [carry_out]:
        return None
    if len(carry_out.users) != 1:  # a running sum that is also read
        return None
    term = next((a for a in carry_out.args if a is not carry_in), None)
    return term if is_alike(term, carry_in) else None


def accumulator_of(index: int, term: fx.Node, is_known: Callable[[fx.Node], bool]) -> Accumulator:
    """Return the accumulator of ``term``, which is added to carry ``index``. A value that
    ``is_known`` is at hand after the loop, and the same for every step."""
    first, maps = term, list[fx.Node]()
    while (base := argument_of_linear(term, is_known)) is not None:
        maps.append(term)
        term = base
    parts = [accumulator_of(index, part, is_known) for part in addends(term)]
    if parts and all(part.is_product for part in parts):
        leaves = tuple(leaf for part in parts for leaf in part.leaves)
        return SumOfProducts(index, term, tuple(maps), leaves, tuple(parts))
    if any(n.target in _CASTS for n in maps) and term.target not in SUMS | _PRODUCTS:
        term, maps = first, []
    return Accumulator(index, term, tuple(maps), _leaves(term))


def argument_of_linear(node: fx.Node, is_known: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return the argument in which ``node`` is linear, all others being known; else None."""
    if node.target not in _SCALINGS | _LINEAR | _CASTS:
        return None
    varying = [n for n in node.all_input_nodes if not is_known(n)]
    if len(varying) != 1 or varying[0] not in node.args or not is_tensor_node(varying[0]):
        return None
    (base,) = varying
    if node.target in _CASTS and not _is_widened(base, node):
        return None
    if node.target in _SCALINGS:
        dtypes = {value_of(base).dtype, value_of(node).dtype}
        once = node.args.count(base) == 1
        if not (once and len(dtypes) == 1 and dtypes <= WIDE and not node.kwargs):
            return None
    if node.target is aten.div.Tensor and base is not node.args[0]:
        return None
    return base


def _is_widened(base: fx.Node, node: fx.Node) -> bool:
    """Return True if ``node`` casts from bfloat16 to a wider dtype and changes nothing else."""
    value, like = value_of(node), value_of(base)
    wide = like.dtype is torch.bfloat16 and value.dtype in (torch.float32, torch.float64)
    return wide and value.device == like.device


def _leaves(term: Any) -> tuple[fx.Node, ...]:
    if term.target is aten.mm.default:
        return tuple(map(_untransposed, term.args))
    return tuple(term.args) if term.target is aten.bmm.default else (term,)
