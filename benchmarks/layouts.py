"""Products with weights that lie in memory in each way, by each library, and a complex LRU.

python -m benchmarks.layouts
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from tests.oracle import written_loop
from torch_scan_hop import scan
from torch_scan_hop._torch import onednn
from torch_scan_hop.inductor.cpu.libraries import LAYOUTS, onednn_is_faster

SIZES = [(8, 64, 64), (32, 64, 64), (256, 64, 128), (512, 64, 512), (256, 512, 2048)]
ROUNDS = 15

ABOUT = [
    "Microseconds of one call of `left @ right`, for each way in which `right` may lie in memory",
    "(medians; the three take turns). MKL: `torch.mm`. oneDNN: its operator, given `right` as it",
    "lies, and as `torch_scan_hop` gives it: a matrix that is not dense is copied. `chosen`: what",
    "was measured to be faster when it was first compiled for.",
    "",
]
ABOUT_LRU = [
    "",
    "A complex LRU, `h = lam * h + x @ b`, `y = (h @ c).real + d * x`, of 16 rows, 64 inputs,",
    "128 states and 128 steps, in milliseconds:",
    "",
]


def _as_it_lies(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def measure(rows: int, depth: int, columns: int) -> list[list[object]]:
    torch.manual_seed(0)
    lines = []
    for layout, made in LAYOUTS.items():
        left, right = torch.randn(rows, depth), made(depth, columns)
        calls = {
            "MKL": functools.partial(torch.mm, left, right),
            "as it lies": functools.partial(_as_it_lies, left, right),
            "copied": functools.partial(onednn.product, left, right),
        }
        for call in calls.values():
            torch.testing.assert_close(call(), calls["MKL"](), rtol=1e-4, atol=1e-3)
        us = {name: t.median * 1e3 for name, t in interleaved(calls, ROUNDS).items()}
        chosen = onednn_is_faster((rows, depth, columns), right=layout)
        lines.append(
            [rows, depth, columns, layout, *(f"{v:.0f}" for v in us.values()),
             "oneDNN" if chosen else "MKL"]
        )  # fmt: skip
    return lines


def _lru(scan_: Callable[..., Any], lam: Any, b: Any, c: Any, d: Any, xs: Any, h: Any) -> Any:
    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = lam * h + x.to(b.dtype) @ b
        return h, (h @ c).real + d * x

    return scan_(cell, h, xs)


def measure_lru() -> list[list[object]]:
    torch.manual_seed(0)
    lam = torch.polar(torch.rand(128) * 0.5 + 0.4, torch.rand(128))
    b, c = (torch.randn(*shape, 2) * 0.1 for shape in ((64, 128), (128, 64)))
    given = [lam, torch.view_as_complex(b), torch.view_as_complex(c), torch.randn(64)]
    given = [leaf.requires_grad_() for leaf in (*given, torch.randn(128, 16, 64))]
    h = torch.zeros(16, 128, dtype=torch.complex64)
    ways = {
        "loop": functools.partial(_lru, written_loop),
        "eager": functools.partial(_lru, scan),
        "compiled": torch.compile(functools.partial(_lru, scan), fullgraph=True),
    }

    def forward(way: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return way(*given, h)

    def train(way: Callable[..., Any]) -> Any:
        h_T, ys = way(*given, h)
        return torch.autograd.grad(ys.sum() + h_T.abs().sum(), given)

    lines: list[list[object]] = []
    for name, run in (("forward", forward), ("training", train)):
        calls = {way: functools.partial(run, fn) for way, fn in ways.items()}
        for call in (*calls.values(), *calls.values()):
            call()
        lines.append([name, *(f"{t.median:.2f}" for t in interleaved(calls, ROUNDS).values())])
    return lines


def main() -> None:
    page = Page("Layouts of weights", "layouts")
    lines = [line for sizes in SIZES for line in page.measured("measure", *sizes, limit=600)]
    head = ["rows", "depth", "columns", "right", "MKL", "oneDNN, as it lies", "oneDNN", "chosen"]
    lru = report.table(["", "loop", "eager", "compiled"], page.measured("measure_lru", limit=600))
    page.write([*ABOUT, *report.table(head, lines), *ABOUT_LRU, *lru])


if __name__ == "__main__":
    main()
