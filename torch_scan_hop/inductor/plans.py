"""Choose the plan of a scan that Inductor lowers: what its loop holds, and what runs around it.

Where a loop may be one kernel, pointwise work stays in it, and sums over lanes are made for each
lane first. A counted loop has as little as may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.inductor import draws_as_eager_mode
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.copies import copy_of
from torch_scan_hop.body.linalg_checks import checks_after
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.inductor.kernels import (
    may_be_one_kernel,
    may_be_parallel_in_time,
    may_be_small_matrices,
    may_run_lane_by_lane,
    pack_weights,
)
from torch_scan_hop.inductor.qualify import CAT, PRODUCTS, is_along_rows, operators_in_the_way
from torch_scan_hop.inductor.scalars.rewrite import lanes_of
from torch_scan_hop.rewrites import Planner, ScanPlan, current_options, using_options
from torch_scan_hop.rewrites.lane_sums import (
    LaneSums,
    are_small,
    find_lane_sums,
    find_matrix_sums,
    lanes_of_matrices,
)
from torch_scan_hop.signature import Signature


@dataclass(frozen=True)
class PlanChoice:
    """The scan of ``body``.

    Attributes:
        carry: the examples of init.
    """

    body: fx.GraphModule
    signature: Signature
    used_outputs: Sequence[bool]
    trip_count: Any
    carry: Sequence[torch.Tensor]
    on_gpu: bool

    def best(self) -> tuple[ScanPlan, LaneSums | None]:
        """Return a plan, and the sums of lanes if the plan is of those."""
        found = self._of_lanes() or self._of_matrices()
        plan, sums = found or (self._plan(), None)
        if sums is None and pack_weights(plan, self.trip_count):
            plan = self._plan()
        return plan, sums

    def _plan(self, *of: Any) -> ScanPlan:
        """Make a plan that leaves pointwise work in the loop.

        On a GPU it moves such work out, too, if the loop then is a kernel of lanes, or has fewer
        operators that keep it from being one kernel and from being written out as scalars.
        """
        body, signature, used_outputs = of or (self.body, self.signature, self.used_outputs)

        def plan(pointwise_pays: bool) -> ScanPlan:
            return Planner(
                body,
                signature,
                current_options(),
                pointwise_pays=pointwise_pays,
                used_outputs=used_outputs,
                any_trip_count=not isinstance(self.trip_count, int),
                keeps_impure=draws_as_eager_mode(),
            ).plan()

        kept = plan(False)
        if not self.on_gpu or _is_lane_by_lane(kept):
            return kept
        moved = plan(True)
        if _is_lane_by_lane(moved):
            return moved
        has_fewer = _in_the_way(moved) < _in_the_way(kept)
        return moved if has_fewer and not _is_written_out(kept) else kept

    def _of_lanes(self) -> tuple[ScanPlan, LaneSums | None] | None:
        """Make a plan with sums for each lane, if that makes the loop a kernel of lanes."""
        options = current_options()
        if not (options.sums_per_lane and options.one_kernel):
            return None
        if self.on_gpu and may_be_parallel_in_time(self.trip_count, self.carry):
            return None
        sums = find_lane_sums(self.body, self.signature, self.used_outputs)
        if sums is None:
            return None
        plan = self._plan(sums.body, sums.signature, sums.used_outputs)
        return (plan, sums) if _is_lane_by_lane(plan) else None

    def _of_matrices(self) -> tuple[ScanPlan, LaneSums | None] | None:
        """Make a plan that adds up in the loop, if that is a kernel of small matrices."""
        if not current_options().one_kernel or self.on_gpu:
            return None
        lanes = lanes_of_matrices(self.body, self.signature)
        if may_be_one_kernel(self.body, on_gpu=False):
            return None
        if not may_be_small_matrices(checks_after(self.body).body):
            return None
        own = copy_of(self.body)
        sums = find_matrix_sums(own, self.signature, self.used_outputs, lanes)
        of_sums: tuple[Any, ...] = (own, self.signature, self.used_outputs)
        if sums is not None:
            of_sums = (sums.body, sums.signature, sums.used_outputs)
        with using_options(contract_accumulators=False):
            plan = self._plan(*of_sums)
        loop = checks_after(plan.body).body
        fits = may_be_small_matrices(loop) and not may_be_one_kernel(plan.body, on_gpu=False)
        return (plan, sums) if fits and are_small(loop, lanes) else None


def _is_written_out(plan: ScanPlan) -> bool:
    """Return True if the loop is written out as scalars, which one that may be a kernel is not."""
    if may_be_one_kernel(plan.body, on_gpu=True):
        return False
    return bool(lanes_of(checks_after(plan.body).body, plan.loop_signature))


def _in_the_way(plan: ScanPlan) -> set[str]:
    """Return what keeps a loop from being a kernel of rows: operators, what a head makes of a row,
    in no blocks that are as wide as the carry, and a carry that has a square of each row."""
    carry = [value_of(plan.roles.carry[k]).shape for k in plan.decisions.loop_carry]
    squares = {"a square" for row in carry if row and [*row, row[-1]] in map(list, carry)}
    width = max((likely_value(shape[-1]) for shape in carry if shape), default=1)
    made = [n for n in plan.body.graph.nodes if n.target in {*PRODUCTS, CAT}]
    columns = {likely_value(value_of(n).shape[-1]) for n in made}
    narrow = {f"{n} columns" for n in columns if n % max(1, width)}
    rows = {"several rows" for n in made if n.target is CAT and not is_along_rows(n)}
    return {*operators_in_the_way(plan.body), *narrow, *rows, *squares}


def _is_lane_by_lane(plan: ScanPlan) -> bool:
    return may_run_lane_by_lane(plan.body, len(plan.decisions.loop_carry))
