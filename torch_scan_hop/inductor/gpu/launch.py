"""Launch a kernel: choose its programs, and write the call in the generated wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_scan_hop._torch.inductor_triton import call_kernel
from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.inductor.gpu.source import Result, TritonSource
from torch_scan_hop.inductor.node import KernelNode

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


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: ``block`` elements and so many warps for each program.

    ``nbytes``: what a program is known to keep in shared memory.
    """

    source: TritonSource
    block: int
    warps: int
    nbytes: int = 0


def launch_of_lanes(source: TritonSource) -> Launch:
    least = min(dtype.itemsize for dtype in source.dtypes if dtype is not None)
    size = likely_size(source.size, fallback=FEW_LANES)
    return Launch(source, *lanes_of_a_program(size, least))


class GpuKernel(KernelNode):
    """The node of a kernel; ``step`` says how it is launched.

    That is known before there is a node, so that it is known, too, whether all can be emitted.
    """

    step: Launch
    unit = "lanes"

    def call_kernel(self, wrapper: Any) -> None:
        call_program(wrapper, self.step, [destination.name for destination in self.destinations])


def call_program(wrapper: Any, program: Launch, results: Sequence[str]) -> None:
    """Define the kernel and call it here; ``results`` names the buffers that it writes."""
    source = program.source
    arguments = [
        results[a.position] if isinstance(a, Result) else a
        for a in (source.size, *source.arguments)
    ]
    how = f"block={program.block}, num_warps={program.warps}"
    call_kernel(wrapper, f"'''\n{source.text}''', {how}", arguments)
