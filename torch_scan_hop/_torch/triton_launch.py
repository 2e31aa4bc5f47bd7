"""Kernels of Triton that generated wrappers define and call (checked on torch 2.9.1, 2.15.0).

Their text is loaded from a file, which is where Triton reads the code of a function.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.codecache import PyCodeCache


class ScanKernel:
    """A kernel whose programs share ``size`` elements, ``block`` each; compiled when first called.

    ``source`` defines the function ``scan_kernel``, whose last parameter is ``BLOCK``.
    """

    def __init__(self, source: str, block: int, num_warps: int) -> None:
        self.source = source
        self.block = block
        self.num_warps = num_warps
        self._function: Any = None

    @property
    def function(self) -> Any:
        """The function, compiled for nothing yet."""
        if self._function is None:
            self._function = PyCodeCache.load(self.source).scan_kernel
        return self._function

    def __call__(self, size: int, *arguments: Any) -> None:
        programs = -(-size // self.block)
        if programs:
            self.function[(programs,)](*arguments, BLOCK=self.block, num_warps=self.num_warps)
