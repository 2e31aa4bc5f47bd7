"""Checkpoint policies, one of each kind."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from torch_scan_hop.schedule.policy import Binomial


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As for ``create_selective_checkpoint_contexts``: products are saved, the rest runs again."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


ONE_OF_EACH: dict[str, Any] = {
    "default": None,
    "full": "full",
    "sqrt": "sqrt",
    "segments": 3,
    "binomial": Binomial(snapshots=2, sweeps=1),
    "per operator": keep_products,
}
