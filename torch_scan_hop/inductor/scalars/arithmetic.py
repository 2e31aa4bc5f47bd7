"""Operators that compute: pointwise ones, sums and their like, products, constants."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars.entries import Entries, Lanes, broadcast
from torch_scan_hop.inductor.scalars.moves import alone, moved, reshape

aten = torch.ops.aten
prims = torch.ops.prims


def is_pointwise(target: Any) -> bool:
    """Return True for a pointwise operator with one result that is not random."""
    if not isinstance(target, OpOverload) or len(target._schema.returns) != 1:
        return False
    tags = target.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def pointwise(target: Any, args: Any, kwargs: Any) -> Entries:
    flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda v: isinstance(v, Entries))
    operands = [v for v in flat if isinstance(v, Entries)]
    aligned = broadcast(*operands)
    found: dict[tuple[int, ...], Any] = {}  # entries that were repeated are computed once

    def entry(position: int) -> Any:
        own = [e.flat[position] for e in aligned]
        key = tuple(map(id, own))
        if key not in found:
            rest = iter(own)
            values = [next(rest) if isinstance(v, Entries) else v for v in flat]
            args, kwargs = pytree.tree_unflatten(values, spec)
            found[key] = target(*args, **kwargs)
        return found[key]

    return aligned[0].like(entry(k) for k in range(len(aligned[0].flat)))


def convert(lanes: Lanes, like: Any, source: Entries, *_: Any, **kwargs: Any) -> Entries:
    if kwargs.get("device") not in (None, source.flat[0].device):
        raise Refusal("a copy to another device")
    return source if source.dtype == like.dtype else source.map(lambda v: v.to(like.dtype))


# --- constants ---


def _number(value: Any, like: Any) -> Any:
    return torch.full((1,), value, dtype=like.dtype, device=like.device)


def full(lanes: Lanes, like: Any, size: Any, value: Any, **_: Any) -> Entries:
    if not isinstance(value, (int, float, bool)):
        raise Refusal("a fill that is no number")
    lane = 0 if like.shape and lanes.begin(like.shape[0]) else None
    grid = lanes.grid_of(like.shape, lane)
    return Entries(grid, [_number(value, like)] * math.prod(grid), lane)


def full_like(lanes: Lanes, like: Any, source: Any, value: Any = 0, **_: Any) -> Entries:
    return full(lanes, like, None, value)


def iota(
    lanes: Lanes, like: Any, length: int, *, start: int = 0, step: int = 1, **_: Any
) -> Entries:
    grid = lanes.grid_of([length], None)
    return Entries(grid, [_number(start + k * step, like) for k in range(*grid)], None)


# --- reductions ---


def _reduction(join: Callable[[Any, Any], Any]) -> Callable[..., Entries]:
    def rule(
        lanes: Lanes, like: Any, source: Entries, dims: Any = None, keepdim: bool = False, **_: Any
    ) -> Entries:
        rank = len(source.shape)
        if dims is None or dims == []:
            dims = range(rank)
        dims = {source.dim(d) for d in ([dims] if isinstance(dims, int) else dims)} if rank else ()
        source = source.map(lambda v: v.to(like.dtype))
        folded = math.prod(source.shape[d] for d in dims)
        if not folded:
            raise Refusal("a reduction of nothing")
        turned = moved(
            aten.permute.default, source, sorted(range(rank), key=lambda d: (d in dims, d))
        )
        kept = tuple(1 if d in dims else n for d, n in enumerate(source.shape))
        found = [functools.reduce(join, row) for row in turned.rows(folded)]
        return reshape(lanes, like, Entries(kept, found, source.lane))

    return rule


def mean(lanes: Lanes, like: Any, source: Entries, *args: Any, **kwargs: Any) -> Entries:
    total: Entries = REDUCTIONS[aten.sum.dim_IntList](lanes, like, source, *args, **kwargs)
    count = len(source.flat) // max(len(total.flat), 1)
    return total.map(lambda v: v / count)


REDUCTIONS: dict[Any, Callable[..., Entries]] = {
    aten.amax.default: _reduction(torch.maximum),
    aten.amin.default: _reduction(torch.minimum),
    aten.any.default: _reduction(torch.logical_or),
    aten.any.dim: _reduction(torch.logical_or),
    aten.any.dims: _reduction(torch.logical_or),
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.prod.dim_int: _reduction(torch.mul),
    aten.sum.default: _reduction(torch.add),
    aten.sum.dim_IntList: _reduction(torch.add),
}


# --- products ---


def product(left: Entries, right: Entries) -> Entries:
    """Return the product of matrices, or of stacks of them."""
    rank, inner = len(left.shape), left.shape[-1]
    if left.lane == rank - 1 or right.lane == rank - 2 or not inner:
        raise Refusal("a product across lanes")
    # [..., n, 1, k] and [..., 1, m, k]: what a product multiplies, side by side
    rows = Entries((*left.shape[:-1], 1, inner), left.flat, left.lane)
    turned = moved(aten.transpose.int, right, -2, -1)
    lane = turned.lane if turned.lane is None or turned.lane < rank - 2 else rank - 1
    columns = Entries((*turned.shape[:-2], 1, *turned.shape[-2:]), turned.flat, lane)
    rows, columns = broadcast(rows, columns)
    pairs = zip(rows.rows(inner), columns.rows(inner), strict=True)
    found = [functools.reduce(torch.add, map(torch.mul, *pair)) for pair in pairs]
    return Entries(rows.shape[:-1], found, rows.lane)


def added_product(
    added: Entries, left: Entries, right: Entries, *, beta: Any = 1, alpha: Any = 1
) -> Entries:
    scaled = lambda e, by: e if by == 1 else e.map(lambda v: v * by)  # noqa: E731
    added, found = broadcast(scaled(added, beta), scaled(product(left, right), alpha))
    return found.like(map(torch.add, added.flat, found.flat))


COMPUTED: dict[Any, Callable[..., Any]] = {
    **REDUCTIONS,
    aten._to_copy.default: convert,
    aten.addmm.default: alone(added_product),
    aten.baddbmm.default: alone(added_product),
    aten.bmm.default: alone(product),
    aten.full.default: full,
    aten.full_like.default: full_like,
    aten.mm.default: alone(product),
    aten.ones_like.default: lambda lanes, like, source, **_: full_like(lanes, like, source, 1),
    aten.zeros_like.default: full_like,
    prims.convert_element_type.default: convert,
    prims.iota.default: iota,
}
