"""Checkpointing across a loop: segments that are recomputed in the backward.

Everything here is nested scans: a scan over segments whose policy is ``"full"`` (it saves
the carry *into* each segment and nothing else) around a scan over the steps of a segment.
So one mechanism serves every backend, transforms and higher derivatives.

- :func:`segmented` (``checkpoint="sqrt"`` or a number of segments): with ``k`` segments of
  ``m`` steps, ``k`` carries are kept, and ``m`` steps' residuals while a segment is
  differentiated; the forward runs twice. ``k ~ m ~ sqrt(T)`` balances them
  (Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016).
- :func:`treeverse` (``checkpoint=Binomial(snapshots)``): at most ``snapshots`` carries are
  alive, at the price of further recomputation (Griewank: Achieving logarithmic growth of
  temporal and spatial complexity in reverse automatic differentiation, 1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, ScanValueError
from torch_scan_hop.step import CombineFn

Run = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Binomial:
    """At most ``snapshots`` carries saved at any time; a step runs at most ``1 + sweeps`` times.

    >>> Binomial(snapshots=3, sweeps=2).leaves()
    10
    """

    snapshots: int
    sweeps: int = 2

    def leaves(self) -> int:
        """How many segments that schedule can reverse: ``C(snapshots + sweeps, sweeps)``."""
        return math.comb(self.snapshots + self.sweeps, self.sweeps)


def check_policy(checkpoint: Any) -> None:
    """Raise for a ``checkpoint=`` that names no policy."""
    if isinstance(checkpoint, Binomial):
        if checkpoint.snapshots < 1 or checkpoint.sweeps < 1:
            raise refused(
                ScanValueError,
                "scan: checkpoint must have at least 1 snapshot and 1 sweep, but got "
                f"Binomial({checkpoint.snapshots}, {checkpoint.sweeps}).",
            )
        return
    if checkpoint is None or checkpoint in ("full", "sqrt"):
        return
    if isinstance(checkpoint, bool) or not (isinstance(checkpoint, int) or callable(checkpoint)):
        raise refused(
            ScanTypeError,
            "scan: checkpoint must be None, 'full', 'sqrt', a number of segments, a Binomial or "
            f"a policy function, but got {checkpoint!r}.",
        )
    if isinstance(checkpoint, int) and checkpoint < 1:
        raise refused(
            ScanValueError, f"scan: checkpoint must be at least 1 segment, but got {checkpoint}."
        )


def segment_length(trip_count: int, segments: int | str) -> int:
    """Steps in a segment: for ``"sqrt"``, the power of two next below the root.

    That takes comparisons alone, so that one trace serves all trip counts between two powers of
    four, where a root would be a trace for each.

    >>> segment_length(100, "sqrt"), segment_length(100, 3), segment_length(2, 5)
    (8, 34, 1)
    """
    if segments == "sqrt":
        length = 1
        while trip_count >= 4 * length * length:
            length *= 2
        return length
    assert isinstance(segments, int)
    return max(1, -(-trip_count // segments))


def _split(xs: Any, trip_count: int, length: int, reverse: bool) -> tuple[Any, Any]:
    """(whole segments, the steps that run after them); backwards, those are the first."""
    rest = trip_count % length
    if reverse:
        whole = tree.map_leaves(lambda x: x[rest:], xs)
        return whole, tree.map_leaves(lambda x: x[:rest], xs)
    whole = tree.map_leaves(lambda x: x[: trip_count - rest], xs)
    return whole, tree.map_leaves(lambda x: x[trip_count - rest :], xs)


def _in_segments(xs: Any, length: int) -> Any:
    return tree.map_leaves(lambda x: x.reshape(x.shape[0] // length, length, *x.shape[1:]), xs)


def _flat(ys: Any) -> Any:
    return tree.map_leaves(lambda y: y.flatten(0, 1), ys)


def _joined(parts: list[Any], reverse: bool) -> Any:
    """ys of consecutive stretches, in the order of xs."""
    ordered = parts[::-1] if reverse else parts
    leaves = [tree.tensors(part) for part in ordered]
    joined = [torch.cat(list(group)) for group in zip(*leaves, strict=True)]
    return tree.unflatten(ordered[0], joined)


def segmented(
    run_full: Run,
    run_steps: Run,
    combine_fn: CombineFn,
    init: Any,
    xs: Any,
    trip_count: int,
    segments: int | str,
    reverse: bool,
) -> tuple[Any, Any]:
    """A scan over segments; ``run_full`` saves carries only, ``run_steps`` is a plain scan."""
    if trip_count == 0:
        return run_steps(combine_fn, init, xs, trip_count)
    length = segment_length(trip_count, segments)
    whole, rest = _split(xs, trip_count, length, reverse)

    def region(carry: Any, xs: Any, steps: int, count: int) -> tuple[Any, Any]:
        def segment(carry: Any, block: Any) -> tuple[Any, Any]:
            return run_steps(combine_fn, carry, block, steps)

        carry, ys = run_full(segment, carry, _in_segments(xs, steps), count)
        return carry, _flat(ys)

    carry, ys = region(init, whole, length, trip_count // length)
    remaining = trip_count % length
    if not remaining:
        return carry, ys
    carry, last = region(carry, rest, remaining, 1)
    return carry, _joined([ys, last], reverse)


def treeverse(
    run_full: Run,
    run_steps: Run,
    combine_fn: CombineFn,
    init: Any,
    xs: Any,
    trip_count: int,
    policy: Binomial,
    reverse: bool,
) -> tuple[Any, Any]:
    """The binomial schedule over segments: the left part is recomputed, the right one kept.

    ::

        chain(snapshots, sweeps) = recomputed chain(snapshots, sweeps - 1),
                                   then chain(snapshots - 1, sweeps)
    """
    if trip_count == 0:
        return run_steps(combine_fn, init, xs, trip_count)
    length = -(-trip_count // policy.leaves())

    def chain(carry: Any, xs: Any, steps: int, snapshots: int, sweeps: int) -> tuple[Any, Any]:
        left = min(steps, math.comb(snapshots + sweeps - 1, snapshots) * length) if sweeps else 0
        if snapshots == 0 or sweeps == 0 or steps <= length:
            return run_steps(combine_fn, carry, xs, steps)
        carry, first = recomputed(carry, part(xs, 0, left, steps), left, snapshots, sweeps - 1)
        if left == steps:
            return carry, first
        rest = part(xs, left, steps, steps)
        carry, second = chain(carry, rest, steps - left, snapshots - 1, sweeps)
        return carry, _joined([first, second], reverse)

    def part(xs: Any, first: int, last: int, steps: int) -> Any:
        if reverse:
            first, last = steps - last, steps - first
        return tree.map_leaves(lambda x: x[first:last], xs)

    def recomputed(carry: Any, xs: Any, steps: int, snapshots: int, sweeps: int) -> tuple[Any, Any]:
        def region(carry: Any, block: Any) -> tuple[Any, Any]:
            return chain(carry, block, steps, snapshots, sweeps)

        carry, ys = run_full(region, carry, _in_segments(xs, steps), 1)
        return carry, _flat(ys)

    return chain(init, xs, trip_count, policy.snapshots, policy.sweeps)
