"""A scan whose steps are split over ranks: each rank has a stretch of consecutive steps.

If steps compose (see ``composed``), all ranks run at once: each rank composes its steps, the
composed maps are exchanged once, and each rank goes through its steps from the carry that the ranks
before it lead to. That is at most twice the work, on as many ranks. If they do not, the ranks take
turns, and the carry goes from one to the next. A carry that is only added to is summed by each rank
on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch.dtensors import Stretches
from torch_scan_hop.body.cache import remember_for
from torch_scan_hop.errors import Refusal
from torch_scan_hop.fallback import announce_in_turn
from torch_scan_hop.op import ScanOptions, call_scan
from torch_scan_hop.rewrites.accumulate import added_terms
from torch_scan_hop.sharding.composed import Composed, composed_steps
from torch_scan_hop.signature import Inputs, Signature


@dataclasses.dataclass(frozen=True)
class _Roles:
    """Carries that are only added to, the others, and how those compose, or why they do not."""

    sums: list[int]
    states: list[int]
    composed: Composed | str


def _roles(body: fx.GraphModule, signature: Signature) -> _Roles:
    sums = list(added_terms(signature.inputs_of(body).carry, signature.outputs_of(body)))
    states = [k for k in range(signature.n_carry) if k not in sums]
    try:
        composed: Composed | str = composed_steps(body, signature, states) if states else ""
    except Refusal as error:
        composed = str(error)
    return _Roles(sums, states, composed)


def scan_over_ranks(
    body: fx.GraphModule, inputs: Inputs[Any], options: ScanOptions, stretches: Stretches
) -> tuple[list[Any], list[int]]:
    """Return this rank's results, with the last carries, and the positions of summands: carries
    with one part on each rank. ``inputs``: this rank's xs, and what all ranks have."""
    signature = inputs.signature
    roles: _Roles = remember_for(body, "over ranks", inputs, (), lambda: _roles(body, signature))
    order = stretches.in_order(options.reverse)
    carry = list(inputs.carry)
    if stretches.rank != order[0]:
        for k in roles.sums:
            carry[k] = torch.zeros_like(carry[k])
    states = [carry[k] for k in roles.states]

    def run(states: Sequence[Any]) -> list[Any]:
        for k, state in zip(roles.states, states, strict=True):
            carry[k] = state
        return list(call_scan(body, Inputs(carry, inputs.xs, inputs.additional), options))

    if not states:
        return run([]), roles.sums
    if isinstance(roles.composed, Composed):
        composed = roles.composed.over(inputs.xs, inputs.additional, options)
        of_ranks = exchanged(composed, stretches)
        for rank in order:
            if rank == stretches.rank:
                mine = states
            states = roles.composed.applied(of_ranks[rank], states)
        results = run(mine)
    else:
        announce_in_turn(roles.composed)
        for rank in order:
            if rank == stretches.rank:
                results = run(states)
                states = [results[k] for k in roles.states]
            states = exchanged(states, stretches)[rank]
    for k, state in zip(roles.states, states, strict=True):
        results[k] = state
    return results, roles.sums


def exchanged(values: Sequence[Tensor], stretches: Stretches) -> list[list[Tensor]]:
    """Exchange the ``values`` of all ranks, once for each dtype among them."""
    found: list[list[Any]] = [[None] * len(values) for _ in range(stretches.count)]
    for dtype in dict.fromkeys(v.dtype for v in values):
        places = [k for k, v in enumerate(values) if v.dtype == dtype]
        rows = stretches.gathered(torch.cat([values[k].flatten() for k in places]))
        for rank, row in enumerate(rows.unbind(0)):
            parts = row.split([values[k].numel() for k in places])
            for k, part in zip(places, parts, strict=True):
                found[rank][k] = part.view(values[k].shape)
    return found
