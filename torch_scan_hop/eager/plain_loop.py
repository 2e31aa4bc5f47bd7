"""The loop that a body runs in if it cannot be traced: :mod:`reference`, at the cost of a loop.

A person who writes the loop by hand copies nothing and checks nothing. A scan promises more: a body
may work in place on its carry and on its x, and earlier ys, the caller's tensors and what the body
closes over stay what they are. The reference copies whatever could be shared, at every step. Here a
copy is made only where nothing cheaper keeps the promise:

- What the body returns is copied if it is a view, if its memory is somebody else's, too, or if
  somebody holds it beside its place in the result: a module, a cell of the body, a list of the
  user's, the other half of ``return h, h``. What nobody else holds is nobody else's to write to.
- Once the body has written to its carry, every carry is copied: autograd may have saved it.
- Without autograd, xs are copied on write. With it, they are copied at once: one backward for all.
- The first step gets copies of init, or init itself where Python could tell a copy.
- What a body registers on a copy is a hook of the original, which other uses flow into, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.operators import copy_on_write, has_memory_alone, is_plain_tensor
from torch_scan_hop._torch.references import has_other_holder, pass_hooks_on
from torch_scan_hop._torch.transforms import under_transform
from torch_scan_hop.capture.user_code import asks_for_identity
from torch_scan_hop.errors import ScanTypeError, ScanValueError
from torch_scan_hop.progress_bar import steps as progressing
from torch_scan_hop.reference import has_numbers_in, run_steps, scan_loop
from torch_scan_hop.step import (
    CombineFn,
    Settling,
    as_output_tensor,
    device_of,
    order_of_steps,
    split_result,
    stacked,
)

Leaves = list[torch.Tensor]
#: by position of a leaf that is a copy
Originals = dict[int, torch.Tensor]


def run_loop(
    combine_fn: CombineFn, init: Any, xs: Any, trip_count: int, reverse: bool
) -> tuple[Any, Any]:
    """Do as :func:`reference.scan_loop` at a lower cost; arguments and results are the same."""
    start = tree.tensors(init)
    leaves = [*start, *tree.tensors(xs)]
    if trip_count == 0 or torch.is_inference_mode_enabled() or under_transform():
        return scan_loop(combine_fn, init, xs, trip_count, reverse)
    if not all(map(_is_plain, leaves)):
        return scan_loop(combine_fn, init, xs, trip_count, reverse)
    order = order_of_steps(trip_count, reverse)
    asks = asks_for_identity(combine_fn)
    own = [asks or _is_more_than_data(leaf) for leaf in start]
    kept = [(v, v.clone(), v._version, v.requires_grad) for v in itertools.compress(start, own)]
    copies = {k: leaf for k, leaf in enumerate(start) if not own[k]}
    carry = [leaf.clone() if k in copies else leaf for k, leaf in enumerate(start)]
    try:
        if isinstance(init, torch.Tensor) and isinstance(xs, torch.Tensor):
            return _run_tensors(combine_fn, init, carry, copies, xs, order)
        steps: list[Leaves] = [[] for _ in order]
        return _steps(combine_fn, init, carry, copies, xs, order, steps, Settling(), None)
    finally:
        for leaf, before, version, required_grad in kept:
            if leaf._version != version:
                _put_back(leaf, before, required_grad)


def _is_more_than_data(leaf: torch.Tensor) -> bool:
    """Return True if Python could tell ``leaf`` from a copy, and a body may write to it.

    A copy has no attributes, and another history. But autograd refuses writes to a leaf that
    requires grad, which a body may make to its carry, unless it asks what it is.
    """
    if leaf.requires_grad:
        return not leaf.is_leaf and not leaf._is_view()
    return (type(leaf) is not torch.Tensor or bool(vars(leaf))) and not leaf._is_view()


def _put_back(leaf: torch.Tensor, before: torch.Tensor, required_grad: bool) -> None:
    """Give ``leaf`` of init the value that it had, and the history."""
    with torch.set_grad_enabled(required_grad and not leaf.is_leaf):
        leaf.copy_(before)
    if leaf.requires_grad and not required_grad:
        (leaf if leaf._base is None else leaf._base).detach_()


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and is_plain_tensor(leaf) and not leaf.is_inference()


def _steps(
    combine_fn: CombineFn,
    template: Any,
    carry: Leaves,
    copies: Originals,
    xs: Any,
    order: range,
    steps: list[Leaves],
    settling: Settling,
    y: Any,
) -> tuple[Any, Any]:
    """Run the steps in ``order``, all of a loop or what is left, and append their ys, all like y.

    ``copies`` says which leaves of ``carry`` are copies, and of what. ``settling`` knows which of
    them have changed before.
    """
    device = device_of(template, xs)
    x_at, carry_of = _slices(xs), _builder(template)
    versions = _versions(carry)
    is_written = False
    for t in progressing(order):
        y = None
        following, y = split_result(settling.call(combine_fn, carry_of(carry), x_at(t)))
        pass_hooks_on(carry, copies)
        is_written = is_written or _versions(carry) != versions
        try:
            carry = _carry_leaves(template, following, device)
        except (ScanTypeError, ScanValueError) as error:
            settling.accept(error, following)
            if has_numbers_in(following):
                steps[t], rest = _y_leaves(y, device), order[order.index(t) + 1 :]
                return run_steps(combine_fn, following, xs, rest, steps, settling, device, y)
            template = following
            carry, carry_of = tree.tensors(template), _builder(template)
        steps[t] = [y] if type(y) is torch.Tensor else _y_leaves(y, device)
        if t != order[-1]:
            following = y = None  # they hold what is the body's alone from here on
        _copy_shared(steps[t])
        copies = _copy_shared(carry, is_written)
        versions = _versions(carry)
    return tree.unflatten(template, carry), stacked(y, steps)


def _run_tensors(
    combine_fn: CombineFn,
    init: torch.Tensor,
    carry: Leaves,
    copies: Originals,
    xs: torch.Tensor,
    order: range,
) -> tuple[Any, Any]:
    """Do as :func:`_steps`, for one tensor in init and one in xs: in small cells, calls count."""
    rows, xs_version = _rows(xs), xs._version
    dtype, shape, device = init.dtype, init.shape, init.device
    version, is_written = carry[0]._version, False
    steps: list[Leaves] = [[] for _ in order]
    y: Any = None
    for t in progressing(order):
        y = None
        x = rows[t] if xs._version == xs_version else xs[t].clone()
        following, y = split_result(combine_fn(carry[0], x))
        pass_hooks_on(carry, copies)
        is_written = is_written or carry[0]._version != version
        if (
            type(following) is torch.Tensor
            and following.dtype is dtype
            and following.shape == shape
            and following.device == device
        ):
            carry[0] = following
        else:
            try:
                carry = tree.match_carry(init, following, device)
            except (ScanTypeError, ScanValueError) as error:
                return _go_on(combine_fn, error, (following, y), xs, order, t, steps)
        steps[t] = leaves = [y] if type(y) is torch.Tensor else _y_leaves(y, device)
        if t != order[-1]:
            following = y = None
        _copy_shared(leaves)
        copies = _copy_shared(carry, is_written)
        version = carry[0]._version
    return carry[0], stacked(y, steps)


def _go_on(
    combine_fn: CombineFn,
    error: Exception,
    result: tuple[Any, Any],
    xs: Any,
    order: range,
    t: int,
    steps: list[Leaves],
) -> tuple[Any, Any]:
    """Run the loop after step ``t``, whose ``result`` has another carry, as ``error`` says."""
    template, y = result
    device, settling = device_of(None, xs), Settling()
    settling.accept(error, template)
    steps[t] = _cloned(_y_leaves(y, device))
    start, rest = tree.tensors(template), order[order.index(t) + 1 :]
    copies = dict(enumerate(start))
    return _steps(combine_fn, template, _cloned(start), copies, xs, rest, steps, settling, y)


def _cloned(leaves: Leaves) -> Leaves:
    return [leaf.clone() for leaf in leaves]


# --- who else has it ---


def _is_shared(leaves: Leaves, k: int) -> bool:
    if has_other_holder(leaves, k):
        return True
    leaf = leaves[k]
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
        return True
    # of a tensor that inference mode has made, torch does not count how often it is written to
    if leaf._is_view() or leaf.is_inference():
        return True
    # h.data is no view, and does not require grad; what does is an operator's result
    return not leaf.requires_grad and not has_memory_alone(leaf)


def _copy_shared(leaves: Leaves, all_of_them: bool = False) -> Originals:
    """Copy in ``leaves`` what is shared, or all of them; return of what there are copies now."""
    originals = {}
    for k in range(len(leaves)):
        if all_of_them or _is_shared(leaves, k):
            originals[k] = leaves[k]
            leaves[k] = leaves[k].clone()
    return originals


def _versions(leaves: Leaves) -> list[int]:
    """Return how often each was written to."""
    return [leaf._version for leaf in leaves]


# --- pytrees of a step, the common ones without a walk that keeps paths ---


def _slices(xs: Any) -> Callable[[int], Any]:
    """Return ``xs`` as a function of the step; the body may write to each leaf."""
    if xs is None or not (leaves := tree.tensors(xs)):
        return lambda t: xs
    rows = list(zip(*map(_rows, leaves), strict=True))
    x_of, versions = _builder(xs), _versions(leaves)

    def x_at(t: int) -> Any:
        if _versions(leaves) == versions:
            return x_of(rows[t])
        # a body that reaches xs by another name, too, scans what it has made of them
        return x_of([leaf[t].clone() for leaf in leaves])

    return x_at


def _rows(leaf: torch.Tensor) -> Sequence[torch.Tensor]:
    # slices that overlap (an expanded tensor's, windows) must not see each other's writes
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(leaf)
    if torch.is_grad_enabled() or leaf.is_complex() or not is_dense:
        return torch.ops.aten.unbind_copy.int(leaf)
    return copy_on_write(leaf).unbind(0)


def _builder(template: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return a function from leaves to a pytree like ``template``."""
    if isinstance(template, torch.Tensor):
        return lambda leaves: leaves[0]
    if type(template) is tuple and all(isinstance(part, torch.Tensor) for part in template):
        return tuple
    return lambda leaves: tree.unflatten(template, list(leaves))


def _carry_leaves(template: Any, value: Any, device: torch.device) -> Leaves:
    leaves: Leaves = []
    return (
        leaves if _matches(template, value, leaves) else tree.match_carry(template, value, device)
    )


def _matches(template: Any, value: Any, leaves: Leaves) -> bool:
    """Append the leaves of ``value`` in the order of ``template``; False if anything is amiss."""
    kind = type(template)
    if type(value) is not kind:
        return False
    if kind is torch.Tensor:
        leaves.append(value)
        same = value.dtype is template.dtype and value.shape == template.shape
        return same and value.device == template.device
    if kind is tuple or kind is list:
        pairs = zip(template, value, strict=False)
        return len(template) == len(value) and all(_matches(a, b, leaves) for a, b in pairs)
    if kind is dict:
        return template.keys() == value.keys() and all(
            _matches(template[key], value[key], leaves) for key in template
        )
    return template is None


def _y_leaves(y: Any, device: torch.device) -> Leaves:
    return [as_output_tensor(leaf, device, y) for leaf in tree.tensors(y)]
