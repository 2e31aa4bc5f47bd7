"""Eager programs: ``scan(compile=True)``, TorchRL's GRU on our operator, a bar, the import.

    python -m benchmarks.eager_programs

Milliseconds of a training step, contestants interleaved, one thread. ``compile=True`` and a
``torch.compile`` of the whole call are warm. Rows of TorchRL, and of a bar, are there
where torchrl and hoptorch, and tqdm, are installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.child import RESULTS, measured
from benchmarks.timing import interleaved
from torch_scan_hop import accelerate_torch, scan

ROUNDS = 21
SIZES = [(8, 64, 20), (8, 64, 100), (64, 256, 100)]
Rows = list[list[str]]


def _rows(name: str, calls: dict[str, Callable[[], object]], base: str) -> Rows:
    for call in calls.values():
        call(), call()
    found = interleaved(calls, ROUNDS)
    return [
        [name, who, f"{t.median:.2f}", f"{t.median / found[base].median:.2f}"]
        for who, t in found.items()
    ]


def _lstm_calls(batch: int, width: int, T: int) -> dict[str, Callable[[], object]]:
    w, u = ((torch.randn(width, 4 * width) * width**-0.5).requires_grad_() for _ in range(2))
    xs, h0 = torch.randn(T, batch, width), torch.zeros(batch, width)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c = state
        i, f, g, o = (x @ w + h @ u).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    def by_hand() -> torch.Tensor:
        state, ys = (h0, h0), []
        for x in xs:
            state, y = step(state, x)
            ys.append(y)
        return torch.stack(ys)

    runs = {
        "Python loop": by_hand,
        "scan": lambda: scan(step, (h0, h0), xs)[1],
        "scan(compile=True)": lambda: scan(step, (h0, h0), xs, compile=True)[1],
        "torch.compile of the call": torch.compile(lambda: scan(step, (h0, h0), xs)[1]),
    }
    return {
        name: lambda run=run: torch.autograd.grad(run().sum(), [w, u]) for name, run in runs.items()
    }


def compiled() -> Rows:
    torch.set_num_threads(1)
    rows: Rows = []
    for size in SIZES:
        batch, width, T = size
        calls = _lstm_calls(*size)
        rows += _rows(f"lstm B={batch} H={width} T={T}", calls, "Python loop")
    return rows


def torchrl() -> Rows:
    if any(importlib.util.find_spec(name) is None for name in ("torchrl", "hoptorch")):
        return []
    torch.set_num_threads(1)
    from tensordict import TensorDict
    from torchrl.modules import GRUModule

    B, T, H = 8, 64, 32
    is_init = torch.zeros(B, T, 1, dtype=torch.bool)
    is_init[:, 0] = True
    data = {"x": torch.randn(B, T, H), "is_init": is_init, "h": torch.zeros(B, T, 1, H)}
    batch = TensorDict(data, [B, T])

    def training(backend: str) -> Callable[[], object]:
        module = GRUModule(
            input_size=H,
            hidden_size=H,
            in_keys=["x", "h"],
            out_keys=["y", ("next", "h")],
            recurrent_backend=backend,
            default_recurrent_mode=True,
        )

        def call() -> None:
            y = module(batch)["y"]
            torch.autograd.grad(y.square().sum(), list(module.parameters()))

        return call

    name = f"gru B={B} H={H} T={T}"
    # ours apart: to switch in between is to capture anew
    rows = _rows(name, {"pad": training("pad"), "torch's scan": training("scan")}, "pad")
    with accelerate_torch():
        return rows + _rows(
            name, {"torch's scan on ours": training("scan")}, "torch's scan on ours"
        )


def bars() -> Rows:
    if importlib.util.find_spec("tqdm") is None:
        return []
    torch.set_num_threads(1)
    xs, w = torch.randn(20_000, 4, 32), torch.randn(32, 32) / 32

    def cell(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h

    def call(progress: bool, compile: bool) -> Callable[[], object]:
        return lambda: scan(cell, torch.zeros(4, 32), xs, compile=compile, progress=progress)

    rows: Rows = []
    for compile in (False, True):
        calls = {"no bar": call(False, compile), "progress=True": call(True, compile)}
        rows += _rows("compile=True" if compile else "eager", calls, "no bar")
    return rows


_IMPORT = """
import sys, time
import torch
start = time.perf_counter()
import torch_scan_hop
print(time.perf_counter() - start)
"""


def imports() -> Rows:
    def once() -> float:
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, check=True)
        return float(done.stdout)

    once()  # writes the byte code
    return [
        ["import, over torch's own", f"{1000 * statistics.median(once() for _ in range(9)):.0f}"]
    ]


def main() -> None:
    start, before = time.perf_counter(), report.load()
    lstm = measured("benchmarks.eager_programs:compiled")
    gru = measured("benchmarks.eager_programs:torchrl")
    bar = measured("benchmarks.eager_programs:bars")
    imported = measured("benchmarks.eager_programs:imports")
    for found in (lstm, gru, bar, imported):
        if isinstance(found, dict) and "failed" in found:
            raise SystemExit(found["failed"])
    minutes = (time.perf_counter() - start) / 60
    text = "\n".join(
        [
            *report.header("Eager programs", "benchmarks.eager_programs", before, minutes),
            "## Inductor's loops inside an eager program",
            "",
            *report.table(["", "", "ms", "/ loop"], lstm),
            "## TorchRL's GRUModule",
            "",
            *report.table(["", "recurrent backend", "ms"], [row[:3] for row in gru]),
            "## A bar: 20,000 steps of an RNN, B=4 H=32, forward",
            "",
            *report.table(["", "", "ms", "/ no bar"], bar),
            *report.table(["", "ms, median of 9 processes"], imported),
        ]
    )
    (RESULTS / "eager_programs.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
