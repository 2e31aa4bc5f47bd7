"""XLA: one While op; see ``torch_scan_hop.xla``. torch_xla is imported on first use only."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.capabilities import require
from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop.op import Body, ScanOptions, scan_op
from torch_scan_hop.signature import Inputs


@scan_op.kernel(DispatchKey.XLA)
def xla(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    require("xla")
    from torch_scan_hop.xla.lower import lower_scan

    return lower_scan(body, inputs, options)
