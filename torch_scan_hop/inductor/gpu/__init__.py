"""One Triton kernel for a whole scan: the loop over time runs inside.

The arithmetic is Inductor's own, so every pointwise operator is covered. No GPU is needed to emit
a kernel, to run it (Triton's interpreter takes tensors on the CPU) or to compile it for a GPU.

``pointwise``   a body without products: which ones qualify
``lanes``       its code: a program takes a block of lanes through all steps, carries in registers
``code``        what the code of all kernels has in common; ``source``: the text, and its arguments
``parallel``    a body that is affine in its carries, long and thin: which ones qualify
``tiles``       its code: a program takes a few lanes, and many steps at once
``composition`` what many steps are together
``rows``        a body with products: which ones qualify
``row_body``    its step, as blocks as wide as the carry
``row_code``    its code: a program takes a block of rows through all steps
``launch``      how many lanes a program takes, and the call in the generated wrapper
``serving``     which devices the kernels are for
"""

from __future__ import annotations

from torch_scan_hop.inductor.gpu.parallel import ParallelKernel
from torch_scan_hop.inductor.gpu.pointwise import PointwiseKernel
from torch_scan_hop.inductor.gpu.rows import RowsKernel

__all__ = ["KERNELS", "ParallelKernel", "PointwiseKernel", "RowsKernel"]

#: the first that takes a scan is its kernel
KERNELS = (ParallelKernel, PointwiseKernel, RowsKernel)
