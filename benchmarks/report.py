"""Rows to markdown: tables, and the issue's targets with the number reached."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.contestants import COMPILED, COPY, CPP, EAGER, JAX, LOOP

Rows = list[dict[str, Any]]
HOW = {"forward": "fwd", "train": "fwd+bwd"}
MODULE = "nn module"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def load() -> str:
    return " ".join(f"{x:.2f}" for x in os.getloadavg())


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = (line.split(":")[1] for line in info if line.startswith("model name"))
            return next(names).strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> str:
    found = []
    for package in ("torch", "jax", "jaxlib", "numpy"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} absent")
    return ", ".join(found)


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def header(title: str, module: str, load_before: str, minutes: float) -> list[str]:
    waiting = {k: os.environ[k] for k in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if k in os.environ}
    return [
        f"# {title}",
        "",
        f"- {datetime.datetime.now():%Y-%m-%d %H:%M}, commit {commit()}, {minutes:.0f} minutes",
        f"- `{' '.join(['python -m', module, *sys.argv[1:]])}`",
        f"- {processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, float32",
        f"- Python {platform.python_version()}, {versions()}",
        f"- load average (1, 5, 15 minutes) before: {load_before}; after: {load()}",
        f"- OpenMP waiting: {waiting or 'as torch comes'}",
        *_warning(max(float(load_before.split()[0]), os.getloadavg()[0])),
        "",
    ]


def _warning(busiest: float) -> list[str]:
    """Our own threads make for a load of about 2 by the end."""
    cores = os.cpu_count() or 1
    if busiest < cores + 1:
        return []
    return [
        f"- **Busy machine** (load {busiest:.1f} on {cores} cores): contestants whose steps wait",
        "  for two threads (all of torch's) lose more to it than those that run on one",
        "  (jax). Ratios",
        "  between torch's contestants hold better than those to jax.",
    ]


SPEED_COLUMNS = [
    "`fwd+bwd` has gradients of all weights and all of xs, for a dense cotangent.",
    "`of limit`: the part of its time that the machine needs at least, by its rate of a large",
    "product or of a large copy, measured in the same process (`benchmarks/limits.py`).",
    "`error`: largest difference of output and gradients to the eager loop's, relative to the",
    "largest element; above 2e-3 no time is shown.",
]


Medians = dict[tuple[str, str, str], float | None]


def medians(rows: Rows) -> Medians:
    """By workload, direction and contestant; None where it was not timed."""
    return {(r["workload"], r["direction"], r["contestant"]): r["median"] for r in rows}


def ratio(row: dict[str, Any], baseline: str, median: Medians) -> str:
    base = median.get((row["workload"], row["direction"], baseline))
    return f"{row['median'] / base:.2f}" if base else "-"


def speed_table(rows: Rows) -> list[str]:
    """Milliseconds [quartiles], with ratios to the baselines."""
    median = medians(rows)
    head = [
        "workload",
        "",
        "contestant",
        "ms",
        "quartiles",
        "n",
        "/ eager loop",
        "/ nn",
        "/ jax",
        "of limit",
        "first call, s",
        "error",
    ]
    lines = []
    for row in rows:
        if row["median"] is None:
            continue
        error = "-" if row["error"] is None else f"{row['error']:.0e}"
        lines.append(
            [row["workload"], HOW[row["direction"]], row["contestant"], f"{row['median']:.2f}",
             f"{row['low']:.2f}-{row['high']:.2f}", row["samples"],
             *(ratio(row, baseline, median) for baseline in (LOOP, MODULE, JAX)),
             f"{row['of_limit']:.2f}", f"{row['first_seconds']:.1f}", error]
        )  # fmt: skip
    return table(head, lines)


def summary(rows: Rows) -> list[str]:
    """Ours, by the better of the two wrappers, in parts of what a user would pick otherwise."""
    median, lines = medians(rows), []
    timed = [r for r in rows if r["median"]]
    for key in dict.fromkeys((r["workload"], r["direction"]) for r in timed):
        of = {r["contestant"]: r for r in timed if (r["workload"], r["direction"]) == key}
        ours = [of[c] for c in OURS if c in of]
        if not ours:
            continue
        best = min(ours, key=lambda r: r["median"])
        lines.append(
            [key[0], HOW[key[1]], f"{best['median']:.2f}",
             *(ratio(best, baseline, median) for baseline in (LOOP, MODULE, JAX)),
             f"{best['of_limit']:.2f}", ratio(of[EAGER], LOOP, median) if EAGER in of else "-"]
        )  # fmt: skip
    head = [
        "", "", "ours compiled, ms", "/ eager loop", "/ nn", "/ jax", "of limit",
        "ours eager / eager loop",
    ]  # fmt: skip
    return table(head, lines)


def missed(targets: list[list[object]]) -> list[str]:
    """One table, last of a page."""
    rows = [row for row in targets if row[-1] != "met"]
    if not targets or not rows:
        return []
    title = f"## Targets: {len(targets) - len(rows)} of {len(targets)} are met; not met are"
    return [title, "", *table(["", "target", "reached"], [row[:-1] for row in rows])]


def skipped_list(rows: Rows) -> list[str]:
    lines = ["Not timed:", ""]
    lines += [
        f"- {r['workload']}, {HOW[r['direction']]}, {r['contestant']}: {r['skipped']}"
        for r in rows
        if r["skipped"] and r["contestant"] not in (COPY, MODULE)
    ]
    return [*lines, ""] if len(lines) > 2 else []


@dataclass(frozen=True)
class Target:
    """``contestant / baseline <= limit``; ours is the better of the two wrappers."""

    workload: str
    direction: str
    contestants: tuple[str, ...]
    baseline: str
    limit: float


OURS = (COMPILED, CPP)
TARGETS = [
    Target("lstm", "forward", OURS, MODULE, 1.1),
    Target("lstm", "train", OURS, MODULE, 1.0),
    Target("lstm", "train", OURS, JAX, 0.4),
    Target("gru", "train", OURS, JAX, 0.4),
    Target("lru", "train", OURS, JAX, 0.6),
    Target("lru", "train", OURS, COPY, 2.0),
    Target("layers", "train", OURS, LOOP, 1.0),
    Target("ssm", "train", OURS, JAX, 0.6),
    Target("lstm", "train", (EAGER,), LOOP, 0.5),
    Target("lru", "train", (EAGER,), LOOP, 0.5),
]


def verdict(reached: float, limit: float) -> str:
    return "met" if reached <= limit else "**not met**"


def speed_targets(rows: Rows) -> list[list[object]]:
    median = medians(rows)
    lines: list[list[object]] = []
    for t in TARGETS:
        base = median.get((t.workload, t.direction, t.baseline))
        found = [(median.get((t.workload, t.direction, c)), c) for c in t.contestants]
        timed = [(value, name) for value, name in found if value]
        if not base or not timed:
            continue
        value, name = min(timed)
        what = f"{t.workload} {HOW[t.direction]}, {name} / {t.baseline}"
        lines.append([what, f"<= {t.limit}", f"{value / base:.2f}", verdict(value / base, t.limit)])
    return lines
