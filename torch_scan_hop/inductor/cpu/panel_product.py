"""The kernel of one product with a packed weight, whose panels threads share."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.inductor import ExternKernel, FixedLayout, TensorBox, register_node
from torch_scan_hop._torch.inductor_cpp import KernelFunction, parallel_num_threads, vector_lanes
from torch_scan_hop._torch.inductor_values import likely_size
from torch_scan_hop.inductor.cpu.product import rows_at_once, source_of_product
from torch_scan_hop.inductor.cpu.sharing import share
from torch_scan_hop.inductor.spans import work_of_sum


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
