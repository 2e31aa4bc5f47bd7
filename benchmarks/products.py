"""One float32 product by torch's library and by oneDNN: what ``using_options(onednn=)`` goes by.

python -m benchmarks.products
"""

from __future__ import annotations

import torch

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from torch_scan_hop._torch import onednn
from torch_scan_hop.inductor.cpu.libraries import onednn_is_faster

WEIGHTS = [(256, 1024), (512, 2048), (1024, 4096)]
ROWS = (1, 4, 16, 64, 256, 2048)
ROUNDS = 15

ABOUT = [
    "Microseconds of one call (medians; the four take turns) of `left @ right`, where `right` has",
    "contiguous rows, as `h @ w` has it, or contiguous columns, as `F.linear(h, w)` has it. MKL:",
    "`torch.mm`. GF/s: of the fastest. `is switched`: whether products of a scan are oneDNN's",
    "there, for contiguous rows and columns, by `torch_scan_hop/inductor/cpu/libraries.py`.",
    "",
]


def measure(depth: int, columns: int) -> list[list[object]]:
    torch.manual_seed(0)
    lines = []
    for rows in ROWS:
        left, right = torch.randn(rows, depth), torch.randn(depth, columns)
        across = right.t().contiguous().t()
        calls = {
            "mm": lambda left=left, right=right: torch.mm(left, right),
            "one": lambda left=left, right=right: onednn.product(left, right),
            "mm of columns": lambda left=left, right=across: torch.mm(left, right),
            "one of columns": lambda left=left, right=across: onednn.product(left, right),
        }
        torch.testing.assert_close(calls["one"](), calls["mm"](), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(calls["one of columns"](), calls["mm"](), rtol=1e-4, atol=1e-3)
        us = {name: t.median * 1e3 for name, t in interleaved(calls, ROUNDS).items()}
        switched = [
            "yes" if onednn_is_faster((rows, depth, columns), right=layout) else "no"
            for layout in ("rows", "columns")
        ]
        rate = 2 * rows * depth * columns / min(us.values()) / 1e3
        lines.append(
            [rows, depth, columns, *(f"{v:.0f}" for v in us.values()),
             f"{us['one'] / us['mm']:.2f}", f"{us['one of columns'] / us['mm of columns']:.2f}",
             f"{rate:.0f}", ", ".join(switched)]
        )  # fmt: skip
    return lines


def main() -> None:
    page = Page("Products by MKL and by oneDNN", "products")
    lines = [line for sizes in WEIGHTS for line in page.measured("measure", *sizes, limit=600)]
    head = [
        "rows", "depth", "columns", "MKL, rows", "oneDNN, rows", "MKL, columns", "oneDNN, columns",
        "ratio, rows", "ratio, columns", "GF/s", "is switched",
    ]  # fmt: skip
    page.write([*ABOUT, *report.table(head, lines)])


if __name__ == "__main__":
    main()
