"""Tells how many rows a program has, and how many warps; a Refusal if its weights do not fit."""

from __future__ import annotations

import torch

from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.gpu.launch import WARP
from torch_scan_hop.inductor.gpu.row_body import RowBody
from torch_scan_hop.inductor.gpu.serving import capability_of

# Rows of a program with products. With few rows in all, a program has one, whose weights stay in
# registers: nothing is staged, and there are more programs. A tensor core multiplies 16 rows at
# least; exact products of float32 run on none, and have fewer rows, sooner done. On an H200, ms of
# an LSTM of 64 rows, 256 steps, forward, with 16 rows, 4 and one: 1.14, 0.63, 0.42 of width 64;
# 1.39, -, 0.79 of width 128 in bfloat16. Of 512 rows and width 64: 1.45, 0.98, 1.08.
ROWS, FEW_ROWS = 16, 4
MOST_FOR_ONE_ROW, MOST_FOR_FEW_ROWS = 256, 1024

# Bytes of weights of a program, and its warps: of one row, which are all registers that there are
# at most (an LSTM of width 128: 1.32 ms, 2.25 trained; as a counted loop 2.75 and 6.5); and of more
# rows, in shared memory. For a GPU older than that which it was measured on, the largest programs
# spill three times as much, and one of them crashes the ptxas of Triton 3.9.
WARPS_OF_ONE_ROW = ((8, 2**16), (16, 2**18))
OLDEST_FOR_MOST_WARPS = (9, 0)
WARPS, SHARED_BYTES = 8, 2**17

# Elements of a square, which a program of one row has in registers. Not measured on a GPU.
MOST_IN_SQUARE = 64**2

# Elements of a thread, and the most that rows without products have. Not measured on a GPU.
ELEMENTS, MOST_ELEMENTS = 8, 32
MOST_WARPS = 8


def rows_of_a_program(width: int) -> tuple[int, int]:
    """Rows and warps of a program without products: a warp, or as many as one row needs.

    >>> rows_of_a_program(16), rows_of_a_program(256), rows_of_a_program(4096)
    ((16, 1), (1, 1), (1, 8))
    """
    one = WARP * ELEMENTS
    if width > MOST_WARPS * WARP * MOST_ELEMENTS:
        raise Refusal(f"a row of {width} elements: not in registers")
    return max(1, one // width), min(MOST_WARPS, max(1, width // one))


def rows_with_products(body: RowBody, width: int, device: torch.device) -> tuple[int, int, int]:
    """Return the rows and warps of a program that multiplies, and its bytes of shared memory."""
    dtypes = {product.weight.dtype for product in body.products}
    blocks = sum(len(p.left) * p.columns // body.width for p in body.products)
    nbytes = blocks * width**2 * max(dtype.itemsize for dtype in dtypes)
    rows = likely_size(body.rows, fallback=MOST_FOR_FEW_ROWS + 1)
    is_new = capability_of(device) >= OLDEST_FOR_MOST_WARPS
    for warps, most in WARPS_OF_ONE_ROW if is_new else WARPS_OF_ONE_ROW[:1]:
        if rows <= MOST_FOR_ONE_ROW and nbytes <= most:
            return 1, warps, 0
    if nbytes > SHARED_BYTES:
        raise Refusal(f"{nbytes} bytes of weights: not in shared memory")
    is_exact = torch.float32 in dtypes and precision_of(torch.float32) == "ieee"
    return FEW_ROWS if is_exact and rows <= MOST_FOR_FEW_ROWS else ROWS, WARPS, nbytes


def warps_of_squares(width: int) -> int:
    """Return the warps of a program of one row with squares.

    >>> warps_of_squares(16), warps_of_squares(64)
    (1, 16)
    """
    if width**2 > MOST_IN_SQUARE:
        raise Refusal(f"squares of {width} columns: not in registers")
    return max(1, width**2 // (WARP * ELEMENTS))


def precision_of(dtype: torch.dtype) -> str:
    """Return Triton's precision of products: tf32 for float32, if the user allowed torch's so."""
    exact = dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"
