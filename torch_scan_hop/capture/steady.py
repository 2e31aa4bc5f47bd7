"""The steady state of a scan: what a step sees from the second one on.

A scan is captured once, for all its steps. If the first step would be traced differently, it runs
on its own, before the scan. That is so if a carry is None, a number or smaller at first; if the
answer to a question about a carry changes (``h.requires_grad``, ``h is h0``); or if an attribute
exists only from the first step on.

If a step assigns to an attribute and the next one reads it, the attribute is a carry.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.operators import FlatOperator
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe
from torch_scan_hop.fallback import announce, refuse_if_not_allowed
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.step import device_of, outputs_of, split_result, stacked_dtype, start_of

#: the key in a body's meta for the leaves that differ after the first step, which then runs on its
#: own, and for what steps leave for one another in objects
STEADY = "torch_scan_hop.steady"
#: how the name of a branch begins, among those of the leaves that differ
BRANCH = "the branch at "


class SteadyScanOperator(FlatOperator):
    """The operator that traced code calls for a scan; its tracker finds how the scan is captured.

    It is called with ``(run, combine_fn, template, carry, init, xs, trip_count, schedule, settled,
    appended)``, and is in no graph. The tracker (``steady_variables``) traces ``run(combine_fn,
    template, carry, xs, trip_count, schedule)``. If that is no scan of steps that are all alike, it
    takes the trace back, and traces :func:`first_step` from ``init`` before the scan.
    """

    def __call__(  # type: ignore[override]
        self,
        _run: Any,
        combine_fn: Any,
        _template: Any,
        _carry: Any,
        init: Any,
        xs: Any,
        trip_count: Any,
        schedule: Any,
        _settled: Any,
        _appended: Any = None,
    ) -> Any:
        """Refuse or warn: Python comes here only if Dynamo breaks its graph, or capture is off."""
        reason = "torch.compile broke its graph here; TORCH_LOGS=graph_breaks says why"
        refuse_if_not_allowed(combine_fn, reason)
        announce(combine_fn, reason)
        return scan_loop(combine_fn, init, xs, trip_count, schedule.reverse)


steady_scan = SteadyScanOperator("scan_steady", cacheable=False)


def first_step(combine_fn: Any, start: Any, xs: Any, schedule: Any) -> tuple[Any, Any]:
    """Run the first step as the loop does, numbers and all; return its carry and its y."""
    device = device_of(start, xs)
    carry, y = split_result(combine_fn(start, _first(xs, schedule.reverse)))
    return carry, outputs_of(y, device)


def _first(xs: Any, reverse: bool) -> Any:
    return tree.map_leaves(lambda leaf: leaf[-1 if reverse else 0].clone(), xs)


def other_steps(
    run: Any,
    combine_fn: Any,
    first: Any,
    xs: Any,
    trip_count: Any,
    schedule: Any,
    settled: Any,
    appended: Any,
) -> tuple[Any, Any]:
    """Run the scan from the second step on, after ``first``, which :func:`first_step` returned."""
    carry, y = first
    if trip_count == 1:
        return owned(carry, xs), tree.map_leaves(lambda leaf: leaf.unsqueeze(0).clone(), y)
    first = stack_of_one(first)
    return steps_after(run, combine_fn, 1, first, xs, trip_count, schedule, settled, appended)


def stack_of_one(first: Any) -> tuple[Any, Any]:
    carry, y = first
    return carry, tree.map_leaves(lambda leaf: leaf.unsqueeze(0), y)


def steps_before(
    run: Any, combine_fn: Any, steps: int, init: Any, xs: Any, schedule: Any, settled: Any
) -> tuple[Any, Any]:
    """Run the first ``steps`` of a scan."""
    first = tree.map_leaves(lambda leaf: leaf[-steps:] if schedule.reverse else leaf[:steps], xs)
    template, start = start_of(init, first)
    return steady_scan(
        run, combine_fn, template, start, init, first, steps, schedule, settled, None
    )


def steps_after(
    run: Any,
    combine_fn: Any,
    steps: int,
    first: Any,
    xs: Any,
    trip_count: Any,
    schedule: Any,
    settled: Any,
    appended: Any = None,
) -> tuple[Any, Any]:
    """Run a scan after its ``first`` so many ``steps``, whose carry and ys are given.

    ``settled`` names what has changed in them, and may not change again.
    """
    carry, ys = first
    rest = tree.map_leaves(lambda leaf: leaf[:-steps] if schedule.reverse else leaf[steps:], xs)
    template, start = start_of(carry, rest)
    carry, more = steady_scan(
        run,
        combine_fn,
        template,
        start,
        carry,
        rest,
        trip_count - steps,
        schedule,
        settled,
        appended,
    )
    return carry, joined(ys, more, schedule.reverse)


def owned(carry: Any, xs: Any) -> Any:
    """Return ``carry`` as a scan returns it: tensors that nobody else has."""
    device = device_of(carry, xs)

    def own(leaf: Any) -> Any:
        return tree.number_tensor(leaf, device) if isinstance(leaf, tree.NUMBERS) else leaf.clone()

    return tree.map_leaves(own, carry)


def joined(first: Any, more: Any, reverse: bool) -> Any:
    """Join the ``first`` steps' ys and the others': before them, or behind if reversed."""
    pairs = list(zip(tree.leaves_with_paths(first, "y"), tree.leaves(more), strict=False))
    if len(tree.leaves(first)) != len(tree.leaves(more)):
        text = f"has {len(tree.leaves(first))} leaves at step 0 and {len(tree.leaves(more))} later"
        raise refused(ScanTypeError, _not_the_same("y", text))
    parts = []
    for (path, one), other in pairs:
        if (one is None) != (other is None) or (
            one is not None and one.shape[1:] != other.shape[1:]
        ):
            early, late = (v if v is None else v.new_empty(v.shape[1:]) for v in (one, other))
            text = f"is {describe(early)} at step 0 and {describe(late)} later"
            raise refused(ScanValueError, _not_the_same(path, text))
        if one is not None:
            dtype = stacked_dtype(one.dtype, other.dtype)
            both = [one.to(dtype), other.to(dtype)]
            parts.append(torch.cat(both[::-1] if reverse else both))
    return tree.unflatten(more, parts)


def _not_the_same(path: str, text: str) -> str:
    return (
        f"scan: {path} must be the same at every step, but {text}. It is stacked: return the same "
        "structure and shapes at every step."
    )


def no_step(
    run: Any, combine_fn: Any, start: Any, xs: Any, trip_count: Any, schedule: Any
) -> tuple[Any, Any]:
    """Return ``start``, and no ys, for no steps of a scan whose first step differs."""

    def own(leaf: Any) -> Any:
        return leaf if isinstance(leaf, tree.NUMBERS) else leaf.clone()

    def y_of(carry: None, x: Any) -> tuple[None, Any]:
        return None, split_result(combine_fn(tree.map_leaves(own, start), x))[1]

    _, ys = run(y_of, None, None, xs, trip_count, schedule)
    return owned(start, xs), ys
