"""Products with loop-invariant weights, in a counted loop: the weight is packed before the loop.

A library lays a weight out anew for each product, or reads it as it lies. A loop can do that once.
*Panels* are groups of columns, stored row by row, as the product reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.inductor import ExternKernel, FixedLayout, TensorBox, register_node
from torch_scan_hop._torch.inductor_cpp import KernelFunction, parallel_num_threads, vector_lanes
from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.body.meta_values import call_recorded, record_again, replace, value_of
from torch_scan_hop.body.own_operators import own_operator
from torch_scan_hop.inductor.cpu.libraries import onednn_is_faster
from torch_scan_hop.inductor.cpu.product import (
    likely_sizes,
    panel_width,
    rows_at_once,
    source_of_product,
)
from torch_scan_hop.inductor.cpu.rows import RowsKernel
from torch_scan_hop.inductor.cpu.sharing import share
from torch_scan_hop.inductor.spans import work_of_sum
from torch_scan_hop.rewrites import current_options
from torch_scan_hop.rewrites.classify import Dependence, ancestors
from torch_scan_hop.rewrites.plan import ScanPlan

aten = torch.ops.aten

#: the gain of fewer steps does not pay for the packing
FEWEST_STEPS = 16
#: operations of a product; the gain of smaller ones does not pay for compiling a kernel
LEAST_FLOPS = 1e6
#: rows of the left operand: with more, packing costs little beside MKL's product at full rate
MOST_ROWS = 64
DTYPES = {torch.float32}
#: AVX2's. A library may know more of a processor with narrow vectors than how to fill those.
FEWEST_LANES = 8

panel_product = own_operator(
    "panel_product(Tensor left, Tensor panels) -> Tensor",
    # for a graph that runs without a compiler
    {"CPU": lambda left, panels: left @ panels.permute(1, 0, 2).flatten(1)},
    fake=lambda left, panels: left.new_empty(left.shape[0], panels.shape[0] * panels.shape[2]),
)


def pack_weights(plan: ScanPlan, trip_count: Any) -> bool:
    """Let products of the planned body read panels; return True if there are any. Packing is loop-
    invariant work of the body, which a plan takes out of the loop."""
    options = current_options()
    few_steps = isinstance(trip_count, int) and trip_count < FEWEST_STEPS
    is_kernel = options.one_kernel and RowsKernel.may_qualify(plan.body)
    if few_steps or is_kernel or not (options.panels and options.hoist_invariant):
        return False
    products = _products_in_loop(plan)
    _read_panels(plan.original.graph, products)
    legality.checked("pack_weights", plan.original)
    return bool(products)


def _products_in_loop(plan: ScanPlan) -> list[fx.Node]:
    """Return the products of a per-step value with a loop-invariant one."""
    decisions = plan.decisions
    roots = [*(plan.outputs.carry[k] for k in decisions.loop_carry), *decisions.stacked]
    in_loop = ancestors(roots)
    known = {*plan.fixed, *decisions.invariants}
    return [
        node
        for node in plan.original.graph.nodes
        if node in in_loop
        and node.target is aten.mm.default
        and decisions.dependence[node] is Dependence.LOOP
        and node.args[1] in known
        and _pays(node)
    ]


def _pays(node: fx.Node) -> bool:
    left, right = (value_of(n) for n in node.args)
    rows, depth, columns = likely_sizes(left, right)
    return (
        left.device.type == "cpu"
        and left.dtype in DTYPES
        and vector_lanes() >= FEWEST_LANES
        and all(isinstance(size, int) for size in right.shape)
        and _may_be_packed_before(rows, columns)
        and 2 * rows * depth * columns >= LEAST_FLOPS
        and (rows <= MOST_ROWS or onednn_is_faster((rows, depth, columns)))
    )


def _may_be_packed_before(rows: int, columns: int) -> bool:
    """Return True if the panels take little memory beside the weight; else the loop packs them."""
    width = panel_width(rows, columns)
    return -(-columns // width) * width <= current_options().memory_gate * columns


def _read_panels(graph: fx.Graph, products: Sequence[fx.Node]) -> None:
    panels: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in products:
        left, right = node.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        rows, _, columns = likely_sizes(value_of(left), value_of(right))
        width = panel_width(rows, columns)
        with graph.inserting_before(node):
            key = right, width
            if key not in panels:
                panels[key] = _packed(right, width)
            result = call_recorded(panel_product, left, panels[key])
            if columns % width:
                result = call_recorded(aten.slice.Tensor, result, 1, 0, columns)
        readers = list(node.users)
        replace(node, result)
        record_again(readers)


def _packed(weight: Any, width: int) -> fx.Node:
    depth, columns = value_of(weight).shape
    count = -(-columns // width)
    if columns % width:
        padding = [0, count * width - columns]
        weight = call_recorded(aten.constant_pad_nd.default, weight, padding, 0.0)
    parts = call_recorded(aten.view.default, weight, [depth, count, width])
    turned = call_recorded(aten.permute.default, parts, [1, 0, 2])
    return call_recorded(aten.clone.default, turned, memory_format=torch.contiguous_format)


# --- the kernel of one product, whose panels threads share ---


def lower_panel_product(left: Any, panels: Any) -> Any:
    left = ExternKernel.realize_input(left)
    if left.get_stride()[-1] != 1:
        left = ExternKernel.require_contiguous(left)
    panels = ExternKernel.require_contiguous(ExternKernel.realize_input(panels))
    return TensorBox.create(PanelProduct(left, panels))


class PanelProduct(ExternKernel):
    def __init__(self, left: Any, panels: Any) -> None:
        (rows, _), (count, _, width) = left.get_size(), panels.get_size()
        layout = FixedLayout(left.get_device(), left.get_dtype(), [rows, count * width])
        super().__init__(None, layout, self.unwrap_storage([left, panels]))
        self.operands: list[Any] = list(self.inputs)
        self.name = register_node(self)

    def should_allocate(self) -> bool:
        return True

    def codegen(self, wrapper: Any) -> None:
        left, panels = self.operands
        rows, depth = left.get_size()
        count, _, width = map(int, panels.get_size())
        function = KernelFunction(self, masks_tails=False)
        product = f"{function.name}_product"
        function.declare(source_of_product(product))
        n_rows = function.text(rows)
        work = f"{n_rows} * INT64_C({count * width * work_of_sum(int(depth))})"
        threads = parallel_num_threads()
        if threads > 1:
            share(function, work)
            function.share_loop(threads)
        most = rows_at_once(likely_size(rows, fallback=width), width)
        row_of_left = function.text(left.get_stride()[0])
        arguments = [
            f"{function.read_pointer(left.get_name())} + {function.text(left.get_layout().offset)}",
            f"{function.read_pointer(panels.get_name())}"
            f" + {function.text(panels.get_layout().offset)} + panel * {int(depth) * width}",
            f"{function.written_pointer(self.get_name())} + panel * {width}",
            *(n_rows, depth, width, row_of_left, count * width),
        ]
        function.code.writeline(f"for (int64_t panel = 0; panel < {count}; ++panel)")
        with function.code.indent():
            call = f"{product}<{most}, {width // vector_lanes()}>"
            function.code.writeline(f"{call}({', '.join(map(str, arguments))});")
        function.define_and_call(wrapper)
