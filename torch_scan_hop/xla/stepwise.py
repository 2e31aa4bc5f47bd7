"""A scan step by step on an XLA device: for bodies that torch_xla cannot lower to HLO.

Operators without a lowering run on the CPU, as they do in a Python loop there: torch_xla executes
what is pending, and moves their inputs to the host and their results back, in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop._torch import xla as _xla
from torch_scan_hop.signature import Signature
from torch_scan_hop.step import order_of_steps


def run_stepwise(
    body: Callable[..., Sequence[Any]],
    signature: Signature,
    flat: Sequence[Any],
    length: int,
    reverse: bool,
) -> list[torch.Tensor]:
    """Run the scan on plain XLA tensors, as a lowered program does."""
    with _xla.above_the_kernel():
        inputs = signature.split_inputs([_xla.wrapped(v) for v in flat])
        carry = inputs.carry
        rows: list[Any] = [None] * length
        for t in order_of_steps(length, reverse):
            out = body(*carry, *(x[t] for x in inputs.xs), *inputs.additional)
            outputs = signature.split_outputs(out)
            carry = outputs.carry
            rows[t] = outputs.ys
        stacks = [torch.stack(column) for column in zip(*rows, strict=True)]
        # copies: a body may return what it takes
        return [_xla.unwrapped(r.clone()) for r in (*carry, *stacks)]
