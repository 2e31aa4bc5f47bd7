"""Dynamo's capture of a scan whose steps leave something in objects: it is carried, or stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.left import ARRAY, NUMBER, TENSOR, GrowingList
from torch_scan_hop._torch.dynamo.objects import opened
from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    TupleVariable,
    VariableTracker,
    call_inlined,
    sequence_items,
)
from torch_scan_hop._torch.sizes import is_exporting
from torch_scan_hop.capture.appending import append_row, let_last_be, own_rows, rows_in_order
from torch_scan_hop.capture.parts import count_after
from torch_scan_hop.capture.stateful import (
    Stateful,
    exact_numbers,
    leave,
    number_after,
    parts_left,
    parts_of,
)
from torch_scan_hop.capture.told import at_hand
from torch_scan_hop.capture.twins import leave_as_one
from torch_scan_hop.schedule.strategies import Schedule

#: of so many steps, each row that is appended is traced: some 2 ms, and 10 or more of a number
_MOST_ROWS, _MOST_ROWS_OF_NUMBERS = 1024, 256


class CostlyCapture(Unsupported):
    """A loop is faster than what would be captured."""


def scan_with_state(
    capture: Any, places: Sequence[Place], lists: Sequence[GrowingList]
) -> VariableTracker:
    """Run the scan with what steps leave at ``places`` as further carries, and what they append to
    ``lists`` as further ys."""
    tx, (xs, trip_count, schedule) = capture.tx, capture.over
    for growing in lists:
        growing.check_inputs(capture.init, xs)
    # before: carry          after: (carry, what is at the places)
    state: VariableTracker = TupleVariable([_start_at(capture, place) for place in places])
    template = capture.template
    if not (template.is_python_constant() and template.as_python_constant() is None):
        template = TupleVariable([template, state])
    carry: VariableTracker = TupleVariable([capture.carry, state])
    step = Stateful(capture.combine_fn, places, lists)
    carry, ys = sequence_items(tx, capture.run_scan(step, template, carry))
    if at_hand.loop_may_run:
        _refuse_costly_captures(tx, step, trip_count if capture.appended is None else None)
    carry, state = sequence_items(tx, carry)
    _leave_state(capture, step, carry, sequence_items(tx, state))
    ys, stacked = sequence_items(tx, ys)
    for n, stacks in enumerate(sequence_items(tx, stacked)):
        last = step.last_appended(tx, n)
        if capture.appended is None:
            _append_rows(tx, lists[n], stacks, step.appended[n], schedule)
            if not capture.has_no_steps():
                call_inlined(tx, let_last_be, lists[n].owner, stacks, last)
        else:
            kinds = ConstantVariable.create(tuple(step.appended[n]))
            call_inlined(tx, _note, capture.appended, lists[n].owner, stacks, kinds, last)
            if not lists[n].has_grown():
                lists[n].forget_items()
    return TupleVariable([carry, ys])


def _leave_state(
    capture: Any, step: Stateful, carry: VariableTracker, values: list[VariableTracker]
) -> None:
    """Leave the ``values`` at the places, as the last step did."""
    tx = capture.tx
    if capture.has_no_steps():
        return  # what is there stays
    values = step.with_known_tensors(tx, values)
    k = len(parts_of(tx, carry))
    for place, value in zip(step.places, values, strict=True):
        counts = [
            count_after(capture, k + i, part)
            for i, part in enumerate(parts_left(tx, place.read(tx)))
        ]
        leave(tx, place, value, counts)
        k += len(counts)
    if not is_exporting():
        leave_as_one(tx, step.places, step.twin_containers)


def _refuse_costly_captures(tx: Any, step: Stateful, steps: VariableTracker | None) -> None:
    """Raise CostlyCapture if a loop may run, and captures would cost more than it: each call is one
    if a list has other items then, which the trace appends to, or is appended to in another number
    of ``steps``; each row is traced. None: the rows of the steps are not in the trace.
    """
    for n, growing in enumerate(step.lists):
        what = f"the body appends to a list, at {growing.line}"
        if growing.has_items(tx) and (steps is not None or growing.has_grown()):
            raise CostlyCapture(
                f"{what}, that has items before the scan: each call would be captured anew. Begin "
                "with an empty list, or return the value in ys"
            )
        most = _MOST_ROWS if {*step.appended[n]} <= {TENSOR} else _MOST_ROWS_OF_NUMBERS
        if steps and (not steps.is_python_constant() or steps.as_python_constant() > most):
            raise CostlyCapture(
                f"{what}, in more than {most} steps or in another number of steps than before"
                ". Return the value in ys"
            )


def _start_at(capture: Any, place: Place) -> VariableTracker:
    value = place.read(capture.tx)
    for part in parts_left(capture.tx, value):
        place.check(part)
    carried = opened(value)
    return call_inlined(capture.tx, exact_numbers, carried, capture.init, capture.over[0])


def _note(appended: list[Any], *what: Any) -> None:
    appended.append(what)


def _append_rows(
    tx: Any, growing: GrowingList, stacks: VariableTracker, kinds: Sequence[str], schedule: Any
) -> None:
    """Append what the steps do, in their order; ``stacks`` has that of all steps, parts of these
    ``kinds``."""
    if {*kinds} <= {TENSOR}:
        call_inlined(tx, _append_tensors, growing.owner, stacks, schedule)
        return
    for row in sequence_items(tx, call_inlined(tx, _rows, stacks, schedule)):
        pairs = zip(sequence_items(tx, row), kinds, strict=True)
        leaves = TupleVariable([_as_it_was(tx, value, kind) for value, kind in pairs])
        call_inlined(tx, append_row, growing.owner, stacks, leaves)


def _as_it_was(tx: Any, value: VariableTracker, kind: str) -> VariableTracker:
    if kind == NUMBER:
        return number_after(tx, value)
    return value.call_method(tx, "numpy", [], {}) if kind == ARRAY else value


def _append_tensors(items: list[Any], stacks: Any, schedule: Schedule) -> None:
    if len(stacks) == 1 and isinstance(stacks[0], torch.Tensor):
        items.extend(own_rows(stacks[0])[:: -1 if schedule.reverse else 1])
        return
    for leaves in _rows(stacks, schedule):
        append_row(items, stacks, leaves)


def _rows(stacks: Any, schedule: Schedule) -> list[tuple[torch.Tensor, ...]]:
    return rows_in_order(map(own_rows, tree.tensors(stacks)), schedule.reverse)
