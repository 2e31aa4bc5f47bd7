"""Scans of a few small steps: each operator of the body runs as it is written.

Rewrites, stacks that are allocated ahead and a derivative of the body cost some 0.1 ms a call, and
0.4 ms in training, which a loop of a few small steps does not take at all. Here autograd records
the operators of each step, as it records those of a loop, so such a scan costs what the loop costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.operators import copy_on_write, is_function_of_torch, past_module_hooks
from torch_scan_hop.body.cache import remember
from torch_scan_hop.eager.run import unaliased
from torch_scan_hop.op import Body, ScanOptions
from torch_scan_hop.progress_bar import steps as progressing
from torch_scan_hop.signature import Inputs
from torch_scan_hop.step import order_of_steps

# Measured with nine cells of 1 to 32 rows and widths of 8 to 128 (AMD EPYC, torch 2.15.0): up to 12
# steps all but the largest were faster so, from 20 on training was faster with a derivative.
MAX_STEPS = 15
# Those cells have up to so many operators. 12 steps of 80 operators, as ten of a cell have, took
# 2.0 of their loop's time forward and 1.6 in training as written, 1.3 and 1.0 with a derivative.
MOST_OPERATORS = 40
# A fused cell is one call into C++: steps took 0.7 to 1.0 of their loop's time forward, where its
# parts took 0.8 to 1.1 (1 to 64 rows, widths of 8 to 256, AMD EPYC).
_FUSED_CELLS = {torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
#: all ys of a step are alive, until they are stacked
MAX_STEPS_OF_FUSED_CELLS = 4096
#: elements of carry, xs of a step and what it closes over
MAX_ELEMENTS = 2**17


def runs_as_written(
    body: Body, inputs: Inputs[Any], options: ScanOptions, is_differentiated: bool
) -> bool:
    """Return True for a body of operators alone, over a few small steps on the CPU."""
    if not isinstance(body, fx.GraphModule) or options.checkpoint is not None:
        return False
    x, most = inputs.xs[0], MAX_STEPS
    if not is_differentiated and most and remember(body, ("fused",), lambda: _is_fused(body)):
        most = MAX_STEPS_OF_FUSED_CELLS
    if not 0 < x.shape[0] <= most or x.device.type != "cpu":
        return False
    if x.shape[0] * len(body.graph.nodes) > most * MOST_OPERATORS:
        return False
    if torch.is_autocast_enabled("cpu") or elements_of_step(inputs) > MAX_ELEMENTS:
        return False
    return remember(body, ("operators",), lambda: all(map(_is_operator, body.graph.nodes)))


def _is_fused(body: fx.GraphModule) -> bool:
    """Return True if a fused cell is called."""
    return any(node.target in _FUSED_CELLS for node in body.graph.nodes)


def elements_of_step(inputs: Inputs[Any]) -> Any:
    """Return how many elements a step reads."""
    stacked = sum([x.numel() for x in inputs.xs])
    whole = [v.numel() for v in (*inputs.carry, *inputs.additional) if isinstance(v, torch.Tensor)]
    return sum(whole) + stacked // inputs.trip_count


def _is_operator(node: fx.Node) -> bool:
    """Return True for what autograd records, or an input or result.

    What a body calls besides (custom functions, hooks, scans) has a derivative that is this
    package's, or torch's for graphs.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "call_method", "output")
    return is_function_of_torch(node.target)


def run_as_written(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    """Run the steps, which autograd records if gradients are wanted."""
    n_carry, run = len(inputs.carry), past_module_hooks(body)
    # bodies are traced for contiguous carries
    carry: Sequence[torch.Tensor] = [c.contiguous() for c in inputs.carry]
    rows = list(zip(*[x.unbind(0) for x in inputs.xs], strict=True))
    ys: list[Sequence[torch.Tensor]] = [()] * len(rows)
    for t in progressing(order_of_steps(len(rows), options.reverse)):
        results = run(*carry, *rows[t], *inputs.additional)
        carry, ys[t] = [c.contiguous() for c in results[:n_carry]], results[n_carry:]
    stacks = [torch.stack(y) for y in zip(*ys, strict=True)]
    # a caller may change results in place, and autograd may have saved the last carry
    return (*map(copy_on_write, unaliased(carry, inputs.flat())), *stacks)
