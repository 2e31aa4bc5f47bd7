"""Operators that only move entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars.entries import (
    Entries,
    Lanes,
    build,
    expanded,
)

aten = torch.ops.aten


def reshape(lanes: Lanes, like: Any, source: Entries, *_: Any) -> Entries:
    return lanes.reshaped(source, like.shape)


def same(lanes: Lanes, like: Any, source: Entries, **_: Any) -> Entries:
    return source


def permute(lanes: Lanes, like: Any, source: Entries, dims: Sequence[int]) -> Entries:
    dims = [source.any_dim(d) for d in dims]
    lane = None if source.lane is None else dims.index(source.lane)

    def entry(index: Sequence[int]) -> Any:
        own = [0] * len(dims)
        for i, d in zip(index, dims, strict=True):
            own[d] = i
        return source[own]

    return build((source.shape[d] for d in dims), lane, entry)


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
    shape = source.shape[:dim] + source.shape[dim + 1 :]
    return build(shape, source.lane_without(dim), lambda i: source.at(*i[:dim], index, *i[dim:]))


def _range(
    source: Entries, dim: int, start: int | None, end: int | None, step: int
) -> tuple[int, range]:
    dim = source.dim(dim)
    return dim, range(source.shape[dim])[slice(start, end, step)]


def slice_(
    lanes: Lanes,
    like: Any,
    source: Entries,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Entries:
    dim, kept = _range(source, dim, start, end, step)
    shape = (*source.shape[:dim], len(kept), *source.shape[dim + 1 :])
    return build(shape, source.lane, lambda i: source.at(*i[:dim], kept[i[dim]], *i[dim + 1 :]))


def split_with_sizes(
    lanes: Lanes, like: Any, source: Entries, sizes: Sequence[int], dim: int = 0
) -> list[Entries]:
    found, start = [], 0
    for size in sizes:
        found.append(slice_(lanes, like, source, dim, start, start + size))
        start += size
    return found


def flip(lanes: Lanes, like: Any, source: Entries, dims: Sequence[int]) -> Entries:
    turned = {source.dim(d) for d in dims}

    def entry(index: Sequence[int]) -> Any:
        return source[[source.shape[d] - 1 - i if d in turned else i for d, i in enumerate(index)]]

    return build(source.shape, source.lane, entry)


def diagonal(
    lanes: Lanes, like: Any, source: Entries, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Entries:
    dim1, dim2 = source.dim(dim1), source.dim(dim2)
    others = [d for d in range(len(source.shape)) if d not in (dim1, dim2)]

    def entry(index: Sequence[int]) -> Any:
        own = [0] * len(source.shape)
        for i, d in zip(index, others, strict=False):
            own[d] = i
        own[dim1] = index[-1] + max(-offset, 0)
        own[dim2] = index[-1] + max(offset, 0)
        return source[own]

    rows, columns = source.shape[dim1], source.shape[dim2]
    length = max(min(rows - max(-offset, 0), columns - max(offset, 0)), 0)
    shape = [*(source.shape[d] for d in others), length]
    return build(shape, source.lane_without(dim1, dim2), entry)


def cat(lanes: Lanes, like: Any, parts: Sequence[Entries], dim: int = 0) -> Entries:
    parts = [p for p in parts if p.shape != (0,)]
    dim = parts[0].dim(dim)
    if any(p.lane != parts[0].lane for p in parts):
        raise Refusal("lanes put beside what has none")
    places = [(p.map(lambda v: v.to(like.dtype)), k) for p in parts for k in range(p.shape[dim])]

    def entry(index: Sequence[int]) -> Any:
        part, k = places[index[dim]]
        return part.at(*index[:dim], k, *index[dim + 1 :])

    shape = (*parts[0].shape[:dim], len(places), *parts[0].shape[dim + 1 :])
    return build(shape, parts[0].lane, entry)


def _written(whole: Entries, part: Entries, place: Callable[[Any], Any]) -> Entries:
    """Return ``whole``, with entries of ``part`` where ``place`` gives an index of one."""

    def entry(index: Any) -> Any:
        own = place(index)
        return whole[index] if own is None else part[own]

    return build(whole.shape, whole.lane, entry)


def select_scatter(
    lanes: Lanes, like: Any, whole: Entries, part: Entries, dim: int, index: int
) -> Entries:
    dim = whole.dim(dim)
    index %= whole.shape[dim]
    part = expanded(part, whole.shape[:dim] + whole.shape[dim + 1 :], whole.lane_without(dim))
    return _written(whole, part, lambda i: (*i[:dim], *i[dim + 1 :]) if i[dim] == index else None)


def diagonal_scatter(
    lanes: Lanes,
    like: Any,
    whole: Entries,
    part: Entries,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Entries:
    dim1, dim2 = whole.dim(dim1), whole.dim(dim2)
    others = [d for d in range(len(whole.shape)) if d not in (dim1, dim2)]
    shape = (*(whole.shape[d] for d in others), part.shape[-1])
    part = expanded(part, shape, whole.lane_without(dim1, dim2))

    def place(index: Any) -> Any:
        on_diagonal = index[dim2] - index[dim1] == offset
        return (*(index[d] for d in others), min(index[dim1], index[dim2])) if on_diagonal else None

    return _written(whole, part, place)


def slice_scatter(
    lanes: Lanes,
    like: Any,
    whole: Entries,
    part: Entries,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Entries:
    dim, kept = _range(whole, dim, start, end, step)
    part = expanded(part, (*whole.shape[:dim], len(kept), *whole.shape[dim + 1 :]), whole.lane)
    place = {k: position for position, k in enumerate(kept)}
    return _written(
        whole,
        part,
        lambda i: (*i[:dim], place[i[dim]], *i[dim + 1 :]) if i[dim] in place else None,
    )


MOVES: dict[Any, Callable[..., Any]] = {
    aten.alias.default: same,
    aten.cat.default: cat,
    aten.clone.default: same,
    aten.detach.default: same,
    aten.diagonal.default: diagonal,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.expand.default: expand,
    aten.flip.default: flip,
    aten.permute.default: permute,
    aten.reshape.default: reshape,
    aten.select.int: select,
    aten.select_scatter.default: select_scatter,
    aten.slice.Tensor: slice_,
    aten.slice_scatter.default: slice_scatter,
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
