"""Meta: shapes and dtypes on the meta device, from one step."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop.eager.run import loop
from torch_scan_hop.op import Body, ScanOptions, scan_op
from torch_scan_hop.signature import Inputs


@scan_op.kernel(DispatchKey.Meta)
def meta(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[torch.Tensor, ...]:
    if not all(t.is_meta for t in inputs.flat() if isinstance(t, torch.Tensor)):
        return loop(body, inputs, options)  # results elsewhere have numbers
    init, trip_count = inputs.carry, inputs.trip_count
    slices = (x.new_empty(x.shape[1:]) for x in inputs.xs)
    out = body(*init, *slices, *inputs.additional)
    if not all(t.is_meta for t in out if isinstance(t, torch.Tensor)):
        return loop(body, inputs, options)
    carry = [torch.empty_like(c, memory_format=torch.contiguous_format) for c in init]
    return (*carry, *(y.new_empty((trip_count, *y.shape)) for y in out[len(init) :]))
