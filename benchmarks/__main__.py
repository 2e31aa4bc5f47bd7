"""Speed of scan against what a user would pick otherwise: ``benchmarks/results/speed.md``.

    python -m benchmarks [--quick] [--workload lstm] [--only eager|compiled] [--section memory|gpu]
                         [--slow] [--write results.md]

Everything is measured in fresh processes (``child.py``): workloads side by side in one process
(``speed.py``), compile time, memory and cost per step each in its own (``probes.py``).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks import gpu, report
from benchmarks.child import RESULTS
from benchmarks.sections import Session, compile_time, memory, per_step, speed
from benchmarks.workloads import WORKLOADS

DEFAULT = RESULTS / "speed.md"
SECTIONS = {"speed": speed, "per-step": per_step, "memory": memory, "compile": compile_time}


def document(session: Session, before: str, targets: list[list[object]], parts: list[str]) -> str:
    minutes = (time.perf_counter() - session.start) / 60
    part = session.options.section
    lines = [
        *report.header(f"Speed: {part}" if part else "Speed", "benchmarks", before, minutes),
        *parts,
        *report.missed(targets),
        *(["## Failed", "", *session.failures, ""] if session.failures else []),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--workload", choices=list(WORKLOADS), help="this one's speed only")
    parser.add_argument("--only", choices=["eager", "compiled"])
    parser.add_argument("--section", choices=[*SECTIONS, "gpu"], help="this part only")
    parser.add_argument("--slow", action="store_true", help="also the loop unrolled by Inductor")
    parser.add_argument("--write", type=Path, default=DEFAULT)
    options = parser.parse_args()
    if options.section == "gpu":  # a page of its own, never a part of the table
        gpu.write(gpu.PAGE if options.write == DEFAULT else options.write, options.quick)
        return
    session, before = Session(options), report.load()
    chosen = "speed" if options.workload else options.section
    sections = [SECTIONS[chosen]] if chosen else list(SECTIONS.values())
    # a part of the table does not replace the whole
    partial = options.workload or options.only or options.quick or options.section
    path = None if partial and options.write == DEFAULT else options.write
    parts: list[str] = []
    targets: list[list[object]] = []
    for section in sections:
        if section is compile_time and options.only == "eager":
            continue
        lines, more = section(session)
        parts, targets = parts + lines, targets + more
        if path:  # after every section: a run that is cut off leaves what it found
            path.write_text(document(session, before, targets, parts))
    print(document(session, before, targets, parts))


if __name__ == "__main__":
    main()
