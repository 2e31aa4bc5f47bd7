"""Autograd: differentiate the body once, run two scans (see ``autodiff``)."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.operators import (
    DispatchKey,
    FakeTensor,
    below_autograd,
    copy_on_write,
    is_plain_tensor,
)
from torch_scan_hop._torch.tracing import is_traced
from torch_scan_hop._torch.transforms import has_tangents
from torch_scan_hop.autodiff.derive import derivative_of
from torch_scan_hop.autodiff.differentiability import gradient_flow, needs_grad
from torch_scan_hop.autodiff.function import ScanCall, ScanFunction
from torch_scan_hop.dispatch.jvp import scan_of_duals, tangent_scan
from torch_scan_hop.examples import step_examples
from torch_scan_hop.op import Body, scan_op, scan_options
from torch_scan_hop.signature import Inputs


class _MetadataOnly(torch.autograd.Function):
    """Marks which results of a scan on fakes require grad; it is never run backward."""

    @staticmethod
    def forward(ctx: Any, results: Any, differentiable: Any, *inputs: Any) -> Any:  # type: ignore[override]
        ctx.mark_non_differentiable(
            *(r for r, d in zip(results, differentiable, strict=True) if not d)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("torch_scan_hop: backward through a scan on fake tensors")


def below(
    combine_fn: Body, init: Any, xs: Any, additional_inputs: Any, **options: Any
) -> tuple[Any, ...]:
    with below_autograd():
        return scan_op(combine_fn, init, xs, additional_inputs, **options)


def _on_fakes(
    combine_fn: Body, init: Any, xs: Any, additional: Any, wanted: Inputs[bool], options: Any
) -> tuple[Any, ...]:
    """Dynamo propagates metadata with this: nothing is traced, only flags are set."""
    mode, examples = step_examples(init, xs, additional)
    flow = gradient_flow(combine_fn, examples, wanted, mode)
    with torch.no_grad():
        results = below(combine_fn, init, xs, additional, **options)
    tensors = [t for t in (*init, *xs, *additional) if isinstance(t, torch.Tensor)]
    return _MetadataOnly.apply(results, flow.outputs(), *tensors)


@scan_op.py_impl(DispatchKey.Autograd)
def autograd(
    combine_fn: Body,
    init: list[Any],
    xs: list[Any],
    additional_inputs: tuple[Any, ...],
    *,
    reverse: bool = False,
    checkpoint: Any = None,
) -> tuple[Any, ...]:
    options = scan_options(reverse, checkpoint)
    flat = [*init, *xs, *additional_inputs]
    differentiated = torch.is_grad_enabled() and any(map(needs_grad, flat))
    duals = has_tangents(flat)
    if duals and not differentiated:
        return scan_of_duals(combine_fn, init, xs, additional_inputs, **options)
    if not differentiated:
        return below(combine_fn, init, xs, additional_inputs, **options)
    wanted = Inputs(
        [needs_grad(c) for c in init],
        [needs_grad(x) for x in xs],
        [needs_grad(a) for a in additional_inputs],
    )
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    if not is_traced(tensors) and any(isinstance(t, FakeTensor) for t in tensors):
        return _on_fakes(combine_fn, init, xs, additional_inputs, wanted, options)
    derivative, sizes = derivative_of(combine_fn, init, xs, additional_inputs, wanted, checkpoint)
    call = ScanCall(
        derivative,
        tuple(None if isinstance(a, torch.Tensor) else a for a in additional_inputs),
        reverse,
        checkpoint,
        below,
        sizes,
        tangent_scan if duals else None,
    )
    outputs = ScanFunction.apply(call, *tensors)[: len(derivative.flow.outputs())]
    if is_traced(tensors) or not all(map(is_plain_tensor, tensors)):
        return outputs
    # a y that the backward reads is the caller's to change, as a loop's stack is
    read = derivative.saved_ys
    n_carry = len(init)
    return tuple(copy_on_write(o) if k - n_carry in read else o for k, o in enumerate(outputs))
