"""Python numbers in ``init``: the dtypes that a step gives them, found before it is captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_scan_hop._torch.dynamo.function_modes import function_modes_in_force
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    VariableTracker,
    call_inlined,
    discard_graph_changes,
    example_value,
    sequence_items,
)
from torch_scan_hop._torch.functorch_levels import is_wrapped
from torch_scan_hop.signature import Inputs


def _a_slice(xs: torch.Tensor) -> torch.Tensor:
    """An example of ``xs[t]`` that says nothing about the trip count, which may be zero."""
    example = xs.new_empty_strided(xs.shape[1:], xs.stride()[1:])
    return example + xs.sum() if xs.requires_grad else example


def _a_row_in_vmap(xs: torch.Tensor) -> torch.Tensor:
    """As :func:`_a_slice`, where torch makes no strided tensor of sizes that are symbols."""
    if isinstance(xs.shape[0], int) and xs.shape[0] == 0:
        return xs.sum(0, dtype=xs.dtype)
    return xs.select(0, 0).clone()


def _slice_of(xs: VariableTracker) -> Any:
    value = example_value(xs)
    symbolic = any(isinstance(size, torch.SymInt) for size in value.shape)
    return _a_row_in_vmap if symbolic and is_wrapped(value) else _a_slice


def example_arguments(tx: Any, inputs: Inputs[VariableTracker]) -> list[VariableTracker]:
    """What a step of a scan of ``inputs`` is called with."""
    carry = inputs.carry
    return [
        *(c if c.is_python_constant() else c.call_method(tx, "clone", [], {}) for c in carry),
        *(call_inlined(tx, _slice_of(x), x) for x in inputs.xs),
        *inputs.additional,
    ]


def with_dtypes_of_step(
    tx: Any, combine_fn: VariableTracker, inputs: Inputs[VariableTracker], positions: list[int]
) -> Inputs[VariableTracker]:
    """``inputs`` with the carries at ``positions`` in the dtypes that a step gives them.

    Those were Python numbers, and are scalars with all their digits here. A number has a kind and
    no dtype of its own: a step is told so by a number, where its operators take one, and by a
    scalar of the default dtype elsewhere. Further rounds see what these dtypes do to other numbers.
    """

    init = inputs.carry

    def dtypes_after(carry: list[VariableTracker]) -> dict[int, torch.dtype]:
        with discard_graph_changes(tx):
            step = example_arguments(tx, replace(inputs, carry=carry))
            with function_modes_in_force(tx):
                result = combine_fn.call_function(tx, step, {})
            found = sequence_items(tx, sequence_items(tx, result)[0])
            return {k: example_value(found[k]).dtype for k in positions}

    def in_dtypes(dtypes: dict[int, torch.dtype]) -> list[VariableTracker]:
        cast = list(init)
        for k, dtype in dtypes.items():
            if example_value(init[k]).dtype != dtype:
                constant = ConstantVariable.create(dtype)
                cast[k] = init[k].call_method(tx, "to", [constant], {})
        return cast

    numbers = list(init)
    for k in positions:
        numbers[k] = ConstantVariable.create(_NUMBER_OF_DTYPE[example_value(init[k]).dtype])
    try:
        dtypes = dtypes_after(numbers)
    except Exception:  # an operator or method that takes no number
        dtypes = {k: _default_dtype(example_value(init[k]).dtype) for k in positions}
    for _ in range(1 + len(positions)):
        with discard_graph_changes(tx):
            carry = in_dtypes(dtypes)
            after = dtypes_after(carry)
        if after == dtypes:
            break
        dtypes = after
    return replace(inputs, carry=in_dtypes(dtypes))


#: a number of the kind that a widest dtype stands for
_NUMBER_OF_DTYPE = {torch.bool: True, torch.int64: 1, torch.float64: 1.0, torch.complex128: 1j}


def _default_dtype(widest: torch.dtype) -> torch.dtype:
    return torch.full((), _NUMBER_OF_DTYPE[widest]).dtype
