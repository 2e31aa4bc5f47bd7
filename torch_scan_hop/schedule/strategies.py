"""Choose the scans that make up one call: each strategy builds a run of several from runs of one.

A policy of segments is a scan over segments whose own policy is ``"full"`` (it saves the carry
*into* each segment and nothing else) around a scan over the steps of a segment. So one mechanism
serves every backend, transforms and higher derivatives.

An exported program serves every trip count in its range, and torch.export refuses what holds for
some of them only, such as a split into blocks or segments. So if the trip count is a symbol there,
a call is one scan: ``unroll`` has no effect, and a policy means ``"full"``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_scan_hop._torch.sizes import is_exporting, is_fixed
from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.schedule.segments import segmented
from torch_scan_hop.schedule.treeverse import treeverse
from torch_scan_hop.schedule.unroll import unrolled
from torch_scan_hop.step import CombineFn, Run


class Schedule(NamedTuple):
    """Says how a caller wants the steps to be run."""

    reverse: bool
    unroll: int
    checkpoint: Any


def is_one_scan(schedule: Schedule) -> bool:
    return schedule.unroll <= 1 and schedule.checkpoint in (None, "full")


def as_one_scan(schedule: Schedule) -> Schedule:
    """Return the schedule of one scan that saves no more than it must."""
    policy = schedule.checkpoint
    saves = policy if policy is None or callable(policy) else "full"
    return Schedule(schedule.reverse, 1, saves)


def with_fixed_numbers(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with numbers that are constants in a capture: they decide how a call is
    split, and Dynamo makes a symbol of one that differs between two calls."""
    policy = schedule.checkpoint
    if isinstance(policy, Binomial):
        policy = Binomial(operator.index(policy.snapshots), operator.index(policy.sweeps))
    elif isinstance(policy, int):
        policy = operator.index(policy)
    return Schedule(schedule.reverse, operator.index(schedule.unroll), policy)


def scheduled(one_scan: Callable[[Any], Run], template: Any, schedule: Schedule) -> Run:
    """Return the run that ``schedule`` asks for; ``one_scan(policy)`` is a scan of one policy.
    Blocks of unrolled steps match their carry with ``template``."""
    if is_one_scan(schedule):
        return one_scan(schedule.checkpoint)
    schedule = with_fixed_numbers(schedule)
    run = _split_as_asked(one_scan, template, schedule)
    run_any = one_scan(None if schedule.checkpoint is None else "full")

    def run_scheduled(
        combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any
    ) -> tuple[Any, Any]:
        is_open = is_exporting() and not is_fixed(trip_count)
        return (run_any if is_open else run)(combine_fn, init, xs, trip_count)

    return run_scheduled


def _split_as_asked(one_scan: Callable[[Any], Run], template: Any, schedule: Schedule) -> Run:
    def steps(policy: Any) -> Run:
        run = one_scan(policy)
        if schedule.unroll == 1:
            return run
        return unrolled(run, template, schedule.unroll, schedule.reverse)

    policy = schedule.checkpoint
    if policy == "sqrt" or isinstance(policy, int):
        return segmented(one_scan("full"), steps(None), policy, schedule.reverse)
    if isinstance(policy, Binomial):
        return treeverse(one_scan("full"), steps(None), policy, schedule.reverse)
    return steps(policy)
