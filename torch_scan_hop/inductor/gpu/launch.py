"""The text of a kernel, what it is called with, and how it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_scan_hop._torch.inductor_triton import (
    call_kernel,
    compute_type,
    is_graph_symbol,
    storage_type,
)
from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.node import KernelNode


@dataclass(frozen=True)
class Result:
    """A buffer that the kernel writes, by its position among the results of the scan."""

    position: int


@dataclass(frozen=True)
class TritonSource:
    """A kernel, and what it is to be called with.

    Attributes:
        text: a module that defines the function ``scan_kernel``.
        arguments: of each parameter but the last, which is ``BLOCK``: the name of a buffer that
            it reads, a :class:`Result`, or a size.
        dtypes: of the buffers among them; None for a size, an integer.
        size: the number of lanes.
    """

    text: str
    arguments: tuple[Any, ...]
    dtypes: tuple[torch.dtype | None, ...]
    size: Any


class Parameters:
    """The parameters of a kernel, in the order in which its code first names them."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[str, torch.dtype | None]] = {}

    def _name(self, argument: Any, name: str, dtype: torch.dtype | None) -> str:
        n = sum(other.startswith(name) for other, _ in self._found.values())
        return self._found.setdefault(argument, (f"{name}{n}", dtype))[0]

    def read(self, buffer: str, dtype: torch.dtype) -> str:
        return self._name(buffer, "in", dtype)

    def written(self, position: int, dtype: torch.dtype) -> str:
        return self._name(Result(position), "out", dtype)

    def size(self, symbol: Any) -> str:
        if not is_graph_symbol(symbol):
            raise Refusal(f"{symbol} is no integer")
        return self._name(symbol, "size", None)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._found.values()]

    @property
    def sizes(self) -> list[str]:
        return [name for name, dtype in self._found.values() if dtype is None]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self._found)

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        return tuple(dtype for _, dtype in self._found.values())


def kept(value: Any, dtype: torch.dtype) -> str:
    """Return ``value`` as the next step reads it: rounded to the carry's dtype."""
    stored, computed = storage_type(dtype), compute_type(dtype)
    return (
        f"{value}.to({computed})" if stored == computed else f"{value}.to({stored}).to({computed})"
    )


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


WARP = 32

# A lane waits for memory at every step, so that lanes are spread as thin as they can be: a warp
# each while there are fewer warps than the GPU holds, which is some thousands. Not measured.
FEW_LANES = 2**17

COPIED_BYTES = 4  # the least that the hardware copies to shared memory ahead of its use


def lanes_of_a_program(size: int, least_bytes: int) -> tuple[int, int]:
    """Return the lanes and warps of a program whose narrowest element has ``least_bytes``.

    A thread takes as many lanes as the hardware copies at once at least.

    >>> lanes_of_a_program(1000, 4), lanes_of_a_program(10**6, 4), lanes_of_a_program(1000, 2)
    ((32, 1), (128, 4), (64, 1))
    """
    warps = 1 if size < FEW_LANES else 4
    return warps * WARP * max(1, COPIED_BYTES // least_bytes), warps


@dataclass(frozen=True)
class Launch:
    """A kernel, the elements and warps of a program, and the bytes of its shared memory."""

    source: TritonSource
    block: int
    warps: int
    nbytes: int = 0


def launch_of_lanes(source: TritonSource) -> Launch:
    least = min(dtype.itemsize for dtype in source.dtypes if dtype is not None)
    size = likely_size(source.size, fallback=FEW_LANES)
    return Launch(source, *lanes_of_a_program(size, least))


class GpuKernel(KernelNode):
    """The node of a kernel. ``step`` says how it is launched, and is made before the node, since it
    may turn out that not all can be emitted."""

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
