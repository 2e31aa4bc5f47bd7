"""Tell which tensors the Triton kernels work on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_scan_hop._torch.inductor import uses_cpp_wrapper
from torch_scan_hop.errors import Refusal

DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip

DEVICES = {"cuda"}

#: compute capability and multiprocessors of a GPU that is not there, whose code is only looked at:
#: those of an H100
CAPABILITY, MULTIPROCESSORS = (9, 0), 132


def is_gpu(device: torch.device) -> bool:
    return device.type in DEVICES


def check_devices(values: Iterable[Any]) -> None:
    """Refuse tensors that are not all on one GPU that the kernels are for."""
    devices = {v.device for v in values if isinstance(v, torch.Tensor)}
    if len(devices) != 1 or not all(map(is_gpu, devices)):
        raise Refusal("its tensors are not on one GPU")


def check_tensors(values: Iterable[Any]) -> None:
    """Refuse tensors of other dtypes, or not all on one GPU; and the wrapper in C++, which cannot
    launch what Triton compiles when it is first called."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    devices = {t.device for t in tensors}
    known = len(devices) == 1 and all(map(is_gpu, devices)) and {t.dtype for t in tensors} <= DTYPES
    if not known or uses_cpp_wrapper():
        raise Refusal("its tensors are of other types, or on two devices; or the wrapper is C++")


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if _is_there(device) else CAPABILITY


def multiprocessors_of(device: torch.device) -> int:
    if not _is_there(device):
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_there(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()
