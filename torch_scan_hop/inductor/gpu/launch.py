"""How a kernel is launched: lanes per program, and the call in the generated wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_scan_hop._torch.inductor_triton import call_kernel
from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.inductor.gpu.source import Result, TritonSource

WARP = 32

# A lane waits for memory at every step, so that lanes are spread as thin as they can be: a warp
# each while there are fewer warps than the GPU holds, which is some thousands. Not measured.
FEW_LANES = 2**17

COPIED_BYTES = 4  # the least that the hardware copies to shared memory ahead of its use


def lanes_of_a_program(size: int, least_bytes: int) -> tuple[int, int]:
    """Return the lanes and warps of one program; ``least_bytes``: of the narrowest element it
    reads.

    A thread takes as many lanes as the hardware copies at once at least.

    >>> lanes_of_a_program(1000, 4), lanes_of_a_program(10**6, 4), lanes_of_a_program(1000, 2)
    ((32, 1), (128, 4), (64, 1))
    """
    warps = 1 if size < FEW_LANES else 4
    return warps * WARP * max(1, COPIED_BYTES // least_bytes), warps


def call_lanes(wrapper: Any, source: TritonSource, results: Sequence[str]) -> None:
    """Define the kernel and call it at this place; ``results`` names the buffers that it writes."""
    least = min(dtype.itemsize for dtype in source.dtypes if dtype is not None)
    block, warps = lanes_of_a_program(likely_size(source.size, fallback=FEW_LANES), least)
    call_program(wrapper, source, results, block, warps)


def call_program(
    wrapper: Any, source: TritonSource, results: Sequence[str], block: int, warps: int
) -> None:
    """Define the kernel and call it here, with programs of ``block`` elements and so many warps."""
    arguments = [
        results[a.position] if isinstance(a, Result) else a
        for a in (source.size, *source.arguments)
    ]
    call_kernel(wrapper, f"'''\n{source.text}''', block={block}, num_warps={warps}", arguments)
