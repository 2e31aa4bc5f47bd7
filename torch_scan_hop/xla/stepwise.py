"""A scan step by step on an XLA device: for bodies that torch_xla cannot lower to HLO.

Operators without a lowering run on the CPU, as they do in a Python loop there: torch_xla executes
what is pending, and moves their inputs to the host and their results back, in every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop._torch import xla as _xla
from torch_scan_hop.capture.user_code import users_stack_level
from torch_scan_hop.fallback import fallback
from torch_scan_hop.signature import Signature


class NotLoweredError(NotImplementedError):
    """The body uses operators that torch_xla runs on the CPU."""


_said: set[str] = set()


def announce(error: NotLoweredError) -> None:
    """Say once that a scan is no loop of XLA's; raise where ``fallback("error")`` is in force."""
    if fallback.mode() == "error":
        raise error
    if fallback.mode() == "warn" and str(error) not in _said:
        _said.add(str(error))
        warnings.warn(
            f"torch_scan_hop: a scan on XLA runs step by step, and waits for each. {error}",
            stacklevel=users_stack_level(),
        )


def run_stepwise(
    body: Callable[..., Sequence[Any]],
    signature: Signature,
    flat: Sequence[Any],
    length: int,
    reverse: bool,
) -> list[torch.Tensor]:
    """Takes and returns plain XLA tensors, as a lowered program does."""
    with _xla.above_the_kernel():
        inputs = signature.split_inputs([_xla.wrapped(v) for v in flat])
        carry, rows = inputs.carry, []
        for t in reversed(range(length)) if reverse else range(length):
            out = body(*carry, *(x[t] for x in inputs.xs), *inputs.additional)
            outputs = signature.split_outputs(out)
            carry = outputs.carry
            rows.append(outputs.ys)
        if reverse:
            rows.reverse()
        stacks = [torch.stack(column) for column in zip(*rows, strict=True)]
        # copies: a body may return what it takes
        return [_xla.unwrapped(r.clone()) for r in (*carry, *stacks)]
