"""The operator's XLA kernel: call the program of a body, from the cache or lowered now.

The rewrites split a scan into work before, in and after the loop. All three become one
computation, so that a call costs the host no more than a call of the loop alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch import xla as _xla
from torch_scan_hop.body.cache import remember_for
from torch_scan_hop.eager.run import empty_results
from torch_scan_hop.fallback import NotLoweredError, announce_stepwise
from torch_scan_hop.op import Body, ScanOptions
from torch_scan_hop.rewrites import Planner, ScanPlan, current_options
from torch_scan_hop.signature import Inputs, Signature
from torch_scan_hop.step import run_in_order
from torch_scan_hop.xla.graph import StepGraph, trace_step
from torch_scan_hop.xla.program import Program, lower_function, lower_loop, metadata_of

# In bytes; measured in benchmarks/results/xla.md. Smaller weights stay in a core's cache from step
# to step, and a product of all steps would be written to memory and read again.
LEAST_WEIGHT_ON_A_CPU = 1 << 20


def lower_scan(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[torch.Tensor, ...]:
    """Return the scan as one pending node that calls a computation with one ``While``.

    It runs below autograd and functionalization, on plain XLA tensors. A checkpoint matters to
    autograd only, which has done its work already.
    """
    length = int(inputs.trip_count)
    if length == 0:
        return empty_results(body, inputs)
    # not the sharding of the inputs: programs hold only what the body itself shards
    step = remember_for(body, "xla", inputs, current_options(), lambda: _Step(body, inputs))
    flat = [*inputs.flat(), *map(_xla.unwrapped, step.graph.attributes)]
    return tuple(step.run(flat, length, options.reverse))


class _Step:
    """A traced body, and its programs by length and direction."""

    def __init__(self, body: Body, inputs: Inputs[Any]) -> None:
        self.graph: StepGraph = trace_step(body, inputs)
        self.signature = self.graph.signature
        # XLA fuses pointwise work into one kernel; only contractions gain from leaving the loop
        self.plan = Planner(
            self.graph.module,
            self.signature,
            current_options(),
            pointwise_pays=False,
            least_weight=LEAST_WEIGHT_ON_A_CPU if _xla.is_on_cpu() else 0,
        ).plan()
        self.programs: dict[tuple[int, bool], Program] = {}
        self.refusal: str | None = None  # why torch_xla cannot lower it

    def run(self, flat: Sequence[Any], length: int, reverse: bool) -> list[torch.Tensor]:
        if self.refusal is None:
            try:
                return self._run_program(flat, length, reverse)
            except NotLoweredError as error:
                self.refusal = str(error)
        announce_stepwise(self.refusal)
        return self._run_in_order(flat, reverse)

    def _run_in_order(self, flat: Sequence[Any], reverse: bool) -> list[torch.Tensor]:
        """Run each step on its own, as a body must that torch_xla cannot lower to HLO.

        Operators without a lowering run on the CPU, as they do in a Python loop there: torch_xla
        executes what is pending, and moves their inputs to the host and their results back, in
        every step.
        """
        with _xla.above_the_kernel():
            inputs = self.signature.split_inputs([_xla.wrapped(v) for v in flat])
            # copies: a body may return what it takes
            results = [r.clone() for r in run_in_order(self.graph.module, inputs, reverse)]
            return [_xla.unwrapped(r) for r in results]

    def _run_program(self, flat: Sequence[Any], length: int, reverse: bool) -> list[torch.Tensor]:
        key = (length, reverse)
        if key not in self.programs:
            self.programs[key] = self._lower(list(map(metadata_of, flat)), length, reverse)
        else:
            _xla.advance_random_state(self.programs[key].draws)
        return self.programs[key].call(flat)

    def _lower(self, inputs: list[Any], length: int, reverse: bool) -> Program:
        if self.plan.is_trivial():
            return lower_loop(self.graph.module, self.signature, inputs, length, reverse)
        whole = _PlannedScan(self.plan, self.signature, length, reverse)
        return lower_function(whole, inputs)


class _PlannedScan:
    """A plan as a function of the flat inputs of its scan; the loop is lowered on first use."""

    def __init__(self, plan: ScanPlan, signature: Signature, length: int, reverse: bool) -> None:
        self.plan = plan
        self.signature = signature
        self.length = length
        self.reverse = reverse
        self.loop: Program | None = None

    def __call__(self, *flat: Any) -> list[Any]:
        return self.plan.run(self._run_loop, self.signature.split_inputs(flat))

    def _run_loop(self, body: Body, inputs: Inputs[Any], _: ScanOptions) -> list[Any]:
        flat = inputs.flat()
        if self.loop is None:
            like = list(map(metadata_of, flat))
            self.loop = lower_loop(body, inputs.signature, like, self.length, self.reverse)
        return [_xla.wrapped(r) for r in self.loop.call(list(map(_xla.unwrapped, flat)))]
