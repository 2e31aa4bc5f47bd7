"""The range of another value that a node reads or writes: by ``select``, ``slice``, ``split``."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import argument, is_tensor_node

aten = torch.ops.aten

SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
WRITES = {aten.select_scatter.default, aten.slice_scatter.default}

Range = tuple[int, int]


def ends_of_reads(carry: fx.Node, dim: int) -> set[int]:
    """Return where reads of the carry, or of a pointwise value of it, begin and end."""
    shape, ends = value_of(carry).shape, set[int]()
    alike = [carry]
    for node in alike:  # grows
        for user in node.users:
            found = range_read_by(user)
            if user.target in SPLITS:
                ends |= {end for element in user.users for end in _ends_in(element, dim, shape)}
            elif found is not None:
                ends |= _ends_in(user, dim, shape)
            elif is_tensor_node(user) and value_of(user).shape == shape and user not in alike:
                alike.append(user)
    return ends


def _ends_in(node: fx.Node, dim: int, shape: Any) -> set[int]:
    found = range_read_by(node)
    return {*found[1]} if found is not None and found[0] % len(shape) == dim else set()


def range_read_by(node: Any) -> tuple[int, Range, bool] | None:
    """Return the dimension and the range that ``node`` reads of another; and if it drops it."""
    if node.target in (aten.select.int, aten.slice.Tensor):
        return range_of(node, 1)
    base = node.args[0] if node.target is operator.getitem else None
    if not isinstance(base, fx.Node) or base.target not in SPLITS:
        return None
    is_element = base.target is aten.unbind.int
    dim = argument(base, 1 if is_element else 2, "dim", 0)
    lengths = [1 if is_element else piece.shape[dim] for piece in value_of(base)]
    if not all(isinstance(n, int) for n in lengths):
        return None
    first = sum(lengths[: node.args[1]])
    return dim, (first, first + lengths[node.args[1]]), is_element


def range_of(node: Any, place: int) -> tuple[int, Range, bool] | None:
    """Return the range of a ``select`` or a ``slice``, or of a write to one.

    ``place``: of the dimension among the arguments.
    """
    dim, first = argument(node, place, "dim", 0), argument(node, place + 1, "start", None)
    is_element = node.target in (aten.select.int, aten.select_scatter.default)
    size = value_of(node.args[0]).shape[dim]
    end = first if is_element else argument(node, place + 2, "end", None)
    step = 1 if is_element else argument(node, place + 3, "step", 1)
    if step != 1 or not all(isinstance(n, (int, type(None))) for n in (first, end, size)):
        return None
    if is_element:
        return dim, (first % size, first % size + 1), True
    start, stop, _ = slice(first, end).indices(size)
    return dim, (start, max(start, stop)), False


def base_of(node: Any) -> Any:
    base = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(base, fx.Node) and base.target in SPLITS:
        return base.args[0]
    return base


def ends_of_writes(value: Any, dim: int) -> set[int]:
    """Return where what ``value`` is put together from begins and ends."""
    if not is_tensor_node(value):
        return set()
    shape, ends, alike = value_of(value).shape, set[int](), [value]
    for node in alike:  # grows
        found = range_of(node, 2) if node.target in WRITES else None
        if found is not None and found[0] % len(shape) == dim:
            ends |= {*found[1]}
        pieces = pieces_along(node, dim - len(shape))
        ends |= {*itertools.accumulate(n for _, n in pieces or ())}
        if node.target is aten.add.Tensor or node.target in WRITES:
            same = (n for n in node.all_input_nodes if is_tensor_node(n) and n not in alike)
            alike += [n for n in same if value_of(n).shape == shape]
    return ends


def pieces_along(node: Any, dim: int) -> list[tuple[fx.Node, int]] | None:
    """Return what ``node`` is put together from along ``dim``, which is negative, and how long
    each is; Inductor writes a stack as ``cat([h, c]).view(2, ...)``."""
    joined: Any = node.args[0] if node.target in (aten.view.default, aten.reshape.default) else node
    if joined.target is not aten.cat.default:
        return None
    pieces: Any = joined.args[0]
    sizes = [value_of(n).shape for n in pieces]
    if joined is node:
        own = argument(node, 1, "dim", 0) % len(sizes[0]) - len(sizes[0])
        return (
            [(n, size[dim]) for n, size in zip(pieces, sizes, strict=True)] if own == dim else None
        )
    at = value_of(node).dim() + dim
    whole = (*sizes[0][:at], len(pieces), *sizes[0][at:])
    is_stack = argument(joined, 1, "dim", 0) % len(sizes[0]) == at
    are_alike = all(size == sizes[0] for size in sizes) and tuple(value_of(node).shape) == whole
    return [(n, 1) for n in pieces] if is_stack and are_alike else None
