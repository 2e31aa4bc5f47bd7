"""The Python loop that defines what :func:`torch_scan_hop.scan` means.

It is the tests' oracle, and what eager execution falls back to for a body that cannot be
traced (print, pdb, data-dependent ``if``).
"""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.step import CombineFn, step


def _empty_ys(combine_fn: CombineFn, init: Any, xs: Any, device: torch.device) -> Any:
    """The y of one step on zeros, as stacks of length 0: a trip count of zero runs no body."""
    with torch.no_grad():
        carry = tree.map_leaves(lambda leaf: leaf.detach().clone(), init)
        x = tree.map_leaves(lambda leaf: leaf.new_zeros(leaf.shape[1:]), xs)
        _, y = step(combine_fn, carry, x, device)
    return tree.map_leaves(lambda leaf: leaf.new_empty((0, *leaf.shape)), y)


def scan_loop(
    combine_fn: CombineFn, init: Any, xs: Any, trip_count: int, reverse: bool
) -> tuple[Any, Any]:
    """``scan`` over the leading dimension of ``xs`` as a Python loop.

    ``init`` holds tensors or None; ``xs`` tensors with a leading dimension ``trip_count``.
    """
    first = (tree.tensors(init) + tree.tensors(xs) + [None])[0]
    device = torch.device("cpu") if first is None else first.device
    if trip_count == 0:
        ys = _empty_ys(combine_fn, init, xs, device)
        return tree.map_leaves(torch.clone, init), ys
    order = range(trip_count - 1, -1, -1) if reverse else range(trip_count)
    # a body may work in place on its carry; the caller's init is not its to change
    carry = tree.map_leaves(torch.clone, init)
    steps: list[list[torch.Tensor]] = [[] for _ in range(trip_count)]
    y: Any = None
    for t in order:
        x = tree.map_leaves(lambda leaf, t=t: leaf[t].clone(), xs)
        leaves, y = step(combine_fn, carry, x, device)
        carry = tree.unflatten(init, leaves)
        # copied, so that a later in-place change of the carry cannot reach an earlier y
        steps[t] = [leaf.clone() for leaf in tree.tensors(y)]
    ys = tree.unflatten(y, [torch.stack(leaf) for leaf in zip(*steps, strict=True)])
    # cloned: a body may return a tensor it closes over, and results never alias inputs
    return tree.map_leaves(torch.clone, carry), ys
