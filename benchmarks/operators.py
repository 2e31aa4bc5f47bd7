"""Where the time of one contestant goes, by operator, from torch's profiler.

    python -m benchmarks.operators lstm "ours eager" [--forward] [--T 256]

Being watched costs each call of an operator about a microsecond: read shares.
"""

from __future__ import annotations

import argparse

from torch.profiler import ProfilerActivity, profile

from benchmarks.body_workloads import BODIES
from benchmarks.contestants import CONTESTANTS
from benchmarks.workloads import ALL, case

WARM_UP, CALLS = 3, 5
WORKLOADS = ALL | BODIES


def table(workload: str, contestant: str, T: int | None, forward: bool) -> str:
    chosen = WORKLOADS[workload]
    it = CONTESTANTS[contestant](chosen, case(chosen, T))
    call = it.forward if forward else it.train
    for _ in range(WARM_UP):
        call()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(CALLS):
            call()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    whole = sum(row.self_cpu_time_total for row in rows)
    lines = [
        "| operator | share | calls | us a call, without others it calls |",
        "|---|---|---|---|",
    ]
    for row in rows:
        share = row.self_cpu_time_total / whole
        if share >= 0.01:
            each = row.self_cpu_time_total / row.count
            lines.append(f"| {row.key} | {share:.0%} | {row.count // CALLS} | {each:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--T", type=int)
    options = parser.parse_args()
    print(table(options.workload, options.contestant, options.T, options.forward))


if __name__ == "__main__":
    main()
