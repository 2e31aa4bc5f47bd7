"""Find tensors that a body changes in place while another tensor of the scan shares their memory.

A changed tensor becomes a carry (``purify``), which is a copy. Other names for the same memory do
not see the changes of a copy: ``row = buf[0]`` beside ``buf.add_(x)``, two views of one buffer,
``w`` and ``w.detach()``, the xs themselves. So such a body runs as a loop, where they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_scan_hop._torch.operators import is_plain_tensor, storages_of


class SharedMemory(RuntimeError):
    """A body changes a tensor that shares its memory with another input."""


#: to be formatted with the line of the change, as ", at file:line: code", or with ""
REASON = (
    "the body changes a tensor in place that shares memory with another tensor that it reads (a "
    "view of it, its detach(), or the xs){}. Give the body one of them, or a clone"
)


def share_memory(changed: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if one of ``changed`` shares its memory with another of them or with ``others``.

    >>> buffer = torch.zeros(3)
    >>> share_memory([buffer], [buffer[0]]), share_memory([buffer], [torch.zeros(3)])
    (True, False)
    """
    own, others = storages_of(changed), storages_of(others)
    return len({*own}) < len(own) or not {*own}.isdisjoint(others)


def check_memory(changed: Sequence[Any], others: Sequence[Any]) -> None:
    """Check, in the captured program, that memory which was not shared in the capture is not."""
    tensors = [t for t in (*changed, *others) if isinstance(t, torch.Tensor)]
    if all(map(is_plain_tensor, tensors)) and share_memory(changed, others):
        raise SharedMemory(REASON.format(""))
