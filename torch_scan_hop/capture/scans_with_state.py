"""Dynamo's capture of a scan whose steps leave something in objects: it is carried, or stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.left import GrowingList
from torch_scan_hop._torch.dynamo.places import Place
from torch_scan_hop._torch.dynamo.variables import (
    TupleVariable,
    VariableTracker,
    call_inlined,
    sequence_items,
)
from torch_scan_hop.capture.parts import count_after
from torch_scan_hop.capture.stateful import Stateful, exact_numbers, leave, parts_of
from torch_scan_hop.capture.told import loop_may_run
from torch_scan_hop.schedule.strategies import Schedule

#: of so many steps, each row that is appended is traced: some 2 ms
_MOST_ROWS = 1024


def scan_with_state(
    capture: Any, places: Sequence[Place], lists: Sequence[GrowingList]
) -> VariableTracker:
    """Run the scan with what steps leave at ``places`` as further carries, and what they append to
    ``lists`` as further ys."""
    tx, (_, trip_count, schedule) = capture.tx, capture.over
    # before: carry          after: (carry, what is at the places)
    state: VariableTracker = TupleVariable([_start_at(capture, place) for place in places])
    template = capture.template
    if not (template.is_python_constant() and template.as_python_constant() is None):
        template = TupleVariable([template, state])
    carry: VariableTracker = TupleVariable([capture.carry, state])
    step = Stateful(capture.combine_fn, places, lists)
    carry, ys = sequence_items(tx, capture.run_scan(step, template, carry))
    _refuse_costly_captures(tx, lists, trip_count)
    carry, state = sequence_items(tx, carry)
    values = sequence_items(tx, state)
    twins = {} if capture.has_no_steps() else step.twins
    k = len(parts_of(tx, carry))
    for n, place in enumerate(places):
        counts = [
            count_after(capture, k + i, part) for i, part in enumerate(parts_of(tx, place.read(tx)))
        ]
        leave(tx, place, values[twins.get(n, n)], counts)
        k += len(counts)
    ys, appended = sequence_items(tx, ys)
    for growing, stacks in zip(lists, sequence_items(tx, appended), strict=True):
        call_inlined(tx, _append_rows, growing.owner, stacks, schedule)
    return TupleVariable([carry, ys])


def _refuse_costly_captures(
    tx: Any, lists: Sequence[GrowingList], trip_count: VariableTracker
) -> None:
    """Raise Unsupported if a loop may run, and captures would cost more than it: each call is one
    if a list has other items then, or is appended to another number of times; each row is traced.
    """
    if not loop_may_run():
        return
    varies = not trip_count.is_python_constant()
    for growing in lists:
        what = f"the body appends to a list, at {growing.line}"
        if growing.has_items(tx):
            raise Unsupported(
                f"{what}, that has items before the scan: each call would be captured anew. Begin "
                "with an empty list, or return the value in ys"
            )
        if varies or trip_count.as_python_constant() > _MOST_ROWS:
            raise Unsupported(
                f"{what}, in more than {_MOST_ROWS} steps or in another number of steps than before"
                ". Return the value in ys"
            )


def _start_at(capture: Any, place: Place) -> VariableTracker:
    value = place.read(capture.tx)
    for part in parts_of(capture.tx, value):
        place.check(part)
    return call_inlined(capture.tx, exact_numbers, value, capture.init, capture.over[0])


def _append_rows(items: list[Any], stacks: Any, schedule: Schedule) -> None:
    """Append to ``items`` what the steps do, in their order; ``stacks`` has that of all steps."""
    order = -1 if schedule.reverse else 1
    if len(stacks) == 1 and isinstance(stacks[0], torch.Tensor):
        items.extend(stacks[0].unbind(0)[::order])
        return
    rows = zip(*(leaf.unbind(0) for leaf in tree.tensors(stacks)), strict=True)
    for leaves in list(rows)[::order]:
        items.extend(tree.unflatten(stacks, list(leaves)))
