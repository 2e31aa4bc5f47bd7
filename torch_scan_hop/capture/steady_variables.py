"""Dynamo's capture of a scan whose first step differs, or whose steps keep state in objects.

One scan of all steps is tried first. If something is in the way, the trace raises it, the attempt
is taken back, and the next one is made with the first step on its own, or with more carries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.dynamo.attempts import taken_back_on_error
from torch_scan_hop._torch.dynamo.counted import note_counters
from torch_scan_hop._torch.dynamo.errors import (
    Turned,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
    causes_of,
    is_branch,
    is_data_dependent,
    is_position,
    is_programs_own,
    own_failures_are_unsupported,
    stack_of,
    uncaptured,
)
from torch_scan_hop._torch.dynamo.indexing import indices_are_captured_outside_bodies
from torch_scan_hop._torch.dynamo.left import GrowingList, GrowingListRead, StateAssigned
from torch_scan_hop._torch.dynamo.number_identity import numbers_are_told
from torch_scan_hop._torch.dynamo.number_positions import flags_branch, ranges_are_compared
from torch_scan_hop._torch.dynamo.places import Place, check_start, is_number, number_of
from torch_scan_hop._torch.dynamo.side_effects import changes_are_undone
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    TorchHigherOrderOperatorVariable,
    TupleVariable,
    VariableTracker,
    call_inlined,
    example_value,
    example_value_or_none,
    sequence_items,
)
from torch_scan_hop.capture.counters import Counters, StepsBranchDifferently
from torch_scan_hop.capture.first_steps import check_ends
from torch_scan_hop.capture.hooks_of_carries import HookOfUsedCarry
from torch_scan_hop.capture.layers import is_layers
from torch_scan_hop.capture.lstms import lstms_are_written_out
from torch_scan_hop.capture.modes_at_first import refuse_modes
from torch_scan_hop.capture.parts import is_less, trace_in_parts, with_numbers_after
from torch_scan_hop.capture.reasons import NOT_CAPTURED, reason_of
from torch_scan_hop.capture.refusals import changed_leaf, is_about_carry
from torch_scan_hop.capture.scans_with_state import CostlyCapture, scan_with_state
from torch_scan_hop.capture.stateful import parts_left, parts_of
from torch_scan_hop.capture.steady import first_step, no_step, other_steps, owned
from torch_scan_hop.capture.told import SomeSteps, at_hand, in_part, told
from torch_scan_hop.capture.traced_steps import steps_are_traced
from torch_scan_hop.schedule.strategies import as_one_scan


class SteadyScanVariable(TorchHigherOrderOperatorVariable):
    """Dynamo's tracker of ``scan_steady``."""

    _HOP_NAME = "scan_steady"
    _ALLOW_FALLBACK_TO_EAGER = False

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        *call, settled, appended = args
        capture = _Capture(tx, *call)
        is_eager = appended.python_type() is list
        if is_eager and at_hand.loop_may_run:
            capture.appended = appended
        try:
            if not is_eager:  # which is asked before
                check_start(_numbers(parts_of(tx, capture.init)).values())
            with (
                own_failures_are_unsupported(),
                steps_are_traced(tx, self.value),
                numbers_are_told(lambda _: None),
                ranges_are_compared(),
                flags_branch(),
            ):
                return capture.trace(settled.as_python_constant())
        except (UserError, Unsupported, UncapturedHigherOrderOpError) as error:
            if isinstance(error, UserError) and not is_data_dependent(error):
                raise  # what the caller did wrong: said in our words already
            reason = reason_of(error, stack_of(error))
            raise uncaptured(error, NOT_CAPTURED + reason) from error


