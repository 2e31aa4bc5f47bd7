"""The code of a reduction of a row: its columns are in registers, and beside them padding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.inductor_triton import compute_type
from torch_scan_hop.inductor.gpu.row_body import Reduction

_CODE = {
    "sum": "tl.sum({}, 1)",
    "prod": "triton_helpers.prod({}, 1)",
    # a nan is the greatest and the least, as it is in torch
    "max": "triton_helpers.max2({}, 1)",
    "min": "triton_helpers.min2({}, 1)",
    "argmax": "triton_helpers.max_with_index({}, {}, 1)[1]",
    "argmin": "triton_helpers.min_with_index({}, {}, 1)[1]",
}


_OF_TWO = {
    "sum": "({} + {})",
    "prod": "({} * {})",
    "max": "triton_helpers.maximum({}, {})",
    "min": "triton_helpers.minimum({}, {})",
    "any": "({} | {})",
}


def of_row(reduction: Reduction, elements: Sequence[str], inside: str, column: Any) -> str:
    """Return the code that reduces the ``elements`` that are ``inside`` of a row; there are some
    for each block of it, as wide as the frame."""
    kind, dtype = reduction.kind, reduction.dtype
    element = functools.reduce(lambda a, b: _OF_TWO[kind].format(a, b), elements)
    if kind == "any":
        return f"(tl.max(tl.where({inside}, {element}, 0).to(tl.int32), 1) > 0)"
    values = f"tl.where({inside}, {element}, {_neutral(kind, dtype)}).to({compute_type(dtype)})"
    if kind.startswith("arg"):
        # padding is after all columns, and the first of equals is taken
        return _CODE[kind].format(values, f"{column}.to(tl.int64)")
    return _CODE[kind].format(values)


def _neutral(kind: str, dtype: torch.dtype) -> str:
    """Return the value that changes nothing."""
    if kind in ("sum", "prod"):
        return "0" if kind == "sum" else "1"
    is_greatest = kind.endswith("max")
    if dtype.is_floating_point:
        return f"float('{'-' if is_greatest else ''}inf')"
    if dtype is torch.bool:
        return "0" if is_greatest else "1"
    info = torch.iinfo(dtype)
    return str(info.min if is_greatest else info.max)
