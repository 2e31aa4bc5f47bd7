"""The product of a tile of rows and a weight: the code of it, and how the weight is packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from torch_scan_hop._torch.inductor_cpp import vector_lanes
from torch_scan_hop._torch.inductor_values import masked, ops
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop.inductor.cpu.places import Product

# Rows by vectors of columns that one call multiplies, so that their sums stay in registers and
# there are enough of them for the pipeline of multiply-add units. Panels of ``vectors`` columns
# are contiguous. In Inductor's micro-kernel sums spill with more than one vector of columns, and
# with one it waits for loads.
_SOURCE = """
template <int rows, int vectors>
inline void NAME_rows(
    const float* left, const float* panel, float* out, int64_t depth, int64_t row, int64_t out_row
) {
    using Vec = at::vec::Vectorized<float>;
    constexpr int lanes = Vec::size();
    Vec sums[rows][vectors];
    #pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
        #pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sums[r][v] = Vec(0.0f);
    for (int64_t k = 0; k < depth; ++k, panel += vectors * lanes) {
        Vec columns[vectors];
        #pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) columns[v] = Vec::loadu(panel + v * lanes);
        #pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const Vec value(left[r * row + k]);
            #pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v)
                sums[r][v] = at::vec::fmadd(value, columns[v], sums[r][v]);
        }
    }
    #pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
        #pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sums[r][v].store(out + r * out_row + v * lanes);
}

template <int vectors, int rows>
inline void NAME_rest(
    int64_t rest, const float* left, const float* panel, float* out, int64_t depth, int64_t row,
    int64_t out_row
) {
    if constexpr (rows > 0) {
        if (rest == rows) NAME_rows<rows, vectors>(left, panel, out, depth, row, out_row);
        else NAME_rest<vectors, rows - 1>(rest, left, panel, out, depth, row, out_row);
    }
}

template <int most, int vectors>
inline void NAME(
    const float* left, const float* panels, float* out,
    int64_t rows, int64_t depth, int64_t columns, int64_t row, int64_t out_row
) {
    constexpr int width = vectors * LANES;
    static_assert(LANES == at::vec::Vectorized<float>::size(), "panels are packed for LANES");
    for (int64_t column = 0; column < columns; column += width) {
        const float* panel = panels + column * depth;
        float* to = out + column;
        int64_t r = 0;
        for (; r + most <= rows; r += most)
            NAME_rows<most, vectors>(left + r * row, panel, to + r * out_row, depth, row, out_row);
        NAME_rest<vectors, most - 1>(
            rows - r, left + r * row, panel, to + r * out_row, depth, row, out_row);
    }
}
"""


def source_of_product(name: str) -> str:
    return _SOURCE.replace("NAME", name).replace("LANES", str(vector_lanes()))


def likely_sizes(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int, int]:
    """Return likely rows, depth and columns of ``left @ right``, both fakes; no guard is made."""
    return likely_value(left.shape[0]), likely_value(left.shape[1]), likely_value(right.shape[1])


def register_block(rows: int, columns: int) -> tuple[int, int]:
    """Return rows, and vectors of columns, of one call: 16 sums with 32 registers, 8 with 16."""
    lanes = vector_lanes()
    sums = _sums_in_registers()
    most = min(rows, sums // 2)
    vectors = -(-columns // lanes)
    wide = [n for n in (8, 4, 2, 1) if n * most <= sums and vectors % n == 0]
    return most, wide[0]


def _sums_in_registers() -> int:
    return 16 if vector_lanes() >= 16 else 8


def panel_width(rows: int, columns: int) -> int:
    """Return the columns of a panel of a weight by which so many rows are multiplied."""
    return vector_lanes() * register_block(max(1, rows), columns)[1]


def rows_at_once(rows: int, width: int) -> int:
    """Return the rows of one call, whose sums for a panel so wide stay in registers."""
    sums = _sums_in_registers()
    return max(1, min(rows, sums // 2, sums * vector_lanes() // width))


def packed(product: Product, rows: int, name: str) -> tuple[Callable[[list[Any]], None], list[Any]]:
    """Pack panels of a weight: return what stores an element, and the sizes of the loops."""
    k, n = product.sizes
    width = panel_width(rows, n)
    load = product.weight.make_loader()

    def store(index: list[Any]) -> None:
        block, row, lane = index
        column = block * width + lane
        if product.padded == n:
            value = load([row, column])
        else:
            inside = ops.lt(ops.index_expr(column, torch.int64), ops.constant(n, torch.int64))
            value = masked(ops, inside, lambda: load([row, column]), 0.0)
        ops.store(name, (block * k + row) * width + lane, value)

    return store, [sympy.Integer(size) for size in (product.padded // width, k, width)]
