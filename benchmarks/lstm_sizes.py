"""An LSTM beside ``nn.LSTM`` over widths and batches: nowhere slower is the target.

python -m benchmarks.lstm_sizes [--quick] [--widths 64 128] [--batches 1 8]
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import report
from benchmarks.contestants import COMPILED, CPP
from benchmarks.page import Page
from benchmarks.report import HOW, MODULE
from benchmarks.speed import DIRECTIONS, measure_workload
from benchmarks.workloads import LSTMWorkload

T = 64
WIDTHS, BATCHES = (64, 128, 256, 512, 1024), (1, 8, 32, 128)
NAMES = [MODULE, COMPILED, CPP]

ABOUT = [
    f"T = {T}, float32, as many inputs as hidden units. nn.LSTM in milliseconds (median and",
    "quartiles); ours, compiled, in parts of that median (median and quartiles), by the Python and",
    "the C++ wrapper. Contestants take turns in one process for each size.",
    *report.SPEED_COLUMNS[:3],
    "`error`: the worst of ours to the Python loop, relative to the largest element.",
    "",
]


def measure(width: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    workload = LSTMWorkload(f"H={width} B={batch}", batch, width, width)
    workload.T = T
    return measure_workload(workload, NAMES, rounds)


def line(width: int, batch: int, direction: str, rows: dict[str, dict[str, Any]]) -> list[object]:
    nn, ours = rows[MODULE], [rows[COMPILED], rows[CPP]]
    for row in ours:
        if row["skipped"]:
            raise SystemExit(f"{row['workload']}, {row['contestant']}: {row['skipped']}")
    base = nn["median"]
    cells = [
        f"{r['median'] / base:.2f} ({r['low'] / base:.2f}-{r['high'] / base:.2f})" for r in ours
    ]
    best = min(r["median"] for r in ours)
    limit = max(r["of_limit"] for r in ours)
    return [
        width, batch, HOW[direction],
        f"{base:.2f} ({nn['low']:.2f}-{nn['high']:.2f})", *cells,
        report.verdict(best / base, 1.0), f"{nn['of_limit']:.2f}", f"{limit:.2f}",
        f"{max(r['error'] for r in ours):.0e}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lstm_sizes")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, not written")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    page = Page("LSTMs of many sizes beside nn.LSTM", "lstm_sizes")
    lines = []
    for width in options.widths:
        for batch in options.batches:
            found = page.measured("measure", width, batch, 5 if options.quick else 15, limit=900)
            for direction in DIRECTIONS:
                rows = {r["contestant"]: r for r in found if r["direction"] == direction}
                lines.append(line(width, batch, direction, rows))
                print(*lines[-1], flush=True)
    head = [
        "H", "B", "", "nn.LSTM, ms", "/ nn", "/ nn, cpp",
        "<= 1", "nn of limit", "of limit", "error",
    ]  # fmt: skip
    partial = (options.widths, options.batches) != (WIDTHS, BATCHES)
    page.write([*ABOUT, *report.table(head, lines)], not options.quick and not partial)


if __name__ == "__main__":
    main()
