"""What a scan must compute: a plain Python loop, with nothing of the package but its pytrees."""

from __future__ import annotations

from typing import Any

import torch
from oracle import reference_steps, with_signature_of_scan
from torch import Tensor

from torch_scan_hop import tree


def _steps(combine_fn: Any, init: Any, xs: Any, trip_count: int, reverse: bool) -> tuple[Any, Any]:
    """A number in init is a Python number in the first step, as in any loop.

    The tests' own oracle knows what comes of no step at all, but not the dtype of a number then.
    """
    if trip_count == 0:
        if any(isinstance(leaf, tree.NUMBERS) for leaf in tree.leaves(init)):
            raise ValueError("no step says what dtype a number has")
        return reference_steps(combine_fn, init, xs, trip_count, reverse)
    carry = tree.map_leaves(lambda v: v.clone() if isinstance(v, Tensor) else v, init)
    rows: list[list[Tensor]] = [[] for _ in range(trip_count)]
    y: Any = None
    template = init
    for t in reversed(range(trip_count)) if reverse else range(trip_count):
        carry, y = combine_fn(carry, tree.map_leaves(lambda x, t=t: x[t].clone(), xs))
        if template is init and _grows(init, carry):
            template = carry
        carry = tree.unflatten(template, _as_tensors(template, carry))
        rows[t] = [v.clone() if isinstance(v, Tensor) else torch.tensor(v) for v in tree.tensors(y)]
    # a y that is the number itself has the dtype of the later steps
    dtypes = [leaf.dtype for leaf in rows[0 if reverse else -1]]
    columns = zip(zip(*rows, strict=True), dtypes, strict=True)
    stacks = [torch.stack([v.to(dtype) for v in column]) for column, dtype in columns]
    return tree.map_leaves(torch.as_tensor, carry), tree.unflatten(y, stacks)


loop = with_signature_of_scan(_steps)


def _grows(init: Any, carry: Any) -> bool:
    """Whether the first step makes a tensor of None, or of a number one with dimensions."""
    pairs = zip(tree.leaves(init), tree.leaves(carry), strict=True)
    return any(
        isinstance(after, Tensor)
        and (before is None or (isinstance(before, tree.NUMBERS) and after.dim() > 0))
        for before, after in pairs
    )


def _as_tensors(init: Any, carry: Any) -> list[Any]:
    """What a step returns, as tensors of their own; a number in the dtype of its leaf of init."""
    found = []
    for first, value in zip(tree.tensors(init), tree.tensors(carry), strict=True):
        dtype = first.dtype if isinstance(first, Tensor) else None
        if type(first) is int and type(value) is int:  # which steps may branch on
            found.append(value)
            continue
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=dtype)
        shape = first.shape if isinstance(first, Tensor) else ()
        if value.shape != shape or (dtype is not None and value.dtype != dtype):
            raise ValueError("the carry is not what init is")
        found.append(value.clone())
    return found
