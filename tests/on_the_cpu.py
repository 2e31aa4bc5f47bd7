"""What the package does on GPUs alone, on the CPU: Triton's kernels, and graphs of a loop."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch_scan_hop.cuda_graphs import devices


def triton_kernels() -> Any:
    """Let the kernels take scans on the CPU, too: with TRITON_INTERPRET=1 they run there.

    It is slower than any other way to run a scan.
    """
    from torch_scan_hop.inductor.gpu import serving

    return mock.patch.object(serving, "DEVICES", {"cuda", "cpu"})


def serving(device_type: str, graphs: Any) -> Any:
    """Let ``graphs`` capture loops on devices of that type."""
    return mock.patch.dict(devices.SERVED, {device_type: graphs})
