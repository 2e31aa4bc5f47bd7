"""Autocast: falls through; the body's own operators cast when the body is traced or run.

Autograd traces the body under the caller's autocast state, so the casts are part of its
graph; the carry keeps init's dtype (see ``tree.match_carry``).
"""

from __future__ import annotations

from torch_scan_hop._torch.operators import dispatch_key
from torch_scan_hop.op import scan_op

AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastXLA", "AutocastXPU", "AutocastMPS")

for name in AUTOCAST_KEYS:
    # not getattr: DispatchKey has no attribute for AutocastXLA
    scan_op.fallthrough(dispatch_key(name))
