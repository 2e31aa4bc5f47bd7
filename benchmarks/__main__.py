"""Speed of scan against what a user would pick otherwise: ``benchmarks/results/speed.md``.

    python -m benchmarks [--quick] [--workload lstm] [--only eager|compiled] [--slow]

Everything is measured in fresh processes (``child.py``): workloads side by side in one process
(``speed.py``), compile time, memory and cost per step each in its own (``probes.py``).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.child import RESULTS, measured
from benchmarks.contestants import COMPILED, CPP, EAGER, JAX, LOOP, names
from benchmarks.plots import plot
from benchmarks.workloads import WORKLOADS

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
    rows: list[dict[str, Any]] = []
    for workload in chosen:
        rounds = 5 if options.quick else 15
        rows += session.run(
            f"speed of {workload}", "benchmarks.speed:measure", workload, columns, rounds, limit=600
        )
    lines = [
        "## Speed",
        "",
        "Medians and quartiles in milliseconds; the contestants of a workload take turns in one",
        "process. `fwd+bwd` has gradients of all weights and all of xs, for a dense cotangent.",
        "`error`: largest difference of output and gradients to the eager loop's, relative to the",
        "largest element; above 2e-3 no time is shown. `copy` moves the bytes that lru has to move.",
        "",
        *report.speed_table(rows),
        *report.skipped_list(rows),
    ]
    return lines, report.speed_targets(rows)


def compile_time(session: Session) -> Section:
    sizes = [16, 4096] if session.options.quick else [16, 256, 4096, 65536]
    contestants = [c for c in (COMPILED, CPP) if session.allows(c)]
    rows = [
        row
        for c in contestants
        for T in sizes
        for row in session.run(
            f"compile time of {c}, T={T}", "benchmarks.probes:compile_time", "lstm", c, T, cold=True
        )
    ]
    head = ["contestant", "T", "toolchain, s", "compile fwd+bwd, s", "run, s"]
    body = [
        [r["contestant"], r["T"], *(f"{r[k]:.2f}" for k in ("toolchain", "compile", "second"))]
        for r in rows
    ]
    targets: list[list[object]] = []
    for c in contestants:
        of = {r["T"]: r for r in rows if r["contestant"] == c}
        if sizes[0] not in of or sizes[-1] not in of:
            continue
        small, large = of[sizes[0]], of[sizes[-1]]
        ratio, cold = large["compile"] / small["compile"], small["toolchain"] + small["compile"]
        name = f"compile time lstm fwd+bwd, {c}, T={sizes[-1]} / T={sizes[0]}"
        targets.append([name, "<= 1.1", f"{ratio:.2f}", report.verdict(ratio, 1.1)])
        for what, seconds in (("compile", small["compile"]), ("toolchain + compile", cold)):
            row = [f"cold lstm, {c}, {what}", "<= 10 s", f"{seconds:.1f} s"]
            targets.append([*row, report.verdict(seconds, 10)])
    series = {c: [(r["T"], r["compile"]) for r in rows if r["contestant"] == c] for c in contestants}
    image = plot(RESULTS / "compile.svg", "lstm, compile time of fwd+bwd", "T", "seconds", series)
    return [
        "## Compile time",
        "",
        "lstm fwd+bwd, a fresh process per row, no caches, an empty cache directory. `toolchain`",
        "compiles `x + 1` first: imports, probing the compiler, precompiled headers. `compile` is",
        "the first call less the second, which is `run`.",
        "",
        *report.table(head, body),
        image,
        "",
    ], targets


def per_step(session: Session) -> Section:
    sizes = [100, 1_000, 10_000] if session.options.quick else [100, 1_000, 10_000, 100_000]
    rows: list[dict[str, Any]] = []
    for c in (LOOP, EAGER, COMPILED, CPP, JAX):
        if session.allows(c):
            # the loop's autograd graph and the steps of eager grow beyond what is worth waiting for
            most = [T for T in sizes if T <= 10_000 or c not in (LOOP, EAGER)]
            rounds = 5 if session.options.quick else 9
            rows += session.run(f"per step, {c}", "benchmarks.probes:growth", c, most, 64, rounds)
    head = ["contestant", "", "T", "ms", "quartiles", "us / step", "us / step since the last T"]
    body: list[list[object]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    costs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    last: dict[str, Any] | None = None
    for r in rows:
        key = (r["contestant"], r["direction"])
        same = last is not None and (last["contestant"], last["direction"]) == key
        cost = r["median"] / r["T"] * 1e3
        more = (r["median"] - last["median"]) / (r["T"] - last["T"]) * 1e3 if same and last else cost
        name, how = r["contestant"], report.HOW[r["direction"]]
        spread = f"{r['low']:.3f}-{r['high']:.3f}"
        body.append([name, how, r["T"], f"{r['median']:.3f}", spread, f"{cost:.2f}", f"{more:.2f}"])
        series.setdefault(f"{name}, {how}", []).append((r["T"], r["median"]))
        costs.setdefault(key, []).append((cost, more))
        last = r
    targets: list[list[object]] = []
    for (name, direction), found in costs.items():
        if name not in (COMPILED, CPP) or len(found) < 2:
            continue
        for what, values in (
            ("us / step", [c for c, _ in found]),
            ("us / step since the last T", [m for _, m in found[1:]]),
        ):
            spread_of = max(values) / max(min(values), 1e-9)
            row = [f"{what} over T, {name}, {report.HOW[direction]}", "max / min <= 1.1"]
            targets.append([*row, f"{spread_of:.2f}", report.verdict(spread_of, 1.1)])
    image = plot(RESULTS / "time.svg", "lru, N=64", "T", "milliseconds", series)
    return [
        "## Cost per step",
        "",
        "lru with N=64. `us / step` includes what a call costs; the last column is the slope from",
        "the T before. The loop and eager stop at 10,000.",
        "",
        *report.table(head, body),
        image,
        "",
    ], targets


def memory(session: Session) -> Section:
    sizes = [64, 256] if session.options.quick else [64, 256, 1024, 4096]
    contestants = [c for c in (LOOP, EAGER, COMPILED, CPP) if session.allows(c)]
    rows: list[dict[str, Any]] = []
    for workload in ("lstm", "lru"):
        for c in contestants:
            for T in sizes:
                if workload == "lru" and T != min(1024, sizes[-1]):
                    continue
                what = f"memory of {workload}, {c}, T={T}"
                rows += session.run(what, "benchmarks.probes:peak_memory", workload, c, T)
    of = {(r["workload"], r["contestant"], r["T"]): r for r in rows}
    body, worst = [], dict.fromkeys(contestants, 0.0)
    for r in rows:
        base = of.get((r["workload"], LOOP, r["T"]))
        ratio = r["allocator"] / base["allocator"] if base else float("nan")
        worst[r["contestant"]] = max(worst[r["contestant"]], ratio)
        process = "-" if r["process"] is None else f"{r['process'] / 2**20:.1f}"
        mib = f"{r['allocator'] / 2**20:.1f}"
        body.append([r["workload"], r["contestant"], r["T"], mib, f"{ratio:.2f}", process])
    targets: list[list[object]] = [
        [f"peak memory fwd+bwd, {c} / eager loop, worst", "<= 1.0", f"{worst[c]:.2f}",
         report.verdict(worst[c], 1.0)]
        for c in contestants if c != LOOP and worst[c]
    ]  # fmt: skip
    series = {
        c: [(r["T"], r["allocator"] / 2**20) for r in rows if (r["workload"], r["contestant"]) == ("lstm", c)]
        for c in contestants
    }
    image = plot(RESULTS / "memory_peak.svg", "lstm, peak memory of fwd+bwd", "T", "MiB", series)
    head = ["workload", "contestant", "T", "allocator, MiB", "/ eager loop", "process, MiB"]
    return [
        "## Memory",
        "",
        "Peak of one fwd+bwd beyond its inputs, after a warm-up, a fresh process per row.",
        "`allocator`: most bytes that torch's CPU allocator had handed out at once (profiler).",
        "`process`: growth of the resident set to its high-water mark; pages that the warm-up left",
        "in the heap are not counted again, so it understates many small tensors.",
        "",
        *report.table(head, body),
        image,
        "",
    ], targets


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--workload", choices=list(WORKLOADS), help="this one's speed only")
    parser.add_argument("--only", choices=["eager", "compiled"])
    parser.add_argument("--slow", action="store_true", help="also the loop unrolled by Inductor")
    parser.add_argument("--write", type=Path, default=RESULTS / "speed.md")
    options = parser.parse_args()
    session, before = Session(options), report.load()
    sections = [speed] if options.workload else [speed, per_step, memory, compile_time]
    parts: list[str] = []
    targets: list[list[object]] = []
    for section in sections:
        if section is compile_time and options.only == "eager":
            continue
        lines, more = section(session)
        parts, targets = parts + lines, targets + more
    minutes = (time.perf_counter() - session.start) / 60
    text = "\n".join(
        [
            *report.header("Speed", "benchmarks", before, minutes),
            "## Targets",
            "",
            *report.table(["", "target", "reached", ""], targets),
            *parts,
            *(["## Failed", "", *session.failures, ""] if session.failures else []),
        ]
    )
    print(text)
    # a part of the table does not replace the whole
    if not (options.workload or options.only or options.quick) or options.write != RESULTS / "speed.md":
        options.write.write_text(text)


if __name__ == "__main__":
    main()
