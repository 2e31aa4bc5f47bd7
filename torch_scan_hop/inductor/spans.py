"""A kernel of a whole loop runs some of its steps in each call, and Python looks up in between.

Otherwise nobody could interrupt a loop of minutes, or see how far it is. A call takes a fraction of
a second, and most loops need only one. One call leaves the carry in the results, where the next one
finds it. (Python does not wait for a kernel of a GPU, so those need no calls.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import progress_bar
from torch_scan_hop._torch.inductor import (
    declare_loop_index,
    fresh_loop_index,
    import_into,
    indented,
    size_expression,
    trip_count_code,
    uses_cpp_wrapper,
)
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.inductor.node import KernelNode, ScanCall
from torch_scan_hop.inductor.qualify import PRODUCTS, is_transcendental

# The most work of a call, in results of operators; a core makes some of those in a nanosecond. It
# should be large, because each call packs the weights anew.
WORK_PER_CALL = 3 * 10**8
# The least work that threads share, some 20 us of one core. Waking them takes as long. Where other
# processes keep the cores busy, the others wait milliseconds for a thread that went to sleep.
WORK_FOR_THREADS = 10**5
# multiplications in the time of another operator on one element
PRODUCTS_AT_ONCE = 8
# other operators in the time of one such
TRANSCENDENTAL = 8


def work_per_step(body: fx.GraphModule) -> int:
    """Return the work of a step, counted in results of cheap operators."""
    return max(1, sum(map(_work_of, body.graph.nodes)))


def work_of_sum(depth: int) -> int:
    """Return the work of a sum of so many products, which is an entry of a matrix product."""
    return max(1, depth // PRODUCTS_AT_ONCE)


def _work_of(node: fx.Node) -> int:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return 0
    work = math.prod(map(likely_value, value.shape))
    if node.target in PRODUCTS:
        inner = likely_value(value_of(node.args[-1]).shape[0])
        work *= work_of_sum(inner)
    return work * TRANSCENDENTAL if is_transcendental(node) else work


@dataclass(frozen=True)
class Span:
    """The steps of a call, ``first`` to ``end`` in the order that they run, at most ``most``.

    ``first`` and ``end`` are variables of the wrapper; the call that begins at 0 copies init.
    ``work_per_step``: in results of operators that are quick.
    """

    trip_count: Any
    first: Any
    end: Any
    work_per_step: int

    @property
    def most(self) -> int:
        return max(1, WORK_PER_CALL // self.work_per_step)

    def is_too_short_for_threads(self) -> bool:
        """Return True if there are known to be too few steps: sharing takes time, too."""
        fewest = -(-WORK_FOR_THREADS // self.work_per_step)
        return bool(self.trip_count.is_Integer and self.trip_count < fewest)

    @contextlib.contextmanager
    def calls(self, wrapper: Any) -> Iterator[None]:
        """Call the kernel once for each span, in the block that this opens."""
        first, end = str(self.first), str(self.end)
        for name in (first, end):
            declare_loop_index(wrapper, name)
        count = trip_count_code(wrapper, self.trip_count)
        if not uses_cpp_wrapper():
            calls = import_into(wrapper, progress_bar.calls)
            wrapper.writeline(f"for {first}, {end} in {calls}({count}, {self.most}):")
            with indented(wrapper):
                yield
            return
        # nobody is there to look up
        wrapper.writeline("{")
        wrapper.writeline(f"    int64_t {first} = 0, {end} = {count};")
        with indented(wrapper):
            yield
        wrapper.writeline("}")


class KernelInSpans(KernelNode):
    """A kernel that is called once for each span of steps."""

    def __init__(self, call: ScanCall, step: Any) -> None:
        super().__init__(call, step)
        self.body = call.body
        self.span = Span(
            call.trip_count,
            size_expression(call.examples.index),
            size_expression(fresh_loop_index()),
            work_per_step(call.body),
        )

    def call_span(self, wrapper: Any) -> None:
        """Define the kernel and call it for the steps of ``span``, at this place of the wrapper."""
        raise NotImplementedError

    def call_kernel(self, wrapper: Any) -> None:
        with self.span.calls(wrapper):
            self.call_span(wrapper)
