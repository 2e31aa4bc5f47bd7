"""Large float32 products by oneDNN, where it is the faster library (``libraries``).

These are the products that plans moved out of a loop, and those that are left in counted loops. The
program's own products, outside of scans, stay as they are. A kernel of rows has products of its
own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch import onednn
from torch_scan_hop._torch.own_scan import is_torchs
from torch_scan_hop._torch.sizes import statically_known_true
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.own_operators import own_operator
from torch_scan_hop.inductor.cpu.libraries import layout_of, onednn_is_faster
from torch_scan_hop.inductor.cpu.product import likely_sizes
from torch_scan_hop.inductor.cpu.rows import RowsKernel
from torch_scan_hop.inductor.qualify import PRODUCTS
from torch_scan_hop.op import scans_in
from torch_scan_hop.rewrites import current_options
from torch_scan_hop.rewrites.classify import Dependence, classify
from torch_scan_hop.signature import Inputs

# Below, a call costs more than the faster library saves.
LEAST_FLOPS = 4e6

large_product = own_operator(
    "large_product(Tensor left, Tensor right) -> Tensor",
    {"CPU": onednn.product},
    fake=lambda left, right: left.new_empty(left.shape[0], right.shape[1]),
)


def replace_large_products(gm: fx.GraphModule, theirs: Collection[fx.Node]) -> None:
    """Replace large products in ``gm`` and in its scans' bodies; nodes that are not ours stay."""
    if current_options().onednn is not False:
        _replace(n for n in gm.graph.nodes if n not in theirs)
        _replace_in_loops(gm)


def _replace_in_loops(gm: fx.GraphModule) -> None:
    for node, body in scans_in(gm):
        if not (is_torchs(body) or _is_kernel_of_rows(node, body)):
            _replace(body.graph.nodes)
            _replace_in_loops(body)
    gm.recompile()


def _is_kernel_of_rows(node: fx.Node, body: fx.GraphModule) -> bool:
    """Return True if an inner scan will be a kernel of rows, by its operators and weights."""
    if not current_options().one_kernel or not RowsKernel.may_qualify(body):
        return False
    given: Inputs[Any] = Inputs(*map(list, node.args[1:]))  # type: ignore[arg-type]
    dependence = classify(body.graph, given.signature.inputs_of(body))
    products = (n for n in body.graph.nodes if n.target in PRODUCTS)
    return all(dependence[n.args[-1]] is Dependence.INVARIANT for n in products)


def _replace(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        if node.target is torch.ops.aten.mm.default and _is_large(*node.args):
            node.target = large_product


def _is_large(left: Any, right: Any) -> bool:
    left, right = value_of(left), value_of(right)
    rows, depth, columns = likely_sizes(left, right)
    return (
        left.device.type == "cpu"
        and left.dtype == torch.float32
        # oneDNN takes no empty matrix
        and all(statically_known_true(size > 0) for size in (*left.shape, *right.shape))
        and 2 * rows * depth * columns >= LEAST_FLOPS
        and _is_faster((rows, depth, columns), left, right)
    )


def _is_faster(sizes: Sequence[int], left: Tensor, right: Tensor) -> bool:
    chosen = current_options().onednn
    if chosen is None:
        return onednn_is_faster(sizes, layout_of(left), layout_of(right))
    return chosen
