"""Which scans one call is: each strategy makes a run of several scans out of runs of one.

A policy of segments is a scan over segments whose own policy is ``"full"`` (it saves the carry
*into* each segment and nothing else) around a scan over the steps of a segment. So one mechanism
serves every backend, transforms and higher derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.schedule.run import Run
from torch_scan_hop.schedule.segments import segmented
from torch_scan_hop.schedule.treeverse import treeverse
from torch_scan_hop.schedule.unroll import unrolled


class Schedule(NamedTuple):
    """How a caller wants the steps to be run."""

    reverse: bool
    unroll: int
    checkpoint: Any


def is_one_scan(schedule: Schedule) -> bool:
    return schedule.unroll <= 1 and schedule.checkpoint in (None, "full")


def scheduled(one_scan: Callable[[Any], Run], template: Any, schedule: Schedule) -> Run:
    """The run that ``schedule`` asks for; ``one_scan(policy)`` is a scan of one policy.

    Blocks of unrolled steps match their carry with ``template``.
    """

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
