"""The two loops of reverse mode, and what the first keeps for the second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import preserve_node_meta

from torch_scan_hop._torch.fakes import fake_mode_of, fake_tensor
from torch_scan_hop.autodiff.derivative import BackwardScan, Derivative
from torch_scan_hop.autodiff.derive import derivative_of
from torch_scan_hop.autodiff.differentiability import wants_gradients
from torch_scan_hop.autodiff.handover import Handover, Source
from torch_scan_hop.autodiff.partition import Partition
from torch_scan_hop.body.node_kinds import operator_name
from torch_scan_hop.capture.reasons import Reason, reason_of
from torch_scan_hop.capture.replay import NotCaptured
from torch_scan_hop.explain.facts import Memory, Residual
from torch_scan_hop.explain.loops import line_of, producer, type_of, value_name
from torch_scan_hop.explain.sites import Site, nbytes_of, recorded
from torch_scan_hop.op import scans_in
from torch_scan_hop.signature import Inputs


def is_trained(site: Site) -> bool:
    return torch.is_grad_enabled() and any(wants_gradients(site.operands.flat()))


def derivative_at(site: Site) -> Derivative:
    """Return the derivative; raise NotCaptured if there is none, since a loop would raise, too."""
    wanted = wants_gradients(site.operands.flat())
    try:
        with preserve_node_meta():  # of which the lines of nodes are
            return derivative_of(site.body, site.operands, wanted, site.checkpoint, False)[0]
    except Exception as error:
        found = reason_of(error)
        why = f"its derivative cannot be traced: {found.why}"
        raise NotCaptured(Reason(why, found.where, found.advice)) from error


def forward_site(site: Site, derivative: Derivative) -> Site:
    """Return the scan that runs in the forward: it returns what is kept, too."""
    kept = range(len(site.ys), len(_stacks(derivative)))
    residuals = (_kept_name(site, derivative, k) for k in kept)
    return replace(site, body=derivative.first.forward, ys=(*site.ys, *residuals))


def _stacks(derivative: Derivative) -> list[fx.Node]:
    return derivative.signature.outputs_of(derivative.first.forward).ys


# --- the backward ---


def backward_site(site: Site, derivative: Derivative) -> Site:
    """Return the scan that runs in the backward."""
    partition = derivative.first
    scan = BackwardScan(derivative.signature, partition, derivative.flow)
    n_carry = len(scan.carry) + partition.n_sums
    inputs, results = site.names.flat(), [*site.names.carry, *site.ys]
    gradients = [f"grad {inputs[k]}" for k in scan.gradients]
    if partition.linear:
        sums = [f"sum of {term.name}" for term in partition.linear.terms]
        gradients[n_carry - len(sums) : n_carry - len(sums)] = sums
    x_names = [f"grad {results[k]}" for k in scan.ys]
    x_names += [_name(site, derivative, h) for h in partition.per_step]
    x_names = x_names or ["(step)"]
    fakes = [recorded(n) for n in scan.body.graph.find_nodes(op="placeholder")]
    n_xs = len(x_names)
    return Site(
        f"{site.name}, backward",
        scan.body,
        Inputs(
            fakes[:n_carry],
            [_stack(site, f) for f in fakes[n_carry : n_carry + n_xs]],
            fakes[n_carry + n_xs :],
        ),
        Inputs(
            gradients[:n_carry], x_names, [_name(site, derivative, h) for h in partition.invariant]
        ),
        tuple(gradients[n_carry:]),
        not site.reverse,
    )


def _stack(site: Site, step: Any) -> Any:
    """Return a fake of all steps' values, of which ``step`` is one."""
    shape = (site.trip_count, *step.shape)
    return fake_tensor(fake_mode_of([step]), shape, None, step.dtype, step.device)


