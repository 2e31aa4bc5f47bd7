"""The operator's XLA kernel: the program of a body, from its cache or lowered now, called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch import xla as _xla
from torch_scan_hop.dispatch.dense import empty_results
from torch_scan_hop.memo import autocast_state, inputs_metadata, remember
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Signature
from torch_scan_hop.xla.graph import StepGraph, trace_step
from torch_scan_hop.xla.program import ScanProgram, lower_step


def lower_scan(
    combine_fn: Body,
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[Any],
    *,
    reverse: bool = False,
    checkpoint: Any = None,
) -> tuple[torch.Tensor, ...]:
    """The scan as one pending node that calls a computation with one ``While``.

    Below autograd and functionalization: takes and returns plain XLA tensors. ``checkpoint``
    matters to autograd only, which has done its work already.
    """
    length = int(xs[0].shape[0])
    if length == 0:
        return empty_results(combine_fn, init, xs, additional_inputs)
    key = ("xla", inputs_metadata(init, xs, additional_inputs), autocast_state())
    step = remember(combine_fn, key, lambda: _Step(combine_fn, init, xs, additional_inputs))
    flat = [*init, *xs, *additional_inputs, *map(_xla.unwrapped, step.graph.attributes)]
    return tuple(step.run(flat, length, reverse))


class _Step:
    """A traced body, and its programs by length and direction."""

    def __init__(
        self, body: Body, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any]
    ) -> None:
        self.graph: StepGraph = trace_step(body, init, xs, additional)
        n_additional = len(additional) + len(self.graph.attributes)
        self.signature = Signature(len(init), len(xs), n_additional)
        self.programs: dict[tuple[int, bool], ScanProgram] = {}

    def run(self, flat: Sequence[Any], length: int, reverse: bool) -> list[torch.Tensor]:
        key = (length, reverse)
        if key not in self.programs:
            program = lower_step(self.graph, self.signature, flat, length, reverse)
            self.programs[key] = program
        else:
            program = self.programs[key]
            _xla.advance_random_state(program.draws)
        return program.call(self.signature.n_carry, flat, length)
