"""The page of results, one row for each recorded run: ``benchmarks/results/fuzz.md``."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

from .campaign import Tally

HEADER = """\
# The differential fuzzer's runs

Each row is a run of `make fuzz ARGS="... --record"`. Random programs run as a scan and as the
Python loop in float64; values and every gradient are compared (`tests/fuzz`). Discarded: the loop
itself raises, or last digits of the inputs decide the result. Loops: the body was not captured, and
ran as a loop with a warning, or was refused by a compiler. Torch: it fails in the same way on
the compiled Python loop. Crashes: the scan raises where the loop does not. Wrong: other numbers.

| date | machine | torch | command | modes | checks | discarded | loops | torch | crashes | wrong | seconds |
|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|
"""


def record(path: Path, tally: Tally, modes: list[str], command: str) -> None:
    if not path.exists():
        path.write_text(HEADER)
    s = tally.statuses
    cells = [
        datetime.date.today().isoformat(),
        f"{platform.machine()}, {os.cpu_count()} cores",
        torch.__version__,
        f"`{command}`",
        ", ".join(modes),
        str(sum(s.values())),
        str(s["discarded"]),
        str(s["loop"]),
        str(s["torch"]),
        str(s["crash"] + s["died"]),
        str(s["wrong"]),
        f"{tally.seconds:.0f}",
    ]
    lines = path.read_text().splitlines()
    end = lines.index(HEADER.splitlines()[-1]) + 1
    while end < len(lines) and lines[end].startswith("|"):
        end += 1  # other sections follow the table
    lines.insert(end, f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")
