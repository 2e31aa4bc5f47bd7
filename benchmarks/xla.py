"""Scan on XLA (PJRT CPU): host time per call and total time, against torch_xla's own scan.

    PJRT_DEVICE=CPU python benchmarks/xla.py [--rounds 15] [--write benchmarks/results/xla.md]

The contestants take turns within a round, so that a busy machine slows all of them; medians.
``host`` is the time until the call returns with its graph pending: of a call that follows
others, as in a loop that runs ahead of the device, of the second in such a row, and of the first,
after a wait for the device, when the processor's caches know nothing of it (on virtual machines,
several times as much). ``total`` is until the device is done. ``jax.lax.scan`` under jit joins in
where jax is installed (0.7.1 was built from the XLA of that time: ``pip install jax==0.7.1``).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch_xla.experimental.scan import scan as their_scan

from torch_scan_hop import scan as our_scan
from torch_scan_hop.xla import lower

# steps, batch, inputs and hidden units; torch_xla's own scan joins in at the first
SIZES = [
    (256, 16, 128),
    (256, 1, 128),
    (256, 64, 32),
    (256, 64, 128),
    (256, 16, 192),
    (256, 1, 256),
    (128, 1, 1024),
]
IN_A_ROW = 4
Call = Callable[[], object]


def lstm_cell(weights, state, x):
    w_in, w, b = weights
    h, c = state
    i, f, g, o = (x @ w_in + h @ w + b).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), h


def lstm_weights(n: int) -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(n, 4 * n), (n, 4 * n), (4 * n,)]
    return [(torch.randn(*s) * 0.05).to("xla").requires_grad_() for s in shapes]


def jax_calls(weights, h, c, x) -> dict[str, dict[str, Call]]:
    """The same cell for ``jax.lax.scan``; results are JAX arrays, which ``wait_for`` knows."""
    import jax

    def cell(p, carry, x):
        h, c = carry
        i, f, g, o = jax.numpy.split(x @ p[0] + h @ p[1] + p[2], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jax.numpy.tanh(g)
        h = jax.nn.sigmoid(o) * jax.numpy.tanh(c)
        return (h, c), h

    def run(p, h, c, x):
        return jax.lax.scan(lambda carry, x: cell(p, carry, x), (h, c), x)[1]

    arrays = [jax.numpy.asarray(t.detach().cpu().numpy()) for t in (*weights, h, c, x)]
    p, rest = arrays[:3], arrays[3:]
    forward = jax.jit(run)
    train = jax.jit(jax.grad(lambda p, *rest: run(p, *rest).sum()))
    name = f"jax {jax.__version__}, jit"
    return {
        "lstm fwd": {name: lambda: forward(p, *rest)},
        "lstm fwd+bwd": {name: lambda: train(p, *rest)},
    }


def wait_for(result: object) -> None:
    if "jax" in sys.modules:
        sys.modules["jax"].block_until_ready(result)  # leaves other objects alone
    torch_xla.sync()
    xm.wait_device_ops()


def contestants(steps: int, batch: int, n: int, theirs_too: bool) -> dict[str, dict[str, Call]]:
    torch.manual_seed(0)
    weights = lstm_weights(n)
    h, c, x = (
        torch.zeros(batch, n).to("xla"),
        torch.zeros(batch, n).to("xla"),
        torch.randn(steps, batch, n).to("xla"),
    )

    def ours_step(state, x):
        return lstm_cell(weights, state, x)

    def step_of_its_own(state, x):  # a step's program is made once
        return lstm_cell(weights, state, x)

    # torch_xla's scan refuses closures: weights travel in the carry
    def theirs_step(carry, x):
        state, w = carry
        state, y = lstm_cell(w, state, x)
        return (state, tuple(v.clone() for v in w)), y

    def ours():
        return our_scan(ours_step, (h, c), x)[1]

    def theirs(pure):
        return lambda: their_scan(theirs_step, ((h, c), tuple(weights)), x, is_fn_pure=pure)[1]

    def without_grad(call):
        def run():
            with torch.no_grad():
                return call()

        return run

    def training(call):
        return lambda: torch.autograd.grad(call().sum(), weights)

    def products_outside(call):
        def run():
            with mock.patch.object(lower, "LEAST_WEIGHT_ON_A_CPU", 0):
                return call()

        return run

    outside = "torch_scan_hop, products outside"
    calls = {"torch_scan_hop": ours, outside: lambda: our_scan(step_of_its_own, (h, c), x)[1]}
    if theirs_too:
        calls |= {"torch_xla, pure": theirs(True), "torch_xla": theirs(False)}
    found = {
        "lstm fwd": {name: without_grad(call) for name, call in calls.items()},
        "lstm fwd+bwd": {name: training(call) for name, call in calls.items()},
    }
    for workload in found.values():
        workload[outside] = products_outside(workload[outside])
    if importlib.util.find_spec("jax") is not None:
        for workload, more in jax_calls(weights, h, c, x).items():
            found[workload] |= more
    return found


def host_in_a_row(call: Call) -> tuple[float, float]:
    """The second call, and the median of those after it; nothing is executed."""
    call()
    times = []
    for _ in range(1 + IN_A_ROW):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        del result
    return times[0], statistics.median(times[1:])


def once(call: Call) -> tuple[float, float]:
    start = time.perf_counter()
    result = call()
    returned = time.perf_counter()
    wait_for(result)
    done = time.perf_counter()
    del result
    return returned - start, done - start


def measure(calls: dict[str, Call], rounds: int) -> dict[str, tuple[float, ...]]:
    for call in calls.values():
        for _ in range(2):
            once(call)
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wait, total = once(call)
            second, later = host_in_a_row(call)
            times[name].append((later, second, wait, total))
    return {
        name: tuple(statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
        for name, rows in times.items()
    }


def n_compiles() -> int:
    data = metrics.metric_data("CompileTime")
    return 0 if data is None else data[0]


def first_steps(trip_count: int, n: int = 32) -> tuple[float, int]:
    """Seconds that the first training step takes longer than a later one; compiles after it."""
    weights, zeros = lstm_weights(n), torch.zeros(2, n).to("xla")
    x = torch.randn(trip_count, 2, n).to("xla")
    wait_for(None)

    def call() -> object:
        def step(state, x):
            return lstm_cell(weights, state, x)

        return torch.autograd.grad(our_scan(step, (zeros, zeros), x)[1].sum(), weights)

    first = once(call)[1]
    compiled = n_compiles()
    later = statistics.median(once(call)[1] for _ in range(5))
    return first - later, n_compiles() - compiled


def report_of_compiling() -> str:
    """Medians of three trip counts around each; every one is traced and compiled anew."""
    first_steps(8)  # imports
    lines = [
        "| T | first training step less a later, s | compiles after it |",
        "|---|---|---|",
    ]
    seconds = {}
    for around in (16, 4096):
        found = [first_steps(around + k) for k in (0, 1, 2)]
        seconds[around] = statistics.median(s for s, _ in found)
        lines.append(f"| {around} | {seconds[around]:.2f} | {sum(n for _, n in found)} |")
    return "\n".join(["", *lines, "", f"Ratio: {seconds[4096] / seconds[16]:.2f}"])


def beside_jax(steps: int, batch: int, n: int, rounds: int) -> list[tuple[str, float]]:
    """Our total time in parts of jax's, by workload; without jax, nothing."""
    found = []
    for workload, calls in contestants(steps, batch, n, theirs_too=False).items():
        total = {name: times[-1] for name, times in measure(calls, rounds).items()}
        found += [
            (workload, total["torch_scan_hop"] / ms)
            for name, ms in total.items()
            if name.startswith("jax")
        ]
    return found


