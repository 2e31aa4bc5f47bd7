"""One step of a scan on flat tensors, checked; shared by the loop and by the traced body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.capture.records import with_records
from torch_scan_hop.capture.refusals import changed_leaf, refused
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe, device_mismatch
from torch_scan_hop.signature import Inputs

CombineFn = Callable[[Any, Any], tuple[Any, Any]]
#: ``run(combine_fn, init, xs, trip_count) -> (carry, ys)``: one scan, or several that come to it
Run = Callable[[CombineFn, Any, Any, Any], tuple[Any, Any]]


def device_of(init: Any, xs: Any) -> torch.device:
    """Return the device on which numbers that a step returns become tensors."""
    for leaf in (*tree.tensors(init), *tree.tensors(xs)):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    # torch.get_default_device(), which Dynamo cannot trace
    return torch.empty(()).device


def as_carry(leaf: Any, device: torch.device) -> torch.Tensor:
    """Return a number as a scalar with all its digits; the step decides its dtype."""
    return leaf if isinstance(leaf, torch.Tensor) else tree.exact_tensor(leaf, device)


def start_of(init: Any, xs: Any) -> tuple[Any, Any]:
    """Return what a step's carry is compared with (``api.run_scheduled``), and the first carry."""
    if not any([isinstance(leaf, tree.NUMBERS) for leaf in tree.leaves(init)]):
        return None, init
    device = device_of(init, xs)
    carry = tree.map_leaves(lambda leaf: as_carry(leaf, device), init)
    # A capture is guarded on the numbers that it sees, and there would be one for each value. So
    # it sees 0 where a number stands, and a tensor with its value.
    return tree.map_leaves(lambda leaf: 0 if isinstance(leaf, tree.NUMBERS) else leaf, init), carry


def check_device(path: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Raise if a step moves the carry at ``path`` to another device, in a direct call of the
    operator.

    A scalar on the CPU may be a Python number of init's, which is on no device of its own.
    """
    is_number = before.dim() == 0 and before.device.type == "cpu"
    if before.device != after.device and not is_number:
        raise ScanValueError(device_mismatch(path, before.device, after.device))


def order_of_steps(trip_count: int, reverse: bool) -> range:
    return range(trip_count - 1, -1, -1) if reverse else range(trip_count)


def run_in_order(run: Callable[..., Any], inputs: Inputs[Any], reverse: bool) -> tuple[Any, ...]:
    """Run each step of a flat scan by ``run``; return contiguous carries, and stacks."""
    slices = list(zip(*(x.unbind(0) for x in inputs.xs), strict=True))
    steps: list[Any] = [None] * len(slices)
    # bodies are traced for contiguous carries
    carry = [c.contiguous() for c in inputs.carry]
    for t in order_of_steps(len(slices), reverse):
        out = run(*carry, *slices[t], *inputs.additional)
        carry = [c.contiguous() for c in out[: len(carry)]]
        steps[t] = out[len(carry) :]
    stacks = (None if ys[0] is None else torch.stack(ys) for ys in zip(*steps, strict=True))
    return (*carry, *stacks)


def empty_stack(y: Any, trip_count: Any) -> torch.Tensor:
    """Return an empty tensor for the ys of all steps, of which ``y`` is one."""
    return torch.empty((trip_count, *y.shape), dtype=y.dtype, device=y.device)


def stacked_dtype(one: torch.dtype, later: torch.dtype) -> torch.dtype:
    """Return the dtype of ys of which an early one may be made of numbers that ``init`` holds.

    That is what ``later`` steps give them. But a kind that comes before is kept, as ``torch.stack``
    keeps it: after ``0.5 + x`` of integers x, ys of integers would lose the half.
    """
    return later if tree.kind_of(one) <= tree.kind_of(later) else torch.promote_types(one, later)


def stacked(y: Any, steps: Sequence[Sequence[torch.Tensor]]) -> Any:
    """Stack the leaves of all steps, in the order of xs, as a pytree like ``y`` of one step."""
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


def in_own_containers(result: Any) -> tuple[Any, Any]:
    """Split what a step returns, in containers that nobody else changes: in a list of the program's
    that it has changed, a trace puts back what was there before."""
    carry, y = split_result(result)
    return tree.unflatten(carry, tree.tensors(carry)), tree.unflatten(y, tree.tensors(y))


def as_output_tensor(leaf: Any, device: torch.device, y: Any) -> torch.Tensor:
    """Return a leaf of ``y`` as a tensor."""
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


def outputs_of(y: Any, device: torch.device) -> Any:
    """Return ``y`` with all its leaves as tensors."""
    return tree.map_leaves(lambda leaf: as_output_tensor(leaf, device, y), y)


def step(
    combine_fn: CombineFn,
    carry: Any,
    x: Any,
    init: Any,
    device: torch.device,
    keep_numbers: bool = False,
) -> tuple[list[torch.Tensor], Any]:
    """Run ``combine_fn(carry, x)``; return the leaves of its carry, in init's order, and its y.

    ``init`` says what the carry must be; where it holds a number, any dtype will do.
    """
    next_carry, y = split_result(combine_fn(carry, x))
    outputs = with_records(outputs_of(y, device))
    leaves = tree.match_carry(init, next_carry, device, keep_numbers=keep_numbers)
    return leaves, outputs


class Settling:
    """A carry that a step makes another one, which further steps are to keep: None at first, or
    smaller. Each leaf may change once; what changes again, or breaks the next step, is a mistake,
    and the error is that of the first change.
    """

    def __init__(self) -> None:
        self.leaves: set[str] = set()
        self.error: Exception | None = None
        self._has_just_changed = False

    def accept(self, error: Exception, value: Any) -> None:
        """Let ``value`` be the carry of further steps; ``error`` says what has changed."""
        leaf = changed_leaf(error)
        self.error = self.error or error
        kinds = (torch.Tensor, *tree.NUMBERS)
        is_carry = all(isinstance(v, kinds) for v in tree.tensors(value))
        if not leaf or leaf in self.leaves or not is_carry:
            raise self.error
        self.leaves.add(leaf)
        self._has_just_changed = True

    def call(self, combine_fn: CombineFn, carry: Any, x: Any) -> Any:
        if not self._has_just_changed:
            return combine_fn(carry, x)
        self._has_just_changed = False
        try:
            return combine_fn(carry, x)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            assert self.error is not None
            raise self.error from error


def as_tensors(value: Any, device: torch.device) -> Any:
    """Return ``value`` with numbers as scalars, in the dtypes that torch gives them."""
    return tree.map_leaves(
        lambda v: tree.number_tensor(v, device) if isinstance(v, tree.NUMBERS) else v, value
    )
