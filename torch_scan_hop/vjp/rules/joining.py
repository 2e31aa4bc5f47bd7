"""Rules that join tensors or take them apart.

`cat` and `split` are each other's transposes, and so are `stack` and `unbind`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..shapes import is_tensor, shape, value
from ..table import Rule, saving_arguments
from .views import getitem_bwd, getitem_fwd


def _with_zeros(ds: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return the cotangents of the parts, zeros for the parts that nobody used."""
    some = next(d for d in ds if d is not None)

    def zeros(s: tuple[int, ...]) -> Any:
        return torch.zeros_like(some) if shape(some) == s else some.new_zeros(s)

    return [zeros(s) if d is None else d for d, s in zip(ds, shapes, strict=True)]


def cat_bwd(d: Any, tensors: Any, dim: int = 0) -> Any:
    shapes = [shape(x) for x in tensors]
    sizes = [s[dim] for s in shapes]
    if len(set(shapes)) == 1 and sizes[0] > 0:
        return (list(torch.chunk(d, len(sizes), dim)),)
    return (list(torch.split(d, sizes, dim)),)


def _parted(parts: Any, dim: int) -> tuple[Any, Any]:
    return parts, ([tuple(part.shape) for part in value(parts)], dim)


def chunk_fwd(x: Any, chunks: int, dim: int = 0) -> Any:
    return _parted(torch.chunk(x, chunks, dim), dim)


def split_fwd(x: Any, split_size: Any, dim: int = 0) -> Any:
    return _parted(torch.split(x, split_size, dim), dim)


def unbind_fwd(x: Any, dim: int = 0) -> Any:
    return _parted(torch.unbind(x, dim), dim)


def parts_bwd(saved: Any, ds: Any) -> Any:
    shapes, dim = saved
    return torch.cat(_with_zeros(ds, shapes), dim)


def unbind_bwd(saved: Any, ds: Any) -> Any:
    shapes, dim = saved
    return torch.stack(_with_zeros(ds, shapes), dim)


def index_fwd(x: Any, index: Any) -> Any:
    """x[index] for a tensor; the transform itself looks into tuples."""
    assert is_tensor(x), x
    return getitem_fwd(x, index)


JOINING: dict[Any, Rule] = {
    torch.cat: saving_arguments(torch.cat, cat_bwd),
    torch.stack: saving_arguments(
        torch.stack, lambda d, tensors, dim=0: (list(torch.unbind(d, dim)),)
    ),
    torch.chunk: Rule(chunk_fwd, parts_bwd),
    torch.split: Rule(split_fwd, parts_bwd),
    torch.ops.aten.split_with_sizes: Rule(split_fwd, parts_bwd),
    torch.unbind: Rule(unbind_fwd, unbind_bwd),
    operator.getitem: Rule(index_fwd, getitem_bwd),
}
