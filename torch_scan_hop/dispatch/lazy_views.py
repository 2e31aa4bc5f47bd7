"""Conjugate and Negative: arguments that are lazy views are written out, then the scan goes on."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop.op import Body, scan_op


def _written_out(value: Any) -> Any:
    return value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value


def with_plain_arguments(
    combine_fn: Body, init: Any, xs: Any, additional_inputs: Any, **options: Any
) -> tuple[Any, ...]:
    init, xs, additional = (
        [_written_out(v) for v in group] for group in (init, xs, additional_inputs)
    )
    return scan_op(combine_fn, init, xs, tuple(additional), **options)


for key in (DispatchKey.Conjugate, DispatchKey.Negative):
    scan_op.py_impl(key)(with_plain_arguments)
