"""One kernel or a counted loop: lstm of several widths and batches, run both ways.

    python -m benchmarks.kernels [--quick]

What ``inductor/cpu/rows`` chooses by the bytes of the weights should be the faster of the two.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

from benchmarks import report
from benchmarks.contestants import compiled
from benchmarks.page import Page
from benchmarks.timing import Timing, interleaved
from benchmarks.workloads import LSTMWorkload, case
from torch_scan_hop.rewrites import using_options

T = 128
WIDTHS, BATCHES = (128, 256, 512), (1, 16, 64)
KERNEL, LOOP = "one kernel", "counted loop"


def measure(width: int, batch: int, rounds: int) -> dict[str, Any]:
    """Milliseconds both ways, whatever would be chosen, and what is."""
    from torch_scan_hop.inductor.cpu import rows

    weights = 4 * width * 4 * width  # of the product with the carry
    chosen = KERNEL if weights <= rows.WEIGHT_BYTES else LOOP
    rows.WEIGHT_BYTES = 2**40
    lstm = LSTMWorkload("lstm", B=batch, D=width, H=width)
    found: dict[str, Any] = {"width": width, "batch": batch, "chosen": chosen}
    given = case(lstm, T)
    # an option of its own for one: Dynamo takes equal backends for the same, and compiles once
    ways = {
        KERNEL: compiled(given, cpp_wrapper=True),
        LOOP: compiled(given, cpp_wrapper=True, debug=False),
    }
    emit = mock.patch.object(
        rows.RowsKernel, "call_kernel", autospec=True, side_effect=rows.RowsKernel.call_kernel
    )
    for direction in ("forward", "train"):
        calls = {name: getattr(way, direction) for name, way in ways.items()}
        for name, call in calls.items():
            with using_options(one_kernel=name == KERNEL), emit as emitted:
                call(), call()
            if emitted.called != (name == KERNEL):
                raise AssertionError(f"{name}: {emitted.call_count} kernels")
        timings: dict[str, Timing] = interleaved(calls, rounds)
        found[direction] = {name: timing.median for name, timing in timings.items()}
    return found


def row_of(r: dict[str, Any]) -> list[object]:
    cells: list[object] = [r["width"], r["batch"], r["chosen"]]
    for direction in ("forward", "train"):
        kernel, loop = r[direction][KERNEL], r[direction][LOOP]
        cells += [f"{kernel:.2f}", f"{loop:.2f}", f"{kernel / loop:.2f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, not written")
    options = parser.parse_args()
    widths, batches = ((128,), (1, 16)) if options.quick else (WIDTHS, BATCHES)
    page = Page("One kernel or a counted loop", "kernels")
    rows = []
    for width in widths:
        for batch in batches:
            rows.append(row_of(page.measured("measure", width, batch, 9, cold=True)))
            print(rows[-1], flush=True)
    head = ["H", "B", "chosen", *(f"{way}, {how}, ms" for how in ("fwd", "fwd+bwd")
            for way in (KERNEL, LOOP))]  # fmt: skip
    head = [*head[:5], "ratio", *head[5:], "ratio"]
    lines = [f"lstm, T={T}, D=H, compiled with the C++ wrapper; medians.", ""]
    page.write([*lines, *report.table(head, rows)], keep=not options.quick)


if __name__ == "__main__":
    main()
