"""Write short scans in a body out, because each step would pay for a call of the operator.

A scan over the four layers of an RNN, in the body of a scan over time, costs several times what its
four steps do. Written out, they are operators of the body like any others.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from torch_scan_hop._torch.own_scan import is_torchs
from torch_scan_hop.op import ScanOptions, scan_op, scans_in
from torch_scan_hop.signature import Inputs
from torch_scan_hop.step import run_in_order

# Beyond these, a call costs little beside its steps, and to trace them takes long.
MOST_STEPS = 16
MOST_OPERATORS = 256

_KEPT = "torch_scan_hop.scans_kept"


def keep_scans(body: fx.GraphModule) -> None:
    """Keep the scans in ``body``, which are segments of a checkpoint.

    Written out, their steps would move before the loop. There they would be done for all segments
    at once, and their results kept.
    """
    body.meta[_KEPT] = True


def with_short_scans_written_out(body: fx.GraphModule) -> Any:
    """Return ``body``, or a function that does the same and calls no short scan, to be traced."""
    holds_scans = body.graph.find_nodes(op="call_function", target=scan_op)
    if _KEPT in body.meta or not holds_scans:
        return body
    return functools.partial(_WritesOut(body).run, enable_io_processing=False)


class _WritesOut(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if n.target is not scan_op:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        body, init, xs, additional = args
        if not _is_short(body, xs[0].shape[0]):
            return super().run_node(n)
        return steps_of(body, Inputs(init, xs, additional), ScanOptions(**kwargs))


def _is_short(body: Any, trip_count: Any) -> bool:
    """Return True for a known trip count of a few steps.

    A scan of 0 steps is left to the operator, which knows what its ys are.
    """
    if not isinstance(trip_count, int) or not 0 < trip_count <= MOST_STEPS:
        return False
    if not isinstance(body, fx.GraphModule) or is_torchs(body):
        return False
    return trip_count * _size(body) <= MOST_OPERATORS


def _size(body: fx.GraphModule) -> int:
    """Return the number of operators, counting MOST_STEPS steps of each inner scan."""
    own = sum(n.op == "call_function" for n in body.graph.nodes)
    return own + sum(MOST_STEPS * _size(inner) for _, inner in scans_in(body))


def steps_of(body: fx.GraphModule, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    """Run the scan step by step, and short scans within it, too."""
    run = functools.partial(_WritesOut(body).run, enable_io_processing=False)
    return run_in_order(run, inputs, options.reverse)
