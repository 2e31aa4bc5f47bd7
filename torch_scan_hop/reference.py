"""The Python loop that defines what :func:`torch_scan_hop.scan` means.

It is the tests' oracle, and what eager execution falls back to for a body that cannot be
traced (print, pdb, data-dependent ``if``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.progress_bar import steps as progressing
from torch_scan_hop.step import CombineFn, as_carry, device_of, split_result, stacked, step


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


def _first_step(
    combine_fn: CombineFn, init: Any, carry: Any, x: Any, device: torch.device
) -> tuple[list[torch.Tensor], Any]:
    """A step from Python numbers, as the plain loop takes it; the results say their dtypes."""

    def start(number: Callable[[Any], Any]) -> Any:
        pairs = zip(tree.tensors(init), tree.tensors(carry), strict=True)
        leaves = [number(i) if isinstance(i, tree.NUMBERS) else c.clone() for i, c in pairs]
        return tree.unflatten(init, leaves)

    try:
        return step(combine_fn, start(lambda number: number), x, init, device)
    except (TypeError, AttributeError):  # an operator or method that takes no number
        default = start(lambda number: tree.number_tensor(number, device))
        return step(combine_fn, default, x, init, device)


def _with_exact_ys(combine_fn: CombineFn, device: torch.device) -> CombineFn:
    """A y that is a number keeps its digits until the later steps say what dtype it has."""

    def exact(leaf: Any) -> Any:
        return tree.exact_tensor(leaf, device) if isinstance(leaf, tree.NUMBERS) else leaf

    def run(carry: Any, x: Any) -> tuple[Any, Any]:
        next_carry, y = split_result(combine_fn(carry, x))
        return next_carry, tree.map_leaves(exact, y)

    return run


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
    has_numbers = any(isinstance(leaf, tree.NUMBERS) for leaf in tree.leaves(init))
    order = range(trip_count - 1, -1, -1) if reverse else range(trip_count)
    steps: list[list[torch.Tensor]] = [[] for _ in range(trip_count)]
    y: Any = None
    for t in progressing(order):
        x = tree.slice_at(xs, t)
        if has_numbers and t == order[0]:
            first = _with_exact_ys(combine_fn, device) if trip_count > 1 else combine_fn
            leaves, y = _first_step(first, init, carry, x, device)
        else:
            leaves, y = step(combine_fn, carry, x, init, device)
        # copied, so that a later in-place change of the carry cannot reach an earlier y
        steps[t] = [leaf.clone() for leaf in tree.tensors(y)]
        # cloned: a body may return a tensor it closes over or the same tensor twice, and
        # neither is the next step's, or the caller's, to change
        carry = tree.unflatten(init, [leaf.clone() for leaf in leaves])
    if has_numbers:
        # a y that is a Python number of init, returned as it is, gets the dtype that this carry has
        # from the second step on
        last = steps[order[-1]]
        steps[order[0]] = [
            leaf.to(like.dtype) for leaf, like in zip(steps[order[0]], last, strict=True)
        ]
    return carry, stacked(y, steps)
