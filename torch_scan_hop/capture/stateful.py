"""A body whose steps leave something in objects, as a function that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import (
    TupleVariable,
    VariableTracker,
    call_inlined,
    sequence_items,
)
from torch_scan_hop.step import split_result


class Stateful(VariableTracker):
    """``combine_fn`` as a function of ``(carry, state)``: its state at ``places`` is carried."""

    def __init__(self, combine_fn: VariableTracker, places: Sequence[Place], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.combine_fn = combine_fn
        self.places = tuple(places)

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        both, x = args
        carry, state = sequence_items(tx, both)
        before = [place.read(tx) for place in self.places]
        self._write(tx, sequence_items(tx, state))
        result = self.combine_fn.call_function(tx, [carry, x], {})
        carry, y = sequence_items(tx, call_inlined(tx, split_result, result))
        state = TupleVariable([place.read(tx) for place in self.places])
        self._write(tx, before)
        return TupleVariable([TupleVariable([carry, state]), y])

    def _write(self, tx: Any, values: Sequence[VariableTracker]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place.write(tx, value)
