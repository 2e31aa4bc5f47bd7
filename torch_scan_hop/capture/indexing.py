"""Index a tensor by 0-d integer tensors without asking for their values.

``table[t]``, ``K[:, :, t] = k`` and ``x.narrow(0, t, 2)`` are views at an offset that Python has to
know. The functions here do the same by one gather or scatter::

    x[:, t]      = index(x, [None, t])
    x[:, t] = v  = index_put_(x, [None, t], v)
    x[t : t + k] = index(x, [t + arange(k)])

A 0-d integer tensor in a key *selects*, as an int does: its dimension is removed before the key's
index tensors and masks are applied. So a key is applied in two steps: first its 0-d tensors
(:class:`Place`), then the rest, as PyTorch does it. uint8 and bool tensors are masks in a key, and
are never read here.

These functions ask tensors for their rank and dtype alone, not for their sizes, because graphs are
written with them, too (:mod:`torch_scan_hop.capture.index_nodes`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

ALL = slice(None)
_MASKS = (torch.bool, torch.uint8)


class TensorProxy(fx.Proxy):
    """A tensor in a graph that is being written, with the rank and dtype of an example."""

    def __init__(self, node: fx.Node, example: torch.Tensor, tracer: Any = None) -> None:
        super().__init__(node, tracer)
        self.rank, self.dtype = example.dim(), example.dtype

    def dim(self) -> int:
        return self.rank


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, TensorProxy))


def is_position(value: Any) -> bool:
    """Return True if ``value`` in a key selects one position that only the device knows.

    >>> [is_position(torch.tensor(v)) for v in (2, True, 2.0, [2])]
    [True, False, False, False]
    """
    if not is_tensor(value) or value.dim() != 0 or value.dtype in _MASKS:
        return False
    return not (value.dtype.is_floating_point or value.dtype.is_complex)


def is_window(value: Any) -> bool:
    """Return True if ``value`` in a key is a slice with a bound that only the device knows."""
    return isinstance(value, slice) and any(is_tensor(b) for b in (value.start, value.stop))


def entries_of(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def select_key(rank: int, dim: int, index: Any) -> tuple[Any, ...]:
    """Return the key of ``x.select(dim, index)``."""
    return (*[ALL] * _from_front(rank, dim), index)


def narrow_key(rank: int, dim: int, start: Any) -> tuple[Any, ...]:
    """Return the key of ``x.narrow(dim, start, length)``: a window with a length and no stop."""
    return (*[ALL] * _from_front(rank, dim), slice(start, None))


def _from_front(rank: int, dim: int) -> int:
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got "
            f"{dim})"
        )
    return dim % rank


class Place(NamedTuple):
    """The place that the 0-d tensors of a key point to: ``x[key]`` is ``(x at place)[rest]``."""

    positions: dict[int, Any]
    """For each dimension that goes: where in it."""
    windows: dict[int, tuple[slice, int]]
    """For each dimension of which a window remains: its slice, and its length."""
    rest: tuple[Any, ...]

    def is_whole(self) -> bool:
        """Return True if the rest of the key takes all that is at the place."""
        return all(entry is Ellipsis or _is_all(entry) for entry in self.rest)

    def makes_copy(self) -> bool:
        """Return True if ``x[key]`` is a copy in eager PyTorch, too; else it is a view of ``x``."""
        return any(is_tensor(e) or isinstance(e, (bool, list, tuple)) for e in self.rest)


def _is_all(entry: Any) -> bool:
    if not isinstance(entry, slice):
        return False
    return entry.start is None and entry.stop is None and entry.step is None


def place_of(rank: int, key: Any, lengths: Sequence[int] = ()) -> Place:
    """Divide a key of a tensor with ``rank`` dimensions; ``lengths`` are its windows'.

    >>> t = torch.tensor(2)
    >>> place_of(3, (..., t, slice(None, 4)))
    Place(positions={1: tensor(2)}, windows={}, rest=(Ellipsis, slice(None, 4, None)))
    """
    entries = entries_of(key)
    taken = sum(_dims_of(entry) for entry in entries)
    if taken > rank:
        raise IndexError(f"too many indices for tensor of dimension {rank}")
    place = Place({}, {}, ())
    rest, left, dim = [], list(lengths), 0
    for entry in entries:
        if is_position(entry):
            place.positions[dim] = entry
        elif is_window(entry):
            place.windows[dim] = (entry, left.pop(0))
            rest.append(slice(None, None, entry.step))
        else:
            rest.append(entry)
        dim += rank - taken if entry is Ellipsis else _dims_of(entry)
    return place._replace(rest=tuple(rest))


def _dims_of(entry: Any) -> int:
    """Return how many dimensions of the tensor an entry of its key is about."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if is_tensor(entry) and entry.dtype in _MASKS:
        return entry.dim()
    if isinstance(entry, (list, tuple)):
        return 1 if any(map(is_tensor, entry)) else _dims_of(torch.tensor(entry))
    return 1


