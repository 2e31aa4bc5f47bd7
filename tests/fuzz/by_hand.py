"""What a scan must compute: a plain Python loop, with nothing of the package but its pytrees."""

from __future__ import annotations

from typing import Any

import oracle
import torch
from torch import Tensor

from torch_scan_hop import tree


def loop(
    combine_fn: Any,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    **_: Any,
) -> tuple[Any, Any]:
    """``scan``; a number in init is a Python number in the first step, as in any loop.

    The tests' own oracle knows what comes of no step at all, but not the dtype of a number then.
    """
    if length != 0 and all(x.shape[dim] for x in tree.tensors(xs)):
        return _loop(combine_fn, init, xs, length, dim, reverse)
    if any(isinstance(leaf, tree.NUMBERS) for leaf in tree.leaves(init)):
        raise ValueError("no step says what dtype a number has")
    return oracle.loop(combine_fn, init, xs, length, dim=dim, reverse=reverse)


def _loop(
    combine_fn: Any, init: Any, xs: Any, length: int | None, dim: int, reverse: bool
) -> tuple[Any, Any]:
    leaves = tree.tensors(xs)
    xs = tree.map_leaves(lambda leaf: torch.movedim(leaf, dim, 0), xs)
    n: Any = leaves[0].shape[dim] if leaves else length
    carry = tree.map_leaves(lambda v: v.clone() if isinstance(v, Tensor) else v, init)
    steps: list[list[Tensor]] = [[] for _ in range(n)]
    y: Any = None
    for t in reversed(range(n)) if reverse else range(n):
        carry, y = combine_fn(carry, tree.map_leaves(lambda x, t=t: x[t].clone(), xs))
        carry = tree.unflatten(init, _as_tensors(init, carry))
        steps[t] = [
            v.clone() if isinstance(v, Tensor) else torch.tensor(v) for v in tree.tensors(y)
        ]
    # a y that is the number itself has the dtype of the later steps
    dtypes = [leaf.dtype for leaf in steps[0 if reverse else -1]]
    rows = zip(*steps, strict=True)
    stacks = [
        torch.stack([v.to(dtype) for v in row]) for row, dtype in zip(rows, dtypes, strict=True)
    ]
    place = dim if dim >= 0 or not leaves else dim + leaves[0].ndim
    moved = [torch.movedim(s, 0, place) if place < s.ndim else s for s in stacks]
    return carry, tree.unflatten(y, moved)


def _as_tensors(init: Any, carry: Any) -> list[Any]:
    """What a step returns, as tensors of their own; a number in the dtype of its leaf of init."""
    found = []
    for first, value in zip(tree.tensors(init), tree.tensors(carry), strict=True):
        dtype = first.dtype if isinstance(first, Tensor) else None
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=dtype)
        shape = first.shape if isinstance(first, Tensor) else ()
        if value.shape != shape or (dtype is not None and value.dtype != dtype):
            raise ValueError("the carry is not what init is")
        found.append(value.clone())
    return found