def report(rounds: int) -> str:
    load = os.getloadavg()[0]
    lines = [
        "| T, B, D | workload | scan | host ms, in a row | second in it | after a wait | total ms "
        "| relative to jax |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sizes in SIZES:
        for workload, calls in contestants(*sizes, theirs_too=sizes is SIZES[0]).items():
            found = measure(calls, rounds)
            jax = next((t[-1] for name, t in found.items() if name.startswith("jax")), None)
            for name, (*host, total) in found.items():
                times = " | ".join(f"{ms:.2f}" for ms in host)
                ratio = "-" if jax is None else f"{total / jax:.2f}"
                size = ", ".join(map(str, sizes))
                lines.append(f"| {size} | {workload} | {name} | {times} | {total:.1f} | {ratio} |")
    header = [
        "# Scan on XLA (PJRT CPU)",
        "",
        f"LSTM, D = H, float32, {rounds} interleaved rounds, medians.",
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"torch_xla {torch_xla.__version__}.",
        f"Command: `PJRT_DEVICE=CPU python {' '.join(sys.argv)}`",
        "",
    ]
    notes = [
        "",
        "torch_xla's scan refuses closures, so there the weights travel in the carry; part of its",
        "cost in training is that. `products outside`: all products that need no carry leave the",
        "loop, as on devices that are no CPU; here those with weights under 1 MiB stay.",
        "With a load average above 1 before the run, the machine was shared: read ratios, not",
        "absolutes.",
    ]
    return "\n".join([*header, *lines, report_of_compiling(), *notes, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = report(options.rounds)
    print(text)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
