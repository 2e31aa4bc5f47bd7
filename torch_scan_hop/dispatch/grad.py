"""functorch's Grad level: the same two scans as Autograd, the forward one level down."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.operators import TransformType
from torch_scan_hop._torch.transforms import (
    SingleLevelFunction,
    enable_single_level_autograd_function,
    gradients_enabled,
    unwrap_for_level,
    wrap_for_level,
)
from torch_scan_hop.autodiff.derive import derivative_of
from torch_scan_hop.autodiff.differentiability import needs_grad
from torch_scan_hop.autodiff.function import ScanCall, gradients, run, save
from torch_scan_hop.op import Body, scan_op, scan_options
from torch_scan_hop.signature import Inputs


class GradLevelScan(SingleLevelFunction):  # type: ignore[misc]
    """:class:`~torch_scan_hop.autodiff.function.ScanFunction` for one functorch level."""

    @staticmethod
    def forward(call: ScanCall, *tensors: Any) -> Any:
        return run(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *tensors = inputs
        save(ctx, call, tensors, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, *gradients(ctx, cotangents)


def one_level_down(interpreter: Any, *args: Any, **options: Any) -> list[Any]:
    """The scan on the values below this level, its results wrapped for it."""
    level = interpreter.level()
    body, *groups = args
    below = [[unwrap_for_level(v, level) for v in group] for group in groups]
    with gradients_enabled(), interpreter.lower():
        results = scan_op(body, *below, **options)
    return [wrap_for_level(r, level) for r in results]


@scan_op.py_impl(TransformType.Grad)
def grad(
    interpreter: Any,
    combine_fn: Body,
    init: list[Any],
    xs: list[Any],
    additional_inputs: tuple[Any, ...],
    *,
    reverse: bool = False,
    checkpoint: Any = None,
) -> tuple[Any, ...]:
    def run_forward(body: Body, *groups: Any, **options: Any) -> list[Any]:
        return one_level_down(interpreter, body, *groups, **options)

    flat = [*init, *xs, *additional_inputs]
    options = scan_options(reverse, checkpoint)
    if not torch.is_grad_enabled() or not any(map(needs_grad, flat)):
        return tuple(run_forward(combine_fn, init, xs, additional_inputs, **options))
    wanted = Inputs(
        [needs_grad(c) for c in init],
        [needs_grad(x) for x in xs],
        [needs_grad(a) for a in additional_inputs],
    )
    derivative, sizes = derivative_of(combine_fn, init, xs, additional_inputs, wanted, checkpoint)
    call = ScanCall(
        derivative,
        tuple(None if isinstance(a, torch.Tensor) else a for a in additional_inputs),
        reverse,
        checkpoint,
        run_forward,
        sizes,
    )
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    with enable_single_level_autograd_function():
        outputs = GradLevelScan.apply(call, *tensors)
    return tuple(outputs[: len(derivative.flow.outputs())])
