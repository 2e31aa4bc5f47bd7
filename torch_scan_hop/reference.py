"""The Python loop that defines what :func:`torch_scan_hop.scan` means.

It is the tests' oracle, and what eager execution falls back to for a body that cannot be
traced (print, pdb, data-dependent ``if``).
"""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.step import CombineFn, as_carry, device_of, step


def _results_of_no_step(
    combine_fn: CombineFn, init: Any, carry: Any, xs: Any, device: torch.device
) -> tuple[Any, Any]:
    """A trip count of zero runs no body; one step on zeros tells the shapes and dtypes."""
    with torch.no_grad():
        probe = tree.map_leaves(lambda leaf: leaf.detach().clone(), carry)
        x = tree.map_leaves(lambda leaf: leaf.new_zeros(leaf.shape[1:]), xs)
        after, y = step(combine_fn, probe, x, init, device)
    dtypes = [leaf.dtype for leaf in after]
    leaves = zip(tree.tensors(carry), dtypes, strict=True)
    carry = tree.unflatten(carry, [leaf.to(dtype) for leaf, dtype in leaves])
    return carry, tree.map_leaves(lambda leaf: leaf.new_empty((0, *leaf.shape)), y)


def scan_loop(
    combine_fn: CombineFn, init: Any, xs: Any, trip_count: int, reverse: bool
) -> tuple[Any, Any]:
    """``scan`` over the leading dimension of ``xs`` as a Python loop.

    ``init`` holds tensors, numbers or None; ``xs`` tensors with a leading dimension
    ``trip_count``.
    """
    device = device_of(init, xs)
    # a body may work in place on its carry; the caller's init is not its to change
    carry = tree.map_leaves(lambda leaf: as_carry(leaf, device).clone(), init)
    if trip_count == 0:
        return _results_of_no_step(combine_fn, init, carry, xs, device)
    order = range(trip_count - 1, -1, -1) if reverse else range(trip_count)
    steps: list[list[torch.Tensor]] = [[] for _ in range(trip_count)]
    y: Any = None
    for t in order:
        x = tree.slice_at(xs, t)
        leaves, y = step(combine_fn, carry, x, init, device)
        # copied, so that a later in-place change of the carry cannot reach an earlier y
        steps[t] = [leaf.clone() for leaf in tree.tensors(y)]
        # cloned: a body may return a tensor it closes over or the same tensor twice, and
        # neither is the next step's, or the caller's, to change
        carry = tree.unflatten(init, [leaf.clone() for leaf in leaves])
    return carry, tree.unflatten(y, [torch.stack(leaf) for leaf in zip(*steps, strict=True)])
