"""A tensor as a grid of its entries, each a value for all lanes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch.sizes import are_known_equal, likely_value
from torch_scan_hop.errors import Refusal

Index = tuple[int, ...]


@dataclass(frozen=True)
class Entries:
    """``tensor[..., l * shape[lane] + i, ...]`` is entry ``[..., i, ...]`` in lane ``l``.

    Attributes:
        shape: of the grid. Where the lanes are, it holds what stands beside them in that
            dimension: 4 in a ``[B * 4, 3]`` of ``B`` lanes.
        flat: the entries in row-major order: tensors of shape ``[B]``, or ``[1]`` where all lanes
            have the same; of shape ``[]`` for a tensor without dimensions, since such a one has
            less to say about the dtype of a result.
        lane: the dimension that the lanes are the outer part of; None where they have none.
    """

    shape: Index
    flat: list[Any]
    lane: int | None

    def __post_init__(self) -> None:
        assert len(self.flat) == math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.flat[0].dtype
        return dtype

    def map(self, fn: Callable[[Any], Any]) -> Entries:
        return Entries(self.shape, [fn(v) for v in self.flat], self.lane)

    def like(self, flat: Iterable[Any]) -> Entries:
        return Entries(self.shape, list(flat), self.lane)

    def rows(self, length: int) -> list[list[Any]]:
        """Return so many entries that follow each other, then so many, and so on."""
        return [self.flat[p : p + length] for p in range(0, len(self.flat), length)]

    def of_rank(self, rank: int) -> Entries:
        """Return the entries of a tensor with so many dimensions: see ``flat``."""
        if rank:
            return self.map(lambda v: v if v.ndim else v.reshape(1))
        return self.map(lambda v: v.reshape(()) if tuple(v.shape) == (1,) else v)

    def padded(self, rank: int) -> Entries:
        """Add dimensions of size 1 in front, as many as are missing."""
        more = rank - len(self.shape)
        lane = None if self.lane is None else self.lane + more
        return Entries((1,) * more + self.shape, self.flat, lane)

    def dim(self, dim: int) -> int:
        """Return ``dim``, counted from the front, for a dimension without lanes."""
        dim = dim % len(self.shape) if self.shape else 0
        if dim == self.lane:
            raise Refusal("work across lanes")
        return dim


def indices(shape: Sequence[int]) -> Iterator[Index]:
    return itertools.product(*map(range, shape))


def broadcast(*operands: Entries) -> list[Entries]:
    """Broadcast the operands' shapes as torch does, from the right."""
    padded = [e.padded(max(len(other.shape) for other in operands)) for e in operands]
    lane = common_lane(padded)
    shape = tuple(map(max, zip(*(e.shape for e in padded), strict=True)))
    return [expanded(e, shape, lane) for e in padded]


def common_lane(operands: Iterable[Entries]) -> int | None:
    """Return the dimension of the lanes in operands of one rank."""
    lanes = {e.lane for e in operands} - {None}
    if len(lanes) > 1:
        raise Refusal("lanes in two dimensions")
    return next(iter(lanes), None)


def expanded(entries: Entries, shape: Index, lane: int | None) -> Entries:
    """Repeat ``entries`` along dimensions of size 1, to a shape and a place for the lanes.

    A tensor may have as many elements where the lanes are to be as there are lanes, and yet have
    its lanes elsewhere, or none: if there are as many rows as lanes, its shape does not tell.
    """
    own = entries.shape
    repeats = len(own) == len(shape) and all(n in (1, k) for n, k in zip(own, shape, strict=True))
    if entries.lane is None:
        has_place = lane is None or own[lane] == 1
    else:
        has_place = entries.lane == lane and own[lane] == shape[lane]
    if not repeats or not has_place:
        raise Refusal(f"{own} with lanes in {entries.lane}, for {shape} with lanes in {lane}")
    places = [0]
    for n, k in zip(own, shape, strict=True):
        places = [p * n + (i if n > 1 else 0) for p in places for i in range(k)]
    return Entries(shape, [entries.flat[p] for p in places], lane)


class Lanes:
    """The number of lanes, ``size``, or None for a body without a batch."""

    def __init__(self, size: Any) -> None:
        self.size = size

    def begin(self, size: Any) -> bool:
        """Return True if ``size`` is the number of lanes, so that the dimension is theirs."""
        return self.size is not None and are_known_equal(size, self.size)

    def entries_of(self, tensor: torch.Tensor) -> int:
        """Return how many entries a tensor is likely to have in each lane, or in all if it has no
        dimension that may be the lanes'."""
        sizes = list(map(likely_value, tensor.shape))
        n_lanes = 1 if self.size is None else max(likely_value(self.size), 1)
        has_lanes = any(size % n_lanes == 0 for size in sizes)
        return math.prod(sizes) // (n_lanes if has_lanes else 1)

    def shape_of(self, entries: Entries) -> list[Any]:
        """Return the shape of the tensor that has these entries."""
        return [n * self.size if d == entries.lane else n for d, n in enumerate(entries.shape)]

    def grid_of(self, shape: Sequence[Any], lane: int | None) -> Index:
        """Return the shape of the entries of a tensor of ``shape``."""
        grid = [1 if d == lane else n for d, n in enumerate(shape)]
        if not all(type(n) is int for n in grid):
            raise Refusal("a size that is not known")
        return tuple(grid)

    def reshaped(self, entries: Entries, shape: Sequence[Any]) -> Entries:
        """Reshape to a shape in which the lanes are the outer part of a dimension, too."""
        if entries.lane is None:
            return Entries(self.grid_of(shape, None), entries.flat, None)
        before = math.prod(entries.shape[: entries.lane])
        beside = math.prod(entries.shape) // max(before, 1)
        for lane in range(len(shape)):
            rest = shape[lane + 1 :]
            fixed = [*shape[:lane], *rest]
            if not all(type(n) is int for n in fixed):
                continue
            inner, left = divmod(beside, max(math.prod(rest), 1))
            if math.prod(shape[:lane]) == before and not left:
                if are_known_equal(shape[lane], inner * self.size):
                    return Entries((*shape[:lane], inner, *rest), entries.flat, lane)
        raise Refusal("lanes that are no longer the outer part of a dimension")
