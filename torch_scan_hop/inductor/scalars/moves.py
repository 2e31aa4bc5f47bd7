"""Operators that only move entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars.entries import Entries, Lanes, expanded

aten = torch.ops.aten


def reshape(lanes: Lanes, like: Any, source: Entries, *_: Any) -> Entries:
    return lanes.reshaped(source, like.shape)


def same(lanes: Lanes, like: Any, source: Entries, **_: Any) -> Entries:
    return source


def permute(lanes: Lanes, like: Any, source: Entries, dims: Sequence[int]) -> Entries:
    dims = [source.any_dim(d) for d in dims]
    lane = None if source.lane is None else dims.index(source.lane)
    return source.moved([source.shape[d] for d in dims], [source.strides[d] for d in dims], lane)


def transpose(lanes: Lanes, like: Any, source: Entries, first: int, second: int) -> Entries:
    dims = list(range(len(source.shape)))
    first, second = source.any_dim(first), source.any_dim(second)
    if dims:
        dims[first], dims[second] = second, first
    return permute(lanes, like, source, dims)


def t(lanes: Lanes, like: Any, source: Entries) -> Entries:
    return permute(lanes, like, source, list(reversed(range(len(source.shape)))))


def expand(lanes: Lanes, like: Any, source: Entries, *_: Any, **__: Any) -> Entries:
    source = source.padded(len(like.shape))
    own, lane = source.shape, source.lane
    if lane is None:
        grown = (d for d, n in enumerate(like.shape) if own[d] == 1 and lanes.begin(n))
        lane = next(grown, None)
        grid = lanes.grid_of(like.shape, lane)
    else:
        sizes = [own[d] if d == lane else n for d, n in enumerate(like.shape)]
        grid = lanes.grid_of(sizes, None)
    return expanded(source, grid, lane)


def select(lanes: Lanes, like: Any, source: Entries, dim: int, index: int) -> Entries:
    dim = source.dim(dim)
    index %= source.shape[dim]
    found = slice_(lanes, like, source, dim, index, index + 1)
    shape = found.shape[:dim] + found.shape[dim + 1 :]
    return Entries(shape, found.flat, source.lane_without(dim))


def slice_(
    lanes: Lanes,
    like: Any,
    source: Entries,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Entries:
    dim, shape, strides = source.dim(dim), [*source.shape], source.strides
    kept = range(shape[dim])[slice(start, end, step)]
    offset = kept.start * strides[dim]
    shape[dim], strides[dim] = len(kept), step * strides[dim]
    return source.moved(shape, strides, source.lane, offset)


def split_with_sizes(
    lanes: Lanes, like: Any, source: Entries, sizes: Sequence[int], dim: int = 0
) -> list[Entries]:
    found, start = [], 0
    for size in sizes:
        found.append(slice_(lanes, like, source, dim, start, start + size))
        start += size
    return found


def flip(lanes: Lanes, like: Any, source: Entries, dims: Sequence[int]) -> Entries:
    strides, offset = source.strides, 0
    for d in {source.dim(d) for d in dims}:
        offset += (source.shape[d] - 1) * strides[d]
        strides[d] = -strides[d]
    return source.moved(source.shape, strides, source.lane, offset)


def diagonal(
    lanes: Lanes, like: Any, source: Entries, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Entries:
    dim1, dim2 = source.dim(dim1), source.dim(dim2)
    shape, strides = source.shape, source.strides
    others = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    first = max(-offset, 0), max(offset, 0)  # row and column of the first entry
    length = max(min(shape[dim1] - first[0], shape[dim2] - first[1]), 0)
    return source.moved(
        [*(shape[d] for d in others), length],
        [*(strides[d] for d in others), strides[dim1] + strides[dim2]],
        source.lane_without(dim1, dim2),
        first[0] * strides[dim1] + first[1] * strides[dim2],
    )


def cat(lanes: Lanes, like: Any, parts: Sequence[Entries], dim: int = 0) -> Entries:
    parts = [p.map(lambda v: v.to(like.dtype)) for p in parts if p.shape != (0,)]
    return joined(parts, parts[0].dim(dim))


def joined(parts: Sequence[Entries], dim: int) -> Entries:
    if any(p.lane != parts[0].lane for p in parts):
        raise Refusal("lanes put beside what has none")
    before, after = parts[0].shape[:dim], parts[0].shape[dim + 1 :]
    rows = zip(*(p.rows(math.prod(p.shape[dim:])) for p in parts), strict=True)
    flat = [v for row in rows for part in row for v in part]
    return Entries((*before, sum(p.shape[dim] for p in parts), *after), flat, parts[0].lane)


def _scatter(read: Callable[..., Entries]) -> Callable[..., Entries]:
    """Return the rule that writes what ``read`` reads."""

    def rule(
        lanes: Lanes, like: Any, whole: Entries, part: Entries, *where: Any, **keywords: Any
    ) -> Entries:
        places = read(lanes, like, whole.like(range(len(whole.flat))), *where, **keywords)
        part = expanded(part, places.shape, places.lane)
        flat = list(whole.flat)
        for place, value in zip(places.flat, part.flat, strict=True):
            flat[place] = value
        return whole.like(flat)

    return rule


MOVES: dict[Any, Callable[..., Any]] = {
    aten.alias.default: same,
    aten.cat.default: cat,
    aten.clone.default: same,
    aten.detach.default: same,
    aten.diagonal.default: diagonal,
    aten.diagonal_scatter.default: _scatter(diagonal),
    aten.expand.default: expand,
    aten.flip.default: flip,
    aten.permute.default: permute,
    aten.reshape.default: reshape,
    aten.select.int: select,
    aten.select_scatter.default: _scatter(select),
    aten.slice.Tensor: slice_,
    aten.slice_scatter.default: _scatter(slice_),
    aten.split_with_sizes.default: split_with_sizes,
    aten.squeeze.default: reshape,
    aten.squeeze.dim: reshape,
    aten.squeeze.dims: reshape,
    aten.t.default: t,
    aten.transpose.int: transpose,
    aten.unsqueeze.default: reshape,
    aten.view.default: reshape,
    aten._unsafe_view.default: reshape,
    torch.ops.prims.rev.default: flip,
}
