"""Bools are loaded and stored as vectors of bytes (checked on torch 2.9.1, 2.13.0, 2.15.0).

Inductor's code for a CPU loads and stores them one by one. Of 117,649 bools, loading took 420 us
and storing 1,400, where as vectors it is 12 and 16 (AMD EPYC with AVX-512, torch 2.15.0). A loop of
torch's operators, whose own code for bools takes some 5 us, was 10 to 70 times as fast for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V

from torch_scan_hop._torch.inductor_checks import holds_a_scan
from torch_scan_hop._torch.replaced import wrap


@functools.cache
def let_bools_be_vectors() -> None:
    """Load and store bools as vectors in the kernels of graphs that hold a scan."""

    def load(
        torchs: Any, self: Any, var: Any, index: Any, dtype: Any, *rest: Any, **named: Any
    ) -> Any:
        if dtype != torch.bool or not holds_a_scan(V.graph):
            return torchs(self, var, index, dtype, *rest, **named)
        return _load_line(self, _address(var, index, "const uint8_t"))

    def store(
        torchs: Any, self: Any, value: Any, var: Any, index: Any, dtype: Any, *rest: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        is_mask = dtype == torch.bool and getattr(value, "dtype", None) == torch.bool
        if not is_mask or not _is_contiguous(self, index) or not holds_a_scan(V.graph):
            return torchs(self, value, var, index, dtype, *rest, **named)
        return _store_line(self, value, _address(var, index, "uint8_t"))

    wrap(CppVecKernel, _get_vec_load_line=load, _get_store_line=store)


def _address(var: Any, index: Any, dtype: str) -> str:
    return f"reinterpret_cast<{dtype}*>({var} + {cexpr_index(index)})"


def _is_contiguous(kernel: CppVecKernel, index: Any) -> bool:
    return kernel._try_get_const_stride(index, kernel.itervars[kernel.tiling_idx]) == 1


def _load_line(kernel: CppVecKernel, address: str) -> str:
    n, floats = _floats(kernel)
    loaded = f"at::vec::VectorizedN<uint8_t, 1>::loadu({address}, {cexpr_index(kernel.num_elems)})"
    numbers = f"{floats}(at::vec::convert<float, {n}, uint8_t, 1>({loaded}))"
    return f"{kernel._get_mask_type()}({numbers} != {floats}(0.0f))"


def _store_line(kernel: CppVecKernel, value: Any, address: str) -> IndentedBuffer:
    n, floats = _floats(kernel)
    mask = f"{floats}({kernel._get_mask_cast(value, torch.float)})"
    numbers = f"{floats}({floats}::blendv({floats}(0.0f), {floats}(1.0f), {mask}))"
    bytes = f"at::vec::convert<uint8_t, 1, float, {n}>({numbers})"
    code = IndentedBuffer()
    code.writeline(f"{bytes}.store({address}, {cexpr_index(kernel.num_elems)});")
    return code


def _floats(kernel: CppVecKernel) -> tuple[int, str]:
    """Return how many vectors of floats a kernel's vector takes, and their type."""
    n: int = kernel._get_num_vectors(torch.float)
    return n, f"at::vec::VectorizedN<float, {n}>"
