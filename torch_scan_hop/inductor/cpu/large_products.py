"""Large float32 products by oneDNN, on the CPUs where it is the faster library.

Those that the plans of scans took out of their loops, and those that are left in counted loops.
What a program has outside of its scans stays as it is. A kernel of rows has products of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch import onednn
from torch_scan_hop._torch.sizes import likely_value, statically_known_true
from torch_scan_hop.rewrites import current_options

# Below, a call costs more than the faster library saves.
LEAST_FLOPS = 4e6

_library = torch.library.Library("torch_scan_hop", "FRAGMENT")
_library.define("large_product(Tensor left, Tensor right) -> Tensor")
_library.impl("large_product", onednn.product, "CPU")
large_product = torch.ops.torch_scan_hop.large_product.default


@torch.library.register_fake("torch_scan_hop::large_product")
def _shape_of(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def pays() -> bool:
    chosen = current_options().onednn
    return onednn.beats_mkl() if chosen is None else chosen


def replace_large_products(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        if node.target is torch.ops.aten.mm.default and _is_large(*node.args):
            node.target = large_product


def _is_large(left: Any, right: Any) -> bool:
    left, right = left.meta["val"], right.meta["val"]
    sizes = *left.shape, right.shape[1]
    rows, depth, columns = map(likely_value, sizes)
    return (
        left.device.type == "cpu"
        and left.dtype == torch.float32
        # oneDNN takes no empty matrix
        and all(statically_known_true(size > 0) for size in sizes)
        and 2 * rows * depth * columns >= LEAST_FLOPS
        and onednn.is_fast_for(rows, likely_value(right.stride(0)) == 1)
    )
