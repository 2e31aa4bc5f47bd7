"""What the machine could do a workload in, by its rate of large products or of large copies.

Whichever of the two takes longer: its products at the one, or its bytes at the other.

FLOPs and bytes are counted on the body graph (``torch_scan_hop.explain``): those of all products,
and the inputs and results of each loop once. What a cache holds may be read faster than a large
copy, so that a small workload can come out above 1.
"""

from __future__ import annotations

import functools

import torch

from benchmarks.timing import Call, once
from benchmarks.workloads import Case
from torch_scan_hop import explain
from torch_scan_hop._torch import onednn

SIZE = 1024  # of the product's matrices
COPIED = 2**26  # bytes
ROUNDS = 7


def _seconds(call: Call) -> float:
    call()
    return min(once(call) for _ in range(ROUNDS))


@functools.cache
def machine_rates() -> tuple[float, float]:
    """(FLOPs per second of a product, bytes per second of a copy, reads and writes counted)."""
    a, b, out = (torch.randn(SIZE, SIZE) for _ in range(3))
    source = torch.randn(COPIED // 4)
    target = torch.empty_like(source)
    product = _seconds(lambda: torch.mm(a, b, out=out))
    if onednn.has_both_libraries():
        product = min(product, _seconds(lambda: onednn.product(a, b)))
    copy = _seconds(lambda: target.copy_(source))
    return 2 * SIZE**3 / product, 2 * COPIED / copy


def least_ms(given: Case, direction: str) -> float:
    """Milliseconds of a call at those rates."""
    problem = given.problem
    with torch.set_grad_enabled(direction == "train"):
        found = explain(
            problem.combine_fn, problem.init, problem.xs, reverse=given.reverse, kernels=False
        )
    work = [loop.work for s in found.scans for loop in s.loops]
    flops, nbytes = sum(w.flops for w in work), sum(w.least_nbytes for w in work)
    flops_per_s, bytes_per_s = machine_rates()
    return 1e3 * max(flops / flops_per_s, nbytes / bytes_per_s)
