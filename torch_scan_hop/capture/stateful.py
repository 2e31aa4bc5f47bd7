"""A body whose steps leave something in objects, as a function that carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.places import Place, is_number
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    TupleVariable,
    VariableTracker,
    call_inlined,
    example_value_or_none,
    sequence_items,
)
from torch_scan_hop.capture.shared_state import SharedState, twins_among
from torch_scan_hop.step import split_result


class Stateful(VariableTracker):
    """``combine_fn`` as a function of ``(carry, state)``: its state at ``places`` is carried."""

    def __init__(self, combine_fn: VariableTracker, places: Sequence[Place], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.combine_fn = combine_fn
        self.places = tuple(places)
        #: of places that a step leaves with the tensor of an earlier one: that one
        self.twins: dict[int, int] = {}

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        both, x = args
        carry, state = sequence_items(tx, both)
        before = [place.read(tx) for place in self.places]
        now = sequence_items(tx, state)
        shared = SharedState(
            tx,
            parts_of(tx, carry),
            parts_of(tx, x),
            [
                (place, *pair)
                for place, *values in zip(self.places, before, now, strict=True)
                for pair in zip(*(parts_of(tx, value) for value in values), strict=True)
            ],
        )
        self._write(tx, now)
        result = self.combine_fn.call_function(tx, [carry, x], {})
        carry, y = sequence_items(tx, call_inlined(tx, split_result, result))
        left = [place.read(tx) for place in self.places]
        self.twins.update(twins_among(left))
        shared.check([*parts_of(tx, carry), *(p for value in left for p in parts_of(tx, value))])
        state = TupleVariable([_left_at(tx, place) for place in self.places])
        self._write(tx, before)
        return TupleVariable([TupleVariable([carry, state]), y])

    def _write(self, tx: Any, values: Sequence[VariableTracker]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place.write(tx, value)


def _left_at(tx: Any, place: Place) -> VariableTracker:
    """Return what a step leaves at ``place``: numbers as they are carried, in double."""

    def in_double(part: VariableTracker) -> VariableTracker:
        example = example_value_or_none(part)
        if not isinstance(example, torch.Tensor) or not example.is_floating_point():
            return part
        return part.call_method(tx, "to", [ConstantVariable.create(torch.float64)], {})

    return with_numbers(tx, place, place.read(tx), in_double)


def parts_of(tx: Any, value: VariableTracker) -> list[VariableTracker]:
    return sequence_items(tx, call_inlined(tx, tree.tensors, value))


def with_numbers(
    tx: Any,
    place: Place,
    value: VariableTracker,
    make: Callable[[VariableTracker], VariableTracker],
) -> VariableTracker:
    """Return ``value`` with ``make(part)`` for its parts, where there were numbers at ``place``."""
    olds = [] if place.before is None else parts_of(tx, place.before)
    parts = parts_of(tx, value)
    if len(olds) != len(parts) or not any(map(is_number, olds)):
        return value
    pairs = zip(olds, parts, strict=True)
    made = [make(part) if is_number(old) else part for old, part in pairs]
    return call_inlined(tx, tree.unflatten, value, TupleVariable(made))
