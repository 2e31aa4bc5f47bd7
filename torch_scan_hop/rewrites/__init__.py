"""Rewrites of a scan that serve every backend: work moves out of the loop.

A body is classified by dependence, not by pattern (``classify``), and split
(``planner``) into a *plan*::

    pre   (init, xs, additional)            once: loop-invariant work; xs-only work, batched
    body  the loop: what the carry depends on, and random operators
    post  (loop results, pre results, ...)  once: output-only work, batched; accumulators as
                                            one contraction over all steps

Batched means ``vmap`` over the steps, so that ``x @ W`` becomes one GEMM over ``T * B`` rows.
A long scan runs its plan block by block (``blocks``): stacks are as long as a block then.
Each rewrite has a switch, and one knob bounds the memory that may be spent; see
:class:`~torch_scan_hop.rewrites.options.Options`.
"""

from torch_scan_hop.rewrites.options import Options, current_options, using_options
from torch_scan_hop.rewrites.plan import ScanPlan
from torch_scan_hop.rewrites.planner import Planner

__all__ = ["Options", "Planner", "ScanPlan", "current_options", "using_options"]
