"""A joint graph cut in two: the backward takes what the forward, or its caller, has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from legality import IllegalRewrite
from legality.structure import check_arity, check_same_kind, outputs_of, value_of
from torch_scan_hop._torch.impure import is_random
from torch_scan_hop.autodiff.handover import Partition, Source
from torch_scan_hop.autodiff.joint import JointGraph


def check_partition(where: str, joint: JointGraph, partition: Partition) -> None:
    signature, flow = joint.signature, joint.flow
    check_arity(
        f"{where}, forward",
        partition.forward,
        signature.n_inputs,
        signature.n_carry,
        len(joint.outputs()) + partition.n_residuals,
    )
    n_carry = sum(flow.carry) + partition.n_sums
    handed = [*partition.per_step, *partition.invariant]
    check_arity(
        f"{where}, backward",
        partition.backward,
        n_carry + sum(flow.ys) + len(handed),
        n_carry,
        n_carry + len(partition.x_gradients),
    )
    _check_draws(where, joint, partition)
    taken = partition.backward.graph.find_nodes(op="placeholder")[n_carry + sum(flow.ys) :]
    for node, handover in zip(taken, handed, strict=True):
        given = _given(joint, partition, handover)
        if given is not None:
            check_same_kind(f"{where}, backward", node, value_of(node), value_of(given), f"{given}")


def _given(joint: JointGraph, partition: Partition, handover: Any) -> fx.Node | None:
    """The node of the forward whose value is handed over."""
    roles = joint.signature.inputs_of(partition.forward)
    ys = outputs_of(partition.forward)[joint.signature.n_carry :]
    groups: dict[Source, Sequence[fx.Node]] = {
        Source.CARRY_IN: roles.carry,
        Source.X: roles.xs,
        Source.ADDITIONAL: roles.additional,
        Source.Y: ys,
    }
    return None if handover.source is Source.SIZE else groups[handover.source][handover.index]


def _check_draws(where: str, joint: JointGraph, partition: Partition) -> None:
    """A random value of the forward is never drawn again."""
    drawn = set(map(str, _draws(partition.forward)))
    for node in _draws(partition.backward):
        if str(node) in drawn:
            raise IllegalRewrite(
                f"{where}, backward: {node} ({node.target}): expected the value that the forward "
                "drew, got another draw"
            )


def _draws(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "call_function" and is_random(n)]
