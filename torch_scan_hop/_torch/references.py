"""Count who holds a tensor, and hand its hooks on (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def _references(tensors: Sequence[torch.Tensor], k: int) -> int:
    return sys.getrefcount(tensors[k])


#: to a tensor that a list alone holds; how many the counting itself adds depends on Python
_ALONE = _references([torch.empty(0)], 0)


def _references_of_saving() -> int:
    """Return how many references autograd adds if it saves a tensor: one since torch 2.13."""
    with torch.inference_mode(False), torch.enable_grad():
        held = [torch.empty(0, requires_grad=True) * 2]
        saving = held[0].sin()
    found = _references(held, 0) - _ALONE
    del saving
    return found


_SAVED = _references_of_saving()


def has_other_holder(tensors: Sequence[torch.Tensor], k: int) -> bool:
    """Return True if Python holds ``tensors[k]`` elsewhere, too; autograd, which saves it, counts
    as nobody."""
    more = _references(tensors, k) - _ALONE
    if more == 0:
        return False
    tensor: Any = tensors[k]  # torch 2.9 does not declare the method
    return more > _SAVED or tensor._use_count() == 1


def pass_hooks_on(copies: Sequence[torch.Tensor], originals: Mapping[int, torch.Tensor]) -> None:
    """Register on ``originals`` what a body has registered on the copies that it was handed.

    A hook of a copy sees only what flows through the copy: of a carry that is a y as well, not the
    gradient of the y.
    """
    for k, original in originals.items():
        hooks = copies[k]._backward_hooks
        if hooks and copies[k]._version == 0:  # else it is what a write has made
            for hook in list(hooks.values()):
                original.register_hook(hook)
            hooks.clear()
