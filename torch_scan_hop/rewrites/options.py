"""Switches for each rewrite, for blocks and for the one kernel, and the memory gate."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """Switches that say which rewrites run.

    Attributes:
        hoist_invariant: run loop-invariant work once, before the loop.
        batch_xs: run work that depends on xs only before the loop, as one batch.
        sink_outputs: run work that only ys depend on after the loop, as one batch.
        contract_accumulators: turn ``acc + a_t @ b_t`` into one contraction after the loop.
        drop_dead: remove carries and ys that nothing reads; carries that never change become
            loop-invariant.
        blocks: do a long scan's work before and after the loop for a block of steps at a time.
        one_kernel: under Inductor, run the whole loop in one kernel if the body is pointwise, or
            pointwise around products with small weights.
        sums_per_lane: under Inductor, keep a sum over dimensions as one for each lane of
            the loop, where that makes the loop one kernel.
        scalars: under Inductor, write small matrices out as scalars, one for each entry, where the
            loop is one kernel then and is none otherwise.
        matrices: under Inductor on the CPU, make a loop over small matrices one kernel, which goes
            through their entries.
        panels: under Inductor on the CPU, pack the weights of a counted loop's products before it.
        onednn: under Inductor, have oneDNN make the large products that are a scan's; None, as it
            comes, where it was measured to be faster than MKL on this machine.
        parallel_in_time: on CUDA, let that kernel go through many steps at once, where the body is
            affine in its carries, and there are few lanes and many steps.
        cuda_graphs: on CUDA, replay a loop that is no kernel as a graph of a block of its steps.
        memory_gate: stacks that a rewrite adds may hold at most this many times the bytes
            that a step reads and writes anyway (xs, ys and carries), each. The knob.
    """

    hoist_invariant: bool = True
    batch_xs: bool = True
    sink_outputs: bool = True
    contract_accumulators: bool = True
    drop_dead: bool = True
    blocks: bool = True
    one_kernel: bool = True
    sums_per_lane: bool = True
    scalars: bool = True
    matrices: bool = True
    panels: bool = True
    onednn: bool | None = None
    parallel_in_time: bool = True
    cuda_graphs: bool = True
    memory_gate: float = 4.0


_current = Options()


def current_options() -> Options:
    return _current


@contextlib.contextmanager
def using_options(**changes: Any) -> Iterator[Options]:
    """Change some options for the scans compiled, or first run, inside.

    >>> with using_options(batch_xs=False) as options:
    ...     options.batch_xs, current_options().sink_outputs
    (False, True)
    """
    global _current
    before = _current
    _current = dataclasses.replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before
