"""Bodies that write to a part of a large carry: time and peak memory, beside the loop.

python -m benchmarks.in_place
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from tests.allocator import peak_of_allocator
from tests.large_carries import BODIES, ENTRIES, STEPS
from tests.oracle import written_loop
from torch_scan_hop import scan, tree

ROUNDS = 15

ABOUT = [
    f"{STEPS} steps, a carry of {ENTRIES:,} floats. The loop in milliseconds and in MiB that",
    "torch's allocator has handed out at most; a scan in parts of the loop's (medians; contestants",
    "take turns). `moved`: `v = c[i].clone(); c[i:i+64] = c[i+1:i+65].clone()`; `cache`: a row is",
    "written and read; `added`: `index_add_` of a row. Targets: time 1.1, memory 1.2.",
    "",
]


WAYS: dict[str, Callable[..., Any]] = {
    "loop": written_loop,
    "eager": scan,
    "compiled": functools.partial(scan, compile=True),
}


def measure(name: str, training: bool) -> list[str]:
    body, init_of, xs_of = BODIES[name]

    def call(run: Callable[..., Any]) -> None:
        start = torch.zeros(ENTRIES, requires_grad=training)
        carry, ys = run(body, init_of(start * 1.0), xs_of())
        if training:
            (tree.tensors(carry)[0].sum() + ys.sum()).backward()

    calls = {way: functools.partial(call, run) for way, run in WAYS.items()}
    for each in (*calls.values(), *calls.values()):
        each()
    ms = {way: t.median for way, t in interleaved(calls, ROUNDS).items()}
    mib = {way: peak_of_allocator(each) / 2**20 for way, each in calls.items()}
    parts = [
        f"{found[way] / found['loop']:.2f}" for way in ("eager", "compiled") for found in (ms, mib)
    ]
    return [name, "training" if training else "forward", f"{ms['loop']:.1f}", f"{mib['loop']:.1f}",
            *parts]  # fmt: skip


def main() -> None:
    page = Page("Writes in place", "in_place")
    lines: list[list[object]] = [
        page.measured("measure", name, training, limit=300)
        for name in BODIES
        for training in (False, True)
    ]
    head = ["body", "", "loop, ms", "loop, MiB", "eager, time", "eager, memory", "compiled, time",
            "compiled, memory"]  # fmt: skip
    page.write([*ABOUT, *report.table(head, lines)])


if __name__ == "__main__":
    main()
