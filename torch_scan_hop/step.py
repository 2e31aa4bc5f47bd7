"""One step of a scan on flat tensors, checked; shared by the loop and by the traced body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe, device_mismatch

CombineFn = Callable[[Any, Any], tuple[Any, Any]]


def device_of(init: Any, xs: Any) -> torch.device:
    """Where numbers that a step returns become tensors."""
    for leaf in (*tree.tensors(init), *tree.tensors(xs)):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    # torch.get_default_device(), which Dynamo cannot trace
    return torch.empty(()).device


def as_carry(leaf: Any, device: torch.device) -> torch.Tensor:
    """A number as a scalar with all its digits; the step will say what dtype it has."""
    return leaf if isinstance(leaf, torch.Tensor) else tree.exact_tensor(leaf, device)


def check_device(path: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Of the carry at ``path``, given to the operator itself, where it is after a step.

    A scalar on the CPU may be a Python number of init's, which is on no device of its own.
    """
    is_number = before.dim() == 0 and before.device.type == "cpu"
    if before.device != after.device and not is_number:
        raise ScanValueError(device_mismatch(path, before.device, after.device))


def empty_stack(y: Any, trip_count: Any) -> torch.Tensor:
    """Where the ys of all steps go, of which ``y`` is one."""
    return torch.empty((trip_count, *y.shape), dtype=y.dtype, device=y.device)


def stacked(y: Any, steps: Sequence[Sequence[torch.Tensor]]) -> Any:
    """The leaves of all steps, in the order of xs, as a pytree like ``y``, one step's."""
    try:
        return tree.unflatten(y, [torch.stack(leaf) for leaf in zip(*steps, strict=True)])
    except (RuntimeError, ValueError):
        _check_same_ys(y, steps)
        raise


def _check_same_ys(y: Any, steps: Sequence[Sequence[torch.Tensor]]) -> None:
    fix = "It is stacked: return the same structure and shapes at every step."
    for t, leaves in enumerate(steps):
        if len(leaves) != len(steps[0]):
            raise ScanTypeError(
                f"scan: y must be the same at every step, but has {len(steps[0])} leaves at step 0 "
                f"and {len(leaves)} at step {t}. {fix}"
            )
        pairs = zip(tree.leaves_with_paths(y, "y"), steps[0], leaves, strict=False)
        for (path, _), first, leaf in pairs:
            if first.shape != leaf.shape:
                raise ScanValueError(
                    f"scan: {path} must be the same at every step, but is {describe(first)} at "
                    f"step 0 and {describe(leaf)} at step {t}. {fix}"
                )


def split_result(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        got = (
            f"a {type(result).__name__} of length {len(result)}"
            if isinstance(result, (tuple, list))
            else describe(result)
        )
        raise refused(
            ScanTypeError,
            f"scan: combine_fn must return a pair (carry, y), but it returned {got}. "
            "Return (carry, None) if there is nothing to stack.",
        )
    return result[0], result[1]


def as_output_tensor(leaf: Any, device: torch.device, y: Any) -> torch.Tensor:
    """A leaf of ``y`` as a tensor."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, tree.NUMBERS):
        return tree.number_tensor(leaf, device)
    path = next(path for path, other in tree.leaves_with_paths(y, "y") if other is leaf)
    raise refused(
        ScanTypeError,
        f"scan: {path} that combine_fn returns must be a tensor, a number or None, but is "
        f"{describe(leaf)}. Return it outside the scan, or convert it to a tensor.",
    )


def step(
    combine_fn: CombineFn, carry: Any, x: Any, init: Any, device: torch.device
) -> tuple[list[torch.Tensor], Any]:
    """``combine_fn(carry, x)`` as (leaves of its carry in the order of ``init``, y pytree).

    ``init`` says what the carry must be; where it holds a number, any dtype will do.
    """
    next_carry, y = split_result(combine_fn(carry, x))
    outputs = tree.map_leaves(lambda leaf: as_output_tensor(leaf, device, y), y)
    return tree.match_carry(init, next_carry, device), outputs
