"""FakeTensorMode: one step on fakes gives every shape and dtype."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop._torch.operators import past_module_hooks
from torch_scan_hop._torch.tracing import lstm_in_parts
from torch_scan_hop.body.step_examples import contiguous_like, slice_like
from torch_scan_hop.errors import describe
from torch_scan_hop.op import Body, ScanOptions, scan_op
from torch_scan_hop.signature import Inputs
from torch_scan_hop.step import check_device, empty_stack


def check_carry(init: list[Any], carry: list[Any]) -> None:
    for k, (before, after) in enumerate(zip(init, carry, strict=True)):
        if after.dtype != before.dtype or after.dim() != before.dim():
            raise TypeError(
                f"torch.ops.higher_order.scan: carry[{k}] is {describe(before)} in init, but "
                f"combine_fn returns {describe(after)}. A carry keeps its shape and dtype."
            )
        check_device(f"carry[{k}]", before, after)


@scan_op.kernel(FakeTensorMode)
@torch.no_grad()
def fake(mode: FakeTensorMode, body: Body, inputs: Inputs[Any], _: ScanOptions) -> tuple[Any, ...]:
    init, trip_count = inputs.carry, inputs.trip_count
    carry_in = [contiguous_like(mode, c) for c in init]
    x_in = [slice_like(mode, x) for x in inputs.xs]
    with mode, lstm_in_parts():
        out = past_module_hooks(body)(*carry_in, *x_in, *inputs.additional)
        check_carry(init, list(out[: len(init)]))
        carry = [torch.empty(c.shape, dtype=c.dtype, device=c.device) for c in init]
        ys = [empty_stack(y, trip_count) for y in out[len(init) :]]
    return (*carry, *ys)
