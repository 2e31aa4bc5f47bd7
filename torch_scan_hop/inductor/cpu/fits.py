"""Which tensors the kernels of the CPU work on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32}


def are_on_cpu(values: Iterable[Any]) -> bool:
    return all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))


def are_stored_in_vectors(results: Iterable[torch.Tensor]) -> bool:
    return all(t.dtype in DTYPES for t in results)
