"""Meta: shapes and dtypes on the meta device, from one step."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop.op import Body, scan_op


@scan_op.py_impl(DispatchKey.Meta)
def meta(
    combine_fn: Body,
    init: list[torch.Tensor],
    xs: list[torch.Tensor],
    additional_inputs: tuple[Any, ...],
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    trip_count = xs[0].shape[0]
    out = combine_fn(*init, *(x.new_empty(x.shape[1:]) for x in xs), *additional_inputs)
    carry = [torch.empty_like(c, memory_format=torch.contiguous_format) for c in init]
    return (*carry, *(y.new_empty((trip_count, *y.shape)) for y in out[len(init) :]))
