"""Choose what the loop's source calls for each operator, and which calls get a place to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of

aten = torch.ops.aten


def _bindings(names: str) -> dict[Any, Callable[..., Any]]:
    """Return for operators their bindings, which parse arguments in C++.

    >>> _bindings("add.Tensor tanh")[aten.tanh.default] is torch.tanh
    True
    """
    parts = [name.partition(".") for name in names.split()]
    return {getattr(getattr(aten, p), o or "default"): getattr(torch, p) for p, _, o in parts}


_ELEMENTWISE = _bindings(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor neg addcmul sigmoid tanh exp log sin cos sqrt "
    "rsqrt maximum minimum"
)
#: may write over any operand of the result's shape; addmm over what it adds to
ELEMENTWISE = _ELEMENTWISE.keys()
#: take out=
WITH_OUT = _ELEMENTWISE | _bindings("mm bmm cat stack addmm sum.dim_IntList")
WITHOUT_OUT = _bindings("t permute reshape unsqueeze relu where.self rsub.Scalar")


def binding(target: Any) -> Callable[..., Any]:
    fast = WITH_OUT.get(target) or WITHOUT_OUT.get(target)
    if fast is not None:
        return fast
    # past OpOverload.__call__, which is Python
    return getattr(target, "_op", target)


def can_write_to(node: fx.Node, like: torch.Tensor) -> bool:
    """Return True if ``node`` may compute straight into a contiguous slot like ``like``."""
    if node.target not in WITH_OUT or "out" in node.kwargs:
        return False
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    dtypes = {v.dtype for v in inputs if isinstance(v, torch.Tensor)}
    return dtypes == {like.dtype} and value_of(node).dtype == like.dtype
