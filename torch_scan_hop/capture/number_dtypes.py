"""Python numbers in ``init``: the dtypes that a step gives them, found before it is captured."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    VariableTracker,
    call_inlined,
    discard_graph_changes,
    example_value,
    sequence_items,
)


def _a_slice(xs: torch.Tensor) -> torch.Tensor:
    """An example of ``xs[t]`` that says nothing about the trip count, which may be zero."""
    example = xs.new_empty_strided(xs.shape[1:], xs.stride()[1:])
    return example + xs.sum() if xs.requires_grad else example


def example_arguments(
    tx: Any,
    init: list[VariableTracker],
    xs: list[VariableTracker],
    additional: list[VariableTracker],
) -> list[VariableTracker]:
    return [
        *(c if c.is_python_constant() else c.call_method(tx, "clone", [], {}) for c in init),
        *(call_inlined(tx, _a_slice, x) for x in xs),
        *additional,
    ]


def with_dtypes_of_step(
    tx: Any,
    combine_fn: VariableTracker,
    init: list[VariableTracker],
    rest: list[list[VariableTracker]],
    positions: list[int],
) -> list[VariableTracker]:
    """``init`` in the dtypes that a step gives the carries at ``positions``.

    Those were Python numbers, and are scalars with all their digits here. A number has a kind and
    no dtype of its own: a step is told so by a number, where its operators take one, and by a
    scalar of the default dtype elsewhere. Further rounds see what these dtypes do to other numbers.
    """

    def dtypes_after(carry: list[VariableTracker]) -> dict[int, torch.dtype]:
        with discard_graph_changes(tx):
            result = combine_fn.call_function(tx, example_arguments(tx, carry, *rest), {})
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
    return in_dtypes(dtypes)


#: a number of the kind that a widest dtype stands for
_NUMBER_OF_DTYPE = {torch.bool: True, torch.int64: 1, torch.float64: 1.0, torch.complex128: 1j}


def _default_dtype(widest: torch.dtype) -> torch.dtype:
    return torch.full((), _NUMBER_OF_DTYPE[widest]).dtype
