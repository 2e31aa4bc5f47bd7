"""Find the leaves that gradients flow through, by a fixpoint over the carries.

A carry is differentiated if its init needs a gradient, or if anything that reaches it in some step
does (as in every RNN whose initial state is zeros). That takes at most ``1 + n_carry`` rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop._torch.operators import past_module_hooks
from torch_scan_hop._torch.replaced import ambient, replaced
from torch_scan_hop._torch.tracing import run_fake
from torch_scan_hop.autodiff.differentiable import with_differentiable_operators
from torch_scan_hop.body.cache import autocast_state, metadata, remember
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Inputs


def carry_fixpoint(
    start: Sequence[bool], one_round: Callable[[tuple[bool, ...]], Sequence[bool]]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return the least set of carries that contains ``start`` and is closed under a step; and which
    results a step marks then.

    ``one_round(flags)`` says which results, carries first, a step marks when ``flags`` are marked
    before it.

    >>> carry_fixpoint([True, False], lambda flags: [False, flags[0], flags[1]])
    ((True, True), (False, True, True))
    """
    flags = tuple(start)
    while True:
        marked = tuple(one_round(flags))
        grown = tuple(a or b for a, b in zip(flags, marked, strict=False))
        if grown == flags:
            return flags, marked
        flags = grown


def needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def wants_gradients(values: Sequence[Any]) -> tuple[bool, ...]:
    return tuple([isinstance(v, torch.Tensor) and v.requires_grad for v in values])


@dataclass(frozen=True)
class GradientFlow:
    """A flag for each leaf of each role: is it differentiated?"""

    carry: tuple[bool, ...]
    xs: tuple[bool, ...]
    additional: tuple[bool, ...]
    ys: tuple[bool, ...]
    #: the carry after one step or more: no longer what was made under ``no_grad`` of such an init
    carry_after: tuple[bool, ...]

    def inputs(self) -> tuple[bool, ...]:
        return self.carry + self.xs + self.additional

    def outputs(self, has_steps: bool = False) -> tuple[bool, ...]:
        """Return which results are differentiated; ``has_steps``: not those of steps that cut off
        what ``init`` was made of."""
        return (self.carry_after if has_steps else self.carry) + self.ys


def _require(value: Any, flag: bool) -> Any:
    return value.detach().requires_grad_() if flag else value


_state = ambient(asks_for_flags_only=False)


def asks_for_flags_only() -> bool:
    """Return True if all that is asked of a run is which of its results require gradients."""
    return _state.asks_for_flags_only  # type: ignore[no-any-return]


def gradient_flow(
    body: Body, examples: Inputs[Any], wanted: Inputs[bool], mode: FakeTensorMode
) -> GradientFlow:
    """Return how gradients flow through ``body`` if they are ``wanted`` for these inputs. This is
    kept, because each run of a body that holds scans asks for theirs."""
    key = (
        "gradient flow",
        tuple(map(metadata, examples.flat())),
        tuple(wanted.flat()),
        len(examples.carry),
        autocast_state(),
    )
    return remember(body, key, lambda: _gradient_flow(body, examples, wanted, mode))


def _gradient_flow(
    body: Body, examples: Inputs[Any], wanted: Inputs[bool], mode: FakeTensorMode
) -> GradientFlow:
    step = past_module_hooks(with_differentiable_operators(body))

    def outputs(carry_flags: Sequence[bool]) -> list[bool]:
        flags = [*carry_flags, *wanted.xs, *wanted.additional]

        def run(*flat: Any) -> Any:
            with torch.enable_grad():
                return step(*(_require(v, f) for v, f in zip(flat, flags, strict=True)))

        with replaced(_state, asks_for_flags_only=True):
            return [needs_grad(out) for out in run_fake(run, examples.flat(), mode)]

    carry, after = carry_fixpoint(wanted.carry, outputs)
    ys, carry_after = after[len(carry) :], after[: len(carry)]
    return GradientFlow(carry, tuple(wanted.xs), tuple(wanted.additional), ys, carry_after)
