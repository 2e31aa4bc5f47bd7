"""A scan of no steps, in a trace: it returns and leaves what a loop does, without a history."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.dynamo.variables import VariableTracker, create_node, example_value
from torch_scan_hop.signature import Inputs


def without_steps(
    tx: Any, given: Inputs[VariableTracker], outputs: list[VariableTracker], mutated: list[int]
) -> tuple[list[VariableTracker], list[int]]:
    """Return the ``outputs`` of a scan, and the positions of the inputs that its steps write to: of
    one that has no steps, copies of init, with the dtypes that steps would give it, and none."""
    steps = example_value(given.xs[0]).shape[0]
    if isinstance(steps, torch.SymInt) or steps != 0:  # a symbol is two or more
        return outputs, mutated
    pairs = zip(given.carry, outputs, strict=False)
    carry = [_copy(tx, first, example_value(after).dtype) for first, after in pairs]
    return [*carry, *outputs[len(carry) :]], []


def _copy(tx: Any, value: VariableTracker, dtype: torch.dtype) -> VariableTracker:
    return create_node(tx, "call_method", "to", (value.as_proxy(), dtype), {"copy": True})
