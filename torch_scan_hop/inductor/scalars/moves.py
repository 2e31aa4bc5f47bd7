"""Operators that only move entries.

torch moves the places of the entries, as numbers in a tensor: of two lanes, which stand for all. If
the second lane still follows the first one in some dimension, entry by entry, the lanes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_scan_hop._torch.isolation import isolated
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.scalars.entries import Entries, Lanes, expanded

aten = torch.ops.aten


def moved(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``target``, which only moves elements, on entries."""
    sources = [v for v in pytree.tree_leaves(args) if isinstance(v, Entries)]
    flat = [value for entries in sources for value in entries.flat]
    count = len(flat)
    shifts: list[int] = []  # from the place of an entry in one lane to that in the next

    def places(value: Any) -> Any:
        if not isinstance(value, Entries):
            return value
        first = torch.arange(len(shifts), len(shifts) + len(value.flat), device="cpu")
        first = first.reshape(value.shape)
        shifts.extend([0 if value.lane is None else count] * len(value.flat))
        return first if value.lane is None else torch.cat([first, first + count], value.lane)

    with isolated():
        try:
            found = target(*pytree.tree_map(places, args), **kwargs)
        except (RuntimeError, IndexError):  # other sizes than those of two lanes
            raise Refusal("work across lanes") from None
        results = found if isinstance(found, (tuple, list)) else [found]
        entries = [_entries(made, flat, torch.tensor(shifts, device="cpu")) for made in results]
    return entries if isinstance(found, (tuple, list)) else entries[0]


def _entries(places: torch.Tensor, flat: Sequence[Any], shifts: torch.Tensor) -> Entries:
    """Return the entries at ``places``, of two lanes if some are shifted."""
    lane = None
    if shifts.any():
        for lane in range(places.ndim):
            first, second = places.tensor_split(2, lane)
            same = first.shape == second.shape and bool((first < len(flat)).all())
            if same and torch.equal(first + shifts[first], second):
                places = first
                break
        else:
            raise Refusal("work across lanes")
    return Entries(tuple(places.shape), [flat[p] for p in places.flatten().tolist()], lane)


def alone(fn: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Make a rule of ``fn``, which needs to know neither the lanes nor what the result is like."""
    return lambda lanes, like, *args, **kwargs: fn(*first, *args, **kwargs)


def reshape(lanes: Lanes, like: Any, source: Entries, *_: Any) -> Entries:
    return lanes.reshaped(source, like.shape)


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


def cat(lanes: Lanes, like: Any, parts: Sequence[Entries], dim: int = 0) -> Entries:
    parts = [p.map(lambda v: v.to(like.dtype)) for p in parts if p.shape != (0,)]
    return moved(aten.cat.default, parts, dim)


def _same(source: Entries, **_: Any) -> Entries:
    return source


_MOVED = (
    aten.diagonal.default,
    aten.diagonal_scatter.default,
    aten.flip.default,
    aten.permute.default,
    aten.select.int,
    aten.select_scatter.default,
    aten.slice.Tensor,
    aten.slice_scatter.default,
    aten.split_with_sizes.default,
    aten.t.default,
    aten.transpose.int,
)

MOVES: dict[Any, Callable[..., Any]] = {
    **{target: alone(moved, target) for target in _MOVED},
    aten.alias.default: alone(_same),
    aten.cat.default: cat,
    aten.clone.default: alone(_same),
    aten.detach.default: alone(_same),
    aten.expand.default: expand,
    aten.reshape.default: reshape,
    aten.squeeze.default: reshape,
    aten.squeeze.dim: reshape,
    aten.squeeze.dims: reshape,
    aten.unsqueeze.default: reshape,
    aten.view.default: reshape,
    aten._unsafe_view.default: reshape,
    torch.ops.prims.rev.default: alone(moved, aten.flip.default),
}