class _Capture:
    """One call of ``scan_steady``, which explains the arguments."""

    def __init__(
        self,
        tx: Any,
        run: VariableTracker,
        combine_fn: VariableTracker,
        template: VariableTracker,
        carry: VariableTracker,
        init: VariableTracker,
        xs: VariableTracker,
        trip_count: VariableTracker,
        schedule: VariableTracker,
    ) -> None:
        self.tx, self.run, self.combine_fn = tx, run, combine_fn
        self.template, self.carry, self.init = template, carry, init
        self.over = (xs, trip_count, schedule)
        #: where an eager scan notes what is appended to lists; None where the trace does that
        self.appended: VariableTracker | None = None
        self.part = at_hand.part
        self.is_whole = self.part.block > 1
        self.decides_branches = False
        self.at_position: Exception | None = None
        self.counters: Counters | None = None
        self.reads: list[Any] | None = []
        self.lists: list[GrowingList] = []

    def trace(self, settled: tuple[str, ...]) -> VariableTracker:
        """Return the results of the scan. If a step reads a tensor as a number, and that number is
        used as none of ours can be, the refusal is that of what reads it."""
        try:
            return self._in_attempts(settled)
        except Exception as error:
            if not self.reads or _cause(error, CostlyCapture):
                raise
        self.reads = None
        return self._in_attempts(settled)

    def _in_attempts(self, settled: tuple[str, ...]) -> VariableTracker:
        places: list[Place] = []
        while True:
            try:
                numbers = self._numbers_at(places)
                self.counters = self._counters(numbers) if self.decides_branches else None
                about = told(settled, map(str, places), numbers, self.counters, self.reads)
                with taken_back_on_error(self.tx), about:
                    return self._scan(places)
            except Exception as error:
                why = error
            # outside of the handler: what is raised from here on has a cause of its own
            assigned = _cause(why, StateAssigned)
            more, longer = (assigned.places, assigned.lists) if assigned else ([], [])
            leaf = _settling(more) or _leaf_in(why)
            if is_layers(self.combine_fn):
                raise why
            if change := _cause(why, StepsBranchDifferently):
                return trace_in_parts(self, change, settled)
            if self._is_split_at_a_hook(why) or self._is_undecided(why, places):
                continue
            if leaf and leaf not in settled:
                check_ends((*settled, leaf), more)
                return self._from_second_step((*settled, leaf), why)
            stuck = [p for p in more if p.must_settle() or p.is_in(places)]
            if stuck and all(place.is_turned() for place in stuck) and self.part.block == 1:
                return self._turned_back(settled, stuck[0])
            for left_again in (*stuck, *(g for g in longer if g.is_in(self.lists))):
                raise left_again.refusal()
            if not (more or longer):
                raise self.at_position or why
            note_counters(self.tx, more)
            places += more
            self.lists += longer

    def _is_split_at_a_hook(self, error: Exception) -> bool:
        """Return True if one scan of all steps is to be tried, of which a schedule has made several
        where a hook is in the way."""
        is_split = not self.is_whole and _cause(error, HookOfUsedCarry) is not None
        if is_split:
            self._make_whole()
        return is_split

    def _make_whole(self) -> None:
        xs, trip_count, schedule = self.over
        self.over = (xs, trip_count, call_inlined(self.tx, as_one_scan, schedule))
        self.is_whole = True

    def _is_undecided(self, error: Exception, places: Sequence[Place]) -> bool:
        """Return True if a step branches, and counters are to be tried, which may decide that; they
        are known at the beginning of a scan of all steps."""
        if self.decides_branches or not (is_branch(error) or is_position(error)):
            return False
        self.at_position = None if is_branch(error) else error
        self.decides_branches = bool(self._counters(self._numbers_at(places)))
        if self.decides_branches and not self.is_whole:
            self._make_whole()
        return self.decides_branches

    def _scan(self, places: Sequence[Place]) -> VariableTracker:
        if places or self.lists:
            result = scan_with_state(self, places, self.lists)
        else:
            result = self.run_scan(self.combine_fn, self.template, self.carry)
        if not self.part.keeps_counts:
            return result
        carry, ys = sequence_items(self.tx, result)
        return TupleVariable([with_numbers_after(self, carry), ys])

    def _numbers_at(self, places: Sequence[Place]) -> dict[int, Any]:
        """Return the leaves of the carry that are numbers, which are left at ``places``."""
        tx = self.tx
        parts = [part for place in places for part in parts_left(tx, place.read(tx))]
        return _numbers(parts, len(parts_of(tx, self.carry)))

    def _counters(self, at_places: dict[int, Any]) -> Counters:
        return Counters({**_numbers(parts_of(self.tx, self.init)), **at_places})

    def run_scan(self, combine_fn: Any, template: Any, carry: Any) -> VariableTracker:
        return self.run.call_function(self.tx, [combine_fn, template, carry, *self.over], {})

    def has_no_steps(self) -> bool:
        return is_less(self.tx, self.over[1], ConstantVariable.create(1))

    def _from_second_step(self, settled: tuple[str, ...], why: Exception) -> VariableTracker:
        tx, (xs, trip_count, schedule) = self.tx, self.over
        if self.has_no_steps():
            with changes_are_undone(), told(reads=self.reads):
                return call_inlined(tx, no_step, self.run, self.combine_fn, self.init, *self.over)
        first = self.first_step(why)
        appended = self.appended or ConstantVariable.create(None)
        more = (xs, trip_count, schedule, ConstantVariable.create(settled), appended)
        try:
            with in_part(SomeSteps(self.part.keeps_counts)):
                return call_inlined(tx, other_steps, self.run, self.combine_fn, first, *more)
        except Exception as error:
            if not (any(map(is_about_carry, causes_of(error))) or is_programs_own(error)):
                raise
        raise why  # and no other steps can follow that one

    def _turned_back(self, settled: tuple[str, ...], mode: Place) -> VariableTracker:
        """Trace several steps as one, since so many bring the ``mode`` back that each turns."""
        for period in (2, 3, 4):
            change = StepsBranchDifferently(mode.line, alike=1, period=period)
            if is_less(self.tx, self.over[1], ConstantVariable.create(2 * period)):
                return self._from_second_step(settled, change)
            self.counters = self.counters or self._counters({})
            self._make_whole()
            try:
                with taken_back_on_error(self.tx):
                    return trace_in_parts(self, change, settled)
            except Exception as error:
                if not (_cause(error, Turned) or _cause(error, StepsBranchDifferently)):
                    raise
        raise mode.refusal()

    def first_step(self, why: Exception) -> VariableTracker:
        """Trace the first step on ``init`` itself, or on a copy if the step writes to it; return
        its carry and its y. ``why`` says in what it differs from others."""
        tx, (xs, _, schedule) = self.tx, self.over
        refuse_modes(tx, why)
        given = [example_value(v) for v in _tensors(tx, self.init)]
        versions = [value._version for value in given]
        indexed = indices_are_captured_outside_bodies(tx)
        with lstms_are_written_out(tx), indexed, in_part(SomeSteps()):
            with contextlib.suppress(_Written), taken_back_on_error(tx):
                first = call_inlined(tx, first_step, self.combine_fn, self.init, xs, schedule)
                if [value._version for value in given] != versions:
                    raise _Written
                return first
            start = call_inlined(tx, owned, self.init, xs)
            return call_inlined(tx, first_step, self.combine_fn, start, xs, schedule)


def _numbers(parts: Sequence[VariableTracker], first: int = 0) -> dict[int, Any]:
    """Return the numbers by leaf of the carry; None for those of the body of a scan."""
    return {first + k: number_of(part) for k, part in enumerate(parts) if is_number(part)}


class _Written(Exception): ...


def _cause(error: BaseException, kind: type[Exception]) -> Any:
    return next((e for e in causes_of(error) if isinstance(e, kind)), None)


def _leaf_in(error: BaseException) -> str:
    if read := _cause(error, GrowingListRead):
        return str(read.place)
    return next(filter(None, map(changed_leaf, causes_of(error))), "")


def _settling(places: Sequence[Place]) -> str:
    """Return the first place that the first step leaves with a value of another kind, or ""."""
    return next((place.settling() for place in places if place.must_settle()), "")


def _tensors(tx: Any, value: VariableTracker) -> list[VariableTracker]:
    leaves = parts_of(tx, value)
    return [v for v in leaves if isinstance(example_value_or_none(v), torch.Tensor)]