def _name(site: Site, derivative: Derivative, handover: Handover) -> str:
    if handover.source is Source.SIZE:
        return str(handover.size)
    k, names = handover.index, site.names
    inputs = {Source.CARRY_IN: names.carry, Source.X: names.xs, Source.ADDITIONAL: names.additional}
    if handover.source in inputs:
        return inputs[handover.source][k]
    return site.ys[k] if k < len(site.ys) else _kept_name(site, derivative, k)


def _kept_name(site: Site, derivative: Derivative, k: int) -> str:
    node = _stacks(derivative)[k]
    if node.op != "placeholder":
        return f"saved {value_name(node)}"
    placeholders = derivative.first.forward.graph.find_nodes(op="placeholder")
    return f"saved {site.names.flat()[placeholders.index(node)]}"


def shifted_bytes(derivative: Derivative) -> int:
    """Return bytes per step of carries that the backward reads from a stack of later ones."""
    partition = derivative.first
    carries = derivative.signature.inputs_of(partition.forward).carry
    shifted = [k for k, (_, is_shifted) in partition.carry_stack.items() if is_shifted]
    return sum(nbytes_of(recorded(carries[k])) for k in shifted)


def nbytes_of_segment(derivative: Derivative) -> int:
    """Return the bytes that scans in a step of the backward stack, for a segment run again."""
    found = 0
    for node, _ in scans_in(derivative.first.backward):
        n_carry = len(node.args[1])  # type: ignore[arg-type]
        found += sum(map(nbytes_of, recorded(node)[n_carry:]))
    return found


# --- what is kept ---


def memory_of(site: Site, derivative: Derivative) -> Memory:
    readers = _readers(derivative.first)
    residuals = [
        _residual(site, derivative, slot, readers.get(slot, "the second derivative"))
        for slot in derivative.saved
        if slot.source is not Source.SIZE
    ]
    kept = sum(r.nbytes for r in residuals if r.kept)
    return Memory(tuple(residuals), kept, kept * site.n_steps)


def _readers(partition: Partition) -> dict[Handover, str]:
    """Return for each kept value the operators of the backward that read it."""
    placeholders = partition.backward.graph.find_nodes(op="placeholder")
    handovers = [*partition.per_step, *partition.invariant]
    found: dict[Handover, list[str]] = {}
    received = placeholders[len(placeholders) - len(handovers) :]
    for handover, node in zip(handovers, received, strict=True):
        for slot in partition.slots(handover):
            found.setdefault(slot, []).extend(operator_name(u) for u in node.users)
    return {slot: ", ".join(dict.fromkeys(names)) for slot, names in found.items()}


_THERE_ANYWAY = {
    Source.CARRY_IN: "init",
    Source.X: "xs",
    Source.ADDITIONAL: "closed over",
    Source.Y: "returned as y",
}


def _residual(site: Site, derivative: Derivative, slot: Handover, readers: str) -> Residual:
    roles = derivative.signature.inputs_of(derivative.first.forward)
    of_source = {
        Source.CARRY_IN: roles.carry,
        Source.X: roles.xs,
        Source.ADDITIONAL: roles.additional,
        Source.Y: _stacks(derivative),
    }
    node = of_source[slot.source][slot.index]
    kept = slot.source is Source.Y and slot.index >= len(site.ys)
    source = _THERE_ANYWAY[slot.source]
    if kept:
        is_carry = node in roles.carry
        source = "carry into the step" if is_carry else f"result of {operator_name(producer(node))}"
    return Residual(
        name=_name(site, derivative, slot).removeprefix("saved "),
        type=type_of(node),
        nbytes=nbytes_of(recorded(node)),
        kept=kept,
        per_step=slot.source in (Source.X, Source.Y),
        source=source,
        read_by=readers,
        line=line_of(node),
    )


def describe_policy(checkpoint: Any) -> str:
    """
    >>> describe_policy(len), describe_policy("full")
    ('len', "'full'")
    """
    return getattr(checkpoint, "__name__", None) or repr(checkpoint)
