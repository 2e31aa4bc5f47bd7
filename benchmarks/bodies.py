"""Bodies beyond those of ``speed.md``: small, complex, nested, with reductions, with solves.

python -m benchmarks.bodies [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from benchmarks import report
from benchmarks.body_workloads import BODIES
from benchmarks.contestants import COMPILED, CPP, EAGER, JAX, LOOP
from benchmarks.page import Page
from benchmarks.speed import measure

__all__ = ["measure", "tell"]

NAMES = [LOOP, EAGER, COMPILED, CPP, JAX]


def tell(page: Page, names: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{page.name}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, not written")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += page.measured("measure", name, NAMES, 5 if options.quick else 15, limit=600)
        print(name, flush=True)
    about = [
        "Medians and quartiles in milliseconds; contestants take turns in one process.",
        *report.SPEED_COLUMNS,
        "",
    ]
    page.write([*about, *report.speed_table(rows), *report.skipped_list(rows)], not options.quick)


if __name__ == "__main__":
    tell(Page("More bodies", "bodies"), BODIES)
