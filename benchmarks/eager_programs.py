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
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import report
from benchmarks.contestants import compiled as compiled_call
from benchmarks.contestants import of_torch, ours, python_loop
from benchmarks.page import Page
from benchmarks.timing import interleaved, ratio
from benchmarks.workloads import LSTMWorkload, case
from torch_scan_hop import accelerate_torch, debug, scan, set_default
from torch_scan_hop.reference import scan_loop

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


def _rnn(T: int, batch: int, width: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A cell, its init and its xs."""
    w = torch.randn(width, width) / width

    def cell(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h

    return cell, torch.zeros(batch, width), torch.randn(T, batch, width)


def compiled() -> Rows:
    torch.set_num_threads(1)
    rows: Rows = []
    for batch, width, T in SIZES:
        workload = LSTMWorkload(B=batch, D=width, H=width)
        given = case(workload, T)
        ways = {
            "Python loop": of_torch(given, partial(python_loop, given.loop_cell)),
            "scan": of_torch(given, partial(ours, given)),
            "scan(compile=True)": of_torch(given, partial(ours, given, compile=True)),
            "torch.compile of the call": compiled_call(given),
        }
        calls = {name: way.train for name, way in ways.items()}
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

    def call(rnn: Any, progress: bool, compile: bool) -> Callable[[], object]:
        return lambda: scan(*rnn, compile=compile, progress=progress)

    rows: Rows = []
    # The eager loop of 60,000 steps takes long enough for a bar to be drawn. 100 steps show what a
    # call costs that ends before.
    for T, compile, repeat in (
        (20_000, False, 1),
        (60_000, False, 1),
        (100, True, 200),
        (20_000, True, 5),
        (60_000, True, 5),
    ):
        rnn = _rnn(T, batch=4, width=32)
        calls = call(rnn, False, compile), call(rnn, True, compile)
        ms, low, middle, high = ratio(*calls, rounds=41, repeat=repeat)
        way = "compile=True" if compile else "eager"
        rows.append([way, f"{T:,}", f"{ms:.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"])
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


def checks() -> Rows:
    """What ``detect_nonfinite`` costs, of a scan forward."""
    torch.set_num_threads(1)
    rnn = _rnn(T=256, batch=16, width=128)

    def run(**options: Any) -> Any:
        return scan(*rnn, **options)

    def checked(call: Callable[[], object]) -> Callable[[], object]:
        def with_check() -> None:
            with set_default(detect_nonfinite=True):
                call()

        return with_check

    def debugged() -> None:
        with debug(detect_nonfinite=True):
            run()

    rows: Rows = []
    # programs of their own: to switch in between is to compile anew
    programs = [torch.compile(run, fullgraph=True) for _ in range(2)]
    ways = {
        "eager": (run, checked(run)),
        "compile=True": (partial(run, compile=True), checked(partial(run, compile=True))),
        "torch.compile": (programs[0], checked(programs[1])),
    }
    for name, (plain, with_check) in ways.items():
        rows += _rows(name, {"as it is": plain, "set_default": with_check}, "as it is")
    by_hand = {"loop": partial(scan_loop, *rnn, 256, False)}
    return rows + _rows("loop", by_hand | {"debug": debugged}, "loop")


def main() -> None:
    page = Page("Eager programs", "eager_programs")
    page.write(
        [
            "## Inductor's loops inside an eager program",
            "",
            *report.table(["", "", "ms", "/ loop"], page.measured("compiled")),
            "## TorchRL's GRUModule",
            "",
            *report.table(
                ["", "recurrent backend", "ms"], [row[:3] for row in page.measured("torchrl")]
            ),
            "## A bar: an RNN, B=4 H=32, forward",
            "",
            *report.table(
                ["", "steps", "ms, no bar", "progress=True / no bar", "quartiles"],
                page.measured("bars"),
            ),
            "## detect_nonfinite=True: 256 steps of an RNN, B=16 H=128, forward",
            "",
            *report.table(["", "", "ms", "/ without"], page.measured("checks")),
            *report.table(["", "ms, median of 9 processes"], page.measured("imports")),
        ]
    )


if __name__ == "__main__":
    main()
