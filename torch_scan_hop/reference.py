"""The Python loop that defines what :func:`torch_scan_hop.scan` means.

It is the tests' oracle, and what eager execution falls back to for a body that cannot be
traced (print, pdb, data-dependent ``if``).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.capabilities import why_off
from torch_scan_hop._torch.references import pass_hooks_on
from torch_scan_hop.errors import ScanTypeError, ScanValueError
from torch_scan_hop.progress_bar import steps as progressing
from torch_scan_hop.step import (
    CombineFn,
    Settling,
    as_carry,
    as_tensors,
    device_of,
    order_of_steps,
    outputs_of,
    split_result,
    stacked,
    stacked_dtype,
)


def _results_of_no_step(
    combine_fn: CombineFn, init: Any, xs: Any, device: torch.device
) -> tuple[Any, Any]:
    """Return the results for a trip count of zero; a step on zeros tells the shapes and dtypes, and
    changes nothing."""
    carry = tree.map_leaves(lambda leaf: as_carry(leaf, device).clone(), init)
    after, y = _one_step(combine_fn, carry, xs)
    with torch.no_grad():
        y = outputs_of(y, device)
        try:
            dtypes = [leaf.dtype for leaf in tree.match_carry(init, after, device)]
        except (ScanTypeError, ScanValueError) as error:
            Settling().accept(error, after)  # the first step would have changed it
            dtypes = [leaf.dtype for leaf in tree.tensors(as_tensors(init, device))]
    leaves = zip(tree.tensors(carry), dtypes, strict=True)
    carry = tree.unflatten(carry, [leaf.to(dtype) for leaf, dtype in leaves])
    return carry, tree.map_leaves(lambda leaf: leaf.new_empty((0, *leaf.shape)), y)


def _one_step(combine_fn: CombineFn, carry: Any, xs: Any, gradients: bool = False) -> Any:
    """Run a step on zeros: without a history, unless it asks for ``gradients`` itself."""

    def like(leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if gradients and leaf.requires_grad:
            value.requires_grad_()
        return value.clone()  # no leaf, which a step could not write to

    first = tree.map_leaves(lambda leaf: like(leaf, leaf.detach()), carry)
    x = tree.map_leaves(lambda leaf: like(leaf, leaf.detach().new_zeros(leaf.shape[1:])), xs)
    try:
        with _changes_put_back(combine_fn), torch.set_grad_enabled(gradients):
            return split_result(combine_fn(first, x))
    except RuntimeError as error:
        is_about_gradients = "does not require grad" in str(error)
        if gradients or not (is_about_gradients and torch.is_grad_enabled()):
            raise
    return _one_step(combine_fn, carry, xs, gradients=True)


def _changes_put_back(combine_fn: CombineFn) -> contextlib.AbstractContextManager[None]:
    if why_off("operator"):  # :mod:`plain` is all there is, and needs no private name of torch
        return contextlib.nullcontext()
    from torch_scan_hop.capture.undone import changes_are_put_back

    return changes_are_put_back(combine_fn)


def _call(
    combine_fn: CombineFn, carry: Any, x: Any, device: torch.device, settling: Settling
) -> tuple[Any, Any]:
    """Run a step on a carry that may hold Python numbers, as in a plain loop."""
    if has_numbers_in(carry):
        try:
            return split_result(settling.call(combine_fn, carry, x))
        except (TypeError, AttributeError):  # an operator or method that takes no number
            carry = as_tensors(carry, device)
    return split_result(settling.call(combine_fn, carry, x))


def has_numbers_in(carry: Any) -> bool:
    return any(isinstance(leaf, tree.NUMBERS) for leaf in tree.leaves(carry))


def _after_step(before: Any, after: Any, device: torch.device, settling: Settling) -> Any:
    """Check the carry after a step; a number, or None, that a step makes a number stays one."""
    try:
        leaves = tree.match_carry(before, after, device, keep_numbers=True)
    except (ScanTypeError, ScanValueError) as error:
        settling.accept(error, after)
        return after
    return tree.unflatten(before, leaves)


def tensors_in(carry: Any) -> dict[int, torch.Tensor]:
    leaves = enumerate(tree.tensors(carry))
    return {k: leaf for k, leaf in leaves if isinstance(leaf, torch.Tensor)}


def scan_loop(
    combine_fn: CombineFn, init: Any, xs: Any, trip_count: int, reverse: bool
) -> tuple[Any, Any]:
    """Run ``scan`` over the leading dimension of ``xs`` as a Python loop.

    ``init`` holds tensors, numbers or None; ``xs`` tensors with a leading dimension
    ``trip_count``.
    """
    device = device_of(init, xs)
    if trip_count == 0:
        return _results_of_no_step(combine_fn, init, xs, device)

    order = order_of_steps(trip_count, reverse)
    return run_steps(combine_fn, init, xs, order, [[] for _ in order], Settling(), device)


def run_steps(
    combine_fn: CombineFn,
    start: Any,
    xs: Any,
    order: range,
    steps: list[list[torch.Tensor]],
    settling: Settling,
    device: torch.device,
    y: Any = None,
) -> tuple[Any, Any]:
    """Run the steps in ``order`` from ``start`` on, all or what is left; ``steps`` gets their ys.

    Of a step that came before, ``y`` is that.
    """

    def own(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    def exact(leaf: Any) -> Any:
        return tree.exact_tensor(leaf, device) if isinstance(leaf, tree.NUMBERS) else leaf

    # a body may work in place on its carry; the caller's init is not its to change
    originals, carry = tensors_in(start), tree.map_leaves(own, start)
    has_numbers = has_numbers_in(start)
    for t in progressing(order):
        after, y = _call(combine_fn, carry, tree.slice_at(xs, t), device, settling)
        pass_hooks_on(tree.tensors(carry), originals)
        if has_numbers and t != order[-1]:
            # a y that is a number keeps its digits until the last step says what dtype it has
            y = tree.map_leaves(exact, y)
        y = outputs_of(y, device)
        # copied, so that a later in-place change of the carry cannot reach an earlier y
        steps[t] = [leaf.clone() for leaf in tree.tensors(y)]
        # cloned: a body may return a tensor it closes over or the same tensor twice, and
        # neither is the next step's, or the caller's, to change
        after = _after_step(carry, after, device, settling)
        originals, carry = tensors_in(after), tree.map_leaves(own, after)
        has_numbers = has_numbers or has_numbers_in(carry)
    if has_numbers and order:
        _give_dtypes(steps, order)
    return as_tensors(carry, device), stacked(y, steps)


def _give_dtypes(steps: list[list[torch.Tensor]], order: range) -> None:
    """Give ys that are numbers at first the dtypes of the last step's, if those hold them."""
    dtypes = [leaf.dtype for leaf in steps[order[-1]]]
    for leaves in steps:
        pairs = zip(leaves, dtypes, strict=True)
        dtypes = [stacked_dtype(leaf.dtype, dtype) for leaf, dtype in pairs]
    for t in range(len(steps)):
        steps[t] = [v.to(dtype) for v, dtype in zip(steps[t], dtypes, strict=True)]
