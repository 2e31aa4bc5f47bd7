"""FakeTensorMode: one step on fakes gives every shape and dtype."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.operators import FakeTensorMode
from torch_scan_hop.errors import describe
from torch_scan_hop.examples import contiguous_like, slice_like
from torch_scan_hop.op import Body, scan_op
from torch_scan_hop.step import empty_stack


def check_carry(init: list[Any], carry: list[Any]) -> None:
    for k, (before, after) in enumerate(zip(init, carry, strict=True)):
        if after.dtype != before.dtype or after.dim() != before.dim():
            raise TypeError(
                f"torch.ops.higher_order.scan: carry[{k}] is {describe(before)} in init, but "
                f"combine_fn returns {describe(after)}. A carry keeps its shape and dtype."
            )


def abstract_results(
    mode: FakeTensorMode, body: Body, init: list[Any], xs: list[Any], additional: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The results' metadata; call it under ``mode``."""
    trip_count = xs[0].shape[0]
    carry_in = [contiguous_like(mode, c) for c in init]
    x_in = [slice_like(mode, x) for x in xs]
    with mode:
        out = body(*carry_in, *x_in, *additional)
        check_carry(init, list(out[: len(init)]))
        carry = [torch.empty(c.shape, dtype=c.dtype, device=c.device) for c in init]
        ys = [empty_stack(y, trip_count) for y in out[len(init) :]]
    return (*carry, *ys)


@scan_op.py_impl(FakeTensorMode)
def fake(
    mode: FakeTensorMode,
    combine_fn: Body,
    init: list[Any],
    xs: list[Any],
    additional_inputs: tuple[Any, ...],
    **options: Any,
) -> tuple[Any, ...]:
    with torch.no_grad():
        return abstract_results(mode, combine_fn, init, xs, additional_inputs)
