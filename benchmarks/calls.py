"""What a call of a scan costs besides its steps: small ones beside the Python loop, in eager mode.

    python -m benchmarks.calls

One thread, ``tanh(h @ w)`` over the weights ``w`` of B=4, D=8: a step takes microseconds. The way
of a call is what ``sys.setprofile`` sees of it: calls of Python functions, of how many functions,
in how many files.
"""

from __future__ import annotations

import functools
import gc
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import torch_scan_hop
from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from tests.oracle import written_loop
from torch_scan_hop import scan

PACKAGE = str(Path(torch_scan_hop.__file__).parent)
TRIP_COUNTS = (1, 5, 15, 20, 100)
B, D = 4, 8
FUSED = ((1, 8), (16, 64), (64, 256))  # rows and width
STEPS_OF_FUSED = (5, 32, 100, 1000)
ROUNDS = 41


def cell(h: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.tanh(h @ w), None


def loop(h: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
    for w in ws.unbind(0):
        h, _ = cell(h, w)
    return h


def ours(h: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
    return scan(cell, h, ws)[0]


def measure(T: int) -> list[list[object]]:
    torch.set_num_threads(1)
    given = [torch.randn(B, D).requires_grad_(), (torch.randn(T, D, D) / 3).requires_grad_()]
    weights = torch.randn(B, D)

    def forward(run: Any) -> Any:
        with torch.no_grad():
            return run(*given)

    def train(run: Any) -> Any:
        return torch.autograd.grad(run(*given), given, weights)

    rows: list[list[object]] = []
    for name, how in (("fwd", forward), ("fwd+bwd", train)):
        calls = {"loop": lambda how=how: how(loop), "scan": lambda how=how: how(ours)}
        for call in calls.values():
            call(), call()
        took = {who: 1000 * t.median for who, t in interleaved(calls, ROUNDS).items()}
        difference = took["scan"] - took["loop"]
        rows.append([T, name, *(f"{us:.0f}" for us in (*took.values(), difference))])
    return rows


def way(T: int) -> list[list[object]]:
    """Return calls, functions and files on the way of one warm training call of a tanh RNN."""
    w, u = (torch.randn(D, D, requires_grad=True) for _ in range(2))
    xs, init = torch.randn(T, B, D), torch.zeros(B, D)

    def rnn(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(x @ w + h @ u)
        return h, h

    codes: list[CodeType] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.append(frame.f_code)

    for _ in range(4):
        codes.clear()
        gc.collect()
        sys.setprofile(see)
        try:
            h, hs = scan(rnn, init, xs)
            (h.sum() + hs.sum()).backward()
        finally:
            sys.setprofile(None)
    ours = [code for code in codes if PACKAGE in code.co_filename]
    return [
        [whose, len(of), len(set(of)), len({code.co_filename for code in of})]
        for whose, of in (("this package", ours), ("torch's and Python's too", codes))
    ]


def fused(B: int, H: int) -> list[list[object]]:
    """Return the times of torch's fused cells without gradients, as parts of their loop's time."""
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for module in (torch.nn.GRUCell(H, H), torch.nn.LSTMCell(H, H)):
        h = torch.zeros(B, H)
        init: Any = (h, h) if isinstance(module, torch.nn.LSTMCell) else h

        def step(state: Any, x: torch.Tensor, module: Any = module) -> Any:
            state = module(x, state)
            return state, state[0] if isinstance(state, tuple) else state

        parts = []
        for T in STEPS_OF_FUSED:
            given = (step, init, torch.randn(T, B, H))
            calls = {
                "loop": functools.partial(written_loop, *given),
                "scan": functools.partial(scan, *given),
            }
            with torch.no_grad():
                for call in calls.values():
                    call(), call()
                ms = {who: t.median for who, t in interleaved(calls, 7).items()}
            parts.append(f"{ms['scan'] / ms['loop']:.2f}")
        rows.append([type(module).__name__, B, H, *parts])
    return rows


def main() -> None:
    page = Page("Small calls", "calls")
    rows = [row for T in TRIP_COUNTS for row in page.measured("measure", T)]
    cells = [row for B, H in FUSED for row in page.measured("fused", B, H)]
    page.write(
        [
            "Microseconds.",
            "",
            *report.table(["T", "", "loop", "scan", "more"], rows),
            "The way of a warm training call of a tanh RNN, T=16:",
            "",
            *report.table(["", "calls", "functions", "files"], page.measured("way", 16)),
            "torch's fused cells without gradients, in parts of the loop's time, by trip count:",
            "",
            *report.table(["", "B", "H", *map(str, STEPS_OF_FUSED)], cells),
        ]
    )


if __name__ == "__main__":
    main()
