"""One Triton kernel for a whole scan: the loop over time runs inside.

The arithmetic is Inductor's own, so every pointwise operator is covered. No GPU is needed to emit
a kernel, to run it (Triton's interpreter takes tensors on the CPU) or to compile it for a GPU.

``pointwise``   bodies without products: a program takes a block of lanes through all steps, with
                the carries in registers
``code``        the common code of all kernels
``parallel``    finds long and thin scans that are affine in their carries
``tiles``       their code: a program takes a few lanes, and many steps at once
``composition`` the code that composes steps
``row_frame``   the rows of carries, and which sizes go with them
``row_body``    their step, as blocks as wide as the carry, numbers of each row, and squares of it
``row_programs`` how many rows a program has
``row_ops``     what a step reads of carries, products and reductions, and the code of those
``row_code``    bodies with products, or reductions of rows: a program takes a block of rows
                through all steps
``launch``      a kernel's text and arguments, the lanes of a program, the call in the wrapper
``serving``     tells which devices the kernels are for
"""

from __future__ import annotations

from torch_scan_hop.inductor.gpu.parallel import ParallelKernel, is_long_and_thin
from torch_scan_hop.inductor.gpu.pointwise import PointwiseKernel
from torch_scan_hop.inductor.gpu.row_code import RowsKernel

__all__ = ["KERNELS", "ParallelKernel", "PointwiseKernel", "RowsKernel", "is_long_and_thin"]

#: the first that takes a scan is its kernel
KERNELS = (ParallelKernel, PointwiseKernel, RowsKernel)
