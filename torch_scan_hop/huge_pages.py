"""Huge pages for large new stacks, on Linux.

glibc returns large freed memory to the system: a mapping of 32 MiB and more at once, and smaller
ones when enough lies free on top of the heap (M_TRIM_THRESHOLD), as after a backward. The next
stack then gets fresh pages, which the system clears when they are first written. It stops for each
page of 4 KiB, and that takes several times as long as writing it. Linux uses pages of 2 MiB for
programs that ask for them (/sys/kernel/mm/transparent_hugepage/enabled is mostly "madvise"). A
stack is written as a whole, so no part of such a page is wasted. Asking takes about a microsecond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_scan_hop import step
from torch_scan_hop._torch.capabilities import why_off

# two huge pages: it has one whole at least, wherever it begins
LEAST_BYTES = 2**22


@functools.cache
def _madvise() -> tuple[Callable[..., int], int, int] | None:
    """Return the system's function, its advice, and the bytes of a small page."""
    import ctypes
    import mmap

    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux, if its kernel has them
    if advice is None:
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function, advice, mmap.PAGESIZE


def advise(stack: torch.Tensor) -> None:
    """Have ``stack``, which nobody has written yet, lie in huge pages if it is large.

    It is advice: where the system has none to give, nothing happens.
    """
    # what a mode of the user's makes may have no memory, and a compiler's fake no number of bytes
    if type(stack) is not torch.Tensor or stack.device.type != "cpu":
        return
    if stack.nbytes < LEAST_BYTES:
        return
    if (system := _madvise()) is None or why_off("huge_pages"):
        return
    madvise, advice, page = system
    begin = -(-stack.data_ptr() // page) * page
    end = (stack.data_ptr() + stack.nbytes) // page * page
    madvise(begin, end - begin, advice)


def empty_stack(y: Any, trip_count: int) -> torch.Tensor:
    """Do as :func:`torch_scan_hop.step.empty_stack`, for memory that is to be written whole."""
    stack = step.empty_stack(y, trip_count)
    # asked here, too: each call of a scan makes some, of which most are small
    if type(stack) is torch.Tensor and stack.nbytes >= LEAST_BYTES:
        advise(stack)
    return stack
