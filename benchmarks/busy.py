"""A busy machine: compiled scans beside jax's, while other processes keep every core busy.

    python -m benchmarks.busy [--quick]

As many processes as cores count in a loop, as data loaders or another user's job would. They are
stopped for the quiet rounds, and go on for the busy ones, which take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import report
from benchmarks.body_workloads import GAE
from benchmarks.contestants import COMPILED, JAX
from benchmarks.page import Page
from benchmarks.speed import DIRECTIONS, Field
from benchmarks.timing import once
from benchmarks.workloads import LRUWorkload, LSTMWorkload, Workload

CASES: dict[str, Workload] = {
    w.name: w
    for w in (
        GAE(),
        LSTMWorkload("small lstm", B=8, D=64, H=64),
        LRUWorkload("narrow lru", N=64),
        LRUWorkload(),
        LSTMWorkload(),
    )
}
CASES["small lstm"].T = 20
NAMES = (COMPILED, "nn module", JAX)
# long enough for the scheduler to go around several times
ROUND_SECONDS = 0.4


@contextlib.contextmanager
def busy_processes() -> Iterator[Callable[[int], None]]:
    """Started and stopped; the function sends all of them a signal."""
    started = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]

    def send(what: int) -> None:
        for process in started:
            process.send_signal(what)

    try:
        send(signal.SIGSTOP)
        yield send
    finally:
        for process in started:
            process.kill()
            process.wait()


def times_of(call: Callable[[], object]) -> list[float]:
    """Milliseconds of the calls of one round."""
    found, end = [], time.perf_counter() + ROUND_SECONDS
    while not found or time.perf_counter() < end:
        found.append(once(call) * 1e3)
    return found


def measure(case: str, rounds: int) -> list[dict[str, Any]]:
    """Means: a call that waits for a core takes many times the median."""
    field = Field(CASES[case], list(NAMES))
    rows = []
    with busy_processes() as send:
        for direction in DIRECTIONS:
            out = field.skipped[direction]
            calls = {n: getattr(c, direction) for n, c in field.ready.items() if n not in out}
            found: dict[tuple[str, str], list[float]] = {}
            for _ in range(rounds):
                for how, what in (("quiet", signal.SIGSTOP), ("busy", signal.SIGCONT)):
                    send(what)
                    time.sleep(0.05)
                    for name, call in calls.items():
                        found.setdefault((name, how), []).append(statistics.mean(times_of(call)))
            send(signal.SIGSTOP)
            for name in calls:
                quiet, busy = (statistics.median(found[name, how]) for how in ("quiet", "busy"))
                rows.append(
                    {
                        "case": case,
                        "how": report.HOW[direction],
                        "who": name,
                        "quiet": quiet,
                        "busy": busy,
                    }
                )
    return rows


def lines_of(rows: list[dict[str, Any]]) -> list[list[object]]:
    busy_jax = {(r["case"], r["how"]): r["busy"] for r in rows if r["who"] == JAX}
    lines: list[list[object]] = []
    for r in rows:
        jax = busy_jax.get((r["case"], r["how"]))
        ratio = "-" if jax is None else f"{r['busy'] / jax:.2f}"
        cells = [f"{r[k]:.3f}" for k in ("quiet", "busy")]
        lines.append(
            [r["case"], r["how"], r["who"], *cells, f"{r['busy'] / r['quiet']:.2f}", ratio]
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, not written")
    options = parser.parse_args()
    page = Page("A busy machine", "busy")
    lines = [
        "Milliseconds: the median over rounds of a round's mean call. A process that shares its",
        "core with another has half of it, so 2 is the least that work on all cores can come to;",
        "short calls that find a core free come to less.",
        "",
    ]
    head = ["case", "", "", "quiet", "busy", "busy / quiet", "busy / jax, busy"]
    for policy in ("", "PASSIVE"):
        if policy:
            os.environ["OMP_WAIT_POLICY"] = policy
        rows: list[dict[str, Any]] = []
        for case in CASES:
            rows += page.measured("measure", case, 3 if options.quick else 7)
            print(case, policy, flush=True)
        title = f"`OMP_WAIT_POLICY={policy}`" if policy else "Threads wait as torch comes"
        lines += [f"## {title}", "", *report.table(head, lines_of(rows))]
    os.environ.pop("OMP_WAIT_POLICY", None)
    page.write(lines, keep=not options.quick)


if __name__ == "__main__":
    main()
