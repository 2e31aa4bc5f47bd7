"""Scans of a few small steps: each operator of the body runs as it is written.

Rewrites, stacks that are allocated ahead and a derivative of the body cost some 0.1 ms a call, and
0.4 ms in training, which a loop of a few small steps does not take at all. Here autograd records
the operators of each step, as it records those of a loop, so such a scan costs what the loop costs.
"""

from __future__ import annotations

import math
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

# Measured with twelve cells of 1 to 64 rows and widths of 8 to 128, or 4096 lanes (AMD EPYC, torch
# 2.15.0): up to 12 steps most were faster so in training, from 20 on with a derivative.
MAX_STEPS = 15
# Forward, eleven of the twelve were faster so for 6 steps, and two for 12.
MAX_STEPS_FORWARD = 9
# The more calls a step makes, the fewer steps: of an LSTM of 18 calls, 12 steps took 1.14 of their
# loop's time in training as written and 1.00 with a derivative; of a cart pole of 30 calls, 8 steps
# took 1.12 and 1.03.
MOST_CALLS = 13
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
    trip_count = x.shape[0]
    if not most or (is_differentiated and trip_count > most):
        return False
    n_calls, is_fused = remember(body, ("calls",), lambda: _calls_of(body))
    if not is_differentiated:
        most = MAX_STEPS_OF_FUSED_CELLS if is_fused else MAX_STEPS_FORWARD
    if not 0 < trip_count <= most or trip_count * n_calls > most * MOST_CALLS:
        return False
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    return bool(elements_of_step(inputs) <= MAX_ELEMENTS)


def _calls_of(body: fx.GraphModule) -> tuple[float, bool]:
    """Return how many calls a step makes, and whether one is of a fused cell.

    What a body calls besides torch's operators is more than any number of calls.
    """
    nodes = list(body.graph.nodes)
    n_calls = sum(node.op in ("call_function", "call_method") for node in nodes)
    is_fused = any(node.target in _FUSED_CELLS for node in nodes)
    return n_calls if all(map(_is_operator, nodes)) else math.inf, is_fused


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
    additional, is_contiguous = inputs.additional, False
    rows = list(zip(*[x.unbind(0) for x in inputs.xs], strict=True))
    ys: list[Sequence[torch.Tensor]] = [()] * len(rows)
    for t in progressing(order_of_steps(len(rows), options.reverse)):
        results = run(*carry, *rows[t], *additional)
        carry, ys[t] = results[:n_carry], results[n_carry:]
        if not is_contiguous:
            # the strides of a step's results follow from those of what it reads, in each step
            is_contiguous = all([c.is_contiguous() for c in carry])
            carry = [c.contiguous() for c in carry]
    stacks = [torch.stack(y) for y in zip(*ys, strict=True)]
    # a caller may change results in place, and autograd may have saved the last carry
    return (*map(copy_on_write, unaliased(carry, inputs.flat())), *stacks)
