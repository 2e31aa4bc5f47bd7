"""Triton's interpreter with a library of mathematical functions, which it has not got.

Import it before Inductor, in a process with TRITON_INTERPRET=1 in its environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("Triton reads TRITON_INTERPRET=1 when it is imported")

import triton.language as tl
from torch._inductor.runtime import triton_helpers
from triton.runtime.interpreter import InterpreterBuilder, ScanOps, TensorHandle


def _values(value: Any) -> torch.Tensor:
    return torch.from_numpy(value.handle.data) if isinstance(value, tl.tensor) else value


def _function(compute: Callable[..., torch.Tensor], dtype: Any = None) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        like = args[0]
        kind = like.dtype if dtype is None else dtype
        with torch.no_grad():
            data = compute(*map(_values, args)).numpy()
        if dtype is not None:
            data = data.astype("int32")
        return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(data.shape)))

    return call


_UNARY = {
    name: getattr(torch, name)
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc",
        "erfinv", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2", "rsqrt",
        "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
    )
}  # fmt: skip
_UNARY |= {"nearbyint": torch.round, "rint": torch.round}
_BINARY = {
    "atan2": torch.atan2, "copysign": torch.copysign, "fmod": torch.fmod, "hypot": torch.hypot,
    "nextafter": torch.nextafter, "pow": torch.pow,
}  # fmt: skip
_TERNARY = {"fma": lambda a, b, c: a * b + c}
_PREDICATES = {"isinf": torch.isinf, "isnan": torch.isnan, "signbit": torch.signbit}

triton_helpers.libdevice = SimpleNamespace(
    **{name: _function(compute) for name, compute in (_UNARY | _BINARY | _TERNARY).items()},
    **{name: _function(compute, tl.int32) for name, compute in _PREDICATES.items()},
)

_create_dot = InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
    """The interpreter keeps the bits of bfloat16 as integers, and multiplies those."""
    if a.dtype == tl.bfloat16:
        a, b = (TensorHandle(_of_bits(m.data), tl.float32) for m in (a, b))
    return _create_dot(self, a, b, *rest, **options)


def _of_bits(data: Any) -> Any:
    return (data.astype("uint32") << 16).view("float32")


InterpreterBuilder.create_dot = _dot


def _tree_scan(self: Any, values: Any) -> list[Any]:
    """As a GPU does it: pairs of results of many rows are combined, all at once.

    The interpreter's own goes from row to row, and never sees what a product of rows may become.
    """
    assert self.axis == 0
    found, distance, rows = list(values), 1, values[0].handle.data.shape[0]
    while distance < rows:
        before = [self.to_tensor(np.roll(v.handle.data, distance, 0), v.dtype) for v in found]
        both = self.combine_fn.fn(*before, *found)
        both = both if isinstance(both, tuple) else (both,)
        found = [
            self.to_tensor(
                np.concatenate([v.handle.data[:distance], w.handle.data[distance:]]), v.dtype
            )
            for v, w in zip(found, both, strict=True)
        ]
        distance *= 2
    return found


ScanOps.generic_scan = _tree_scan
