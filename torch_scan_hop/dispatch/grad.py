"""functorch's Grad level: the same two scans as Autograd, the forward one level down."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_scan_hop._torch.operators import TransformType
from torch_scan_hop._torch.tracing import is_traced
from torch_scan_hop._torch.transforms import (
    SingleLevelFunction,
    enable_single_level_autograd_function,
    gradients_enabled,
    unwrap_for_level,
    wrap_for_level,
)
from torch_scan_hop.autodiff.derive import differentiated_call
from torch_scan_hop.autodiff.differentiability import wants_gradients
from torch_scan_hop.autodiff.function import DifferentiatedCall, gradients, run, save
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs


class GradLevelScan(SingleLevelFunction):  # type: ignore[misc]
    """:class:`~torch_scan_hop.autodiff.function.ScanFunction` for one functorch level."""

    @staticmethod
    def forward(call: DifferentiatedCall, *tensors: Any) -> Any:
        return run(call, call.inputs(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *tensors = inputs
        save(ctx, call, call.inputs(tensors), output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, *gradients(ctx, cotangents)


def one_level_down(
    interpreter: Any, body: Body, inputs: Inputs[Any], options: ScanOptions
) -> list[Any]:
    """Run the scan on the values below this level; its results are wrapped for the level."""
    level = interpreter.level()
    below = inputs.map(lambda v: unwrap_for_level(v, level))
    with gradients_enabled(), interpreter.lower():
        results = call_scan(body, below, options)
    return [wrap_for_level(r, level) for r in results]


@scan_op.kernel(TransformType.Grad)
def grad(
    interpreter: Any, body: Body, inputs: Inputs[Any], options: ScanOptions
) -> tuple[Any, ...]:
    run_forward = functools.partial(one_level_down, interpreter)
    wanted = wants_gradients(inputs.flat())
    if not torch.is_grad_enabled() or not any(wanted):
        return tuple(run_forward(body, inputs, options))
    traced = is_traced(inputs.flat())
    call = differentiated_call(body, inputs, wanted, options, run_forward, traced=traced)
    tensors = [t for t in inputs.flat() if isinstance(t, torch.Tensor)]
    with enable_single_level_autograd_function():
        outputs = GradLevelScan.apply(call, *tensors)
    return tuple(outputs[: call.derivative.n_outputs])
