"""Let compiled code put its large stacks in huge pages (``huge_pages``)."""

from __future__ import annotations

import math
from typing import Any

import sympy

from torch_scan_hop import huge_pages
from torch_scan_hop._torch.inductor import import_into, splice_into_header, uses_cpp_wrapper

# The same as huge_pages.advise, which says why.
SOURCE = """
#ifndef SCAN_HUGE_PAGES
#define SCAN_HUGE_PAGES
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif
static inline void scan_advise_huge_pages(AtenTensorHandle stack) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    void* data = nullptr;
    int64_t bytes = 0;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(stack, &bytes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(stack, &data));
    if (bytes < LEAST_BYTES) return;
    const uintptr_t page = sysconf(_SC_PAGESIZE), first = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = (first + page - 1) / page * page, end = (first + bytes) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}
#endif
""".replace("LEAST_BYTES", str(huge_pages.LEAST_BYTES))


def advise_when_run(wrapper: Any, output: Any) -> None:
    """Write a line that asks for huge pages for ``output``, which the line before allocates."""
    if output.get_device().type != "cpu" or _is_small(output.layout):
        return
    if uses_cpp_wrapper():
        splice_into_header(wrapper, SOURCE)
        wrapper.writeline(f"scan_advise_huge_pages({output.get_name()});")
    else:
        wrapper.writeline(f"{import_into(wrapper, huge_pages.advise)}({output.get_name()})")


def _is_small(layout: Any) -> bool:
    """Return True if the buffer is known to be small."""
    nbytes = math.prod(layout.size, start=sympy.Integer(layout.dtype.itemsize))
    return bool(nbytes.is_Integer and nbytes < huge_pages.LEAST_BYTES)
