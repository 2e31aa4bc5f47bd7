"""What eager programs gain: ``scan(compile=True)``, and TorchRL's GRU on our operator.

    python -m benchmarks.eager_programs

Milliseconds of a training step, contestants interleaved, one thread. ``compile=True`` and a
``torch.compile`` of the whole call are warm. TorchRL's rows are there where torchrl and hoptorch
are installed.
"""

from __future__ import annotations

import importlib.util
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


def main() -> None:
    start, before = time.perf_counter(), report.load()
    lstm = measured("benchmarks.eager_programs:compiled")
    gru = measured("benchmarks.eager_programs:torchrl")
    for found in (lstm, gru):
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
        ]
    )
    (RESULTS / "eager_programs.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
