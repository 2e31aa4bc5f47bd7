"""The sections of ``speed.md``: what is run, its tables and plots, its targets."""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks import report
from benchmarks.child import RESULTS, measured
from benchmarks.contestants import COMPILED, CPP, EAGER, JAX, LOOP, names
from benchmarks.plots import plot
from benchmarks.report import Rows
from benchmarks.workloads import NARROW, NARROW_LRU, WORKLOADS

Section = tuple[list[str], list[list[object]]]  # markdown, rows for the table of targets


class Session:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.start = time.perf_counter()
        self.failures: list[str] = []

    def run(self, what: str, where: str, *arguments: Any, **how: Any) -> list[dict[str, Any]]:
        found = measured(where, *arguments, **how)
        took = time.perf_counter() - self.start
        if isinstance(found, dict) and "failed" in found:
            self.failures.append(f"- {what}: {found['failed']}")
            print(f"[{took:4.0f} s] {what}: {found['failed']}", flush=True)
            return []
        print(f"[{took:4.0f} s] {what}", flush=True)
        return found if isinstance(found, list) else [found]

    def allows(self, contestant: str) -> bool:
        return contestant in names(self.options.only)


def speed(session: Session) -> Section:
    options = session.options
    chosen = [options.workload] if options.workload else list(WORKLOADS)
    columns = list(names(options.only, options.slow))
    rows: Rows = []
    for workload in chosen:
        rounds = 5 if options.quick else 15
        rows += session.run(
            f"speed of {workload}", "benchmarks.speed:measure", workload, columns, rounds, limit=600
        )
    lines = [
        "Compared are a plain Python loop, its fused module (`nn.LSTM`, `nn.GRU`),",
        "`jax.lax.scan` in a jitted function, torch's own prototype `scan()`, and ours in eager",
        "mode and compiled, by Inductor's Python and C++ wrappers, of which the table has the",
        "better one. `of limit`: the part of its time that the machine needs at least, by its",
        "rate of a large product or copy.",
        "",
        *report.summary(rows),
        "![time against T](time.svg) ![lstm, peak memory of fwd+bwd](memory_peak.svg)",
        "",
        "## Speed",
        "",
        "Medians and quartiles in milliseconds; the contestants of a workload take turns in one",
        "process. `copy` moves the bytes lru has to move.",
        *report.SPEED_COLUMNS,
        "",
        *report.speed_table(rows),
        *report.skipped_list(rows),
    ]
    return lines, report.speed_targets(rows)


def compile_targets(rows: Rows, contestants: list[str], sizes: list[int]) -> list[list[object]]:
    of = {(r["workload"], r["contestant"], r["T"]): r for r in rows}
    targets: list[list[object]] = []
    for c in contestants:
        small, large = (of.get((NARROW.name, c, T)) for T in (sizes[0], sizes[-1]))
        if small is not None and large is not None:
            ratio = large["cpu"] / small["cpu"]
            name = f"compile time (cpu) lstm fwd+bwd, {c}, T={sizes[-1]} / T={sizes[0]}"
            targets.append([name, "<= 1.1", f"{ratio:.2f}", report.verdict(ratio, 1.1)])
        lstm = of.get(("lstm", c, WORKLOADS["lstm"].T))
        if lstm is None:
            continue
        cold = lstm["toolchain"] + lstm["compile"]
        for what, seconds in (("compile", lstm["compile"]), ("toolchain + compile", cold)):
            row = [f"cold lstm, {c}, {what}", "<= 10 s", f"{seconds:.1f} s"]
            targets.append([*row, report.verdict(seconds, 10)])
    return targets


def compile_rows(session: Session, contestants: list[str], sizes: list[int]) -> Rows:
    rows: Rows = []
    for c in contestants:
        for workload, T in [("lstm", WORKLOADS["lstm"].T), *((NARROW.name, T) for T in sizes)]:
            what = f"compile time of {workload}, {c}, T={T}"
            rows += session.run(what, "benchmarks.probes:compile_time", workload, c, T, cold=True)
    return rows


def compile_time(session: Session) -> Section:
    sizes = [16, 4096] if session.options.quick else [16, 4096, 65536]
    contestants = [c for c in (COMPILED, CPP) if session.allows(c)]
    rows = compile_rows(session, contestants, sizes)
    keys = ("toolchain", "compile", "cpu", "second")
    body = [[r["workload"], r["contestant"], r["T"], *(f"{r[k]:.2f}" for k in keys)] for r in rows]
    head = ["", "contestant", "T", "toolchain, s", "compile fwd+bwd, s", "of it cpu, s", "run, s"]
    series: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        if r["workload"] == NARROW.name:
            series.setdefault(r["contestant"], []).append((r["T"], r["cpu"]))
    title = "lstm, compile time of fwd+bwd"
    return [
        "## Compile time",
        "",
        "fwd+bwd, a fresh process per row, no caches, an empty cache directory. `toolchain`",
        "compiles `x + 1` first: imports, probing the compiler, precompiled headers. `compile` is",
        "the first call less the second, which is `run`; `cpu` adds up processors' seconds, the",
        "C++ compiler's too, and does not grow with other work on the machine as `compile` does.",
        f"{NARROW.name}: B={NARROW.B} D=H={NARROW.H}, so that T=65536 runs in seconds.",
        "",
        *report.table(head, body),
        plot(RESULTS / "compile.svg", title, "T", "seconds, cpu", series),
        "",
    ], compile_targets(rows, contestants, sizes)


