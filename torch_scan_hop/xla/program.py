"""Functions lowered to XLA computations once, and called as often as wanted.

A *loop* is a computation with one ``While``, assembled around the HLO of its body::

    body:   (some of: carry, x, additional, constants, seed) -> (carry', ys)
    loop:   (carry, then the others of these that the body reads, x and seeds stacked)
            -> (carry, stacked ys)

A *function* is what surrounds the loop as well: work that the rewrites moved out of it.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch import xla as _xla
from torch_scan_hop._torch.isolation import isolated
from torch_scan_hop.fallback import NotLoweredError
from torch_scan_hop.signature import Signature
from torch_scan_hop.xla._hlo import INVARIANT, SLICED, assemble_scan

#: Part of the key of XLA's compilation cache, so it never changes.
NAME = "torch_scan_hop"

#: A position among the flat inputs, a constant, or None for the random seed.
Argument = int | torch.Tensor | None

#: The shape and dtype of a tensor; anything else stands for itself.
Metadata = Any


def metadata_of(value: Any) -> Metadata:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _is_tensor(metadata: Metadata) -> bool:
    return isinstance(metadata, tuple)


@dataclass(frozen=True)
class Program:
    """A computation, and what it takes.

    ``seeds`` is the shape of its random seed: one for each step of a loop. ``draws`` is how
    often lowering advanced the random state: calls that reuse the program advance it as far, so
    that a seed gives the same numbers with a warm and with a cold cache.
    """

    computation: Any
    module: bytes
    arguments: tuple[Argument, ...]
    seeds: tuple[int, ...]
    draws: int

    def call(self, flat: Sequence[Any]) -> list[torch.Tensor]:
        """Return a pending node: nothing runs. Results are not wrapped for functionalization."""
        values = [
            flat[a] if isinstance(a, int) else draw_seeds(self.seeds) if a is None else a
            for a in self.arguments
        ]
        return _xla.call_computation("xla::scan", self.computation, values)


def draw_seeds(shape: tuple[int, ...]) -> torch.Tensor:
    return _xla.unwrapped(torch.randint(0, 2**62, shape, dtype=torch.int64, device="xla"))


def lower_function(fn: Callable[..., Sequence[Any]], inputs: Sequence[Metadata]) -> Program:
    """Lower ``fn`` to one computation."""
    hlo, draws = _hlo(fn, inputs)
    arguments = tuple(None if k == hlo.seed else a for k, a in enumerate(hlo.parameters))
    return Program(_xla.computation_from_hlo(NAME, hlo.module), hlo.module, arguments, (), draws)


def lower_loop(
    body: Callable[..., Sequence[Any]],
    signature: Signature,
    inputs: Sequence[Metadata],
    length: int,
    reverse: bool,
) -> Program:
    """Lower the scan of ``body`` over ``inputs`` (carry, xs and additional of the scan)."""
    sliced = range(signature.n_carry, signature.n_carry + signature.n_xs)
    of_step = [(m[0][1:], m[1]) if k in sliced else m for k, m in enumerate(inputs)]
    hlo, draws = _hlo(body, of_step)
    roles: list[int] = []
    arguments: list[Argument] = list(range(signature.n_carry))
    for k, source in enumerate(hlo.parameters):
        if isinstance(source, int) and source < signature.n_carry:
            roles.append(source)
            continue
        stacked = k == hlo.seed or (isinstance(source, int) and source in sliced)
        roles.append(SLICED if stacked else INVARIANT)
        arguments.append(None if k == hlo.seed else source)
    module = assemble_scan(hlo.module, signature.n_carry, length, reverse, roles, NAME)
    computation = _xla.computation_from_hlo(NAME, module)
    return Program(computation, module, tuple(arguments), (length,), draws)


def _hlo(fn: Callable[..., Sequence[Any]], inputs: Sequence[Metadata]) -> tuple[_xla.BodyHlo, int]:
    """Return the HLO of ``fn``, and how often that advanced the random state."""
    before = _xla.random_state()
    with isolated(), _xla.lowering_mode():
        _refuse_fallbacks(fn, inputs)
        hlo = _lowered(fn, inputs)
    return hlo, _draws_between(before, _xla.random_state())


def _refuse_fallbacks(fn: Callable[..., Sequence[Any]], inputs: Sequence[Metadata]) -> None:
    """Run ``fn`` lazily on zeros, so that an operator without a lowering reads those.

    It would read its inputs, and on placeholders that is a segfault.
    """
    before = _xla.executed_fallbacks()
    fn(*(torch.zeros(m[0], dtype=m[1], device="xla") if _is_tensor(m) else m for m in inputs))
    after = _xla.executed_fallbacks()
    names = sorted(name for name, count in after.items() if count != before.get(name, 0))
    if names:
        raise NotLoweredError(
            f"scan: combine_fn uses {', '.join(names)}, which torch_xla cannot lower to XLA. Move "
            "it out of combine_fn, or write it with other operators."
        )


def _lowered(fn: Callable[..., Sequence[Any]], inputs: Sequence[Metadata]) -> _xla.BodyHlo:
    """Lower, and let no tensor made here outlive this function: a placeholder has no data."""
    values = [_xla.placeholder(*m) if _is_tensor(m) else m for m in inputs]
    positions = [k for k, m in enumerate(inputs) if _is_tensor(m)]
    before = _xla.random_state()
    try:
        outputs = fn(*map(_xla.derived, values))
        is_random = _xla.random_state() != before
        outputs = [o.clone() for o in outputs]
        hlo = _xla.hlo_of(outputs, [values[k] for k in positions], is_random)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        values.clear()
        gc.collect()
        raise
    parameters = tuple(positions[p] if isinstance(p, int) else p for p in hlo.parameters)
    return _xla.BodyHlo(hlo.module, parameters, hlo.seed)


def _draws_between(before: int, after: int) -> int:
    """Count draws along torch_xla's seeds, which are a linear congruential sequence."""
    draws, state = 0, before
    while state != after:
        state = _xla.next_random_state(state)
        draws += 1
        assert draws < 1_000_000, "torch_xla's sequence of seeds is not the one we know"
    return draws
