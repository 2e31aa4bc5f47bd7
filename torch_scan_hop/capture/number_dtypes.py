"""Python numbers in ``init``: the dtypes that a step gives them, found before it is captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.dtensors import is_dtensor
from torch_scan_hop._torch.dynamo.attempts import changes_are_taken_back
from torch_scan_hop._torch.dynamo.function_modes import function_modes_in_force
from torch_scan_hop._torch.dynamo.made_numbers import is_made_number
from torch_scan_hop._torch.dynamo.number_functions import kinds_of_numbers_are_known
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    VariableTracker,
    call_inlined,
    discard_graph_changes,
    example_value,
    sequence_items,
)
from torch_scan_hop._torch.functorch_levels import is_wrapped
from torch_scan_hop._torch.symbols import SYMBOLS
from torch_scan_hop.capture.first_steps import FirstStepDiffers
from torch_scan_hop.capture.refusals import note_leaf
from torch_scan_hop.capture.told import in_a_body
from torch_scan_hop.capture.weak_numbers import mark_numbers, numbers_among
from torch_scan_hop.signature import Inputs

#: by position of a carry
Dtypes = dict[int, torch.dtype]


def _a_slice(xs: torch.Tensor) -> torch.Tensor:
    """An example of ``xs[t]`` that says nothing about the trip count, which may be zero."""
    example = xs.new_empty_strided(xs.shape[1:], xs.stride()[1:])
    return example + xs.sum() if xs.requires_grad else example


def _a_row_in_vmap(xs: torch.Tensor) -> torch.Tensor:
    """Do as :func:`_a_slice`, where torch makes no strided tensor of symbolic sizes."""
    if isinstance(xs.shape[0], int) and xs.shape[0] == 0:
        return xs.sum(0, dtype=xs.dtype)
    return xs.select(0, 0).clone()


def _slice_of(xs: VariableTracker) -> Any:
    value = example_value(xs)
    symbolic = any(isinstance(size, torch.SymInt) for size in value.shape)
    is_strange = is_dtensor(value) or (symbolic and is_wrapped(value))
    return _a_row_in_vmap if is_strange else _a_slice


def example_arguments(tx: Any, inputs: Inputs[VariableTracker]) -> list[VariableTracker]:
    """Return example arguments for one step of a scan of ``inputs``."""
    carry = inputs.carry
    return [
        *(c if c.is_python_constant() else c.call_method(tx, "clone", [], {}) for c in carry),
        *(call_inlined(tx, _slice_of(x), x) for x in inputs.xs),
        *inputs.additional,
    ]


def with_dtypes_of_step(
    tx: Any, combine_fn: VariableTracker, inputs: Inputs[VariableTracker], positions: list[int]
) -> tuple[Inputs[VariableTracker], list[int]]:
    """Return ``inputs`` with the carries at ``positions`` in the dtypes that a step gives them, and
    those of them that stay numbers.

    Those were Python numbers, and are scalars with all their digits here. A number has a kind and
    no dtype of its own: a step is given a scalar of the default dtype, with the mark of a number.
    What it makes of numbers alone has that mark, and is a number in the next one, too. Further
    rounds see what the dtypes found do to other numbers.
    """
    found = _Dtypes(tx, combine_fn, inputs, positions)
    widest = {k: example_value(inputs.carry[k]).dtype for k in positions}
    kinds = {k: _KIND_OF_DTYPE[widest[k]] for k in positions}
    try:
        settled = found.settle({k: torch.full((), kind(1)).dtype for k, kind in kinds.items()})
    except Exception as error:  # the step asks for a number, or multiplies matrices by what grows
        note_leaf(error, "a step takes no scalars for the numbers in init", grows=True)
        raise
    for k, dtype in settled.items():
        is_counted = kinds[k] is bool and dtype != torch.bool  # True + True is 2, of tensors True
        if is_counted or tree.kind_of(dtype) < tree.kind_of(widest[k]):
            raise FirstStepDiffers(
                f"leaf {k} of the carry is a {kinds[k].__name__} at first, and then {dtype}"
            )
    return replace(inputs, carry=found.carry_in(settled)), found.staying


class _Dtypes:
    """The dtypes that a step makes of carry leaves that are numbers: those at ``positions``."""

    def __init__(
        self,
        tx: Any,
        combine_fn: VariableTracker,
        inputs: Inputs[VariableTracker],
        positions: list[int],
    ) -> None:
        self.tx, self.combine_fn, self.inputs, self.positions = tx, combine_fn, inputs, positions
        #: those of them that stay numbers
        self.staying = positions

    def settle(self, dtypes: Dtypes) -> Dtypes:
        """Return the dtypes that steps keep."""
        for _ in range(2 + 2 * len(self.positions)):
            after, staying = self._after(dtypes)
            if after == dtypes and staying == self.staying:
                break
            dtypes, self.staying = after, staying
        return dtypes

    def _after(self, dtypes: Dtypes) -> tuple[Dtypes, list[int]]:
        """Return the dtypes that a step makes of these, and what stays a number."""
        tx = self.tx
        with discard_graph_changes(tx), changes_are_taken_back(tx):
            step = example_arguments(tx, replace(self.inputs, carry=self.carry_in(dtypes)))
            mark_numbers(step, [*numbers_among(self.inputs.carry), *self.staying])
            with function_modes_in_force(tx), kinds_of_numbers_are_known(), in_a_body():
                keep: Any = {"keep_numbers": ConstantVariable.create(True)}
                result = self.combine_fn.call_function(tx, step, keep)
            leaves = sequence_items(tx, sequence_items(tx, result)[0])
            staying = [k for k in self.staying if _is_number(leaves[k])]
            return {k: _dtype_of(leaves[k]) for k in self.positions}, staying

    def carry_in(self, dtypes: Dtypes) -> list[VariableTracker]:
        carry = list(self.inputs.carry)
        for k, dtype in dtypes.items():
            if dtype != example_value(carry[k]).dtype:
                constant = ConstantVariable.create(dtype)
                carry[k] = carry[k].call_method(self.tx, "to", [constant], {})
        return carry


def _is_constant(variable: VariableTracker) -> bool:
    return variable.is_python_constant() or isinstance(example_value(variable), SYMBOLS)


def _is_number(variable: VariableTracker) -> bool:
    return _is_constant(variable) or is_made_number(variable)


def _dtype_of(variable: VariableTracker) -> torch.dtype:
    """Return the dtype of what a step leaves; for a number, of a scalar that is made of it."""
    if _is_constant(variable):
        return torch.full((), variable.python_type()(1)).dtype
    dtype: torch.dtype = example_value(variable).dtype
    return dtype


_KIND_OF_DTYPE: dict[torch.dtype, type] = {
    torch.bool: bool,
    torch.int64: int,
    torch.float64: float,
    torch.complex128: complex,
}
