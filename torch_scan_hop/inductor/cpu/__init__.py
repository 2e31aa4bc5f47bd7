"""One C++ kernel for a whole scan: the loop over time runs inside.

The arithmetic is Inductor's own, so every pointwise operator is covered. This package decides the
order of the loops, and where values are stored.

``pointwise``   bodies without products: a tile of lanes takes all steps before the next tile
``rows``        finds bodies with products that qualify: no row reads another
``row_body``    their step as nests of loops and products, in stages; ``places`` says where values
                are
``row_code``    their code: a tile of rows takes all steps before the next tile
``matrices``    finds bodies of small matrices; ``matrix_body`` and ``matrix_code``: their step,
                and its code; ``matrix_lowering`` on top of ``matrix_memory`` what a step does,
                ``matrix_rules`` and ``matrix_source`` factorisations
``product``     the product of a tile of rows and a packed weight
``sharing``     decides if threads share a kernel
``fits``        checks which tensors the kernels work on
``panels``      packs weights of products in counted loops, and has the kernel of one
``large_products``  products that a library makes; ``libraries`` measures which library is faster
``vector_ops``  operators that are faster than Inductor's: tanh, and a carry's product and sum
"""

from __future__ import annotations

from torch_scan_hop._torch.onednn import lower_product
from torch_scan_hop.inductor.cpu.large_products import large_product
from torch_scan_hop.inductor.cpu.matrices import MatricesKernel
from torch_scan_hop.inductor.cpu.panels import lower_panel_product, panel_product
from torch_scan_hop.inductor.cpu.pointwise import PointwiseKernel
from torch_scan_hop.inductor.cpu.rows import RowsKernel

#: the first that takes a scan is its kernel
KERNELS = (PointwiseKernel, RowsKernel, MatricesKernel)

LOWERINGS = {large_product: lower_product, panel_product: lower_panel_product}
