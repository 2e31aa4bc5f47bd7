"""Autograd: differentiate the body once, run two scans (see ``autodiff``)."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.dtensors import shards_of
from torch_scan_hop._torch.fakes import FakeTensor, under_compiler
from torch_scan_hop._torch.operators import (
    DispatchKey,
    below_autograd,
    copy_on_write,
    is_plain_tensor,
)
from torch_scan_hop._torch.sizes import is_known_positive
from torch_scan_hop._torch.tracing import is_traced
from torch_scan_hop._torch.transforms import has_tangents, make_dual, unpack_dual
from torch_scan_hop.autodiff.derive import differentiated_call
from torch_scan_hop.autodiff.differentiability import (
    asks_for_flags_only,
    gradient_flow,
    needs_grad,
    wants_gradients,
)
from torch_scan_hop.autodiff.function import ScanFunction
from torch_scan_hop.body.step_examples import step_examples
from torch_scan_hop.dispatch.jvp import scan_of_duals, tangent_scan
from torch_scan_hop.eager.few_steps import run_as_written, runs_as_written
from torch_scan_hop.eager.run import dense
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs


class _MetadataOnly(torch.autograd.Function):
    """Marks which results of a scan on fakes require grad. Its backward never runs."""

    @staticmethod
    def forward(ctx: Any, results: Any, differentiable: Any, *inputs: Any) -> Any:  # type: ignore[override]
        ctx.mark_non_differentiable(
            *(r for r, d in zip(results, differentiable, strict=True) if not d)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("torch_scan_hop: backward through a scan on fake tensors")


def below(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    if scan_op.goes_to_kernel(tuple(inputs.flat())):
        return dense(body, inputs, options)
    with below_autograd():
        return call_scan(body, inputs, options)


def _on_fakes(
    body: Body, inputs: Inputs[Any], wanted: Inputs[bool], options: ScanOptions
) -> tuple[Any, ...]:
    """Propagate metadata: set flags on the results, and trace nothing."""
    mode, examples = step_examples(inputs)
    flow = gradient_flow(body, examples, wanted, mode)
    with torch.no_grad():
        results = below(body, inputs, options)
    tensors = [t for t in inputs.flat() if isinstance(t, torch.Tensor)]
    flags = flow.outputs(is_known_positive(inputs.xs[0].shape[0]))
    return _MetadataOnly.apply(results, flags, *tensors)


def _cut_off(value: Any) -> Any:
    """Cut ``value`` off reverse mode's graph, but keep its tangent, which ``detach`` takes away."""
    if not needs_grad(value):
        return value
    primal, tangent = unpack_dual(value)
    return primal.detach() if tangent is None else make_dual(primal.detach(), tangent)


@scan_op.kernel(DispatchKey.Autograd)
def autograd(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    flat = inputs.flat()
    wanted = wants_gradients(flat)
    differentiated = torch.is_grad_enabled() and any(wanted)
    duals = has_tangents(flat)
    if duals and not differentiated:
        return scan_of_duals(body, inputs, options)
    # then no trace watches the call, and no tensor is a fake
    is_plain = scan_op.goes_to_kernel(tuple(flat))
    if is_plain and not duals and runs_as_written(body, inputs, options, differentiated):
        return run_as_written(body, inputs, options)
    if not differentiated:
        return (dense if is_plain else below)(body, inputs, options)
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    traced = not is_plain and is_traced(tensors)
    if not is_plain and not traced and (under_compiler() or asks_for_flags_only()):
        if any(isinstance(shard, FakeTensor) for shard in shards_of(tensors)):
            return _on_fakes(body, inputs, inputs.signature.split_inputs(wanted), options)
    run_forward = dense if is_plain else below
    tangents_of = tangent_scan if duals else None
    call = differentiated_call(body, inputs, wanted, options, run_forward, tangents_of, traced)
    derivative = call.derivative
    if any(derivative.cut_off):
        cut_off = derivative.cut_off[is_known_positive(inputs.xs[0].shape[0])]
        # or autograd would go through their graph, and call hooks of theirs, with None
        kept = [_cut_off(v) if k in cut_off else v for k, v in enumerate(flat)]
        tensors = [v for v in kept if isinstance(v, torch.Tensor)]
    outputs = ScanFunction.apply(call, *tensors)[: derivative.n_outputs]
    if duals:
        flow = derivative.flow.outputs(is_known_positive(inputs.xs[0].shape[0]))
        outputs = tuple(o if d else _cut_off(o) for o, d in zip(outputs, flow, strict=True))
    if not is_plain and (traced or not all(map(is_plain_tensor, tensors))):
        return outputs
    # A caller may change ys in place, as those of a loop. Where the backward reads a y, the caller
    # gets a copy on write of it.
    n_carry, read = len(inputs.carry), derivative.saved_ys
    return tuple([copy_on_write(o) if k - n_carry in read else o for k, o in enumerate(outputs)])
