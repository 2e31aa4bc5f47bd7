"""How a kernel is launched: lanes per program, and the call in the generated wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_scan_hop._torch.inductor_triton import call_kernel
from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.inductor.gpu.lanes import Result, TritonSource

WARP = 32

# A lane waits for memory at every step, so that lanes are spread as thin as they can be: a warp
# each while there are fewer warps than the GPU holds, which is some thousands. Not measured.
FEW_LANES = 2**17


def lanes_of_a_program(size: int) -> tuple[int, int]:
    """Lanes, and warps, of one program.

    >>> lanes_of_a_program(1000), lanes_of_a_program(10**6)
    ((32, 1), (128, 4))
    """
    warps = 1 if size < FEW_LANES else 4
    return warps * WARP, warps


def call_lanes(wrapper: Any, source: TritonSource, results: Sequence[str]) -> None:
    """Define the kernel and call it at this place; ``results`` names the buffers that it writes."""
    block, warps = lanes_of_a_program(likely_size(source.size, fallback=FEW_LANES))
    arguments = [
        results[a.position] if isinstance(a, Result) else a for a in (source.size, *source.arguments)
    ]
    call_kernel(wrapper, f"'''\n{source.text}''', block={block}, num_warps={warps}", arguments)
