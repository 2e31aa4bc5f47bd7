"""Python numbers in ``init``: the dtypes that a step gives them, found before it is captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.dtensors import is_dtensor
from torch_scan_hop._torch.dynamo.attempts import changes_are_taken_back
from torch_scan_hop._torch.dynamo.errors import is_branch, is_of_arithmetic
from torch_scan_hop._torch.dynamo.function_modes import function_modes_in_force
from torch_scan_hop._torch.dynamo.left import StateAssigned
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

#: what an example of a step is given as numbers, in turn: it may divide by n - 1, or take its root
_EXAMPLES = (1, 0, 7, 0.4, -0.4, -7, 100)
#: by position of a carry; a kind of number where it is one
Dtypes = dict[int, torch.dtype | type]


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
    no dtype of its own: a step is told so by a number, where its operators take one, and by a
    scalar of the default dtype elsewhere. What a step makes of numbers alone is a number in the
    next one, too. Further rounds see what the dtypes found do to other numbers.
    """
    found = _Dtypes(tx, combine_fn, inputs, positions)
    of_numbers: Exception | None = None
    widest = {k: example_value(inputs.carry[k]).dtype for k in positions}
    kinds: Dtypes = {k: _KIND_OF_DTYPE[widest[k]] for k in positions}
    try:
        dtypes = found.settle_of_some_number(kinds)
        staying = [k for k in positions if isinstance(dtypes[k], type)]
    except Exception as error:  # an operator or method that takes no number
        if is_of_arithmetic(error):
            raise
        dtypes, staying = kinds, []
        of_numbers = error
    whole: Dtypes = {k: _as_dtype(dtypes[k]) for k in positions}
    found.staying = staying
    try:
        settled = found.settle(whole)
    except Exception as error:  # the step asks for a number, or multiplies matrices by what grows
        if isinstance(of_numbers, StateAssigned) and is_branch(error):
            raise of_numbers from error  # carried, what the step leaves is in the way no more
        note_leaf(error, "a step takes no scalars for the numbers in init", grows=True)
        raise
    # a step that returns a number itself: the scalar that it becomes
    last = {k: _as_dtype(settled[k]) for k in positions}
    for k, dtype in last.items():
        is_counted = kinds[k] is bool and dtype != torch.bool  # True + True is 2, of tensors True
        if is_counted or tree.kind_of(dtype) < tree.kind_of(widest[k]):
            number = kinds[k].__name__  # type: ignore[union-attr]
            raise FirstStepDiffers(
                f"leaf {k} of the carry is a {number} at first, and then {dtype}"
            )
    return replace(inputs, carry=found.carry_in({**last})), staying


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
        #: those of them that are known to stay numbers
        self.staying: list[int] = []
        self.example: float = 1

    def settle_of_some_number(self, kinds: Dtypes) -> Dtypes:
        """Return the dtypes that steps keep, found with numbers of which Python makes no error."""
        for self.example in _EXAMPLES[:-1]:
            try:
                return self.settle(kinds)
            except Exception as error:
                if not is_of_arithmetic(error):
                    raise
        self.example = _EXAMPLES[-1]
        return self.settle(kinds)

    def settle(self, dtypes: Dtypes) -> Dtypes:
        """Return the dtypes that steps keep."""
        for _ in range(2 + len(self.positions)):
            after = self._after(dtypes)
            if after == dtypes:
                break
            dtypes = after
        return dtypes

    def _after(self, dtypes: Dtypes) -> Dtypes:
        tx = self.tx
        with discard_graph_changes(tx), changes_are_taken_back(tx):
            step = example_arguments(tx, replace(self.inputs, carry=self.carry_in(dtypes)))
            mark_numbers(step, [*numbers_among(self.inputs.carry), *self.staying])
            with function_modes_in_force(tx), kinds_of_numbers_are_known(), in_a_body():
                keep: Any = {"keep_numbers": ConstantVariable.create(True)}
                result = self.combine_fn.call_function(tx, step, keep)
            leaves = sequence_items(tx, sequence_items(tx, result)[0])
            return {k: _after(leaves[k], dtypes[k]) for k in self.positions}

    def carry_in(self, dtypes: Dtypes) -> list[VariableTracker]:
        carry = list(self.inputs.carry)
        for k, dtype in dtypes.items():
            widest = example_value(carry[k]).dtype
            if isinstance(dtype, type):
                carry[k] = ConstantVariable.create(dtype(self.example))
            elif dtype != widest:
                constant = ConstantVariable.create(dtype)
                carry[k] = carry[k].call_method(self.tx, "to", [constant], {})
        return carry


def _after(variable: VariableTracker, before: torch.dtype | type) -> torch.dtype | type:
    """Return the dtype of what a step leaves; a kind for a number, and for what it makes of numbers
    that it reads if it was given one."""
    if variable.is_python_constant() or isinstance(example_value(variable), SYMBOLS):
        return variable.python_type()
    dtype: torch.dtype = example_value(variable).dtype
    if isinstance(before, type) and is_made_number(variable):
        return tree.NUMBERS[tree.kind_of(dtype)]
    return dtype


_KIND_OF_DTYPE: dict[torch.dtype, type] = {
    torch.bool: bool,
    torch.int64: int,
    torch.float64: float,
    torch.complex128: complex,
}


def _as_dtype(dtype: torch.dtype | type) -> torch.dtype:
    """Return the dtype of a scalar that is made of such a number."""
    return torch.full((), dtype(1)).dtype if isinstance(dtype, type) else dtype
