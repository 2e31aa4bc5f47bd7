"""Bodies that write to a part of a large carry; for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS, ENTRIES = 200, 200_000


def moved(c: Tensor, i: Tensor) -> Any:
    v = c[i].clone()
    c[i : i + 64] = c[i + 1 : i + 65].clone()
    return c, v


def cache(carry: Any, x: Tensor) -> Any:
    rows, i = carry
    rows[i] = x
    return (rows, i + 1), rows[i].sum()


def added(c: Tensor, x: Tensor) -> Any:
    return c.index_add_(0, torch.tensor([3]), x[None]), c[3].clone()


#: the body, its first carry of so many entries, and its xs
BODIES: dict[str, tuple[Any, Any, Any]] = {
    "moved": (moved, lambda c: c, lambda: torch.arange(STEPS)),
    "cache": (
        cache,
        lambda c: (c.view(STEPS, -1), torch.tensor(0)),
        lambda: torch.ones(STEPS, ENTRIES // STEPS),
    ),
    "added": (added, lambda c: c.view(-1, 200), lambda: torch.ones(STEPS, 200)),
}
