"""Questions that rules may ask about a graph's values while the graph is being written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree


def value(x: Any) -> Any:
    """Return the meta tensor (or a tuple of them) of a proxy or node; a number is itself."""
    if isinstance(x, fx.Proxy):
        return x.node.meta["val"]
    return x.meta["val"] if isinstance(x, fx.Node) else x


def shape(x: Any) -> tuple[int, ...]:
    """Return the shape of `x` as plain numbers: `()` for a number.

    Code that uses them is specialised to these sizes. Prefer what needs no size: `ndim`, `flatten`,
    `chunk`, `unbind`, `zeros_like`.
    """
    v = value(x)
    return tuple(v.shape) if isinstance(v, Tensor) else ()


def ndim(x: Any) -> int:
    """Return the number of dimensions of `x`, 0 for a number."""
    return len(shape(x))


def is_tensor(x: Any) -> bool:
    """Return True if `x` stands for a tensor."""
    return isinstance(value(x), Tensor)


def is_differentiable(x: Any) -> bool:
    """Return True if `x` stands for a tensor of floating point numbers, or a tuple with one."""
    v = value(x)
    return is_complex(x) or any(
        isinstance(t, Tensor) and t.is_floating_point() for t in pytree.tree_leaves(v)
    )


def is_complex(x: Any) -> bool:
    """Return True if `x` stands for a complex tensor, or a tuple with one in it."""
    return any(isinstance(t, Tensor) and t.is_complex() for t in pytree.tree_leaves(value(x)))


def unbroadcast(d: Any, x: Any) -> Any:
    """Return the cotangent of `x: [..., 1, ...]` from `d`, that of `x` repeated: a sum.

    Writes no code where the shapes are equal. Names the dimensions to sum, not their sizes.
    """
    if not is_tensor(x):
        return None
    extra = ndim(d) - ndim(x)
    stretched = [
        i + extra for i, (n, m) in enumerate(zip(shape(x), shape(d)[extra:], strict=True)) if n != m
    ]
    if stretched:
        d = torch.sum(d, stretched, keepdim=True)
    return torch.sum(d, list(range(extra))) if extra else d


def check_same_shape(op: str, a: Any, b: Any) -> None:
    """Refuse to broadcast."""
    if shape(a) != shape(b):
        raise ValueError(
            f"{op}: the shapes differ, {list(shape(a))} and {list(shape(b))}, "
            "and the strict rule does not broadcast"
        )
