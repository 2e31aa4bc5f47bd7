"""A body lowered to HLO, and the scan's computation assembled around it.

::

    body:   (some of: carry, x, additional, attributes, constants, seed) -> (carry', ys)
    scan:   (carry, then the others of these that the body reads, x and seed stacked) -> (carry, ys)
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch import xla as _xla
from torch_scan_hop._torch.tracing import isolated
from torch_scan_hop.signature import Signature
from torch_scan_hop.xla._hlo import INVARIANT, SLICED, assemble_scan
from torch_scan_hop.xla.graph import StepGraph

#: Part of the key of XLA's compilation cache, so it never changes.
NAME = "torch_scan_hop"

#: A position among the flat inputs, a constant, or None for the stacked random seeds.
Argument = int | torch.Tensor | None


@dataclass(frozen=True)
class ScanProgram:
    """A scan's computation, and what it takes after the carries.

    ``draws`` is how often lowering advanced the random state: calls that reuse the program
    advance it as far, so that a seed gives the same numbers with a warm and with a cold cache.
    """

    computation: Any
    module: bytes
    arguments: tuple[Argument, ...]
    draws: int

    def call(self, n_carry: int, flat: Sequence[Any], length: int) -> list[torch.Tensor]:
        values = [
            flat[a] if isinstance(a, int) else draw_seeds(length) if a is None else a
            for a in self.arguments
        ]
        return _xla.call_computation("xla::scan", self.computation, [*flat[:n_carry], *values])


def draw_seeds(length: int) -> torch.Tensor:
    """One random seed for each step: what the body draws differs from step to step."""
    return _xla.unwrapped(torch.randint(0, 2**62, (length,), dtype=torch.int64, device="xla"))


def lower_step(
    step: StepGraph, signature: Signature, flat: Sequence[Any], length: int, reverse: bool
) -> ScanProgram:
    """``flat``: carry, xs, additional and attributes of a call; only metadata is read."""
    shapes = [
        (v.shape[1:] if k in _sliced(signature) else v.shape, v.dtype)
        if isinstance(v, torch.Tensor)
        else v
        for k, v in enumerate(flat)
    ]
    state = _xla.random_state()
    with isolated(), _xla.lowering_mode():
        _refuse_fallbacks(step, shapes)
        hlo = _lowered(step, shapes)
    draws = _draws_between(state, _xla.random_state())
    roles, arguments = _roles(hlo, signature)
    module = assemble_scan(hlo.module, signature.n_carry, length, reverse, roles, NAME)
    computation = _xla.computation_from_hlo(NAME, module)
    return ScanProgram(computation, module, tuple(arguments), draws)


def _sliced(signature: Signature) -> range:
    return range(signature.n_carry, signature.n_carry + signature.n_xs)


def _refuse_fallbacks(step: StepGraph, shapes: Sequence[Any]) -> None:
    """Runs the body lazily on zeros: an operator without a lowering would read its inputs.

    On placeholders that would be a segfault.
    """
    before = _xla.executed_fallbacks()
    zeros = [
        torch.zeros(s[0], dtype=s[1], device="xla") if isinstance(s, tuple) else s for s in shapes
    ]
    step.module(*zeros)
    after = _xla.executed_fallbacks()
    names = sorted(name for name, count in after.items() if count != before.get(name, 0))
    if names:
        raise NotImplementedError(
            f"scan: combine_fn uses {', '.join(names)}, which torch_xla cannot lower to XLA. Move "
            "it out of combine_fn, or write it with other operators."
        )


def _lowered(step: StepGraph, shapes: Sequence[Any]) -> _xla.BodyHlo:
    """No tensor that is made here may outlive this function: a placeholder has no data."""
    placeholders = [_xla.placeholder(*s) if isinstance(s, tuple) else s for s in shapes]
    tensors = [p for p in placeholders if isinstance(p, torch.Tensor)]
    positions = [k for k, p in enumerate(placeholders) if isinstance(p, torch.Tensor)]
    try:
        # clones: mark_sharding, for one, replaces the tensor it is given
        outputs = step.module(*(p.clone() if isinstance(p, torch.Tensor) else p for p in placeholders))
        hlo = _xla.hlo_of([o.clone() for o in outputs], tensors)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        del placeholders, tensors
        gc.collect()
        raise
    return _xla.BodyHlo(
        hlo.module,
        tuple(positions[p] if isinstance(p, int) else p for p in hlo.parameters),
        hlo.seed,
    )


def _roles(hlo: _xla.BodyHlo, signature: Signature) -> tuple[list[int], list[Argument]]:
    """The role of each parameter of the body, and the scan's arguments after the carries."""
    roles: list[int] = []
    arguments: list[Argument] = []
    for k, source in enumerate(hlo.parameters):
        if k == hlo.seed:
            roles.append(SLICED)
            arguments.append(None)
        elif isinstance(source, int) and source < signature.n_carry:
            roles.append(source)
        else:
            roles.append(SLICED if isinstance(source, int) and source in _sliced(signature) else INVARIANT)
            arguments.append(source)
    return roles, arguments


def _draws_between(before: int, after: int) -> int:
    """torch_xla's seeds are a linear congruential sequence; draws are counted along it."""
    draws, state = 0, before
    while state != after:
        state = _xla.next_random_state(state)
        draws += 1
        assert draws < 1_000_000, "torch_xla's sequence of seeds is not the one we know"
    return draws