def series_of(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["workload"], row["contestant"], row["direction"]


def costs_per_step(rows: Rows) -> Rows:
    """With ``cost``, microseconds per step, and ``slope``, those since the T before."""
    found: Rows = []
    for r in rows:
        cost = slope = r["median"] / r["T"] * 1e3
        if found and series_of(found[-1]) == series_of(r):
            before = found[-1]
            slope = (r["median"] - before["median"]) / (r["T"] - before["T"]) * 1e3
        found.append(r | {"cost": cost, "slope": slope})
    return found


def per_step_targets(rows: Rows) -> list[list[object]]:
    """Flat in T: as a call costs, and without what a call costs at T = 0."""
    targets: list[list[object]] = []
    for name in dict.fromkeys(map(series_of, rows)):
        workload, contestant, direction = name
        of = [r for r in rows if series_of(r) == name]
        if contestant not in (COMPILED, CPP) or len(of) < 3:
            continue
        flat = {"us / step since the last T": [r["slope"] for r in of[1:]]}
        if workload != NARROW_LRU.name:  # its steps cost less than a call, whatever T is
            flat["us / step"] = [r["cost"] for r in of]
        for what, values in flat.items():
            row: list[object] = [
                f"{what}, {workload} {report.HOW[direction]}, {contestant}",
                "max / min <= 1.1",
            ]
            if min(values) <= 0:  # what steps add is less than the noise of a call
                targets.append([*row, "below the noise", "**not measured**"])
                continue
            ratio = max(values) / min(values)
            targets.append([*row, f"{ratio:.2f}", report.verdict(ratio, 1.1)])
    return targets


def per_step(session: Session) -> Section:
    sizes = [100, 1_000, 10_000] if session.options.quick else [100, 1_000, 10_000, 100_000]
    rounds = 5 if session.options.quick else 9
    rows: Rows = []
    for workload, turns, contestants in (
        ("lstm", 3, (COMPILED, CPP, JAX)),  # 100,000 steps of it take seconds
        (NARROW_LRU.name, rounds, (LOOP, EAGER, COMPILED, CPP, JAX)),
    ):
        for c in filter(session.allows, contestants):
            # their autograd graph or their steps take longer than is worth waiting for
            long = c in (COMPILED, CPP) or (c == JAX and workload != "lstm")
            reached = [T for T in sizes if T <= 10_000 or long]
            rows += session.run(
                f"per step, {workload}, {c}",
                "benchmarks.probes:growth",
                workload,
                c,
                reached,
                turns,
                limit=600,
            )
    rows = costs_per_step(rows)
    head = ["", "contestant", "", "T", "ms", "quartiles", "us / step", "us / step since the last T"]
    body = [
        [r["workload"], r["contestant"], report.HOW[r["direction"]], r["T"], f"{r['median']:.3f}",
         f"{r['low']:.3f}-{r['high']:.3f}", f"{r['cost']:.2f}", f"{r['slope']:.2f}"]
        for r in rows
    ]  # fmt: skip
    series: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        line = series.setdefault(", ".join((*series_of(r)[:2], report.HOW[r["direction"]])), [])
        line.append((r["T"], r["median"]))
    return [
        "## Cost per step",
        "",
        "lstm, and lru with N=64, whose steps cost less than 0.1 us: there `us / step` shows what",
        "a call costs. The last column is the slope from the T before. The loop, eager and jax's",
        "lstm stop at 10,000.",
        "",
        *report.table(head, body),
        plot(RESULTS / "time.svg", "time against T", "T", "milliseconds", series),
        "",
    ], per_step_targets(rows)


def memory_rows(session: Session, contestants: list[str], sizes: list[int]) -> Rows:
    rows: Rows = []
    for workload, chosen in (("lstm", sizes), ("lru", [min(1024, sizes[-1])])):
        for c in contestants:
            what = f"memory of {workload}, {c}"
            rows += session.run(what, "benchmarks.probes:peak_memory", workload, c, chosen)
    base = {(r["workload"], r["T"]): r["allocator"] for r in rows if r["contestant"] == LOOP}
    nothing = float("nan")
    return [
        r | {"ratio": r["allocator"] / base.get((r["workload"], r["T"]), nothing)} for r in rows
    ]


def memory(session: Session) -> Section:
    sizes = [64, 256] if session.options.quick else [64, 256, 1024, 4096]
    contestants = [c for c in (LOOP, EAGER, COMPILED, CPP) if session.allows(c)]
    rows = memory_rows(session, contestants, sizes)
    body: list[list[object]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        process = "-" if r["process"] is None else f"{r['process'] / 2**20:.1f}"
        mib = r["allocator"] / 2**20
        name = r["contestant"]
        body.append([r["workload"], name, r["T"], f"{mib:.1f}", f"{r['ratio']:.2f}", process])
        if r["workload"] == "lstm":
            series.setdefault(name, []).append((r["T"], mib))
    targets: list[list[object]] = []
    for c in contestants[1:]:
        worst = max((r["ratio"] for r in rows if r["contestant"] == c), default=0.0)
        row = [f"peak memory fwd+bwd, {c} / eager loop, worst", "<= 1.0", f"{worst:.2f}"]
        targets.append([*row, report.verdict(worst, 1.0)])
    head = ["workload", "contestant", "T", "allocator, MiB", "/ eager loop", "process, MiB"]
    return [
        "## Memory",
        "",
        "Peak of one fwd+bwd beyond its inputs, after a warm-up at the same T.",
        "`allocator`: most bytes that torch's CPU allocator had handed out at once (profiler).",
        "`process`: growth of the resident set to its high-water mark; pages that the warm-up left",
        "in the heap are not counted again, so it understates many small tensors.",
        "",
        *report.table(head, body),
        plot(RESULTS / "memory_peak.svg", "lstm, peak memory of fwd+bwd", "T", "MiB", series),
        "",
    ], targets
