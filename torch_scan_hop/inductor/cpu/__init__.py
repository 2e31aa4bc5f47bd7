"""One C++ kernel for a whole scan: the loop over time runs inside.

The arithmetic is Inductor's own, so every pointwise operator is covered; what is ours is the
order of the loops, and where values live.

``pointwise``   a body without products: which ones qualify
``lanes``       its code: a tile of lanes takes all steps before the next tile
``rows``        a body with products: which ones qualify
``row_body``    its step as nests of loops and products, in stages; ``places``, ``row_lowering``
                and ``row_order`` say where values are, what they are, and when they are stored
``row_independence``  whether a row reads no other row
``row_code``    its code: a tile of rows takes all steps before the next tile
``product``     the product of a tile of rows and a packed weight
``sharing``     whether threads share it
``fits``        which tensors both work on
``panels``      products in counted loops: their weights are packed before; ``panel_product``: the
                kernel of one
``large_products``  others, which are calls of a library; ``libraries``: of which, by measurement
``tanh``        tanh, faster than the vectorised one of Inductor
"""

from __future__ import annotations

from torch_scan_hop._torch.onednn import lower_product
from torch_scan_hop.inductor.cpu.large_products import large_product
from torch_scan_hop.inductor.cpu.panel_product import lower_panel_product
from torch_scan_hop.inductor.cpu.panels import panel_product
from torch_scan_hop.inductor.cpu.pointwise import PointwiseKernel
from torch_scan_hop.inductor.cpu.rows import RowsKernel

__all__ = ["KERNELS", "LOWERINGS"]

#: the first that takes a scan is its kernel
KERNELS = (PointwiseKernel, RowsKernel)

LOWERINGS = {large_product: lower_product, panel_product: lower_panel_product}
