"""Vector code for what Inductor loads one by one (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.virtualized import V, ops

#: Two loads that begin and end at numbers that are wanted: nothing beyond the last one is read.
_EVERY_SECOND = """
#ifndef SCAN_EVERY_SECOND
#define SCAN_EVERY_SECOND
namespace {
inline at::vec::Vectorized<float> scan_every_second(const float* from) {
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i places = _mm512_set_epi32(
        31, 29, 27, 25, 23, 21, 19, 17, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_ps(_mm512_loadu_ps(from), places, _mm512_loadu_ps(from + 15));
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256 mixed = _mm256_shuffle_ps(
        _mm256_loadu_ps(from), _mm256_loadu_ps(from + 7), _MM_SHUFFLE(3, 1, 2, 0));
    return _mm256_castpd_ps(
        _mm256_permute4x64_pd(_mm256_castps_pd(mixed), _MM_SHUFFLE(3, 1, 2, 0)));
#else
    __at_align__ float values[at::vec::Vectorized<float>::size()];
    for (int k = 0; k < at::vec::Vectorized<float>::size(); ++k) values[k] = from[2 * k];
    return at::vec::Vectorized<float>::loadu(values);
#endif
}
}  // namespace
#endif
"""

_SIDE_BY_SIDE = """
#ifndef SCAN_SIDE_BY_SIDE
#define SCAN_SIDE_BY_SIDE
namespace {
inline void scan_side_by_side(
    float* to, const at::vec::Vectorized<float>& first, const at::vec::Vectorized<float>& second) {
    const auto in_turn = at::vec::interleave2(first, second);
    in_turn.first.store(to);
    in_turn.second.store(to + at::vec::Vectorized<float>::size());
}
}  // namespace
#endif
"""


def store_side_by_side(name: str, index: Any, first: Any, second: Any) -> None:
    """Store two values to neighbours, the first of which is at ``index``."""
    kernel: Any = V.kernel
    values = [getattr(value, "value", value) for value in (first, second)]
    is_vector = isinstance(kernel, VectorKernel)
    if not is_vector or not kernel.store_side_by_side(name, index, *values):
        ops.store(name, index, first)
        ops.store(name, index + 1, second)


class VectorKernel(CppVecKernel):
    """The parts of complex numbers, which alternate in memory, are loaded and stored as vectors."""

    def _load_or_store_non_contiguous(
        self, var: Any, index: Any, dtype: Any, *rest: Any, **named: Any
    ) -> Any:
        is_load = var is not None and not rest and not named
        is_whole = self._load_mask is None and not self.tail_size
        if is_load and is_whole and dtype == torch.float32 and self._stride(index) == 2:
            line = f"scan_every_second({var} + {cexpr_index(index)})"
            return self.cse.generate(self.loads, line, dtype=dtype)
        return super()._load_or_store_non_contiguous(var, index, dtype, *rest, **named)

    def store_side_by_side(self, name: str, index: Any, first: Any, second: Any) -> bool:
        """Store two float32 vectors in turn, from ``index`` on; False where that is no vector."""
        place = self.rename_indexing(index)
        is_float = V.graph.get_dtype(name) == torch.float32
        if self.tail_size or not is_float or self._stride(place) != 2:
            return False
        both = [v if v.is_vec else self.broadcast(v) for v in (first, second)]
        address = f"{self.args.output(name)} + {cexpr_index(place)}"
        self.stores.writeline(f"scan_side_by_side({address}, {both[0]}, {both[1]});")
        return True

    def _stride(self, index: Any) -> Any:
        return self._try_get_const_stride(index, self.itervars[self.tiling_idx])


def helpers_of(source: str) -> list[str]:
    """Return the helpers that the source of a kernel calls, to be declared before it."""
    helpers = {"scan_every_second(": _EVERY_SECOND, "scan_side_by_side(": _SIDE_BY_SIDE}
    return [helper for call, helper in helpers.items() if call in source]


def multiply_add(x: Any, y: Any, z: Any) -> Any:
    """Return ``x * y + z`` of scalars of one floating dtype, rounded once."""
    kernel: Any = V.kernel
    return kernel.cse.generate(kernel.compute, f"std::fma({x}, {y}, {z})", dtype=x.dtype)
