"""oneDNN's float32 product beside MKL's, which ``torch.mm`` calls (checked on torch 2.9.1, 2.13.0,
2.15.0).

Import ``lower_product`` only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion


@functools.cache
def beats_mkl() -> bool:
    """Whether this is a CPU with AVX-512 that is none of Intel's.

    MKL runs its AVX2 kernels there, at half the rate of oneDNN's.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "GenuineIntel" not in _vendor()
    )


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("vendor_id")), "")


def is_fast_for(rows: int, is_transposed: bool) -> bool:
    """Whether it is where MKL is the slower library, for a ``left`` of so many rows.

    ``is_transposed``: of ``right``, a column is contiguous. A row times a matrix reads columns; and
    torch 2.9's oneDNN lays such a matrix out anew in each call, from 16 rows on.
    """
    if is_transposed:
        return not (torch.__version__ < TorchVersion("2.13") and 8 < rows < 128)
    return rows >= 4


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, of float32 matrices on the CPU."""
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def lower_product(left: Any, right: Any) -> Any:
    """The same of Inductor's values, as one call. ``right`` is read where it lies."""
    from torch._inductor.ir import ExternKernel, FixedLayout, TensorBox
    from torch._inductor.lowering import permute
    from torch._inductor.mkldnn_ir import LinearUnary

    left = ExternKernel.require_contiguous(ExternKernel.realize_input(left))
    right = ExternKernel.realize_input(permute(right, [1, 0]))
    (rows, _), (columns, _) = left.get_size(), right.get_size()
    layout = FixedLayout(left.get_device(), left.get_dtype(), [rows, columns])
    return TensorBox.create(LinearUnary(layout, [left, right], [None, "none", [-1], ""]))
