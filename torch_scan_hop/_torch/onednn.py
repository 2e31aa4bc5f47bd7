"""oneDNN's float32 product beside MKL's, which ``torch.mm`` calls (checked on torch 2.9.1, 2.13.0,
2.15.0).

Import ``lower_product`` only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def has_both_libraries() -> bool:
    """Return True if this torch has oneDNN, and MKL beside it."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def compilers_folder() -> str:
    """Return the folder in which Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of float32 matrices on the CPU, by oneDNN.

    A left matrix that is not contiguous is copied, and so is a right one unless its transpose is
    contiguous. For others oneDNN takes a reference kernel, which is hundreds of times slower.
    """
    weight = right.t()
    if not (right.is_contiguous() or weight.is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left.contiguous(), weight, None, "none", [], "")


def lower_product(left: Any, right: Any) -> Any:
    """Lower the same for Inductor's values, as one call."""
    from torch._inductor.ir import ExternKernel, FixedLayout, TensorBox
    from torch._inductor.lowering import permute
    from torch._inductor.mkldnn_ir import LinearUnary

    from torch_scan_hop._torch.inductor import boxed

    left = ExternKernel.require_contiguous(ExternKernel.realize_input(left))
    weight = ExternKernel.realize_input(permute(right, [1, 0]))
    lies = weight.get_layout()
    if not (lies.is_contiguous() or lies.is_transposed()):
        weight = ExternKernel.require_contiguous(boxed(weight))
    (rows, _), (columns, _) = left.get_size(), weight.get_size()
    layout = FixedLayout(left.get_device(), left.get_dtype(), [rows, columns])
    return TensorBox.create(LinearUnary(layout, [left, weight], [None, "none", [-1], ""]))
