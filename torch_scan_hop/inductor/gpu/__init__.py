"""One Triton kernel for a whole scan: the loop over time runs inside.

The arithmetic is Inductor's own, so every pointwise operator is covered. No GPU is needed to emit
a kernel, to run it (Triton's interpreter takes tensors on the CPU) or to compile it for a GPU.

``pointwise``   a body without products: which ones qualify
``lanes``       its code: a program takes a block of lanes through all steps, carries in registers
``code``        what the code of all kernels has in common; ``source``: the text, and its arguments
``launch``      how many lanes a program takes, and the call in the generated wrapper
``serving``     which devices the kernels are for
"""

from __future__ import annotations

from torch_scan_hop.inductor.gpu.pointwise import PointwiseKernel

__all__ = ["KERNELS", "PointwiseKernel"]

#: the first that takes a scan is its kernel
KERNELS = (PointwiseKernel,)
