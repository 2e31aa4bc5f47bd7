"""Mends of Python numbers in a carry: their digits and their dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from .registry import mutant


def _dtypes_from_scalars(tx: Any, combine_fn: Any, init: Any, rest: Any, positions: Any) -> Any:
    """Rounds that start with the scalars themselves, as they were before the mend."""
    from torch_scan_hop._torch.dynamo.variables import ConstantVariable, sequence_items
    from torch_scan_hop.capture import number_dtypes

    init = list(init)
    for _ in positions:
        with number_dtypes.discard_graph_changes(tx):
            result = combine_fn.call_function(
                tx, number_dtypes.example_arguments(tx, init, *rest), {}
            )
            carry = sequence_items(tx, sequence_items(tx, result)[0])
            dtypes = {k: number_dtypes.example_value(carry[k]).dtype for k in positions}
        changed = [k for k in positions if number_dtypes.example_value(init[k]).dtype != dtypes[k]]
        if not changed:
            break
        for k in changed:
            init[k] = init[k].call_method(tx, "to", [ConstantVariable.create(dtypes[k])], {})
    return init


@mutant("g", "eager", "pointwise,numbers")
def returned_numbers_lose_digits() -> Iterator[object]:
    """A number that a body returns is a scalar of the default dtype before it gets the carry's."""
    from torch_scan_hop import tree

    real = tree.number_tensor

    def number_tensor(value: Any, device: Any, dtype: Any = None) -> Any:
        made = real(value, device)
        return made if dtype is None else made.to(dtype)

    with mock.patch.object(tree, "number_tensor", number_tensor):
        yield None


@mutant("g", "eager", "pointwise,numbers")
def numbers_have_widest_dtypes() -> Iterator[object]:
    """The dtype of a number in init is found from an int64 or float64 scalar, which promotes."""
    from torch_scan_hop.capture import variables

    with mock.patch.object(variables, "with_dtypes_of_step", _dtypes_from_scalars):
        yield None
