"""Tell which tensors the Triton kernels work on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_scan_hop._torch.inductor import uses_cpp_wrapper

DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip

DEVICES = {"cuda"}


def is_gpu(device: torch.device) -> bool:
    return device.type in DEVICES


def are_served(values: Iterable[Any]) -> bool:
    """Return True if all tensors are on one GPU that the kernels are for, and of dtypes they know.

    The wrapper in C++ cannot launch a kernel that Triton compiles when it is first called.
    """
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    devices = {t.device for t in tensors}
    return (
        len(devices) == 1
        and all(map(is_gpu, devices))
        and {t.dtype for t in tensors} <= DTYPES
        and not uses_cpp_wrapper()
    )
