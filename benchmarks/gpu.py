"""Scans on a CUDA device: ``benchmarks/results/gpu.md``, by ``python -m benchmarks --section gpu``.

Where there is no device the page says so: nothing on it is guessed. Times are medians between CUDA
events, of one contestant after the other in one process. The whole takes some minutes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.child import RESULTS
from benchmarks.report import commit, table, versions
from torch_scan_hop import scan
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import using_options

PAGE = RESULTS / "gpu.md"
NO_GRAPHS = "without CUDA graphs"
STEP_BY_STEP = "step by step"
Run = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """A cell on inputs of ``sizes``; ``inputs(device, dtype)`` gives init, xs and parameters."""

    name: str
    sizes: str
    step: Callable[[Any, Any, Any], Any]
    inputs: Callable[[str, torch.dtype], tuple[Any, Any, Any]]
    #: a step is too little for a loop of launches to be worth its time
    thin: bool = False


def ema(h: Any, x: Any, p: Any) -> Any:
    h = torch.lerp(h, x, p["rate"])
    return h, h


def gae(g: Any, x: Any, p: Any) -> Any:
    g = x["delta"] + p["discount"] * x["goes_on"] * g
    return g, g


def complex_lru(h: Any, x: Any, p: Any) -> Any:
    re, im = h
    re, im = p["re"] * re - p["im"] * im + x, p["re"] * im + p["im"] * re
    return (re, im), re


def gated(h: Any, x: Any, p: Any) -> Any:
    g = torch.sigmoid(x + p["u"] * h)
    h = g * h + (1 - g) * torch.tanh(x - p["u"] * h)
    return h, h


def lru(h: Any, x: Any, p: Any) -> Any:
    h = p["a"] * h + x
    return h, h


def ssm(h: Any, x: Any, p: Any) -> Any:
    dt = F.softplus(x["u"] * p["dt"])[..., None]
    h = torch.exp(-dt * torch.exp(p["log_a"])) * h + dt * x["b"][:, None, :] * x["u"][..., None]
    return h, (h * x["c"][:, None, :]).sum(-1)


def attention(carry: Any, x: Any, p: Any) -> Any:
    """No kernel: a loop of launches, or a graph of them."""
    keys, values = carry
    q, k, v = (x @ p["w"]).chunk(3, -1)
    keys = torch.cat([keys[:, 1:], k[:, None]], 1)
    values = torch.cat([values[:, 1:], v[:, None]], 1)
    weights = torch.softmax((keys @ q[:, :, None])[..., 0], -1)
    return (keys, values), (weights[:, None] @ values)[:, 0]


def workloads(quick: bool) -> list[Workload]:
    """``quick``: sizes for a look at whether it runs."""
    T, B, D, N = (8, 2, 16, 4) if quick else (4096, 8, 2048, 16)
    S = 8 if quick else 256
    C, A = (4, 16) if quick else (128, 64)  # of a cache: its length, and its width

    def draw(*shape: int) -> Callable[[str, torch.dtype], torch.Tensor]:
        return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype) * 0.3

    def made(make: Any, device: str, dtype: torch.dtype) -> Any:
        if isinstance(make, dict):
            return {k: made(v, device, dtype) for k, v in make.items()}
        if isinstance(make, tuple):
            return tuple(made(v, device, dtype) for v in make)
        return make(device, dtype)

    def inputs(*parts: Any) -> Callable[[str, torch.dtype], tuple[Any, Any, Any]]:
        return lambda device, dtype: made(parts, device, dtype)

    many, few = (16, 3) if quick else (2**16, 64)

    lanes, states = f"T={T} B={B} D={D}", f"T={T} B={B} D={D} N={N}"
    return [
        Workload("lru", lanes, lru, inputs(draw(B, D), draw(T, B, D), {"a": draw(D)})),
        Workload("gated", lanes, gated, inputs(draw(B, D), draw(T, B, D), {"u": draw(D)})),
        Workload(
            "selective ssm", states, ssm,
            inputs(
                draw(B, D, N),
                {"u": draw(T, B, D), "b": draw(T, B, N), "c": draw(T, B, N)},
                {"dt": draw(D), "log_a": draw(D, N)},
            ),
        ),
        # long and thin, so that it is parallel in time
        Workload(
            "ema", f"T={many}, 1 lane", ema, inputs(draw(), draw(many), {"rate": draw()}), thin=True
        ),
        Workload(
            "gae", f"T={many}, {few} lanes", gae,
            inputs(
                draw(few), {"delta": draw(many, few), "goes_on": draw(many, few)},
                {"discount": draw()},
            ),
            thin=True,
        ),
        Workload(
            "complex lru", f"T={many}, {few} lanes", complex_lru,
            inputs((draw(few), draw(few)), draw(many, few), {"re": draw(few), "im": draw(few)}),
            thin=True,
        ),
        Workload(
            "attention over a cache", f"T={2 * S} B={B} cache={C} D={A}", attention,
            inputs(
                (draw(B, C, A), draw(B, C, A)), draw(2 * S, B, A), {"w": draw(A, 3 * A)},
            ),
        ),
    ]  # fmt: skip


def milliseconds(run: Run, device: str, rounds: int) -> float:
    run()
    run()
    times = []
    for _ in range(rounds):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def trained(run: Run) -> Run:
    """``run``, and all gradients for a dense cotangent."""

    def both() -> None:
        y = run()
        y.backward(torch.ones_like(y))

    return both


def contestants(work: Workload, device: str, dtype: torch.dtype) -> dict[str, Run]:
    init, xs, parameters = work.inputs(device, dtype)
    leaves = [*parameters.values(), *(xs.values() if isinstance(xs, dict) else [xs])]
    for leaf in leaves:
        leaf.requires_grad_()
    trip_count = leaves[-1].shape[0]

    def ours(init: Any, xs: Any, parameters: Any) -> Any:
        return scan(lambda c, x: work.step(c, x, parameters), init, xs)[1]

    def loop() -> Any:
        return scan_loop(lambda c, x: work.step(c, x, parameters), init, xs, trip_count, False)[1]

    compiled = torch.compile(ours, fullgraph=True)
    found: dict[str, Run] = {"this, torch.compile": lambda: compiled(init, xs, parameters)}
    if work.thin:
        stepping = torch.compile(lambda *inputs: ours(*inputs), fullgraph=True)
        found["this, torch.compile, " + STEP_BY_STEP] = lambda: stepping(init, xs, parameters)
        return found
    found |= {"this, eager": lambda: ours(init, xs, parameters), "Python loop": loop}
    if work.step is attention:  # no kernel
        launched = torch.compile(lambda *inputs: ours(*inputs), fullgraph=True)
        found["this, torch.compile, " + NO_GRAPHS] = lambda: launched(init, xs, parameters)
    found["this, eager, " + NO_GRAPHS] = lambda: ours(init, xs, parameters)
    return found


class Looped(torch.nn.Module):
    """A cell in a loop, for ``torch.cuda.make_graphed_callables``."""

    def __init__(self, step: Any, cell: torch.nn.Module, init: Any) -> None:
        super().__init__()
        self.step, self.cell, self.init = step, cell, init

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        return scan_loop(self.step, self.init, xs, xs.shape[0], False)[1]


def recurrent(kind: str, T: int, B: int, H: int, device: str, dtype: torch.dtype) -> dict[str, Run]:
    """``nn.LSTMCell`` or ``nn.GRUCell`` over time, beside the layer that torch has for it."""
    cell = getattr(torch.nn, f"{kind}Cell")(H, H, device=device, dtype=dtype)
    layer = getattr(torch.nn, kind)(H, H, device=device, dtype=dtype)
    xs = torch.randn(T, B, H, device=device, dtype=dtype, requires_grad=True)
    zeros = torch.zeros(B, H, device=device, dtype=dtype)
    init = (zeros, zeros) if kind == "LSTM" else zeros

    def step(state: Any, x: torch.Tensor) -> Any:
        state = cell(x, state)
        return state, state[0] if kind == "LSTM" else state

    def ours() -> torch.Tensor:
        return scan(step, init, xs)[1]

    found: dict[str, Run] = {
        f"nn.{kind} (cuDNN)": lambda: layer(xs)[0],
        "this, torch.compile": torch.compile(ours, fullgraph=True),
        "this, eager": ours,
    }
    looped = Looped(step, cell, init)
    if H == 256:
        found["Python loop"] = lambda: looped(xs)
        if device == "cuda":
            graphed = torch.cuda.make_graphed_callables(Looped(step, cell, init), (xs,))
            found["Python loop in a CUDA graph"] = lambda: graphed(xs)
    return found


def layers(quick: bool) -> list[tuple[str, int, int, int, torch.dtype]]:
    """Kind, steps, rows, width, dtype."""
    if quick:
        return [("LSTM", 8, 4, 16, torch.float32)]
    sizes = [(64, 64), (64, 128), (64, 256), (64, 512), (512, 64)]
    found = [(kind, 256, B, H, torch.float32) for kind in ("LSTM", "GRU") for B, H in sizes]
    return found + [("LSTM", 256, 64, H, torch.bfloat16) for H in (64, 128, 256, 512)]


def copied(work: Workload, device: str, dtype: torch.dtype, rounds: int) -> float:
    """Milliseconds to copy as many bytes as xs have: each is read and written once."""
    _, xs, _ = work.inputs(device, dtype)
    sources = list(xs.values()) if isinstance(xs, dict) else [xs]
    targets = [torch.empty_like(x) for x in sources]

    def run() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return milliseconds(run, device, rounds)


def measured(device: str, quick: bool) -> list[list[object]]:
    rows: list[list[object]] = []

    def row(*cells: object) -> None:
        rows.append([*cells])
        print(*cells, flush=True)

    def timed(name: str, sizes: str, dtype: torch.dtype, found: dict[str, Run]) -> None:
        for contestant, run in found.items():
            rounds = 3 if "loop" in contestant or "eager" in contestant else 9
            options = {
                "cuda_graphs": not contestant.endswith(NO_GRAPHS),
                "parallel_in_time": not contestant.endswith(STEP_BY_STEP),
            }
            with using_options(**options):
                forward = milliseconds(run, device, rounds)
                both = milliseconds(trained(run), device, rounds)
            row(name, sizes, str(dtype)[6:], contestant, f"{forward:.3f}", f"{both:.3f}")

    for kind, T, B, H, dtype in layers(quick):
        timed(kind, f"T={T} B={B} H={H}", dtype, recurrent(kind, T, B, H, device, dtype))
        torch._dynamo.reset()
    for work in workloads(quick):
        # carries in bfloat16 are not parallel in time
        for dtype in (torch.float32,) if work.thin else (torch.float32, torch.bfloat16):
            copy = f"{copied(work, device, dtype, 9):.3f}"
            row(work.name, work.sizes, str(dtype)[6:], "copy of xs", copy, "")
            timed(work.name, work.sizes, dtype, contestants(work, device, dtype))
            torch._dynamo.reset()
    return rows


def machine() -> list[str]:
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [f"- {line}" for line in done.stdout.strip().splitlines()]


def write(path: Path, quick: bool = False) -> None:
    """Measure, if there is something to measure on, and write the page."""
    lines = ["# Scans on a GPU", ""]
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing is measured.")
        lines += [
            "**Not measured.** No machine with a CUDA device was at hand. What was checked without",
            "one (numbers in Triton's interpreter, cubins of three architectures) is in the tests.",
            "",
            "On a machine that has one: `make gpu` (or, in an environment with torch for CUDA,",
            "`python -m pytest -m gpu` and `python -m benchmarks --section gpu`).",
            "",
        ]
    else:
        start = time.perf_counter()
        rows = measured("cuda", quick)
        head = [
            "workload",
            "sizes",
            "dtype",
            "contestant",
            "forward, ms",
            "forward and backward, ms",
        ]
        minutes = (time.perf_counter() - start) / 60
        lines += [
            f"- {time.strftime('%Y-%m-%d')}, commit {commit()}, {minutes:.0f} minutes,"
            f" `{' '.join(['python -m benchmarks', *sys.argv[1:]])}`",
            f"- {versions()}, CUDA {torch.version.cuda}",
            *machine(),
            "",
            *table(head, rows),
        ]
    path.write_text("\n".join(lines))
