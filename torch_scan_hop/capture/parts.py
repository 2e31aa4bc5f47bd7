"""Dynamo's capture of a scan whose steps take several branches, known from what they count.

``if self.n < 4`` parts the steps in two scans: those before the branch changes, and those after.
``if self.n % 3 == 0`` makes a scan over blocks of three steps, each of which takes its own branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import SymFloat

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.places import is_number, number_of
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    TupleVariable,
    VariableTracker,
    call_inlined,
    example_value_or_none,
)
from torch_scan_hop.capture.counters import StepsBranchDifferently
from torch_scan_hop.capture.counting import MOST_PARTS, later
from torch_scan_hop.capture.stateful import number_after, parts_of
from torch_scan_hop.capture.steady import stack_of_one, steps_after, steps_before
from torch_scan_hop.capture.told import SomeSteps, in_part
from torch_scan_hop.schedule.strategies import Schedule, as_one_scan

#: a block costs the traces and the code of its steps
_LONGEST_BLOCK = 16


def trace_in_parts(
    capture: Any, change: StepsBranchDifferently, settled: tuple[str, ...]
) -> VariableTracker:
    """Return the results of ``capture``, whose steps branch as ``change`` says."""
    if len(capture.part.before) >= MOST_PARTS:
        raise capture.at_position or change
    if change.alike == 0:
        raise change
    return _Parting(capture, change, settled).trace()


@dataclass(frozen=True)
class _Parting:
    capture: Any
    change: StepsBranchDifferently
    settled: tuple[str, ...]

    def trace(self) -> VariableTracker:
        capture, change = self.capture, self.change
        block = self._period() * capture.part.block
        if capture.part.block < block <= _LONGEST_BLOCK and _has_two(capture, block):
            return self._in_blocks(block)
        alike = change.alike * capture.part.block
        steps = ConstantVariable.create(alike)
        if alike == 1:
            first = call_inlined(capture.tx, stack_of_one, capture.first_step(change))
        else:
            first = self._steps_before(steps, capture.over[2], SomeSteps(keeps_counts=True))
        return self._followed(steps, first)

    def _period(self) -> int:
        """Return after how many steps of the capture they branch as they do now, as far as is
        known: a step has begun with the same counts before."""
        part, asked = self.capture.part, self.capture.counters.asked()
        begun = [begin for begin, before in part.before if before and before == asked]
        return part.begin - begun[-1] if begun else self.change.period

    def _in_blocks(self, block: int) -> VariableTracker:
        tx, (_, trip_count, schedule) = self.capture.tx, self.capture.over
        size = ConstantVariable.create(block)
        steps = call_inlined(tx, _in_whole_blocks, trip_count, size)
        schedule = call_inlined(tx, _of_blocks, schedule, size)
        has_rest = is_less(tx, steps, trip_count)
        part = SomeSteps(has_rest or self.capture.part.keeps_counts, block)
        first = self._steps_before(steps, schedule, part)
        return self._followed(steps, first) if has_rest else first

    def _steps_before(
        self, steps: VariableTracker, schedule: VariableTracker, part: SomeSteps
    ) -> VariableTracker:
        """Trace so many ``steps`` by ``schedule``, which are ``part``."""
        capture, names = self.capture, ConstantVariable.create(self.settled)
        call = (capture.run, capture.combine_fn, steps, capture.init, capture.over[0], schedule)
        with in_part(part):
            return call_inlined(capture.tx, steps_before, *call, names)

    def _followed(self, steps: VariableTracker, first: VariableTracker) -> VariableTracker:
        """Trace the rest after ``first``, the results of ``steps``."""
        capture, part = self.capture, self.capture.part
        if _has_others(capture):
            raise self.change
        before = (*part.before, (part.begin, capture.counters.asked()))
        end = part.begin + steps.as_python_constant() if steps.is_python_constant() else -1
        names = ConstantVariable.create((*self.settled, self.change.leaf))
        rest = (capture.run, capture.combine_fn, steps, first, *capture.over, names)
        with in_part(SomeSteps(part.keeps_counts, 1, before, end)):
            return call_inlined(capture.tx, steps_after, *rest)


def _has_others(capture: Any) -> bool:
    """Return True if ``init`` has numbers of which it is not known what they are later: ints that
    steps do not count, flags, complex numbers."""
    return any(
        k not in capture.counters.counting and not isinstance(number_of(leaf), (float, SymFloat))
        for k, leaf in enumerate(parts_of(capture.tx, capture.init))
        if isinstance(example_value_or_none(leaf), (type(None), *tree.NUMBERS))
    )


def with_numbers_after(capture: Any, carry: VariableTracker) -> VariableTracker:
    """Return the ``carry`` after a part, in which what was a number is one again."""
    tx = capture.tx
    pairs = zip(parts_of(tx, capture.init), parts_of(tx, carry), strict=True)
    leaves = [
        (count_after(capture, k, start) or number_after(tx, leaf)) if is_number(start) else leaf
        for k, (start, leaf) in enumerate(pairs)
    ]
    return call_inlined(tx, tree.unflatten, carry, TupleVariable(leaves))


def count_after(capture: Any, k: int, start: VariableTracker) -> VariableTracker | None:
    """Return what leaf ``k`` of the carry is after all steps; None if they do not count it."""
    counting = capture.counters.counting.get(k) if capture.counters is not None else None
    if counting is None:
        return None
    known = map(ConstantVariable.create, (capture.part.block, *counting))
    return call_inlined(capture.tx, _after, start, capture.over[1], *known)


def _after(start: int, trip_count: int, block: int, *counting: int) -> int:
    return later(start, trip_count // block, *counting)


def _in_whole_blocks(trip_count: int, block: int) -> int:
    return trip_count // block * block


def _has_two(capture: Any, block: int) -> bool:
    """Return True if there are two blocks of so many steps."""
    return not is_less(capture.tx, capture.over[1], ConstantVariable.create(2 * block))


def is_less(tx: Any, steps: VariableTracker, others: VariableTracker) -> bool:
    return bool(call_inlined(tx, _is_less, steps, others).as_python_constant())


def _is_less(steps: int, others: int) -> bool:
    if steps < others:  # a symbol is decided here, and guarded
        return True
    return False


def _of_blocks(schedule: Schedule, block: int) -> Schedule:
    return as_one_scan(schedule)._replace(unroll=block)
