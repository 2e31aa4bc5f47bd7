"""What leaves the loop gives the same there.

::

    before the loop, once         reads no carry and no x
    before the loop, batched      reads no carry; by operators whose batching is known to be right
    after the loop, batched       reads what the loop returns; by such operators
    nowhere but in the loop       random draws, effects and operators with bodies, in their order
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from legality import IllegalRewrite
from legality.structure import (
    check_arity,
    check_same_kind,
    may_be_same,
    outputs_of,
    strides_agree,
    value_of,
)
from torch_scan_hop._torch.impure import is_random
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.rewrites.batchable import is_batchable
from torch_scan_hop.rewrites.classify import ancestors, is_pinned
from torch_scan_hop.rewrites.plan import Decisions, ScanPlan
from torch_scan_hop.signature import Inputs, Signature


def check_decisions(
    where: str, body: fx.GraphModule, signature: Signature, decisions: Decisions
) -> None:
    """Before anything is cut out of ``body``."""
    d = decisions
    roles = signature.inputs_of(body)
    constants = [roles.carry[k] for k in d.constant_carry]
    fixed = [*roles.additional, *constants]
    known = [*fixed, *d.invariants]
    _check_moved(where, "before the loop", d.invariants, fixed, ())
    _check_moved(where, "before the loop", d.batched, [*roles.xs, *known], roles.xs)
    stacks = [*roles.xs, *d.batched, *d.stacked]
    _check_moved(where, "after the loop", d.sunk, [*stacks, *known], stacks)
    outputs = signature.split_outputs(outputs_of(body))
    for k, y in enumerate(outputs.ys):
        if d.used_outputs[signature.n_carry + k]:
            _check_is_made(where, y, {*stacks, *d.sunk, *known})
    for a in d.accumulators:
        _check_accumulator(where, a, roles.carry[a.index], {*stacks, *d.sunk})
    for k in d.constant_carry:
        if outputs.carry[k] is not roles.carry[k]:
            raise IllegalRewrite(f"{where}: {roles.carry[k]}: expected a carry that never changes")


def _check_moved(
    where: str,
    place: str,
    moved: Sequence[fx.Node],
    inputs: Collection[fx.Node],
    stacks: Collection[fx.Node],
) -> None:
    """Everything that ``moved`` is computed from and that is not among ``inputs`` moves, too."""
    at_hand = set(inputs) - set(moved)
    going = ancestors(list(moved), stop=at_hand) - at_hand
    varying = set(stacks)
    for node in sorted(going):
        if node.op == "placeholder":
            raise IllegalRewrite(f"{where}: {node} is not known {place}, where it is read")
        if is_pinned(node):
            kind = "a random draw" if is_random(node) else "an effect, or has a body"
            raise IllegalRewrite(
                f"{where}: {node} ({node.target}) moved {place}: expected it to stay in the loop, "
                f"for it is {kind}"
            )
        if varying.isdisjoint(node.all_input_nodes):
            continue
        varying.add(node)
        if not is_batchable(node):
            raise IllegalRewrite(
                f"{where}: {node} ({node.target}) moved {place}: expected an operator whose "
                "batching is known to be right (rewrites/batchable.py)"
            )


def _check_is_made(where: str, node: Any, made: Collection[Any]) -> None:
    if node not in made:
        raise IllegalRewrite(f"{where}: {node}: expected to be made before, in or after the loop")


def _check_accumulator(where: str, accumulator: Any, carry: fx.Node, made: Any) -> None:
    if len(carry.users) != 1:
        readers = ", ".join(n.name for n in carry.users)
        raise IllegalRewrite(f"{where}: {carry}: expected a sum that no step reads, got {readers}")
    for leaf in accumulator.leaves:
        _check_is_made(where, leaf, made)


def check_plan(where: str, plan: ScanPlan) -> None:
    """The loop's body takes what is made for it, and gives what is read of it."""
    d = plan.decisions
    loop_xs = plan.loop_xs or plan.roles.xs[:1]
    n_inputs = len(d.loop_carry) + len(loop_xs) + len(plan.loop_additional)
    check_arity(where, plan.body, n_inputs, len(d.loop_carry), len(d.loop_carry) + len(d.stacked))
    given = [*(plan.roles.carry[k] for k in d.loop_carry), *loop_xs, *plan.loop_additional]
    _check_handed(where, plan.body, given)
    for part in (plan.invariant_part, plan.batched_part, plan.sunk_part):
        _check_handed(where, part.module, part.inputs)
        check_arity(where, part.module, len(part.inputs), 0, len(part.outputs))
    pinned = [n.target for n in plan.body.graph.nodes if is_pinned(n)]
    original = iter(n.target for n in plan.roles.xs[0].graph.nodes if is_pinned(n))
    for target in pinned:
        if target not in original:  # that reads it up to there
            raise IllegalRewrite(f"{where}: {target} changed its place among draws and effects")


def _check_handed(where: str, module: fx.GraphModule, given: Sequence[fx.Node]) -> None:
    for placeholder, node in zip(module.graph.find_nodes(op="placeholder"), given, strict=True):
        check_same_kind(where, placeholder, value_of(placeholder), value_of(node), f"{node}")


def check_operands(
    where: str, body: fx.GraphModule, operands: Inputs[Any], strides: bool = False
) -> None:
    """What a loop is given is like its body's examples; of xs without their leading dimension."""
    roles = operands.signature.inputs_of(body)
    for group, values, drop in (
        (roles.carry, operands.carry, 0),
        (roles.xs, operands.xs, 1),
        (roles.additional, operands.additional, 0),
    ):
        for node, value in zip(group, values, strict=True):
            if isinstance(value, torch.Tensor) and is_tensor_node(node) and node.users:
                _check_like(where, node, value, drop)
                if strides:
                    check_strides(where, node, value, drop, group is roles.carry)


def _check_like(where: str, node: fx.Node, value: torch.Tensor, drop: int) -> None:
    example = node.meta["val"]
    shape = tuple(value.shape)[drop:]
    if value.dtype != example.dtype or not may_be_same(shape, example.shape):
        raise IllegalRewrite(
            f"{where}: {node}: expected {example.dtype}{list(example.shape)} as its example, got "
            f"{value.dtype}{list(shape)}"
        )


def check_strides(
    where: str, node: fx.Node, value: torch.Tensor, drop: int, contiguous: bool
) -> None:
    """A loop makes its carries contiguous; others have the strides of what they are."""
    example = node.meta["val"]
    wanted = (
        torch.empty(example.shape, device="meta").stride()
        if contiguous
        else tuple(value.stride())[drop:]
    )
    if not strides_agree(example.stride(), wanted, example.shape):
        raise IllegalRewrite(
            f"{where}: {node}: expected an example with the strides of what runs, "
            f"{list(wanted)}, got {list(example.stride())}"
        )


def check_stacks(where: str, stacks: dict[fx.Node, Any], trip_count: Any) -> None:
    """A stack has a row like its node's value for each step."""
    for node, stack in stacks.items():
        row = value_of(node)
        if not isinstance(row, torch.Tensor):
            continue
        if stack.dtype != row.dtype or not may_be_same(stack.shape, (trip_count, *row.shape)):
            raise IllegalRewrite(
                f"{where}: {node}: expected a stack of {trip_count} rows like "
                f"{row.dtype}{list(row.shape)}, got {stack.dtype}{list(stack.shape)}"
            )
