"""XLA: one While op; see ``torch_scan_hop.xla``. torch_xla is imported on first use only."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop.op import Body, scan_op


@scan_op.py_impl(DispatchKey.XLA)
def xla(
    combine_fn: Body,
    init: list[Any],
    xs: list[Any],
    additional_inputs: tuple[Any, ...],
    **options: Any,
) -> tuple[Any, ...]:
    from torch_scan_hop.xla.lower import lower_scan

    return lower_scan(combine_fn, init, xs, additional_inputs, **options)
