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
    "view of it, or its detach()){}. Give the body one of them, or a clone"
)
#: how the reason begins if that is one of the xs: a loop's x is what has become of it
OF_XS = "the body changes the xs in place by another name"
_REASON_OF_XS = OF_XS + "{}. Scan xs.clone() if each x is to be what it was before the scan"


def share_memory(changed: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if one of ``changed`` shares its memory with another of them or with ``others``.

    >>> buffer = torch.zeros(3)
    >>> share_memory([buffer], [buffer[0]]), share_memory([buffer], [torch.zeros(3)])
    (True, False)
    """
    own, others = storages_of(changed), storages_of(others)
    return len({*own}) < len(own) or not {*own}.isdisjoint(others)


def reason_to_refuse(changed: Sequence[Any], others: Sequence[Any], xs: Sequence[Any]) -> str:
    """Return why a body may not change those, to be formatted like ``REASON``; "" if it may."""
    if not {*storages_of(xs)}.isdisjoint(storages_of(changed)):
        return _REASON_OF_XS
    return REASON if share_memory(changed, others) else ""


def check_memory(changed: Sequence[Any], others: Sequence[Any], xs: Sequence[Any]) -> None:
    """Check, in the captured program, that memory which was not shared in the capture is not."""
    tensors = [t for t in (*changed, *others, *xs) if isinstance(t, torch.Tensor)]
    reason = reason_to_refuse(changed, others, xs) if all(map(is_plain_tensor, tensors)) else ""
    if reason:
        raise SharedMemory(reason.format(""))
