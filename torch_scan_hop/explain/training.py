"""The two loops of reverse mode, and what the first keeps for the second."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def training_of(site: Site) -> Training:
    """Return how ``site`` is trained; raise NotCaptured where a loop would raise, too."""
    wanted = wants_gradients(site.operands.flat())
    try:
        with preserve_node_meta():  # of which the lines of nodes are
            found = derivative_of(site.body, site.operands, wanted, site.checkpoint, False)[0]
    except Exception as error:
        reason = reason_of(error)
        why = f"its derivative cannot be traced: {reason.why}"
        raise NotCaptured(Reason(why, reason.where, reason.advice)) from error
    return Training(site, found)


@dataclass(frozen=True)
class Training:
    """A scan and its derivative."""

    site: Site
    derivative: Derivative

    @property
    def stacks(self) -> list[fx.Node]:
        """What the forward returns of each step: ys, then what is kept."""
        return self.derivative.signature.outputs_of(self.derivative.first.forward).ys

    def forward_site(self) -> Site:
        """Return the scan that runs in the forward: it returns what is kept, too."""
        site = self.site
        residuals = map(self._kept_name, range(len(site.ys), len(self.stacks)))
        return replace(site, body=self.derivative.first.forward, ys=(*site.ys, *residuals))

    # --- the backward ---

    def backward_site(self) -> Site:
        """Return the scan that runs in the backward."""
        site, partition = self.site, self.derivative.first
        scan = BackwardScan(self.derivative.signature, partition, self.derivative.flow)
        n_carry = len(scan.carry) + partition.n_sums
        inputs, results = site.names.flat(), [*site.names.carry, *site.ys]
        gradients = [f"grad {inputs[k]}" for k in scan.gradients]
        if partition.linear:
            sums = [f"sum of {term.name}" for term in partition.linear.terms]
            gradients[n_carry - len(sums) : n_carry - len(sums)] = sums
        x_names = [f"grad {results[k]}" for k in scan.ys]
        x_names += map(self._name, partition.per_step)
        x_names = x_names or ["(step)"]
        fakes = [recorded(n) for n in scan.body.graph.find_nodes(op="placeholder")]
        n_xs = n_carry + len(x_names)
        stacks = [_stack(site, step) for step in fakes[n_carry:n_xs]]
        invariant = [*map(self._name, partition.invariant)]
        return Site(
            f"{site.name}, backward",
            scan.body,
            Inputs(fakes[:n_carry], stacks, fakes[n_xs:]),
            Inputs(gradients[:n_carry], x_names, invariant),
            tuple(gradients[n_carry:]),
            not site.reverse,
        )

    def _name(self, handover: Handover) -> str:
        if handover.source is Source.SIZE:
            return str(handover.size)
        k, names, ys = handover.index, self.site.names, self.site.ys
        inputs = {
            Source.CARRY_IN: names.carry,
            Source.X: names.xs,
            Source.ADDITIONAL: names.additional,
        }
        if handover.source in inputs:
            return inputs[handover.source][k]
        return ys[k] if k < len(ys) else self._kept_name(k)

    def _kept_name(self, k: int) -> str:
        node = self.stacks[k]
        if node.op != "placeholder":
            return f"saved {value_name(node)}"
        placeholders = self.derivative.first.forward.graph.find_nodes(op="placeholder")
        return f"saved {self.site.names.flat()[placeholders.index(node)]}"

    def shifted_bytes(self) -> int:
        """Return bytes per step of carries that the backward reads from a stack of later ones."""
        partition = self.derivative.first
        carries = self.derivative.signature.inputs_of(partition.forward).carry
        shifted = [k for k, (_, is_shifted) in partition.carry_stack.items() if is_shifted]
        return sum(nbytes_of(recorded(carries[k])) for k in shifted)

    def segment_bytes(self) -> int:
        """Return the bytes that scans in a step of the backward stack, for a segment run again."""
        found = 0
        for node, _ in scans_in(self.derivative.first.backward):
            n_carry = len(node.args[1])  # type: ignore[arg-type]
            found += sum(map(nbytes_of, recorded(node)[n_carry:]))
        return found

    # --- what is kept ---

    def memory(self) -> Memory:
        readers = _readers(self.derivative.first)
        residuals = [
            self._residual(slot, readers.get(slot, "the second derivative"))
            for slot in self.derivative.saved
            if slot.source is not Source.SIZE
        ]
        kept = sum(r.nbytes for r in residuals if r.kept)
        return Memory(tuple(residuals), kept, kept * self.site.n_steps)

    def _residual(self, slot: Handover, readers: str) -> Residual:
        roles = self.derivative.signature.inputs_of(self.derivative.first.forward)
        of_source, source = {
            Source.CARRY_IN: (roles.carry, "init"),
            Source.X: (roles.xs, "xs"),
            Source.ADDITIONAL: (roles.additional, "closed over"),
            Source.Y: (self.stacks, "returned as y"),
        }[slot.source]
        node = of_source[slot.index]
        kept = slot.source is Source.Y and slot.index >= len(self.site.ys)
        if kept:
            made = f"result of {operator_name(producer(node))}"
            source = "carry into the step" if node in roles.carry else made
        return Residual(
            name=self._name(slot).removeprefix("saved "),
            type=type_of(node),
            nbytes=nbytes_of(recorded(node)),
            kept=kept,
            per_step=slot.source in (Source.X, Source.Y),
            source=source,
            read_by=readers,
            line=line_of(node),
        )


def _stack(site: Site, step: Any) -> Any:
    """Return a fake of all steps' values, of which ``step`` is one."""
    shape = (site.trip_count, *step.shape)
    return fake_tensor(fake_mode_of([step]), shape, None, step.dtype, step.device)


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


def describe_policy(checkpoint: Any) -> str:
    """
    >>> describe_policy(len), describe_policy("full")
    ('len', "'full'")
    """
    return getattr(checkpoint, "__name__", None) or repr(checkpoint)
