"""Conjugate and Negative: arguments that are lazy views are written out, then the scan goes on."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs


def _written_out(value: Any) -> Any:
    return value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value


def with_plain_arguments(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    return call_scan(body, inputs.map(_written_out), options)


for key in (DispatchKey.Conjugate, DispatchKey.Negative):
    scan_op.kernel(key)(with_plain_arguments)