def getitem(x: Any, key: Any, lengths: Sequence[int] = ()) -> Any:
    """Return ``x[key]`` as a gather; ``lengths`` are those of slices with tensors as bounds.

    >>> x, t = torch.arange(12).view(3, 4), torch.tensor(-1)
    >>> getitem(x, (slice(1, None), t))
    tensor([ 7, 11])
    >>> getitem(x, (0, slice(t - 2, t)), [2])
    tensor([1, 2])
    """
    place = place_of(x.dim(), key, lengths)
    found = _read(x, place)
    return found if place.is_whole() else found[place.rest]


def setitem(x: Any, key: Any, value: Any, lengths: Sequence[int] = ()) -> None:
    """Write ``x[key] = value`` as a scatter; a functional graph may say ``x[t] = x[0]``.

    >>> x, t = torch.zeros(2, 3), torch.tensor(2)
    >>> setitem(x, (..., t), torch.tensor([1, 2]))
    >>> x
    tensor([[0., 0., 1.],
            [0., 0., 2.]])
    """
    place = place_of(x.dim(), key, lengths)
    if place.is_whole() and not place.windows:
        value = _like_target(x, value, x.dim() - len(place.positions))
        torch.ops.aten.index_put_.default(x, _indices(x, place), value)
        return
    # read, change, write back: a few elements more, for all that a key may hold
    found = _read(x, place)
    _assign(found, place.rest, value)
    _write(x, place, found)


def index_select(x: Any, dim: int, index: Any) -> Any:
    """Do ``x.index_select(dim, index)`` by an index of length 1, if ``index`` is 0-d.

    Inductor cannot differentiate the former (torch 2.9 and 2.13).
    """
    return x.index_select(dim, index.reshape(1))


def _assign(x: Any, key: tuple[Any, ...], value: Any) -> None:
    if isinstance(x, fx.Proxy):
        x.tracer.create_proxy("call_function", operator.setitem, (x, key, value), {})
    else:
        x[key] = value


def _like_target(x: Any, value: Any, rank: int) -> Any:
    """Convert ``value`` as an assignment does: a number, another dtype, or ones in front."""
    if not is_tensor(value):
        return x.new_full((), value)
    for _ in range(value.dim() - rank):
        value = value.squeeze(0)
    return value.to(x)


def _indices(x: Any, place: Place) -> list[Any]:
    last = max(place.positions)
    indices = [place.positions.get(dim) for dim in range(last + 1)]
    return [None if t is None else t.to(torch.int64) for t in indices]


def _read(x: Any, place: Place) -> Any:
    if not place.windows:
        return torch.ops.aten.index.Tensor(x, _indices(x, place))
    moved = _movedim(x, _in_front(place), None)
    found = torch.ops.aten.index.Tensor(moved, _indices_in_front(x, place))
    return _movedim(found, None, _windows_of_result(place))


def _write(x: Any, place: Place, value: Any) -> None:
    if not place.windows:
        torch.ops.aten.index_put_.default(x, _indices(x, place), value)
        return
    moved = _movedim(x, _in_front(place), None)
    value = _movedim(value, _windows_of_result(place), None)
    torch.ops.aten.index_put_.default(moved, _indices_in_front(x, place), value)


# With windows, dimensions move to the front, where those of the result of `index` stand, too:
#
#     x                 [a, P, b, W]      P: positions, W: windows
#     moved             [P, W, a, b]
#     index(moved)      [k, a, b]         k: the window's length
#     result            [a, b, k]


def _in_front(place: Place) -> list[int]:
    return [*place.positions, *place.windows]


def _windows_of_result(place: Place) -> list[int]:
    return [dim - sum(p < dim for p in place.positions) for dim in place.windows]


def _movedim(x: Any, source: list[int] | None, destination: list[int] | None) -> Any:
    """Move dimensions, where None stands for those in front."""
    dims = list(range(len(source or destination or ())))
    source, destination = source or dims, destination or dims
    return x if source == destination else x.movedim(source, destination)


def _indices_in_front(x: Any, place: Place) -> list[Any]:
    positions = [t.to(torch.int64) for t in place.positions.values()]
    windows = []
    for k, (dim, (window, length)) in enumerate(place.windows.items()):
        shape = [1] * len(place.windows)
        shape[k] = length
        windows.append(_window(x, dim, window, length).reshape(shape))
    return [*positions, *windows]


def _window(x: Any, dim: int, window: slice, length: int) -> Any:
    """Return the positions in a window; if it does not lie inside ``x`` they are out of range.

    A slice that PyTorch would make shorter is out of range: here every step has one shape.
    """
    size = x.size(dim)
    start = window.start
    if not is_tensor(start):  # x[2 : t], with a t that is known to be 2 + length
        start = window.stop - length
    start = start.reshape(()).to(torch.int64)
    first = torch.where(start < 0, start + size, start)
    outside = first < 0
    if window.stop is not None and length:
        outside = outside | (start == -length)  # x[-2:0] is empty
    first = torch.where(outside, size, first)
    return first + torch.arange(length, device=x.device)
